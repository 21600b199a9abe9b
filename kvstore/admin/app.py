"""The application: routes, errors, and the document that describes them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from anyio import to_thread
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from kvstore.admin.guard import Guard
from kvstore.admin.prefixes import RETAINED, SCHEMA, BodyReader
from kvstore.admin.problems import MEDIA_TYPE, FieldProblem, Problem, ProblemError
from kvstore.admin.routes import Source, router
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["Source", "create_app"]

NUM_WORKERS = 8
"""Threads that run routes."""

_PREFIX_ROUTES = (
    ("/v1/prefixes:match", "post"),
    ("/v1/prefixes:explain", "post"),
    ("/v1/prefixes:evict", "post"),
    ("/v1/prefixes:retain", "post"),
    ("/v1/pins/{name}", "put"),
)


def create_app(source: Source) -> FastAPI:
    """Return the application that shows ``source``.

    ``state.needs_token`` of the application says whether it may listen beyond this machine.

    Raises:
        ConfigError: the token is empty.
    """
    if source.token == "":
        raise ConfigError("token is empty: give it at least one character, or none at all")
    app = FastAPI(
        title="kvstore",
        summary="Admin interface of a kvstore daemon.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_limit_workers,
        generate_unique_id_function=lambda route: route.name,
        responses={"default": {"model": Problem, "description": "A problem (RFC 9457)."}},
        exception_handlers={
            ProblemError: _on_problem,
            HTTPException: _on_http_error,
            RequestValidationError: _on_invalid_request,
        },
    )
    app.state.source = source
    app.state.bodies = BodyReader()
    app.state.needs_token = source.token is not None
    app.include_router(router)
    app.add_middleware(Guard, token=source.token)
    _describe(app)
    return app


@asynccontextmanager
async def _limit_workers(_app: FastAPI) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = NUM_WORKERS
    yield


async def _on_problem(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer for what the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    detail = error.detail
    if error.status_code == 404:
        detail = "there is nothing here: GET /openapi.json lists what there is"
    elif error.status_code == 405:
        methods = {
            method
            for route in router.routes
            if route.matches(request.scope)[0] is not Match.NONE
            for method in getattr(route, "methods", ())
        }
        headers["Allow"] = ", ".join(sorted(methods))
        detail = f"allowed here: {headers['Allow']}"
    return ProblemError(error.status_code, None, detail, headers=headers).response()


async def _on_invalid_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [
        FieldProblem(parameter=str(item["loc"][-1]), detail=item["msg"]) for item in error.errors()
    ]
    detail = "; ".join(f"{field.parameter}: {field.detail}" for field in fields)
    return ProblemError(422, "invalid-request", detail, errors=fields).response()


def _describe(app: FastAPI) -> None:
    """Tell the OpenAPI document what FastAPI cannot know: raw bodies, media type of errors, token."""
    document: dict[str, Any] = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation["responses"]["default"]["content"]
            content[MEDIA_TYPE] = content.pop("application/json")
    for path, method in _PREFIX_ROUTES:
        name = "RetainedPrefix" if path.endswith(":retain") else "Prefix"
        schema = {"$ref": f"#/components/schemas/{name}"}
        document["paths"][path][method]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    document["components"]["schemas"] |= {"Prefix": SCHEMA, "RetainedPrefix": RETAINED}
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}, {}]
