"""Tables of ranks and nodes that stay quick with thousands of entries.

Both are values: a change makes another table, which shares all that is the same. What is asked
after every event (is any rank still in that stage, when is the next deadline) is answered from
summaries, so that no event takes a walk over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, reduce
from itertools import chain
from math import inf
from operator import and_, attrgetter, or_
from typing import Any, TypeVar, overload

from deadpool_launch.controller.node import Node
from deadpool_launch.controller.rank import Rank, Trait

Value = TypeVar("Value")

#: Ranks of one chunk. A change copies one chunk and the list of chunks.
_CHUNK = 128
_SHIFT = 7
_MASK = _CHUNK - 1
#: Of such ranks nothing is asked. A name of its own: every rank of a chunk that changes is tried.
_ASIDE = Trait.ASIDE
#: After every epoch.
_LATEST = 1 << 62


class _Chunk:
    """Some ranks in a row, and what they have in common."""

    __slots__ = (
        "_least_completed",
        "_least_protected",
        "_those_present",
        "deadline",
        "every",
        "ranks",
        "some",
        "traits",
    )

    def __init__(self, ranks: tuple[Rank, ...], traits: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.traits = traits
        #: The same, with everything in the place of one that is set aside: it lacks nothing.
        self._those_present = tuple(map(_if_present, traits))
        self.some: int = reduce(or_, traits)
        self.every: int = reduce(and_, self._those_present)
        self.deadline = _earliest(ranks)
        self._least_completed: float | None = None
        self._least_protected: int | None = None

    def with_changes(self, changes: Mapping[int, Rank]) -> _Chunk:
        """Most changes are of one rank and change nothing that is summed up, or one trait."""
        made = _Chunk.__new__(_Chunk)
        ranks, traits, present = list(self.ranks), list(self.traits), list(self._those_present)
        timed = turned = False
        for place, rank in changes.items():
            timed = timed or rank.deadline != ranks[place].deadline
            ranks[place] = rank
            its = rank.traits
            if its != traits[place]:
                turned = True
                traits[place], present[place] = its, _if_present(its)
        made.ranks = tuple(ranks)
        if turned:
            made.traits, made._those_present = tuple(traits), tuple(present)
            made.some, made.every = reduce(or_, traits), reduce(and_, present)
        else:
            made.traits, made._those_present = self.traits, self._those_present
            made.some, made.every = self.some, self.every
        made.deadline = _earliest(ranks) if timed else self.deadline
        made._least_completed = made._least_protected = None
        return made

    def least_completed(self) -> float:
        """The least step that one of them has completed which has steps left; infinite if none
        has. Worked out when it is asked for, as that is only while an incident is open.
        """
        if self._least_completed is None:
            left = [rank.completed for rank in self.ranks if rank.goes_on]
            self._least_completed = min(left, default=inf)
        return self._least_completed

    def least_protected(self) -> int:
        """The oldest epoch in which one of them was protected last."""
        if self._least_protected is None:
            self._least_protected = min(
                (rank.protected for rank in self.ranks if not rank.aside), default=_LATEST
            )
        return self._least_protected


def _if_present(traits: int) -> int:
    return -1 if traits & _ASIDE else traits


def _earliest(ranks: Sequence[Rank]) -> float | None:
    return _first([rank.deadline for rank in ranks if rank.deadline is not None])


def _first(times: list[float]) -> float | None:
    return min(times) if times else None


class RankTable(Sequence[Rank]):
    """All ranks, in order. ``Rank.traits`` says what is summed up."""

    __slots__ = ("_chunks", "_deadline", "_every", "_length", "_some")

    def __init__(self, ranks: Iterable[Rank]) -> None:
        table = tuple(ranks)
        parts = [table[at : at + _CHUNK] for at in range(0, len(table), _CHUNK)]
        self._chunks = tuple(_Chunk(part, tuple(r.traits for r in part)) for part in parts)
        self._length = len(table)
        self._sum_up()

    def _sum_up(self) -> None:
        chunks = self._chunks
        self._some: int = reduce(or_, [chunk.some for chunk in chunks], 0)
        self._every: int = reduce(and_, [chunk.every for chunk in chunks], -1)
        self._deadline = _first([c.deadline for c in chunks if c.deadline is not None])

    def with_changes(self, changes: Mapping[int, Rank]) -> RankTable:
        """The table with other entries at these places."""
        by_chunk: dict[int, dict[int, Rank]] = {}
        for place, rank in changes.items():
            by_chunk.setdefault(place >> _SHIFT, {})[place & _MASK] = rank
        chunks = list(self._chunks)
        same = True
        for at, inside in by_chunk.items():
            old, new = chunks[at], chunks[at].with_changes(inside)
            same = same and old.some == new.some and old.every == new.every
            same = same and old.deadline == new.deadline
            chunks[at] = new
        table = RankTable.__new__(RankTable)
        table._chunks, table._length = tuple(chunks), self._length
        if same:
            table._some, table._every = self._some, self._every
            table._deadline = self._deadline
        else:
            table._sum_up()
        return table

    # ------------------------------------------------------------ what all have

    def some(self, traits: int) -> bool:
        """Whether any rank has any of these traits."""
        return bool(self._some & traits)

    def every(self, traits: int) -> bool:
        """Whether every rank that takes part has all of these traits."""
        return self._every & traits == traits

    def having(self, traits: int) -> list[Rank]:
        """The ranks that have any of these traits, in order."""
        return [
            rank
            for chunk in self._chunks
            if chunk.some & traits
            for rank, its in zip(chunk.ranks, chunk.traits, strict=True)
            if its & traits
        ]

    def deadline(self) -> float | None:
        """The earliest deadline of any rank."""
        return self._deadline

    def all_past(self, step: int) -> bool:
        """Whether every rank that has steps left has completed one after ``step``."""
        return all(chunk.least_completed() > step for chunk in self._chunks)

    def all_protected(self, epoch: int) -> bool:
        """Whether every rank was protected in ``epoch``, of which there is no later one."""
        return all(chunk.least_protected() >= epoch for chunk in self._chunks)

    # ------------------------------------------------------------ a sequence

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Rank: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Rank, ...]: ...

    def __getitem__(self, place: int | slice) -> Rank | tuple[Rank, ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        if place < 0:
            place += self._length
        if not 0 <= place < self._length:
            raise IndexError(f"there is no rank {place} among {self._length}")
        return self._chunks[place >> _SHIFT].ranks[place & _MASK]

    def __iter__(self) -> Iterator[Rank]:
        return chain.from_iterable(chunk.ranks for chunk in self._chunks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankTable):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def changed(value: Value, **changes: Any) -> Value:
    """A dataclass's value with other fields: ``dataclasses.replace``, at a third of its time."""
    kind: Any = type(value)
    read, places = _fields_of(kind)
    parts = list(read(value))
    for name, part in changes.items():
        parts[places[name]] = part
    made: Value = kind(*parts)
    return made


