"""Groups that are smaller for a while, because some ranks are set aside.

The group objects stay, and so do the numbers by which the launcher knows the ranks. What torch says
about a group while ranks are missing is what it would say in a job without them: sizes are those of
the members that take part, and members are counted from 0 without gaps. So averages are over who is
there, and ``dist.get_rank() == 0`` is true on one rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deadpool_runtime.groups import native
from deadpool_runtime.groups.mechanism import GroupRecord

#: All members of groups that were there when ranks were set aside, by the job's own numbers.
_all_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def take_part(records: Iterable[GroupRecord], aside: Collection[int]) -> None:
    """Let the groups have only those members that are not set aside; called before they connect.

    ``aside``: not this process's own rank.
    """
    records = list(records)
    everyone = sorted({rank for record in records for rank in record.ranks()})
    number_of = {rank: number for number, rank in enumerate(_without(everyone, aside))}
    for record in records:
        there = _without(record.ranks(), aside)
        group = record.living()
        if not aside and group not in _all_ranks:
            continue  # no rank is or was set aside since it was made
        # One that keeps all its members too: those behind a rank that is gone count anew.
        own = record.ranks()[record.group_rank]
        record.rank_now, record.size_now = there.index(own), len(there)
        _all_ranks[group] = record.ranks()
        native.load().set_shape(group, record.rank_now, record.size_now)
        c10d._world.pg_group_ranks[group] = {
            number_of[rank]: place for place, rank in enumerate(there)
        }


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """All members of a group by the job's own numbers, those that are set aside included."""
    known = _all_ranks.get(group)
    return list(known) if known is not None else dist.get_process_group_ranks(group)


def _without(ranks: Iterable[int], aside: Collection[int]) -> list[int]:
    return [rank for rank in ranks if rank not in aside]
