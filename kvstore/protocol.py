"""The control plane between a client and its daemon: messages, frames, limits. No I/O.

A frame is a length (uint32, little-endian) and a msgpack body; a body is one message, an array whose
first item names its kind. Tokens, offsets and indices travel as raw little-endian arrays in byte
strings. Bytes of blocks never pass here: they are copied from and to shared memory.

A connection begins with :class:`Hello` and :class:`Welcome` (or :class:`Failed`); over a unix socket
the arena's descriptor comes with the welcome. Requests that carry an ``id`` are answered in any order
with the same ``id``; :class:`Release` and :class:`Prefilled` are not answered. Anything else ends the
connection.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvstore.errors import UsageError
from kvstore.explain import Explanation
from kvstore.namespace import Namespace
from kvstore.retention import NORMAL_PRIORITY
from kvstore.stats import DaemonStatus

if TYPE_CHECKING:
    from collections.abc import Callable

OLDEST_VERSION = 2
VERSION = 2
"""Versions of the protocol that this code speaks. A daemon of version 1 would show blocks of which a part is
written: it does not know ``Reserve.heads``."""

MAX_FRAME_BYTES = 32 << 20
"""Longest body: 8 million tokens, or a million blocks by hash."""
MAX_HELLO_BYTES = 64 << 10
"""Longest body before the handshake is done."""

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_INITIAL_BYTES = 64 << 10
_KEPT_BYTES = 1 << 20
"""A reader's buffer starts with the first and shrinks to it when it is empty and beyond the second."""

Key = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
"""Key bytes of a prompt, as :func:`kvstore.tokens.block_keys` makes them."""
Name = Annotated[str, Meta(max_length=255)]


class ProtocolError(Exception):
    """The other side sent what this protocol does not know; the connection ends."""


class Message(Struct, array_like=True, gc=False):
    """Base of all messages."""


# -- client to daemon --------------------------------------------------------------------------------


class Hello(Message, tag=0):
    """The first message of a connection."""

    oldest_version: int
    version: int
    client: Name
    """Name for people: program and process id."""
    access: Literal["read", "write"]
    """Whether the client maps the arena for writing, and may reserve."""
    dma: bool
    """Whether a device may still write to reserved slots for a moment after the client has died."""
    token: Name | None
    """Secret; needed over TCP."""


class Lookup(Message, tag=1):
    """Ask for :meth:`kvstore.pool.Pool.lookup`. Answer: :class:`Number`."""

    id: int
    namespace: bytes
    """As made by :func:`encode_namespace`."""
    key: Key


class Prefetch(Message, tag=2):
    """Ask for :meth:`kvstore.pool.Pool.prefetch`. Answer: :class:`Number`."""

    id: int
    namespace: bytes
    key: Key


class Acquire(Message, tag=3):
    """Ask for a lease. Answer: :class:`Held`."""

    id: int
    namespace: bytes
    key: Key
    may_wait: bool = False
    """Hold nothing while blocks are being loaded from a slower tier: the client asks again."""


class Release(Message, tag=4):
    """End a lease. Not answered: the client knows by its own clock whether the lease had run out."""

    lease: int


class Verify(Message, tag=5):
    """Compare the blocks of a lease with their checksums. Answer: :class:`Number` of good ones."""

    id: int
    lease: int


class Reserve(Message, tag=6):
    """Ask for slots. Answer: :class:`Held`."""

    id: int
    namespace: bytes
    key: Key
    heads: tuple[int, int] | None = None
    """Range ``[start, stop)`` of the KV heads that the client will write; None: all."""
    priority: int = NORMAL_PRIORITY
    """0 to 100: what is evicted first and last."""
    ttl_s: float | None = None
    """Seconds after the commit in which the blocks expire; None: never."""


class Commit(Message, tag=7):
    """End a reservation whose blocks are written. Answer: :class:`Number` of blocks now visible."""

    id: int
    reservation: int


class Abort(Message, tag=8):
    """End a reservation without making anything visible. Answer: :class:`Number`, 0."""

    id: int
    reservation: int


class Explain(Message, tag=9):
    """Ask why tokens hit or miss. Answer: :class:`Explained`."""

    id: int
    namespace: bytes
    key: Key


class Evict(Message, tag=10):
    """Forget a prefix and what follows it. Answer: :class:`Number` of blocks matched."""

    id: int
    namespace: bytes
    key: Key


class Clear(Message, tag=11):
    """Forget everything. Answer: :class:`Number`, 0."""

    id: int


class Drain(Message, tag=12):
    """Wait for the moves between tiers that have begun. Answer: :class:`Number`, 0."""

    id: int


class Status(Message, tag=13):
    """Ask what the daemon is doing. Answer: :class:`Told`."""

    id: int


class ExplainAll(Message, tag=14):
    """Ask why tokens hit or miss, for people who know no namespace. Answer: :class:`ExplainedAll`.

    Every namespace that has blocks and whose keys are tokens is asked, or the one named by ``digest``.
    """

    id: int
    digest: Annotated[str, Meta(max_length=64)] | None
    """Hex."""
    key: Key


class Prefilled(Message, tag=15):
    """Tell how long an engine took to compute tokens. Not answered."""

    namespace: bytes
    start: int
    stop: int
    seconds: float