@cache
def _fields_of(kind: type[Any]) -> tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, int]]:
    names = [field.name for field in fields(kind)]
    return attrgetter(*names), {name: place for place, name in enumerate(names)}


class NodeTable(dict[str, Node]):
    """All nodes by name. Never changed once made, only replaced."""

    __slots__ = ("_deadline", "_waiting", "answers", "stages")

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        super().__init__(nodes)
        #: The same object in every later table in which each agent is at the stage it is at here.
        self.stages = object()
        #: How many have not yet said which copies they have.
        self.answers = sum(node.inventory_by is not None for node in self.values())
        self._sum_up()

    def _sum_up(self) -> None:
        times = [at for node in self.values() for at in _times(node)]
        self._deadline = _first(times)
        #: How many times there are that are the earliest.
        self._waiting = times.count(self._deadline) if self._deadline is not None else 0

    def with_nodes(self, nodes: Sequence[Node]) -> NodeTable:
        """The table with other entries for these nodes."""
        table = NodeTable.__new__(NodeTable)
        table.update(self)
        table.stages = self.stages
        first, waiting, answers = self._deadline, self._waiting, self.answers
        known = first is not None
        for node in nodes:
            old = table[node.name]
            table[node.name] = node
            if node.stage is not old.stage:
                table.stages = object()
            answers += (node.inventory_by is not None) - (old.inventory_by is not None)
            if first is not None:
                come = _times(node)
                known = known and min(come, default=first) >= first
                waiting += come.count(first) - _times(old).count(first)
        table.answers = answers
        if known and waiting > 0:
            table._deadline, table._waiting = first, waiting
        else:
            table._sum_up()
        return table

    def deadline(self) -> float | None:
        """The earliest time at which any node is given up."""
        return self._deadline


def _times(node: Node) -> list[float]:
    times = (node.deadline, node.inventory_by, node.back_at)
    return [at for at in times if at is not None]
