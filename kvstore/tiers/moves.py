"""What moves between tiers, and the copying and hashing itself: bytes only, no lock, no metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from kvstore.blocks import FIRST_CHECKSUM, NO_CHECKSUM
from kvstore.tiers.arena import slot_bytes
from kvstore.tiers.disk.format import (
    GOOD,
    BlockIdentity,
    block_digest,
    checksum_of,
    codec_of,
    root_digest,
)
from kvstore.tiers.disk.store import DiskStore
from kvstore.tiers.dram import DramStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.blocks import Ids
    from kvstore.namespace import Namespace
    from kvstore.tiers.store import HostBlocks, Store
    from kvstore.tiers.tier import NamespaceTree, Tier
    from radix import Node


class Prompt:
    """The blocks of a prompt by their names, each of which is computed once.

    Not thread-safe; the mover of one lane uses it at a time.
    """

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        """Describe a prompt whose blocks have ``key``, from the first one on."""
        self.namespace = namespace
        self.key = key
        self._digests = [root_digest(namespace)]

    def identities(
        self,
        positions: NDArray[np.int64],
        checksums: NDArray[np.uint64],
        plain: NDArray[np.bool_],
    ) -> list[BlockIdentity]:
        """Name the blocks at ``positions``; checksums, uint64, and forms, bool, are of the same length."""
        digests, stride, key = self._digests, self.namespace.key_bytes, self.key
        for at in range(len(digests) - 1, int(positions.max()) + 1):
            own = key[at * stride : (at + 1) * stride]
            digests.append(block_digest(digests[at], at, own))
        return [
            BlockIdentity(
                self.namespace,
                at,
                digests[at],
                digests[at + 1],
                key[at * stride : (at + 1) * stride],
                checksum,
                plain=form,
            )
            for at, checksum, form in zip(
                positions.tolist(), checksums.tolist(), plain.tolist(), strict=True
            )
        ]


@dataclass(frozen=True, eq=False)
class Origin:
    """Which blocks these are: what a durable tier writes on them, and wants to read there."""

    prompt: Prompt
    positions: NDArray[np.int64]
    """int64 ``[num_blocks]``: places in the prompt, in blocks."""
    plain: NDArray[np.bool_]
    """bool ``[num_blocks]``: which the codec of the namespace refuses."""

    def take(self, which: NDArray[np.bool_] | NDArray[np.intp] | slice) -> Origin:
        """Return the origin of some of the blocks."""
        return Origin(self.prompt, self.positions[which], self.plain[which])

    def as_plain(self) -> Origin:
        """Return the origin of the same blocks, all of which the codec refuses."""
        return Origin(self.prompt, self.positions, np.ones(len(self.positions), bool))

    def identities(self, checksums: NDArray[np.uint64]) -> list[BlockIdentity]:
        """Name the blocks, whose checksums are uint64 ``[num_blocks]``."""
        return self.prompt.identities(self.positions, checksums, self.plain)

    @property
    def is_exact(self) -> NDArray[np.bool_]:
        """Bool ``[num_blocks]``: which come back as they were, to the bit."""
        return self.plain | codec_of(self.prompt.namespace).lossless


class Path(NamedTuple):
    """A prompt as the index knows it."""

    tree: NamespaceTree
    key: bytes

    @classmethod
    def to(cls, node: Node) -> Path:
        """Return the prompt that ends with ``node``, which is in the tree of a namespace."""
        return cls(node.tree, node.tree.prefix(node))  # type: ignore[arg-type]


@dataclass(eq=False)
class Move:
    """Blocks on their way to slots of another tier, or to other slots of the same one.

    Each holds a reference until the move ends.
    """

    ids: Ids
    source: int
    source_offsets: NDArray[np.int64]
    target: int
    target_offsets: NDArray[np.int64]
    block_bytes: int
    drop_source: bool
    path: Path | None = None
    """Where the blocks belong; None within a tier."""
    origin: Origin | None = None
    """Needed where a durable tier is involved."""
    known: NDArray[np.uint64] | None = None
    """uint64 ``[num_blocks]``: checksums as they were known at the start, with an origin."""


class Outcome(NamedTuple):
    """What became of the bytes of a move."""

    checksums: NDArray[np.uint64]
    """uint64 ``[num_blocks]``: of what was copied; ``NO_CHECKSUM`` where it did not pass through the host."""
    copied: NDArray[np.bool_]
    """Whether the bytes are at their target."""
    lost: NDArray[np.bool_]
    """Whether the source does not have them any more."""
    refused: NDArray[np.bool_]
    """Whether the codec of their namespace refuses them: they can be written plain."""
    changed: NDArray[np.bool_]
    """Whether they need not have the checksum that was known: a codec has changed them within its bound, or
    another writer's bytes were read."""


