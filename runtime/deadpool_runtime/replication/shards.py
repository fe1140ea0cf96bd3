"""The step to go back to where optimizers share out their state over the ranks that take part.

Each of those ranks then has a *shard* that no other has, and after one of them is set aside, or has
come back, it is other shards. Copies that were made before serve all the same as long as a shard of
each rank is there of those that took part then: it is brought by the rank itself, or lent to one
that takes part now, and all is shared out anew. What ranks have in common, and the own part, are
not touched by that.

Pure, as ``agreement`` is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.agreement import Adoption, Agreement, Lent, agree, counts
from deadpool_runtime.replication.naming import Ranks, members


@dataclass(frozen=True, slots=True)
class Shared:
    """Over which ranks state was shared out in each epoch: all but those that were aside then."""

    world_size: int
    aside_in: Mapping[int, Ranks]

    def aside(self, epoch: int) -> Ranks:
        """The ranks that have no shards in the copies of this epoch."""
        return self.aside_in.get(epoch, ())


def agree_on_shared(
    copies: Mapping[str, Sequence[Copy]],
    history: Sequence[tuple[int, int]],
    node_of: Mapping[int, str],
    refused: Set[int],
    adopts: Mapping[int, Adoption],
    shared: Shared,
    *,
    twice: bool = True,
) -> Agreement:
    """As ``agreement.agree``, with state that was shared out over other ranks than ``node_of`` has.

    ``twice``: a shard of a rank that takes no part is brought by a rank of a node that does not
    have it yet, so that it is on two nodes until all have copies of what they got.
    """
    epochs = {copy.epoch for each in copies.values() for copy in each}
    found = (
        _Former(aside, copies, history, node_of, shared, twice).agree(refused, adopts)
        for aside in dict.fromkeys(shared.aside(epoch) for epoch in sorted(epochs, reverse=True))
    )

    def worth(each: Agreement) -> tuple[int, bool]:
        return -1 if each.step is None else each.step, bool(each.lacking)

    return max(found, key=worth, default=Agreement(None, {}, {}))


class _Former:
    """The copies with the state as it was shared out over the same ranks."""

    def __init__(
        self,
        aside: Ranks,
        copies: Mapping[str, Sequence[Copy]],
        history: Sequence[tuple[int, int]],
        node_of: Mapping[int, str],
        shared: Shared,
        twice: bool,
    ) -> None:
        self._ranks = ranks = frozenset(range(shared.world_size)).difference(aside)
        self._history = history
        self._node_of = node_of
        self._twice = twice
        # The shard of a rank that had none then does not matter, but all else of its copy does.
        self._copies = {
            node: [
                copy for copy in each if copy.rank not in ranks or shared.aside(copy.epoch) == aside
            ]
            for node, each in copies.items()
        }

    def agree(self, refused: Set[int], adopts: Mapping[int, Adoption]) -> Agreement:
        """The newest step of these copies."""
        # What a peer has is no shard of those that had one.
        adopts = {rank: each for rank, each in adopts.items() if rank not in self._ranks}
        lacking: dict[int, Ranks] = {}
        while True:
            found = agree(self._copies, self._history, self._node_of, refused, adopts)
            lacking = {**found.lacking, **lacking}
            if found.step is None or self._ranks == self._node_of.keys():
                return replace(found, lacking=lacking)
            lent, missing = self._lend(found.step)
            if not missing:
                former = tuple(sorted(self._ranks))
                return Agreement(found.step, found.fetches, lacking, former, lent)
            lacking[found.step] = missing
            refused = refused | {found.step}

    def _lend(self, step: int) -> tuple[dict[int, tuple[Lent, ...]], Ranks]:
        """Who brings the shards of those that take no part; and whose shards nobody has."""
        lent: dict[int, list[Lent]] = defaultdict(list)
        missing = []
        for rank in sorted(self._ranks - self._node_of.keys()):
            sources = self._with_shard(rank, step)
            if not sources:
                missing.append(rank)
                continue
            bringer, node = self._bringer(rank, list(sources), lent)
            where = node or self._node_of[bringer]
            copy = sources[where]
            lent[bringer].append(Lent(rank, copy.replica, _alone(copy, rank), node))
        return {bringer: tuple(each) for bringer, each in sorted(lent.items())}, tuple(missing)

    def _with_shard(self, rank: int, step: int) -> dict[str, Copy]:
        """By node, a copy of the rank that has all of its shard."""
        found: dict[str, Copy] = {}
        for node in sorted(self._copies):
            for copy in self._copies[node]:
                if (
                    (copy.rank, copy.step) == (rank, step)
                    and counts(copy, self._history)
                    and not any(members(name) == (rank,) for name in copy.missing)
                ):
                    found.setdefault(node, copy)
        return found

    def _bringer(
        self, rank: int, nodes: Sequence[str], lent: Mapping[int, Sequence[Lent]]
    ) -> tuple[int, str | None]:
        """The rank that brings a shard which these nodes have, and where it fetches it; None if
        its own node has it. Who brings least so far comes first, then the next after ``rank``."""
        here = [each for each in self._node_of if self._node_of[each] in nodes]
        others = [each for each in self._node_of if self._node_of[each] not in nodes]
        fetches = bool(others) and (not here or (self._twice and len(nodes) == 1))
        bringer = min(
            others if fetches else here,
            key=lambda each: (len(lent.get(each, ())), each < rank, each),
        )
        return bringer, nodes[0] if fetches else None


def _alone(copy: Copy, rank: int) -> tuple[Ranks, ...]:
    return tuple(name for name in copy.segments if members(name) == (rank,))
