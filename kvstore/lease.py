"""Leases and reservations: what a caller holds while bytes move.

A :class:`Lease` keeps the blocks of one hit where they are; a :class:`Reservation` holds slots for
blocks that are about to be written. Both are plain records of *where the bytes are*: block ``i``
lies in ``buffers[tiers[i]]`` at ``offsets[i] : offsets[i] + block_bytes``, in the order of
:attr:`kvstore.KVLayout.shape`. The buffers belong to the record and not to the store: those of a
client change when its daemon is restarted. The caller copies the bytes itself, then ends the
record exactly once; ending it a second time is refused and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.interface import KVStore
    from kvstore.namespace import Namespace

PATIENCE, LEAST_PATIENCE_S = 1.5, 0.005
"""How long an engine waits for blocks that are being loaded: so many times what is expected, and a moment."""


@dataclass(slots=True, eq=False)
class _Held:
    store: KVStore = field(repr=False)
    namespace: Namespace = field(repr=False)
    tiers: NDArray[np.int8] = field(repr=False)
    """int8 ``[num_blocks]``: index into ``store.tier_names``."""
    offsets: NDArray[np.int64] = field(repr=False)
    """int64 ``[num_blocks]``: byte offset in that tier's buffer."""
    expires_at: float
    """Monotonic seconds after which the record no longer protects anything."""
    held_id: int = 0
    buffers: tuple[Any, ...] = field(default=(), repr=False, kw_only=True)
    """Memory of each tier, uint8 ``[capacity_bytes]``: numpy arrays on the host, else torch tensors."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks held."""
        return len(self.offsets)

    def slots(self) -> Iterator[Any]:
        """Views of the blocks' bytes, uint8 ``[block_bytes]`` each: numpy arrays, or torch tensors."""
        buffers, size = self.buffers, self.block_bytes
        for tier, offset in zip(self.tiers.tolist(), self.offsets.tolist(), strict=True):
            yield buffers[tier][offset : offset + size]

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self.namespace.layout.block_bytes


@dataclass(slots=True, eq=False)
class Lease(_Held):
    """The leading blocks of a prompt, protected from eviction and movement until released.

    An empty lease (``num_blocks == 0``) is a miss: it holds nothing, and releasing it, however often,
    does nothing. As a context manager a lease is released at the end of the block. ``failure`` is the
    reason why a client could not ask its daemon (:class:`kvstore.errors.UnavailableError`), or None.

    ``coming_blocks`` behind ``ready_blocks`` that memory has are being loaded from a slower tier, and expected
    in ``ready_in_s`` seconds: whoever asks again then will get them. An engine waits for ``patience_s`` seconds
    from its first such answer on, then takes what has come by then, and computes the rest.
    """

    failure: str | None = field(default=None, kw_only=True)
    ready_blocks: int = field(default=0, kw_only=True)
    coming_blocks: int = field(default=0, kw_only=True)
    ready_in_s: float = field(default=0.0, kw_only=True)

    @property
    def patience_s(self) -> float:
        """Seconds to wait for the coming blocks: longer than expected, but not much."""
        return PATIENCE * self.ready_in_s + LEAST_PATIENCE_S

    @property
    def hit_tokens(self) -> int:
        """Leading tokens of the prompt whose KV need not be computed."""
        return self.num_blocks * self.namespace.layout.block_tokens

    def __enter__(self) -> Lease:
        """Return the lease itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release; raises :class:`LeaseExpiredError` if what was read may be wrong."""
        self.store.release(self)


@dataclass(slots=True, eq=False)
class Reservation(_Held):
    """Slots for the blocks of a prompt that the pool does not hold yet.

    ``indices`` (int32 ``[num_blocks]``, ascending) are the positions in the prompt, in blocks, that
    the caller is to write: those that exist, or that another writer is writing, are left out.
    ``refused`` counts blocks that found no room, ``failure`` is as for a lease. As a context manager
    it is committed at the end of the block, or aborted when the block raises.
    """

    indices: NDArray[np.int32] = field(kw_only=True)
    refused: int = field(default=0, kw_only=True)
    failure: str | None = field(default=None, kw_only=True)

    def __enter__(self) -> Reservation:
        """Return the reservation itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit, or abort when the body raised."""
        if kind is None:
            self.store.commit(self)
        else:
            self.store.abort(self)
