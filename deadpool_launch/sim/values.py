"""What the training computes: numbers that tell at once whether a state is the right one.

The state of a rank after a step is a number for each of its segments and one for its own part. A
step mixes the sum over all ranks into each of them, so one wrong number spoils every later one, and
what an undisturbed run has after each step is known in advance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from deadpool_runtime.replication.naming import Ranks, members, packed

_MASK = (1 << 64) - 1
#: Stands for the own part where segments are named by the lowest of their ranks.
_OWN = 1 << 32


def mix(first: int, second: int) -> int:
    """A number of 64 bits that depends on every bit of both."""
    value = (first ^ (second * 0x9E3779B97F4A7C15)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return value ^ (value >> 27)


class LayoutKind(StrEnum):
    """What the ranks have in common."""

    #: Everything.
    DDP = "ddp"
    #: The parameters; each rank has a share of the optimizer state, another one when others take
    #: part.
    ZERO = "zero"
    #: Nothing.
    FSDP = "fsdp"
    #: Ranks with the same place on their node have the same shard.
    HSDP = "hsdp"


class Layout:
    """Which segments each rank has."""

    def __init__(self, kind: LayoutKind, world_size: int, nproc_per_node: int) -> None:
        self.kind = kind
        self.world_size = world_size
        ranks = tuple(range(world_size))
        everyone = packed(ranks)
        alone = [(rank,) for rank in ranks]
        self.segments: list[tuple[Ranks, ...]]
        match kind:
            case LayoutKind.DDP:
                self.segments = [(everyone,)] * world_size
            case LayoutKind.ZERO:
                self.segments = [tuple(dict.fromkeys([everyone, own])) for own in alone]
            case LayoutKind.FSDP:
                self.segments = [(own,) for own in alone]
            case LayoutKind.HSDP:
                shards = [packed(ranks[place::nproc_per_node]) for place in range(nproc_per_node)]
                self.segments = [(shards[rank % nproc_per_node],) for rank in ranks]

    def replica_of(self, rank: int) -> tuple[Ranks, str]:
        """The ranks that have a whole model with this one, and why all are needed; see
        ``protocol.Attached``."""
        match self.kind:
            case LayoutKind.DDP | LayoutKind.ZERO:
                return (rank,), ""
            case LayoutKind.HSDP:
                nproc = len({segments for segments in self.segments})
                first = rank - rank % nproc
                return tuple(range(first, first + nproc)), ""
            case _:
                return tuple(range(self.world_size)), "ranks have state that no other has"

    @property
    def shares(self) -> bool:
        """Whether what a rank has alone is shared out over those that take part."""
        return self.kind is LayoutKind.ZERO

    def alike(self, rank: int, peer: int) -> bool:
        """Whether the copy of ``peer`` may take the place of that of ``rank``."""

        def common(of: int) -> list[Ranks]:
            return [name for name in self.segments[of] if not self.shares or name != (of,)]

        return peer != rank and common(rank) == common(peer)

    def shard_of(self, rank: int, state: State) -> int:
        """What ``rank`` has alone in this state of it."""
        return state.values[self.segments[rank].index((rank,))]

    def shared_anew(self, rank: int, state: State, shards: Mapping[int, int]) -> State:
        """The state with the share that falls to ``rank`` of what is in ``shards``, all of which
        it depends on."""
        total = sum(mix(value, of + 1) for of, value in shards.items()) & _MASK
        values = tuple(
            mix(total, rank) if name == (rank,) else value
            for name, value in zip(self.segments[rank], state.values, strict=True)
        )
        return State(state.step, state.lineage, values, state.own)

    @cached_property
    def undisturbed(self) -> list[tuple[State, ...]]:
        """The states of all ranks after each step so far asked for."""
        names = {name for segments in self.segments for name in segments}
        start = {name: mix(name[0], len(members(name))) for name in names}
        first = [
            State(0, 0, tuple(start[name] for name in segments), mix(_OWN, rank))
            for rank, segments in enumerate(self.segments)
        ]
        return [tuple(first)]

    def expected(self, rank: int, step: int) -> State:
        """What an undisturbed run has on ``rank`` after ``step``; its lineage means nothing."""
        table = self.undisturbed
        while len(table) <= step:
            total = sum(contribution(state) for state in table[-1]) & _MASK
            table.append(tuple(after_step(state, total, 0) for state in table[-1]))
        return table[step][rank]


@dataclass(frozen=True, slots=True)
class State:
    """The state of one rank after a step.

    ``lineage`` names how it came about (see ``Lineages``); the rank does not know it.
    """

    step: int
    lineage: int
    #: One for each segment of the rank, in the order of its layout.
    values: tuple[int, ...]
    own: int

    def equals(self, other: State) -> bool:
        """Whether the numbers are the same, whatever they came from."""
        mine = self.step, self.values, self.own
        return mine == (other.step, other.values, other.own)


def contribution(state: State) -> int:
    """What a rank adds to the sum of all in the next step."""
    total = state.own
    for value in state.values:
        total += mix(value, state.step)
    return total


def after_step(state: State, total: int, lineage: int) -> State:
    """The next state, from the sum over all ranks."""
    what = mix(total, state.step + 1)
    values = tuple(mix(value, what) for value in state.values)
    return State(state.step + 1, lineage, values, mix(state.own, what))


class Lineages:
    """The pasts of states: which step was computed in which epoch after which other one.

    Two states may be mixed only if they have the same past, even where their numbers are equal.
    """

    def __init__(self) -> None:
        #: Parent, step and epoch of each.
        self._all: list[tuple[int, int, int]] = [(-1, 0, 0)]
        self._known: dict[tuple[int, int, int], int] = {}

    def extend(self, lineage: int, step: int, epoch: int) -> int:
        """The past of a state that was computed in ``epoch`` from one with ``lineage``."""
        key = (lineage, step, epoch)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self._all)
            self._all.append(key)
        return found

    def is_past(self, older: int, lineage: int) -> bool:
        """Whether ``older`` is ``lineage`` or a past of it."""
        while lineage > older:
            lineage = self._all[lineage][0]
        return lineage == older
