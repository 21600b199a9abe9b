"""``python -m kvstore.admin.openapi``: print the OpenAPI document, as ``docs/openapi.json`` has it."""

from __future__ import annotations

import json
from typing import NoReturn

from prometheus_client import CollectorRegistry

from kvstore.admin.app import create_app
from kvstore.admin.routes import Source


def document() -> str:
    """Return the OpenAPI document as JSON text that ends with a newline."""
    nobody = Source(None, _nothing, dict, CollectorRegistry(), None, lambda: (False, "starting"))
    return json.dumps(create_app(nobody).openapi(), indent=2, ensure_ascii=False) + "\n"


def _nothing() -> NoReturn:
    raise AssertionError("only described, never asked")


if __name__ == "__main__":
    print(document(), end="")  # noqa: T201  (it is a command)
