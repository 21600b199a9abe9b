"""What one client holds, and the answers to its requests. No sockets, no threads, no event loop.

*Who owns what.* The leases and reservations that a session was granted belong to it and to nobody else:
an id of another session is unknown here. The daemon ends what is left when the client is gone, leases
at once, reservations only when it is certain that nobody writes to their slots any more.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from kvstore import protocol
from kvstore.daemon.answers import failed, later, namespace_of
from kvstore.errors import (
    LeaseError,
    LeaseExpiredError,
    LeaseNotHeldError,
    UsageError,
)
from kvstore.lease import Lease, Reservation
from kvstore.namespace import KVLayout, Namespace
from kvstore.protocol import Explained, ExplainedAll, Held, Number, Told
from kvstore.tiers.arena import slot_bytes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from kvstore.pool import Pool
    from kvstore.protocol import Reply, Request
    from kvstore.stats import DaemonStatus

    Work = Callable[[], Reply]
    Answer = Reply | Work | None

logger = logging.getLogger(__name__)

NOTHING = 0
"""Name of a lease or reservation that holds nothing."""

_ANY = Namespace(b"-", KVLayout(1, 1, 1, "uint8"))
_UNKNOWN: dict[str, Any] = {
    "store": None,
    "namespace": _ANY,
    "tiers": np.empty(0, np.int8),
    "offsets": np.empty(0, np.int64),
    "expires_at": 0.0,
    "held_id": -1,
}
"""What is given back without being held: the pool refuses it, and counts that."""


class Session:
    """One client's half of a connection, after the handshake.

    Not thread-safe: everything is called from the event loop, except for the work that
    :meth:`handle` returns.
    """

    def __init__(
        self,
        pool: Pool,
        status: Callable[[], DaemonStatus],
        *,
        access: Literal["read", "write"],
        max_reserved_bytes: int,
        counts: Counter[str],
    ) -> None:
        """Start with nothing held.

        Args:
            pool: its first tier is the arena that the client maps.
            status: what the daemon is doing.
            access: ``read`` may not reserve.
            max_reserved_bytes: bytes of slots reserved by this session and not ended yet, at most;
                a reservation that would exceed it gets the leading blocks that do not. A part of a
                block counts as the whole.
            counts: counters of the daemon, by the names of ``DAEMON_COUNTERS``.
        """
        self.draining = False
        """Whether nothing new is lent or reserved, because the daemon is about to end."""
        self.reserved_bytes = 0
        self._pool = pool
        self._status = status
        self._access = access
        self._max_reserved_bytes = max_reserved_bytes
        self._counts = counts
        self._leases: dict[int, Lease] = {}
        self._reservations: dict[int, Reservation] = {}
        self._last_expired = NOTHING

    @property
    def num_held(self) -> int:
        """Leases and reservations that have not ended."""
        return len(self._leases) + len(self._reservations)

    def handle(self, request: Request) -> Answer:
        """Carry out ``request``.

        Returns:
            The answer; or None where there is none (:class:`kvstore.protocol.Release`); or a function
            that takes its time, to be called on another thread, which returns the answer. Nothing is
            raised.
        """
        try:
            return self._handlers[type(request)](self, request)
        except Exception as error:  # noqa: BLE001  (a request must not end the daemon)
            answer = failed(request, error)
            return None if isinstance(request, protocol.Release | protocol.Prefilled) else answer

    def forget_expired(self, now: float) -> None:
        """Forget the leases that ran out before ``now``; the pool ends them by itself."""
        while self._leases:
            held_id, lease = next(iter(self._leases.items()))
            if lease.expires_at > now:
                return
            del self._leases[held_id]
            self._last_expired = held_id

    def end_leases(self) -> None:
        """Release what is left: to be called when the client cannot think it still holds them."""
        leases, self._leases = self._leases, {}
        self._counts["abandoned_leases"] += len(leases)
        for lease in leases.values():
            _log_failure(self._pool.release, lease)

    def end_reservations(self) -> None:
        """Abort what is left: to be called when nobody can write to the slots any more."""
        reservations, self._reservations = self._reservations, {}
        self._counts["abandoned_reservations"] += len(reservations)
        self.reserved_bytes = 0
        for reservation in reservations.values():
            _log_failure(self._pool.abort, reservation)

    # -- reading --------------------------------------------------------------------------------

    def _lookup(self, request: protocol.Lookup) -> Answer:
        return Number(request.id, self._pool.lookup(namespace_of(request.namespace), request.key))

    def _prefetch(self, request: protocol.Prefetch) -> Answer:
        return Number(request.id, self._pool.prefetch(namespace_of(request.namespace), request.key))

    def _acquire(self, request: protocol.Acquire) -> Answer:
        namespace = namespace_of(request.namespace)
        if self.draining:
            return Held(request.id, NOTHING, b"", b"", 0)
        lease = self._pool.acquire(namespace, request.key, may_wait=request.may_wait)
        covered = _in_arena(lease)
        if not covered:
            self._pool.release(lease)
        else:
            self._leases[lease.held_id] = lease
        return Held(
            request.id,
            lease.held_id if covered else NOTHING,
            lease.offsets[:covered].tobytes(),
            b"",
            0,
            lease.ready_blocks if lease.coming_blocks else covered,
            lease.coming_blocks,
            lease.ready_in_s,
        )

    def _release(self, request: protocol.Release) -> Answer:
        lease = self._leases.pop(request.lease, None)
        if lease is None and NOTHING <= request.lease <= self._last_expired:
            return None
        with suppress(LeaseError):  # the client knows by its own clock; the pool counts
            self._pool.release(lease or Lease(**_UNKNOWN))
        return None

    def _verify(self, request: protocol.Verify) -> Answer:
        lease = self._leases.get(request.lease)
        if lease is None and NOTHING < request.lease <= self._last_expired:
            raise LeaseExpiredError("the lease ran out")
        if lease is None:
            raise LeaseNotHeldError("no such lease in this session")
        held = lease
        return later(
            request, lambda: Number(request.id, min(self._pool.verify(held), _in_arena(held)))
        )

    # -- writing --------------------------------------------------------------------------------

    def _reserve(self, request: protocol.Reserve) -> Answer:
        self._check_may_write()
        namespace = namespace_of(request.namespace)
        if self.draining:
            num_blocks = len(request.key) // namespace.key_bytes
            return Held(request.id, NOTHING, b"", b"", num_blocks)
        slot_size = slot_bytes(namespace.layout.block_bytes)
        room = max(0, self._max_reserved_bytes - self.reserved_bytes) // slot_size
        if not self.reserved_bytes:
            room = max(1, room)  # also where half of the arena is less than a block
        reservation = self._pool.reserve(
            namespace,
            request.key,
            heads=request.heads,
            max_blocks=room,
            priority=request.priority,
            ttl_s=request.ttl_s,
        )
        self._counts["refused_session_budget"] += (
            reservation.refused > 0 and reservation.num_blocks == room
        )
        if reservation.held_id != NOTHING:
            self._reservations[reservation.held_id] = reservation
            self.reserved_bytes += _reserved_bytes(reservation)
        return Held(
            request.id,
            reservation.held_id,
            reservation.offsets.tobytes(),
            reservation.indices.tobytes(),
            reservation.refused,
        )

    def _commit(self, request: protocol.Commit) -> Answer:
        return Number(request.id, self._pool.commit(self._take(request.reservation)))

    def _abort(self, request: protocol.Abort) -> Answer:
        self._pool.abort(self._take(request.reservation))
        return Number(request.id, 0)

    def _take(self, held_id: int) -> Reservation:
        self._check_may_write()
        reservation = self._reservations.pop(held_id, None)
        if reservation is None:
            return Reservation(**_UNKNOWN, indices=np.empty(0, np.int32))
        self.reserved_bytes -= _reserved_bytes(reservation)
        return reservation

    def _check_may_write(self) -> None:
        if self._access != "write":
            raise UsageError("this client maps the arena for reading: connect for writing")

    def _prefilled(self, request: protocol.Prefilled) -> Answer:
        namespace = namespace_of(request.namespace)
        self._pool.prefilled(namespace, request.start, request.stop, request.seconds)
        return None

    # -- administration -------------------------------------------------------------------------

    def _explain(self, request: protocol.Explain) -> Answer:
        namespace = namespace_of(request.namespace)
        return later(
            request, lambda: Explained(request.id, self._pool.explain(namespace, request.key))
        )

    def _explain_all(self, request: protocol.ExplainAll) -> Answer:
        return later(request, lambda: self._explained_all(request))

    def _explained_all(self, request: protocol.ExplainAll) -> Reply:
        known = [stats.digest for stats in self._pool.namespaces() if stats.keys == "tokens"]
        asked = known if request.digest is None else [request.digest]
        explanations = {}
        for digest in asked:
            namespace = self._pool.namespace(digest) if digest in known else None
            if namespace is not None:
                explanations[digest] = self._pool.explain(namespace, request.key)
            elif request.digest is not None:
                raise UsageError(f"no namespace {digest!r} with tokens as keys has blocks")
        return ExplainedAll(request.id, explanations)

    def _evict(self, request: protocol.Evict) -> Answer:
        self._check_may_write()
        return Number(request.id, self._pool.evict(namespace_of(request.namespace), request.key))

    def _clear(self, request: protocol.Clear) -> Answer:
        self._check_may_write()
        self._pool.clear()
        return Number(request.id, 0)

    def _drain(self, request: protocol.Drain) -> Answer:
        def drained() -> Reply:
            self._pool.drain()
            return Number(request.id, 0)

        return later(request, drained)

    def _tell(self, request: protocol.Status) -> Answer:
        return Told(request.id, self._status())

    _handlers: ClassVar[dict[type[Any], Callable[[Any, Any], Answer]]] = {
        protocol.Lookup: _lookup,
        protocol.Prefetch: _prefetch,
        protocol.Acquire: _acquire,
        protocol.Release: _release,
        protocol.Verify: _verify,
        protocol.Reserve: _reserve,
        protocol.Commit: _commit,
        protocol.Abort: _abort,
        protocol.Explain: _explain,
        protocol.ExplainAll: _explain_all,
        protocol.Evict: _evict,
        protocol.Clear: _clear,
        protocol.Drain: _drain,
        protocol.Status: _tell,
        protocol.Prefilled: _prefilled,
    }


def _log_failure(end: Callable[[Any], None], record: Lease | Reservation) -> None:
    """End ``record``, whatever happens: the others must end as well."""
    try:
        end(record)
    except LeaseError:
        pass  # it ran out
    except Exception:
        logger.exception("cannot end what a client left")


def _in_arena(lease: Lease) -> int:
    """Leading blocks in the pool's first tier: the client maps no other."""
    elsewhere = lease.tiers != 0
    return int(elsewhere.argmax()) if elsewhere.any() else len(lease.tiers)


def _reserved_bytes(reservation: Reservation) -> int:
    return len(reservation.offsets) * slot_bytes(reservation.block_bytes)
