"""When which nodes fail: the same faults for every strategy and for any number of spares.

A *seat* is a node's place in the job: those that train come first, then the spares. Each seat has a
sequence of faults of its own, drawn from the seed, the seat and a count and from nothing else. So
strategies that are compared meet the same faults at the same times, and one more spare changes none
of those of the others (common random numbers). A node that takes a seat begins a new lifetime at
the time of the fault, as the node that fell out would have; for exponential lifetimes this is
exact, for others the age that a spare has reached by waiting is forgotten.
"""

from __future__ import annotations

import heapq
import math
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Fault:
    """Something happened at ``at`` seconds to the nodes in ``seats``.

    ``permanent``: the nodes are lost with all copies on them. Otherwise a process ended there and
    can be started again on its node, which keeps its copies.
    """

    at: float
    seats: tuple[int, ...]
    permanent: bool


class Faults(Protocol):
    """A failure process."""

    def stream(self, seed: int, nodes: int, spares: int) -> Iterator[Fault]:
        """The faults of a run in the order of time."""

    def rate(self, nodes: int) -> float:
        """How often a second some of ``nodes`` nodes fail, in the long run."""

    def losses(self, nodes: int) -> float:
        """How many of ``nodes`` nodes are lost a second, in the long run."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """Nodes with independent lifetimes, and groups of nodes that fail together.

    ``shape``: of the Weibull distribution of the lifetimes; 1 is the exponential one. The nodes
    have been running for long when the job begins (the process is stationary), so the rate of
    faults is that of the mean from the first second on.
    """

    mtbf_s: float
    shape: float = 1.0
    #: The share of the faults that leave the node in the job.
    transient: float = 0.0
    #: Neighbouring nodes that share a switch or a power supply, and how often that fails.
    group: int = 1
    group_mtbf_s: float = math.inf

    def stream(self, seed: int, nodes: int, spares: int) -> Iterator[Fault]:
        """See ``Faults``."""
        seats = nodes + spares
        queue = [(self._first(seed, seat), 0, seat, 0) for seat in range(seats)]
        if self._groups:
            groups = range(-(-seats // self.group))
            queue += [(self._life(1, seed, group, 0), 1, group, 0) for group in groups]
        heapq.heapify(queue)
        while True:
            at, kind, index, count = queue[0]
            permanent = _uniform(seed, kind, index, count, 1) >= self.transient
            if kind == 0:
                yield Fault(at, (index,), permanent)
            else:
                first = index * self.group
                yield Fault(at, tuple(range(first, min(first + self.group, seats))), permanent)
            after = at + self._life(kind, seed, index, count + 1)
            heapq.heapreplace(queue, (after, kind, index, count + 1))

    def rate(self, nodes: int) -> float:
        """See ``Faults``."""
        groups = math.ceil(nodes / self.group) / self.group_mtbf_s if self._groups else 0.0
        return nodes / self.mtbf_s + groups

    def losses(self, nodes: int) -> float:
        """See ``Faults``."""
        rate = 1 / self.mtbf_s + (1 / self.group_mtbf_s if self._groups else 0.0)
        return nodes * rate * (1 - self.transient)

    @property
    def _groups(self) -> bool:
        return self.group > 1 and math.isfinite(self.group_mtbf_s)

    def _life(self, kind: int, seed: int, index: int, count: int) -> float:
        exponential = -math.log(1.0 - _uniform(seed, kind, index, count, 0))
        if kind == 1:
            return exponential * self.group_mtbf_s
        return self._scale * math.pow(exponential, 1 / self.shape)

    def _first(self, seed: int, seat: int) -> float:
        """What is left of the lifetime of a node that has been running for long.

        The lifetime that a random moment falls into is longer than others, in proportion to its
        length; the moment is anywhere in it. For a Weibull distribution the power of such a
        lifetime is gamma distributed.
        """
        if self.shape == 1.0:
            return self._life(0, seed, seat, 0)
        dice = random.Random(_bits(seed, 0, seat, 0, 2))
        power = dice.gammavariate(1 + 1 / self.shape, 1.0)
        return self._scale * math.pow(power, 1 / self.shape) * dice.random()

    @property
    def _scale(self) -> float:
        return self.mtbf_s / math.gamma(1 + 1 / self.shape)


@dataclass(frozen=True, slots=True)
class Trace:
    """Faults that were recorded. The record is taken to repeat after ``length_s``.

    Seed 0 begins where the record begins, every other seed at a random moment of it.
    """

    faults: tuple[Fault, ...]
    length_s: float

    def stream(self, seed: int, nodes: int, spares: int) -> Iterator[Fault]:
        """See ``Faults``. Nodes that the job does not have are passed over."""
        begin = self.length_s * _uniform(seed, 2, 0, 0, 0) if seed else 0.0
        kept = [each for each in self.faults if min(each.seats) < nodes + spares]
        turn = 0
        while kept:
            for each in kept:
                at = each.at + turn * self.length_s - begin
                if at >= 0:
                    yield Fault(at, each.seats, each.permanent)
            turn += 1

    def rate(self, nodes: int) -> float:
        """See ``Faults``."""
        return sum(min(each.seats) < nodes for each in self.faults) / self.length_s

    def losses(self, nodes: int) -> float:
        """See ``Faults``."""
        struck = sum(seat < nodes for each in self.faults if each.permanent for seat in each.seats)
        return struck / self.length_s


def listed(rows: Sequence[tuple[float, int, bool]], length_s: float | None = None) -> Trace:
    """A record from rows of time, seat and whether the node was lost.

    Nodes that are lost in the same second fail together. Without ``length_s`` the record ends with
    its last fault.
    """
    together: dict[tuple[float, bool], list[int]] = {}
    for at, seat, permanent in sorted(rows):
        together.setdefault((at, permanent), []).append(seat)
    faults = [
        Fault(at, tuple(seats), permanent) for (at, permanent), seats in sorted(together.items())
    ]
    return Trace(tuple(faults), length_s if length_s is not None else faults[-1].at)


def _bits(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little")


def _uniform(*numbers: int) -> float:
    """A number from 0 up to but not including 1, the same for the same numbers everywhere."""
    return (_bits(*numbers) >> 11) / (1 << 53)
