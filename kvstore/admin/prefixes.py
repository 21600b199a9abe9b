"""Bodies that carry a prompt: read within limits, turned into key bytes in small steps.

A body is ``{"namespace": DIGEST, "tokens": [INT, …]}`` or ``{"namespace": DIGEST, "token_bytes": BASE64}``.
The list of tokens is cut out of the body and decoded piece by piece, because decoding a million
numbers in one call would keep every other thread of the process waiting for the interpreter's lock.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvstore.admin.problems import ProblemError, invalid_body
from kvstore.errors import UsageError
from kvstore.retention import MAX_PRIORITY, MAX_TTL_S, lifetime_of
from kvstore.tokens import block_keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from kvstore.namespace import Namespace
    from kvstore.pool import Pool

MAX_BODY_BYTES = 32 << 20
MAX_BODIES_BYTES = 4 * MAX_BODY_BYTES
"""Bytes of all bodies that are held at once."""

_PIECE_BYTES = 16 << 10
"""Text decoded in one call: about 0.2 ms."""

SCHEMA: dict[str, Any] = {
    "title": "Prefix",
    "description": "A prompt, or its beginning, in one namespace. Either tokens or token_bytes.",
    "type": "object",
    "properties": {
        "namespace": {
            "type": "string",
            "pattern": "^[0-9a-fA-F]{64}$",
            "description": "Digest of the namespace, hex.",
        },
        "tokens": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        },
        "token_bytes": {
            "type": "string",
            "contentEncoding": "base64",
            "description": "Little-endian int32, 4 bytes a token; in a namespace whose keys are hashes, "
            "32 bytes a block.",
        },
    },
    "required": ["namespace"],
    "oneOf": [{"required": ["tokens"]}, {"required": ["token_bytes"]}],
    "additionalProperties": False,
}


class _Prefix(msgspec.Struct, forbid_unknown_fields=True):
    namespace: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    tokens: list[int] | UnsetType = UNSET
    token_bytes: bytes | UnsetType = UNSET


class _Retained(_Prefix, forbid_unknown_fields=True):
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 0
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] | UnsetType | None = UNSET


_decode_prefix = msgspec.json.Decoder(_Prefix).decode
_decode_retained = msgspec.json.Decoder(_Retained).decode
_decode_piece = msgspec.json.Decoder().decode


P = TypeVar("P", bound=_Prefix)

RETAINED: dict[str, Any] = SCHEMA | {
    "title": "RetainedPrefix",
    "description": "A prefix, and how to keep what is stored of it.",
    "properties": SCHEMA["properties"]
    | {
        "priority": {
            "type": "integer",
            "minimum": 0,
            "maximum": MAX_PRIORITY,
            "description": "Least priority that the blocks have from now on.",
        },
        "ttl_s": {
            "type": ["number", "null"],
            "exclusiveMinimum": 0,
            "maximum": MAX_TTL_S,
            "description": "Seconds from now before which the blocks do not expire; null: never.",
        },
    },
}


class BodyReader:
    """Reads request bodies of one application, bounded each and together. For one event loop."""

    def __init__(self) -> None:
        """Start with none held."""
        self._held_bytes = 0

    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the body of ``request``, once; its bytes count as held until the iterator is closed.

        Raises:
            ProblemError: it is too long (413), not JSON (415), or too much is held already (503).
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ProblemError(
                415, "not-json", "send JSON, and the header Content-Type: application/json"
            )
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise _too_long()
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._held_bytes += len(chunk)
                if len(body) > MAX_BODY_BYTES:
                    raise _too_long()
                if self._held_bytes > MAX_BODIES_BYTES:
                    raise ProblemError(
                        503,
                        "overloaded",
                        "too many large requests at once: try again",
                        headers={"Retry-After": "1"},
                    )
            yield body
        finally:
            self._held_bytes -= len(body)


def locate(pool: Pool, body: bytearray) -> tuple[Namespace, bytes]:
    """Return the namespace that ``body`` names, and the key bytes of its tokens.

    Raises:
        ProblemError: no such body (422), unusable tokens (422), or a namespace without blocks (404).
    """
    return _located(pool, body, _decode_frame(body, _decode_prefix))


def locate_retained(pool: Pool, body: bytearray) -> tuple[Namespace, bytes, int, float]:
    """Do as :func:`locate`; return also the priority and lifetime in seconds that ``body`` asks for.

    Where it says nothing of them they are 0.
    """
    wanted = _decode_frame(body, _decode_retained)
    lifetime_s = 0.0 if wanted.ttl_s is UNSET else lifetime_of(wanted.ttl_s)
    return *_located(pool, body, wanted), wanted.priority, lifetime_s


def _located(pool: Pool, body: bytearray, prefix: _Prefix) -> tuple[Namespace, bytes]:
    namespace = pool.namespace(prefix.namespace.lower())
    if namespace is None:
        raise ProblemError(
            404,
            "unknown-namespace",
            "no blocks are stored in this namespace: GET /v1/namespaces lists those that have some",
        )
    if prefix.token_bytes is not UNSET:
        return namespace, _keys(namespace, prefix.token_bytes, "#/token_bytes")
    return namespace, _list_keys(namespace, body, body.find(b"[") + 1, body.rfind(b"]"))


def _decode_frame(body: bytearray, decode: Callable[[bytearray], P]) -> P:
    """Return ``body`` without its tokens."""
    start, stop = body.find(b"["), body.rfind(b"]")
    frame = body if start < 0 else body[: start + 1] + (body[stop:] if stop > start else b"")
    try:
        prefix = decode(frame)
    except (ValueError, RecursionError) as error:
        text = re.sub(r" \(byte \d+\)", "", str(error))  # it would count without the tokens
        message, _, path = text.partition(" - at `$")
        pointer = "#" + "".join(f"/{name}" for name in re.findall(r"\w+", path)[:1])
        raise invalid_body(pointer, message) from None
    if (prefix.tokens is UNSET) is (prefix.token_bytes is UNSET):
        raise invalid_body("#", "give exactly one of tokens and token_bytes")
    return prefix


def _list_keys(namespace: Namespace, body: bytearray, start: int, stop: int) -> bytes:
    """Return the key bytes of the comma-separated numbers in ``body[start:stop]``."""
    keys = []
    begin = start
    while begin <= stop:
        comma = body.find(b",", begin + _PIECE_BYTES, stop)
        end = stop if comma < 0 else comma
        try:
            piece = _decode_piece(b"[" + body[begin:end] + b"]")
        except (ValueError, RecursionError):
            piece = None
        if piece is None or (not piece and body[start:stop].strip()):  # nothing beside a comma
            raise invalid_body("#/tokens", "tokens are no flat list of integers")
        keys.append(_keys(namespace, piece, "#/tokens"))
        begin = end + 1
    return b"".join(keys)


def _keys(namespace: Namespace, tokens: object, pointer: str) -> bytes:
    try:
        return block_keys(namespace, tokens)
    except UsageError as error:
        raise invalid_body(pointer, str(error)) from None


def _too_long() -> ProblemError:
    return ProblemError(
        413,
        "body-too-large",
        f"a body has at most {MAX_BODY_BYTES} bytes: send token_bytes instead of tokens, or a shorter prefix",
    )