Request = (
    Lookup
    | Prefetch
    | Acquire
    | Release
    | Verify
    | Reserve
    | Commit
    | Abort
    | Explain
    | Evict
    | Clear
    | Drain
    | Status
    | ExplainAll
    | Prefilled
)


# -- daemon to client --------------------------------------------------------------------------------


class Welcome(Message, tag=64):
    """The handshake is done; over a unix socket the arena's descriptor comes with this frame."""

    version: int
    node: Name
    epoch: bytes
    """Drawn at each start of the daemon: what was held in another epoch is void."""
    tier: Name
    """Name of the tier that the arena is."""
    capacity_bytes: int
    block_tokens: int
    lease_timeout_s: float
    pid: int
    arena: tuple[int, int, int]
    """Descriptor number in the daemon, device and inode of the arena: TCP clients on the same host
    open it through ``/proc`` and compare."""


class Number(Message, tag=65):
    """The answer is a number."""

    id: int
    value: int


class Held(Message, tag=66):
    """A lease or reservation: where its blocks are."""

    id: int
    held: int
    """Name of the lease or reservation; 0 if it holds nothing."""
    offsets: bytes
    """int64 ``[num_blocks]``: byte offsets in the arena."""
    indices: bytes
    """int32 ``[num_blocks]``: positions in the prompt, in blocks; empty for a lease."""
    refused: int
    """Blocks that found no room."""
    ready: int = 0
    """Blocks that a lease covers, or would cover now."""
    coming: int = 0
    """Blocks behind those that are being loaded from a slower tier."""
    ready_in_s: float = 0.0
    """Expected seconds until they are there."""


class Explained(Message, tag=67):
    """The fate of every token."""

    id: int
    explanation: Explanation


class ExplainedAll(Message, tag=70):
    """The fate of every token in several namespaces, by digest (hex)."""

    id: int
    explanations: dict[str, Explanation]


class Told(Message, tag=68):
    """What the daemon is doing."""

    id: int
    status: DaemonStatus


class Failed(Message, tag=69):
    """The request, or (``id`` 0) the connection, is refused."""

    id: int
    error: Literal["usage", "too_large", "expired", "not_held", "refused", "internal"]
    message: str


Reply = Welcome | Number | Held | Explained | ExplainedAll | Told | Failed

_encoder = msgspec.msgpack.Encoder()
_decode_hello = msgspec.msgpack.Decoder(Hello).decode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode
_decode_namespace = msgspec.msgpack.Decoder(Namespace).decode


def encode(message: Message) -> bytes:
    """Return the frame of ``message``."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return bytes(frame)


def decode_hello(body: memoryview | bytes) -> Hello:
    """Return the first message of a client. Raises :class:`ProtocolError`."""
    return _decode(_decode_hello, body)


def decode_request(body: memoryview | bytes) -> Request:
    """Return a client's message. Raises :class:`ProtocolError`."""
    return _decode(_decode_request, body)


def decode_reply(body: memoryview | bytes) -> Reply:
    """Return a daemon's message. Raises :class:`ProtocolError`."""
    return _decode(_decode_reply, body)


def encode_namespace(namespace: Namespace) -> bytes:
    """Return every field of ``namespace``; the daemon computes the digest itself."""
    return _encoder.encode(namespace)


def decode_namespace(encoded: bytes) -> Namespace:
    """Return the namespace that a client means.

    Raises:
        UsageError: a field is missing, or has a value that makes no namespace.
    """
    try:
        return _decode_namespace(encoded)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UsageError(f"no namespace: {error}") from None


def _decode(decoder: Callable[[memoryview | bytes], T], body: memoryview | bytes) -> T:
    try:
        return decoder(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message that this version does not know: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into the bodies of frames.

    Receive into :meth:`buffer`, tell :meth:`received` how much came, and take :meth:`next_frame`. Memory
    follows what really arrived, not what a length field promises, and is given back.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        """Start with an empty stream whose bodies have at most ``max_frame_bytes``."""
        self.max_frame_bytes = max_frame_bytes
        self._data = bytearray(_INITIAL_BYTES)
        self._start = self._stop = 0

    def buffer(self) -> memoryview:
        """Return free memory to receive into; never empty."""
        pending = self._stop - self._start
        if not pending:
            self._start = self._stop = 0
            if len(self._data) > _KEPT_BYTES:
                self._data = bytearray(_INITIAL_BYTES)
        elif self._stop == len(self._data):
            data = bytearray(max(_INITIAL_BYTES, 4 * pending))
            data[:pending] = memoryview(self._data)[self._start : self._stop]
            self._data, self._start, self._stop = data, 0, pending
        return memoryview(self._data)[self._stop :]

    def received(self, num_bytes: int) -> None:
        """Say that ``num_bytes`` were written to the beginning of the last :meth:`buffer`."""
        self._stop += num_bytes

    def next_frame(self) -> memoryview | None:
        """Return the next complete body, valid until :meth:`buffer` is called; None without one.

        Raises:
            ProtocolError: the frame is longer than allowed.
        """
        begin = self._start + _LENGTH.size
        if self._stop < begin:
            return None
        (length,) = _LENGTH.unpack_from(self._data, self._start)
        if length > self.max_frame_bytes:
            raise ProtocolError(f"a frame of {length} bytes: at most {self.max_frame_bytes}")
        if self._stop < begin + length:
            return None
        self._start = begin + length
        return memoryview(self._data)[begin : begin + length]
