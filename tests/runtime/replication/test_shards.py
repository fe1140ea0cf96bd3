"""The agreed step where state is shared out: what must hold for all copies that there may be."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.agreement import Adoption
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.shards import Shared, agree_on_shared

COMMON: Ranks = (0, 1, 2, 3)
#: Ranks 0 to 3 until step 5; without ranks 2 and 3 from there until step 7; then without rank 3.
SHARED = Shared(4, {2: (2, 3), 3: (3,)})
HISTORY = [(2, 5), (3, 7)]
NODES = {rank: f"n{rank}" for rank in COMMON}


def copies_of(rank: int, step: int, epoch: int) -> list[tuple[str, Copy]]:
    """Its own copy, and the replica on the next node."""
    own = Copy(rank, step, epoch, False, [COMMON, (rank,)], [])
    replica = Copy(rank, step, epoch, True, [(rank,)], [COMMON])
    return [(f"n{rank}", own), (f"n{(rank + 1) % 4}", replica)]


def all_copies() -> list[tuple[str, Copy]]:
    kept = [(step, 1, COMMON) for step in (3, 4, 5)]
    kept += [(step, 2, (0, 1)) for step in (6, 7)]
    kept += [(8, 3, (0, 1, 2))]
    return [
        each for step, epoch, ranks in kept for r in ranks for each in copies_of(r, step, epoch)
    ]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([(0,), (0, 1), (0, 1, 2), COMMON]))
def test_whatever_is_left_each_share_is_brought_once_from_where_it_is(
    dice: random.Random, present: Ranks
) -> None:
    there: dict[str, list[Copy]] = {}
    for node, copy in all_copies():
        if dice.random() < 0.8:
            there.setdefault(node, []).append(copy)
    adopts = {2: Adoption(7, (0, 1)), 3: Adoption(99, (0, 1, 2))}
    node_of = {rank: NODES[rank] for rank in present}
    found = agree_on_shared(there, HISTORY, node_of, set(), adopts, SHARED)
    if found.step is None:
        return
    epoch = {3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 3}[found.step]
    had = set(COMMON).difference(SHARED.aside(epoch))
    assert set(found.fetches) == set(present)
    if had == set(present):
        assert (found.former, found.lent) == ((), {})
    else:
        assert found.former == tuple(sorted(had))
    lent = [(bringer, each) for bringer, all_of in found.lent.items() for each in all_of]
    assert sorted(each.rank for _, each in lent) == sorted(had - set(present))
    for bringer, each in lent:
        node = each.node or NODES[bringer]
        (copy,) = [
            copy
            for copy in there[node]
            if (copy.rank, copy.step, copy.replica) == (each.rank, found.step, each.replica)
        ]
        assert each.segments == ((each.rank,),)
        assert (each.rank,) in copy.segments
    for rank in had & set(present):
        base = [fetch for fetch in found.fetches[rank] if fetch.base]
        assert all(fetch.rank == rank for fetch in base), "a peer's copy is not its share"


def test_newest_step_is_taken_however_it_was_shared_out() -> None:
    there: dict[str, list[Copy]] = {}
    for node, copy in all_copies():
        there.setdefault(node, []).append(copy)
    adopts = {2: Adoption(7, (0, 1))}
    node_of = {rank: NODES[rank] for rank in (0, 1)}
    assert agree_on_shared(there, HISTORY, node_of, set(), adopts, SHARED).step == 8
    found = agree_on_shared(there, HISTORY, node_of, {8}, adopts, SHARED)
    assert (found.step, found.former) == (7, ())
    found = agree_on_shared(there, HISTORY, node_of, {6, 7, 8}, adopts, SHARED)
    assert (found.step, found.former) == (5, COMMON)
    assert {each.rank for lent in found.lent.values() for each in lent} == {2, 3}


def test_copy_that_has_the_own_part_alone_lends_nothing_but_of_a_rank_without_a_share() -> None:
    deputy = Copy(1, 3, 1, True, [], [COMMON, (1,)])
    own = Copy(0, 3, 1, False, [COMMON, (0,)], [])
    shared = Shared(2, {})
    there = {"n0": [own, deputy]}
    found = agree_on_shared(there, [], {0: "n0"}, set(), {}, shared)
    assert (found.step, found.lacking) == (None, {3: (1,)})
    there = {"n0": [own, Copy(1, 3, 1, True, [], [COMMON])]}
    found = agree_on_shared(there, [], {0: "n0"}, set(), {}, shared)
    assert (found.step, [each.segments for each in found.lent[0]]) == (3, [()])