def copy_blocks(move: Move, tiers: Sequence[Tier]) -> Outcome:
    """Copy the bytes of ``move``.

    Raises:
        Exception: whatever the memory or a driver raises; the target then holds garbage. A durable tier
            raises nothing.
    """
    source, target = tiers[move.source].store, tiers[move.target].store
    if isinstance(target, DiskStore):
        return _write(move, _on_the_host(source), target)
    if isinstance(source, DiskStore):
        return _read(move, source, _on_the_host(target))
    sums = _copied(move, source, target)
    done = np.ones(len(move.ids), bool)
    return Outcome(sums, done, ~done, ~done, ~done)


def _copied(move: Move, source: Store, target: Store) -> NDArray[np.uint64]:
    """Copy from memory to memory; return the checksums of what passed through the host's."""
    if move.source == move.target:
        source.relocate(move.source_offsets, move.target_offsets, move.block_bytes)
        if not isinstance(target, DramStore):
            return np.full(len(move.ids), NO_CHECKSUM, np.uint64)
        return _checksums(target.blocks(move.target_offsets, move.block_bytes))
    if isinstance(target, DramStore):
        source.read_into(move.source_offsets, target.blocks(move.target_offsets, move.block_bytes))
        return _checksums(target.blocks(move.target_offsets, move.block_bytes))
    blocks = _on_the_host(source).blocks
    target.write_from(move.target_offsets, blocks(move.source_offsets, move.block_bytes))
    return _checksums(blocks(move.source_offsets, move.block_bytes))


def _write(move: Move, source: DramStore, target: DiskStore) -> Outcome:
    """Write blocks whose bytes are still what their writer wrote."""
    assert move.origin is not None
    assert move.known is not None
    sums = _checksums(source.blocks(move.source_offsets, move.block_bytes))
    right = np.flatnonzero((move.known < FIRST_CHECKSUM) | (move.known == sums))
    written, refused = np.zeros(len(move.ids), bool), np.zeros(len(move.ids), bool)
    if len(right):
        origin = move.origin
        named = origin.identities(np.where(origin.is_exact, sums, np.uint64(NO_CHECKSUM)))
        payloads = list(source.blocks(move.source_offsets, slot_bytes(move.block_bytes)))
        written[right], refused[right] = target.write(
            move.target_offsets[right],
            [named[at] for at in right.tolist()],
            [payloads[at] for at in right.tolist()],
        )
    none = np.zeros(len(move.ids), bool)
    return Outcome(sums, written, none, refused, none)


def _read(move: Move, source: DiskStore, target: DramStore) -> Outcome:
    """Read blocks; what is there is compared with what must be there."""
    assert move.origin is not None
    assert move.known is not None
    known = np.where(move.origin.is_exact, move.known, np.uint64(NO_CHECKSUM))
    named = move.origin.identities(known)
    payloads = list(target.blocks(move.target_offsets, slot_bytes(move.block_bytes)))
    verdicts = source.read(move.source_offsets, named, payloads)
    good = np.array([verdict == GOOD for verdict in verdicts])
    lost = np.array([verdict not in (GOOD, "off") for verdict in verdicts])
    sums = np.where(good, known, np.uint64(NO_CHECKSUM))
    changed = known < FIRST_CHECKSUM
    for at in np.flatnonzero(good & changed).tolist():
        sums[at] = checksum_of(payloads[at][: move.block_bytes])
    return Outcome(sums, good, lost, np.zeros(len(good), bool), changed)


def _on_the_host(store: Store | DiskStore) -> DramStore:
    if not isinstance(store, DramStore):
        raise TypeError("one side of a move must be host memory")
    return store


def on_host(tiers: Sequence[Tier]) -> NDArray[np.bool_]:
    """Say of each tier whether its bytes lie in host memory, where they can be hashed."""
    return np.array([isinstance(tier.store, DramStore) for tier in tiers])


def checksums(
    tiers: Sequence[Tier],
    indices: NDArray[np.int8],
    offsets: NDArray[np.int64],
    block_bytes: int,
) -> NDArray[np.uint64]:
    """Checksums of the blocks at ``offsets`` of the tiers ``indices``; ``NO_CHECKSUM`` off the host."""
    sums = np.full(len(indices), NO_CHECKSUM, np.uint64)
    for index, tier in enumerate(tiers):
        here = np.flatnonzero(indices == index)
        if len(here) and isinstance(tier.store, DramStore):
            sums[here] = _checksums(tier.store.blocks(offsets[here], block_bytes))
    return sums


def _checksums(blocks: HostBlocks) -> NDArray[np.uint64]:
    """xxh3-64 of each block, at least ``FIRST_CHECKSUM``."""
    sums = [xxhash.xxh3_64_intdigest(block.data) for block in blocks]
    return np.maximum(np.array(sums, np.uint64), np.uint64(FIRST_CHECKSUM))
