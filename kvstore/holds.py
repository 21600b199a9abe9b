"""Who holds which blocks: leases, reservations and pins, by id or name.

Bookkeeping only: the pool adds and drops the references, and holds its lock around every call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvstore.copies import NO_REFILL, Refill
from kvstore.errors import LeaseExpiredError, LeaseNotHeldError, UsageError
from kvstore.lease import Lease, Reservation
from kvstore.stats import LeaseStats, PinStats

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.namespace import Namespace
    from kvstore.tiers.tier import NamespaceTree

MAX_LEASES = 32000
MAX_PINS = 200
"""A block counts its users in 16 bits: leases, reservations, pins, claims and the moves under way."""

MAX_NAME_LENGTH = 255

HOLDS_NOTHING = 0
"""Id of leases and reservations without blocks: ending them, however often, does nothing."""


@dataclass(eq=False)
class Hold:
    """The pool's own record of a lease or reservation."""

    tree: NamespaceTree
    key: bytes
    known: Ids
    """Blocks leased; or, for a reservation, the known ones before the last that is written."""
    fresh: Ids
    """Blocks being written, in the order of the prompt; none for a lease."""
    tiers: NDArray[np.int8]
    offsets: NDArray[np.int64]
    """Where the holder reads the leased blocks, or writes the fresh ones."""
    expires_at: float
    indices: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """Positions of the fresh blocks in the prompt, in blocks."""
    refill: Refill = NO_REFILL
    """Of the known blocks those that are written to memory again."""
    heads: int | None = None
    """Mask of the KV heads that are written of each fresh block; None: all of them, by nobody else."""

    @property
    def ids(self) -> Ids:
        """Every block that has a reference of this hold."""
        return np.concatenate([self.known, self.fresh])


@dataclass(eq=False)
class Pin:
    """Blocks that are kept until somebody says otherwise."""

    namespace: Namespace
    ids: Ids


class Holds:
    """The table of everything that is held. Single-owner: the pool serialises access."""

    def __init__(
        self, clock: Callable[[], float], max_held: int, counts: Counter[tuple[str, ...]]
    ) -> None:
        """Start with nothing held.

        Args:
            clock: monotonic seconds, for deadlines.
            max_held: leases and reservations held at once, at most ``MAX_LEASES``.
            counts: where refusals and expiries are counted.
        """
        if not 0 < max_held <= MAX_LEASES:
            raise UsageError(f"max_leases must be in 1 .. {MAX_LEASES}, got {max_held}")
        self.leases: dict[int, Hold] = {}
        """By id; in the order in which they run out."""
        self.reservations: dict[int, Hold] = {}
        self.pins: dict[str, Pin] = {}
        self.max_held = max_held
        self._clock = clock
        self._counts = counts
        self._next_id = 1

    def has_room(self) -> bool:
        """Whether one more lease or reservation may be held; counted when not."""
        free = len(self.leases) + len(self.reservations) < self.max_held
        self._counts["refused_leases",] += not free
        return free

    def add(self, holds: dict[int, Hold], hold: Hold) -> int:
        """Put ``hold`` into ``leases`` or ``reservations``; return its id."""
        held_id = self._next_id
        self._next_id += 1
        holds[held_id] = hold
        return held_id

    def end(self, store: object, record: Lease | Reservation) -> Hold:
        """Take out what ``record`` stands for, if ``store`` gave it out and it is still held.

        Raises:
            LeaseExpiredError: it ran out.
            LeaseNotHeldError: it was ended before, or another store gave it out.
        """
        what, holds = (
            ("lease", self.leases)
            if isinstance(record, Lease)
            else ("reservation", self.reservations)
        )
        ours = record.store is store
        hold = holds.pop(record.held_id, None) if ours else None
        if hold is not None:
            return hold
        if ours and self._clock() >= record.expires_at:
            raise LeaseExpiredError(
                f"the {what} ran out before it was released: what was read may be wrong"
            )
        self._counts["refused_releases",] += 1
        raise LeaseNotHeldError(f"the {what} was ended before, or belongs to another store")

    def expired(self, now: float) -> Iterator[Hold]:
        """Take out the leases whose deadline has passed at ``now``."""
        while self.leases:
            held_id, hold = next(iter(self.leases.items()))
            if hold.expires_at > now:
                return
            del self.leases[held_id]
            self._counts["expired_leases",] += 1
            yield hold

    def check_name(self, name: str) -> None:
        """Refuse a pin that cannot be kept.

        Raises:
            UsageError: the name is empty or too long, or there are too many pins.
        """
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise UsageError(f"a pin's name has 1 to {MAX_NAME_LENGTH} characters, got {len(name)}")
        if name not in self.pins and len(self.pins) >= MAX_PINS:
            raise UsageError(f"there are {MAX_PINS} pins already: unpin one first")

    def pinned_without(self, name: str) -> Ids:
        """Blocks of all pins but ``name``, each once."""
        ids = [pin.ids for other, pin in self.pins.items() if other != name]
        return np.unique(np.concatenate(ids)) if ids else np.empty(0, np.int32)

    def references(self) -> Iterator[Ids]:
        """Blocks of every hold, which have one reference for each time that they are named here."""
        for hold in [*self.leases.values(), *self.reservations.values()]:
            yield hold.ids
        for pin in self.pins.values():
            yield pin.ids

    def pin_stats(self) -> list[PinStats]:
        """Describe the pins, oldest first."""
        return [
            PinStats(
                name,
                pin.namespace.digest.hex(),
                len(pin.ids) * pin.namespace.layout.block_tokens,
                len(pin.ids),
            )
            for name, pin in self.pins.items()
        ]

    def lease_stats(self) -> list[LeaseStats]:
        """Describe the leases, those that run out first before the others, then the reservations."""
        now = self._clock()
        return [
            *(
                LeaseStats(
                    held_id,
                    hold.tree.namespace.digest.hex(),
                    len(hold.known),
                    "lease",
                    max(0.0, hold.expires_at - now),
                )
                for held_id, hold in self.leases.items()
            ),
            *(
                LeaseStats(
                    held_id,
                    hold.tree.namespace.digest.hex(),
                    len(hold.fresh),
                    "reservation",
                    None,
                )
                for held_id, hold in self.reservations.items()
            ),
        ]
