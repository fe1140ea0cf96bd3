"""Which step can be made whole on every rank, and who fetches what from where for that.

Pure functions of what they are given: the same answer on every caller, and for any order of the
entries of a mapping.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.slotting import newest_below


@dataclass(frozen=True, slots=True)
class Fetch:
    """A part of a copy of ``rank`` that is taken from ``node``; see ``protocol.Piece``."""

    node: str
    rank: int
    replica: bool
    segments: tuple[Ranks, ...]
    base: bool


@dataclass(frozen=True, slots=True)
class Adoption:
    """Whose copies a rank that took no part for a while may take over, of steps up to ``until``."""

    until: int
    peers: Ranks


@dataclass(frozen=True, slots=True)
class Lent:
    """The shard of ``rank``, which takes no part, for a rank that brings it; see ``shards``.

    It is in a copy on ``node``, or on the bringer's own node if that is None.
    """

    rank: int
    replica: bool
    segments: tuple[Ranks, ...]
    node: str | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """The newest step that can be made whole on every rank, or None.

    ``fetches``: what each rank fetches, the base first; nothing for one whose node has it all.
    ``lacking``: for each newer step of which there is a copy, the ranks that cannot have it.
    ``former`` and ``lent``: if not empty, over which ranks state was shared out in the copies, and
    whose shards each rank brings besides its own; see ``shards``.
    """

    step: int | None
    fetches: Mapping[int, tuple[Fetch, ...]]
    lacking: Mapping[int, Ranks]
    former: Ranks = ()
    lent: Mapping[int, tuple[Lent, ...]] = field(default_factory=dict)


def counts(copy: Copy, history: Sequence[tuple[int, int]]) -> bool:
    """Whether the copy is of the history that the job went on from.

    ``history``: epoch and step of every resume. A copy made in an older epoch counts only if no
    later resume went back to before its step:

    1. Rank 0 completes step 21 in epoch 1 and its copy is sealed; rank 1 dies in step 21.
    2. All resume in epoch 2 from step 20. The copy of 21 is still in its slot.
    3. Rank 1 dies again before anybody has completed step 21 in epoch 2. Rank 0's old copy of 21 is
       of a step that never was, as far as the others know.
    """
    return all(copy.step <= step for epoch, step in history if epoch > copy.epoch)


def agree(
    copies: Mapping[str, Sequence[Copy]],
    history: Sequence[tuple[int, int]],
    node_of: Mapping[int, str],
    refused: Set[int] = frozenset(),
    adopts: Mapping[int, Adoption] | None = None,
) -> Agreement:
    """The newest step that every rank of ``node_of`` can have, from the ``copies`` on each node.

    Steps in ``refused`` are not taken. ``adopts``: ranks that need no copy of their own.
    """
    by_step: dict[int, _Stock] = defaultdict(_Stock)
    for node in sorted(copies):
        for copy in copies[node]:
            if copy.step not in refused and copy.rank in node_of and counts(copy, history):
                by_step[copy.step].add(node, copy)
    lacking: dict[int, Ranks] = {}
    for step in sorted(by_step, reverse=True):
        stock = by_step[step]
        fetches: dict[int, tuple[Fetch, ...]] = {}
        for rank in sorted(node_of):
            found = stock.fetches(rank, node_of[rank])
            adoption = (adopts or {}).get(rank)
            if found is None and adoption is not None and step <= adoption.until:
                found = stock.adopted(adoption.peers)
            if found is not None:
                fetches[rank] = found
        if len(fetches) == len(node_of):
            return Agreement(step, fetches, lacking)
        lacking[step] = tuple(rank for rank in sorted(node_of) if rank not in fetches)
    return Agreement(None, {}, lacking)


def replicated_before(
    step: int, copies: Mapping[str, Sequence[Copy]], history: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """The newest steps before this one that may have to be gone back to until a replica of it is
    whole everywhere: those of which there are replicas.
    """
    replicas = {
        copy.step
        for its in copies.values()
        for copy in its
        if copy.replica and counts(copy, history)
    }
    return tuple(sorted(newest_below(step, replicas)))


class _Stock:
    """The copies of one step, and how often each node gives from them."""

    def __init__(self) -> None:
        self._of_rank: dict[int, list[tuple[str, Copy]]] = defaultdict(list)
        self._having: dict[Ranks, _Donors] = {}
        self._given: dict[str, int] = defaultdict(int)

    def add(self, node: str, copy: Copy) -> None:
        self._of_rank[copy.rank].append((node, copy))
        for name in copy.segments:
            if (donors := self._having.get(name)) is None:
                donors = self._having[name] = _Donors()
            donors.add(node, copy)

    def fetches(self, rank: int, node: str) -> tuple[Fetch, ...] | None:
        """What ``rank`` fetches to its ``node``; None if it cannot have this step."""
        # A full copy on its own node, a full copy elsewhere, a replica on its node, one elsewhere.
        bases = sorted(
            self._of_rank[rank],
            key=lambda found: (found[1].replica, found[0] != node, found[0], -found[1].epoch),
        )
        for where, base in bases:
            if not base.replica and not base.missing and where == node:
                return ()
            donors = [self._donor(ranks, node) for ranks in base.missing]
            if all(donor is not None for donor in donors):
                parts: dict[tuple[str, int, bool], list[Ranks]] = defaultdict(list)
                for ranks, donor in zip(base.missing, donors, strict=True):
                    assert donor is not None
                    parts[donor[0], donor[1].rank, donor[1].replica].append(ranks)
                for giver in (where, *(key[0] for key in parts)):
                    self._given[giver] += 1
                return (
                    Fetch(where, rank, base.replica, tuple(base.segments), True),
                    *(Fetch(*key, tuple(groups), False) for key, groups in parts.items()),
                )
        return None

    def adopted(self, peers: Ranks) -> tuple[Fetch, ...] | None:
        """The whole copy of a peer, from where the least was taken; None if there is none."""
        whole = [
            (where, copy)
            for peer in peers
            for where, copy in self._of_rank[peer]
            if not copy.replica and not copy.missing
        ]
        found = min(whole, key=lambda each: (self._given[each[0]], each[1].rank), default=None)
        if found is None:
            return None
        where, copy = found
        self._given[where] += 1
        return (Fetch(where, copy.rank, False, tuple(copy.segments), True),)

    def _donor(self, name: Ranks, node: str) -> tuple[str, Copy] | None:
        """Who gives a segment: a copy on the same node, else on the one that gave least so far."""
        donors = self._having.get(name)
        return None if donors is None else donors.best(node, self._given)


class _Donors:
    """The copies that have one segment.

    Own slots go before replicas, then what comes from the node that gave least so far, then the
    first by name of the node and number of the rank.
    """

    def __init__(self) -> None:
        #: The best copy on each node.
        self._on_node: dict[str, Copy] = {}
        #: The same in order, from the first question on. What a node has given only grows: a place
        #: that is out of date is too far in front, and is put right when it comes to the front.
        self._order: list[tuple[bool, int, str]] | None = None

    def add(self, node: str, copy: Copy) -> None:
        other = self._on_node.get(node)
        if other is None or (copy.replica, copy.rank) < (other.replica, other.rank):
            self._on_node[node] = copy
        self._order = None

    def best(self, node: str, given: Mapping[str, int]) -> tuple[str, Copy]:
        if node in self._on_node:
            return node, self._on_node[node]
        if self._order is None:
            self._order = [
                (copy.replica, given.get(where, 0), where) for where, copy in self._on_node.items()
            ]
            heapq.heapify(self._order)
        while True:
            replica, known, where = self._order[0]
            if known == given.get(where, 0):
                return where, self._on_node[where]
            heapq.heapreplace(self._order, (replica, given.get(where, 0), where))
