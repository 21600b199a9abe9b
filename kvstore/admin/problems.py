"""Errors as ``application/problem+json`` (M. Nottingham et al., RFC 9457, 2023).

``type`` is ``urn:kvstore:problem:KIND``, or ``about:blank`` where the status says it all. A detail
never repeats what the request carried, but for one token id that is out of range.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEDIA_TYPE = "application/problem+json"


class FieldProblem(BaseModel):
    """One part of a request that cannot be used."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    pointer: str | None = None
    """JSON pointer into the body (RFC 6901), as a fragment: ``#/tokens``."""
    parameter: str | None = None
    """Name of the query or path parameter."""
    detail: str


class Problem(BaseModel):
    """What went wrong, for people and machines."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    """``about:blank`` or ``urn:kvstore:problem:KIND``."""
    title: str
    status: int
    detail: str
    """What happened, and what to do."""
    errors: list[FieldProblem] | None = None
    """The parts of the request that are wrong; only with status 422."""


class ProblemError(Exception):
    """Ends a request with this problem. ``kind`` None means ``about:blank``."""

    def __init__(
        self,
        status: int,
        kind: str | None,
        detail: str,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Keep everything; see :class:`Problem`."""
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.errors = errors
        self.headers = headers

    def body(self) -> bytes:
        """Return the problem as JSON."""
        document: dict[str, Any] = {
            "type": f"urn:kvstore:problem:{self.kind}" if self.kind else "about:blank",
            "title": self.kind.replace("-", " ").capitalize()
            if self.kind
            else HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        if self.errors:
            document["errors"] = [error.model_dump(exclude_none=True) for error in self.errors]
        return json.dumps(document).encode()

    def response(self) -> Response:
        """Return the answer to send."""
        headers = dict(self.headers or {})
        return Response(self.body(), self.status, headers, media_type=MEDIA_TYPE)


def invalid_body(pointer: str, detail: str) -> ProblemError:
    """Return the problem of a body whose part at ``pointer`` (such as ``#/tokens``) is wrong."""
    field = FieldProblem(pointer=pointer, detail=detail)
    return ProblemError(422, "invalid-request", detail, errors=[field])
