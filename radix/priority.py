"""Eviction by level: what matters less goes first, whatever policy ranks the rest.

Every node has a level (:attr:`radix.Node.level`), never below that of a node under it. Nodes of one level
have an order of their own, of any policy; the victim comes from the lowest level that has one. So all
descendants of a node leave before it, and where there is one level only, this is exactly that level's order.

A node in use is passed over, as are its ancestors, for :data:`PASSED` touches or as long as something else can
go: of the same level first, then of the next. Touching costs what the levels' orders take, plus O(1) a node.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import TYPE_CHECKING

from radix.leaves import LeafOrder
from radix.order import EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from radix.tree import Node

PASSED = 64
"""Touches for which a node in use is passed over."""


@dataclass(eq=False)
class _Level:
    """The nodes of one level."""

    order: EvictionOrder
    passed: OrderedDict[Node, int] = field(default_factory=OrderedDict)
    """Nodes in use or above such, by the touch that ends it, the earliest first."""

    def candidate(self) -> Node | None:
        """Return the victim, if it is not passed over."""
        node = self.order.victim()
        return None if node in self.passed else node


class PriorityOrder(EvictionOrder):
    """One order for each level.

    Invariants (:meth:`check_invariants`, in this order):

    1. a known node is known to the order of one level, and no other;
    2. what is passed over is known, and so are its known ancestors passed over;
    3. no level that has a node to give shows one that is passed over;
    4. those of the levels' orders.
    """

    def __init__(self, make: Callable[[], EvictionOrder]) -> None:
        """Start with no node; ``make`` makes the order of a level, when it has its first node."""
        self._make = make
        self._levels: dict[int, _Level] = {}
        self._ascending: list[int] = []
        self._level_of: dict[Node, _Level] = {}
        self._touches = 0

    @property
    def name(self) -> str:
        """That of the orders of its levels."""
        level = next(iter(self._levels.values()), None)
        return level.order.name if level else self._make().name

    # -- what the order is told -----------------------------------------------------------------

    def touch(self, path: Sequence[Node]) -> None:
        """Tell the order of each level of its part of ``path``; all of them of one that is empty, a miss."""
        self._touches += 1
        if not path:
            for level in self._levels.values():
                level.order.touch(path)
        for level, part in self._parts(path):
            level.order.touch(part)
        self._settle()

    def arrive(self, path: Sequence[Node]) -> None:
        """Tell the order of each level of its part of ``path``."""
        for level, part in self._parts(path):
            level.order.arrive(part)
        self._settle()

    def split(self, upper: Node, lower: Node) -> None:
        """Have ``upper`` in the order that ``lower`` is in."""
        level = self._level_of.get(lower)
        if level is None:
            return
        self._level_of[upper] = level
        level.order.split(upper, lower)
        if lower in level.passed:
            self._pass(upper)

    def join(self, upper: Node, lower: Node) -> None:
        """Have ``lower`` in the order that ``upper`` was in, and its rank there, if it has no other."""
        level = self._level_of.pop(upper, None)
        if level is None:
            return
        level.passed.pop(upper, None)
        before = self._level_of.get(lower)
        if before is not level:
            self._level_of[lower] = level
            if before is not None:
                self._leave(lower, before)
        level.order.join(upper, lower)
        self._settle()

    def remove(self, node: Node) -> None:
        """Forget ``node``."""
        level = self._level_of.pop(node, None)
        if level is not None:
            level.passed.pop(node, None)
            level.order.remove(node)
            self._settle()

    def postpone(self, node: Node) -> None:
        """Pass over ``node`` and its ancestors."""
        level = self._level_of.get(node)
        if level is None:
            return
        level.order.postpone(node)
        if len(self._levels) > 1:
            self._pass(node)
            if all(len(level.passed) == len(level.order) for level in self._levels.values()):
                for level in self._levels.values():  # from the start: some may be free by now
                    level.passed.clear()
                self._pass(node)
        self._settle()

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether the order that ``upper`` is in ranks them alike."""
        level = self._level_of.get(upper)
        return level is None or level.order.alike(upper, lower)

    # -- what it is asked -----------------------------------------------------------------------

    def victim(self) -> Node | None:
        """Return the victim of the lowest level that has one which is not passed over."""
        levels = [self._levels[number] for number in self._ascending]
        victims = (level.candidate() for level in levels)
        first = next((node for node in victims if node is not None), None)
        if first is None:
            first = next((node for node in (x.order.victim() for x in levels) if node), None)
        return first

    def __len__(self) -> int:
        """Number of known nodes."""
        return sum(len(level.order) for level in self._levels.values())

    def __contains__(self, node: object) -> bool:
        """Whether ``node`` is known."""
        level = self._level_of.get(node)  # type: ignore[call-overload]
        return level is not None and node in level.order

    def __iter__(self) -> Iterator[Node]:
        """Nodes by level, and those that are passed over after all others."""
        levels = [self._levels[number] for number in self._ascending]
        return chain(
            (node for level in levels for node in level.order if node not in level.passed),
            (
                node
                for level in levels
                if level.passed
                for node in level.order
                if node in level.passed
            ),
        )

    # -- inner ----------------------------------------------------------------------------------

    def _parts(self, path: Sequence[Node]) -> Iterator[tuple[_Level, Sequence[Node]]]:
        """Cut ``path`` by level, and put every node where it belongs."""
        if path and path[0].level == path[-1].level:
            yield self._placed(path)
            return
        for _, part in groupby(path, lambda node: node.level):
            yield self._placed(list(part))

    def _placed(self, part: Sequence[Node]) -> tuple[_Level, Sequence[Node]]:
        level = self._levels.get(part[0].level)
        if level is None:
            level = self._levels[part[0].level] = _Level(self._make())
            insort(self._ascending, part[0].level)
        for node in part:
            before = self._level_of.get(node)
            if before is not level:
                self._level_of[node] = level
                if before is not None:
                    self._leave(node, before)
        return level, part

    def _leave(self, node: Node, before: _Level) -> None:
        """Take ``node`` out of the order that it was in; if it was passed over there, it is still."""
        before.order.remove(node)
        if before.passed.pop(node, None) is not None:
            self._pass(node)

    def _pass(self, node: Node) -> None:
        """Pass over ``node``, and over its ancestors no shorter."""
        for step in node.path():
            if (level := self._level_of.get(step)) is not None:
                level.passed[step] = self._touches + PASSED
                level.passed.move_to_end(step)

    def _settle(self) -> None:
        """End what is over, and bring to the front of each order a node that may go, if it has one."""
        for level in self._levels.values():
            while level.passed:
                node, due = next(iter(level.passed.items()))
                if due > self._touches:
                    break
                del level.passed[node]
            for _ in range(len(level.passed) if len(level.passed) < len(level.order) else 0):
                if (victim := level.order.victim()) is None or victim not in level.passed:
                    break
                level.order.postpone(victim)

    def check_invariants(self) -> None:
        """Raise AssertionError naming the first broken invariant."""
        for node, level in self._level_of.items():
            known = [other for other in self._levels.values() if node in other.order]
            assert known == [level], "1: one order knows a node"
        assert len(self) == len(self._level_of), "1: all known nodes have a level"
        for level in self._levels.values():
            for node in level.passed:
                assert node in level.order, "2: what is passed over is known"
                for above in node.path():
                    where = self._level_of.get(above)
                    assert where is None or above in where.passed, "2: so is what is above it"
            stuck = len(level.passed) < len(level.order) and level.candidate() is None
            assert not stuck, "3: a level shows what it can give"
            if isinstance(level.order, LeafOrder):
                level.order.check_invariants()
