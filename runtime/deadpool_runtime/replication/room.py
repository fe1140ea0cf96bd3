"""How much host memory the copies on each node take. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deadpool_runtime.replication.manifest import ALIGN_NBYTES, aligned
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.placement import Holding, Share
from deadpool_runtime.replication.slotting import SLOTS, own_slots

#: Allowed for the manifest of each copy and for growth of the own part.
SPARE_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Need:
    """Host memory that the copies on one node take, in bytes."""

    #: Ranks of the node, and the size of one copy of all of them.
    ranks: Ranks
    copy_nbytes: int
    #: Ranks whose replicas it holds, and the size of one replica of all of them.
    held: Ranks
    held_nbytes: int
    #: Copies and replicas of each rank.
    copies: int = SLOTS
    replicas: int = SLOTS

    @property
    def nbytes(self) -> int:
        """All slots of both."""
        return self.copies * self.copy_nbytes + self.replicas * self.held_nbytes


def needs(
    segments: Mapping[int, Mapping[Ranks, int]],
    own_nbytes: Mapping[int, int],
    node_of: Mapping[int, str],
    holders: Mapping[int, Holding | None],
    interval: int = 1,
) -> dict[str, Need]:
    """What each node needs that has ranks or holds replicas, by name."""
    copies = own_slots(interval)
    ranks: dict[str, list[int]] = defaultdict(list)
    held: dict[str, list[int]] = defaultdict(list)
    own_sum: dict[str, int] = defaultdict(int)
    held_sum: dict[str, int] = defaultdict(int)
    for rank in sorted(segments):
        node = node_of[rank]
        ranks[node].append(rank)
        own_sum[node] += _slot_nbytes(segments[rank].values(), own_nbytes[rank])
        holder = holders.get(rank)
        if holder is not None:
            deputies = () if holder.deputy is None else (Share(holder.deputy, ()),)
            for share in (*holder.shares, *deputies):
                sizes = [segments[rank][each] for each in share.segments]
                held[share.node].append(rank)
                held_sum[share.node] += _slot_nbytes(sizes, own_nbytes[rank])
    return {
        node: Need(tuple(ranks[node]), own_sum[node], tuple(held[node]), held_sum[node], copies)
        for node in sorted({*ranks, *held})
    }


def _slot_nbytes(segments: Iterable[int], own_nbytes: int) -> int:
    return ALIGN_NBYTES + sum(map(aligned, segments)) + aligned(own_nbytes) + SPARE_NBYTES
