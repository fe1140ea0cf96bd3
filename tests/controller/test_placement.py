"""Holders, memory and the agreed step: what must hold for every layout, and a few worked cases."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.agreement import Fetch, agree, counts, replicated_before
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.placement import Holding, Nodes, Share, choose_holders
from deadpool_runtime.replication.room import needs
from deadpool_runtime.replication.slotting import SLOTS

COUNT = settings(max_examples=150, deadline=None)


@dataclass(frozen=True)
class Layout:
    """Ranks on nodes, in domains, with the segments of a parallel layout."""

    nodes: Nodes
    node_of: dict[int, str]
    segments: dict[int, dict[Ranks, int]]

    def domain(self, rank: int) -> str:
        return self.nodes.domain(self.node_of[rank])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Ranks in a grid of data-parallel and other groups; each group has a segment in common."""
    nproc = draw(st.integers(1, 4))
    count = draw(st.integers(1, 6))
    world = nproc * count
    names = tuple(f"n{i}" for i in range(count))
    spares = tuple(f"s{i}" for i in range(draw(st.integers(0, 2))))
    racks = draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))
    domains = dict(zip((*names, *spares), map(str, racks), strict=False))
    widths = [width for width in range(1, world + 1) if world % width == 0]
    segments: dict[int, dict[Ranks, int]] = {rank: {} for rank in range(world)}
    for _ in range(draw(st.integers(0, 3))):
        width, strided = draw(st.sampled_from(widths)), draw(st.booleans())
        size = draw(st.integers(0, 100))
        for first in range(world // width):
            step = world // width
            members = range(first, world, step) if strided else range(first * width, world)
            ranks = tuple(members)[:width]
            for rank in ranks:
                segments[rank].setdefault(ranks, size)
    return Layout(
        Nodes(names, spares, domains if draw(st.booleans()) else None),
        {rank: names[rank // nproc] for rank in range(world)},
        segments,
    )


def ddp(nodes: int, nproc: int, spares: tuple[str, ...] = (), own: int = 0) -> Layout:
    """Data-parallel replicas; with ``own`` each also has a shard of its own of that size."""
    world = nodes * nproc
    names = tuple(f"n{i + 1}" for i in range(nodes))
    everyone = tuple(range(world))
    shared: dict[Ranks, int] = {everyone: 1000}
    return Layout(
        Nodes(names, spares),
        {rank: names[rank // nproc] for rank in everyone},
        {rank: shared | ({(rank,): own} if own else {}) for rank in everyone},
    )


def holders_of(layout: Layout, factor: int = 1) -> dict[int, Holding | None]:
    return choose_holders(layout.segments, layout.node_of, layout.nodes, factor)


# ---------------------------------------------------------------- holders


@COUNT
@given(layouts())
def test_holder_is_elsewhere_and_in_another_domain_if_there_is_one(layout: Layout) -> None:
    nodes = layout.nodes
    everywhere = (*nodes.active, *nodes.spares)
    for rank, holding in holders_of(layout).items():
        own = layout.node_of[rank]
        if holding is None:
            assert everywhere == (own,)
            continue
        assert holding.node != own
        apart = [node for node in everywhere if nodes.domain(node) != layout.domain(rank)]
        active = [node for node in apart if node in nodes.active]
        assert holding.node in (active or apart or everywhere)
        if holding.node in nodes.spares:
            assert not active


@COUNT
@given(layouts(), st.randoms())
def test_every_caller_comes_to_the_same_holders(layout: Layout, dice: random.Random) -> None:
    order = list(layout.node_of)
    dice.shuffle(order)
    segments = {rank: dict(reversed(layout.segments[rank].items())) for rank in order}
    node_of = {rank: layout.node_of[rank] for rank in reversed(order)}
    again = choose_holders(segments, node_of, layout.nodes)
    assert again == holders_of(layout)
    assert list(again) == sorted(again)


@COUNT
@given(st.integers(1, 12), st.integers(1, 4))
def test_every_node_of_a_ring_holds_for_exactly_one(nodes: int, nproc: int) -> None:
    layout = ddp(nodes, nproc)
    served = {(layout.node_of[rank], h.node) for rank, h in holders_of(layout).items() if h}
    assert len(served) == (nodes if nodes > 1 else 0)
    assert all(count == 1 for count in Counter(node for _, node in served).values())


@COUNT
@given(layouts())
def test_load_is_no_larger_than_it_must_be(layout: Layout) -> None:
    """In one ring over all nodes the largest load is what the domains' sizes force."""
    nodes = layout.nodes
    everyone = tuple(layout.node_of)
    segments: dict[int, dict[Ranks, int]] = {rank: {everyone: 1} for rank in everyone}
    holders = choose_holders(segments, layout.node_of, nodes)
    domains = Counter(nodes.domain(node) for node in nodes.active)
    if len(domains) < 2 or len(everyone) < 2:
        return
    served = {(layout.node_of[rank], h.node) for rank, h in holders.items() if h is not None}
    largest = max(Counter(node for _, node in served).values())
    total = len(nodes.active)
    # The nodes of a domain can only be held outside it (Hall's condition).
    assert largest == max(-(-size // (total - size)) for size in domains.values())


@COUNT
@given(layouts())
def test_what_only_one_domain_has_is_sent_once_and_nothing_else(layout: Layout) -> None:
    holders = holders_of(layout)
    sent: Counter[Ranks] = Counter()
    for rank, holding in holders.items():
        if holding is not None:
            assert set(holding.segments) <= layout.segments[rank].keys()
            sent.update(holding.segments)
    apart = all(
        h is not None and layout.nodes.domain(h.node) != layout.domain(rank)
        for rank, h in holders.items()
    )
    if not apart:
        return
    for ranks in {ranks for own in layout.segments.values() for ranks in own}:
        inside = len({layout.domain(rank) for rank in ranks}) == 1
        assert sent[ranks] == (1 if inside else 0)


def test_ring_is_the_data_parallel_group() -> None:
    """HSDP 2x2, a rank a node: rank 0 and 2 are replicas of each other, as are 1 and 3."""
    segments: dict[int, dict[Ranks, int]] = {
        0: {(0, 2): 100}, 1: {(1, 3): 100}, 2: {(0, 2): 100}, 3: {(1, 3): 100},
    }  # fmt: skip
    names = ("n1", "n2", "n3", "n4")
    holders = choose_holders(segments, dict(enumerate(names)), Nodes(names))
    assert {rank: h and h.node for rank, h in holders.items()} == {
        0: "n3", 1: "n4", 2: "n1", 3: "n2",
    }  # fmt: skip


def test_ring_on_one_node_falls_back_to_the_next_node() -> None:
    """Pipeline over nodes, replicas inside each: nobody else has a stage, one rank sends it."""
    segments: dict[int, dict[Ranks, int]] = {
        0: {(0, 1): 100}, 1: {(0, 1): 100}, 2: {(2, 3): 100}, 3: {(2, 3): 100},
    }  # fmt: skip
    node_of = {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert choose_holders(segments, node_of, Nodes(("n1", "n2"))) == {
        0: Holding("n2", ((0, 1),)),
        1: Holding("n2", ()),
        2: Holding("n1", ((2, 3),)),
        3: Holding("n1", ()),
    }


def test_spare_holds_only_when_no_active_node_can() -> None:
    assert holders_of(ddp(1, 2, ("s1", "s2"))) == {
        0: Holding("s1", ((0, 1),), deputy="s2"),
        1: Holding("s1", (), deputy="s2"),
    }
    assert {h and h.node for h in holders_of(ddp(2, 1, ("s1",))).values()} == {"n1", "n2"}
    assert holders_of(ddp(1, 2)) == {0: None, 1: None}


def test_shared_parameters_are_not_sent() -> None:
    assert holders_of(ddp(2, 1, own=10)) == {
        0: Holding("n2", ((0,),)),
        1: Holding("n1", ((1,),)),
    }


@COUNT
@given(layouts(), st.integers(2, 4))
def test_every_holder_is_another_node_and_domain_as_far_as_there_are(
    layout: Layout, factor: int
) -> None:
    nodes = layout.nodes
    everywhere = {*nodes.active, *nodes.spares}
    domains = {nodes.domain(node) for node in everywhere}
    for rank, holding in holders_of(layout, factor).items():
        places = [layout.node_of[rank], *(s.node for s in (holding.shares if holding else ()))]
        assert len(set(places)) == len(places) == min(factor + 1, len(everywhere))
        there = {nodes.domain(node) for node in places}
        assert len(there) == min(factor + 1, len(domains))
        assert holding is None or holding.deputy is None or len(holding.shares) == 1


@COUNT
@given(layouts(), st.integers(1, 4))
def test_the_first_holder_of_several_is_the_only_one_of_one(layout: Layout, factor: int) -> None:
    alone, several = holders_of(layout), holders_of(layout, factor)
    assert {rank: h and h.node for rank, h in alone.items()} == {
        rank: h and h.node for rank, h in several.items()
    }


def test_second_holders_are_spread_as_the_first_are() -> None:
    layout = ddp(5, 2, own=10)
    for rank, holding in holders_of(layout, 2).items():
        assert holding is not None
        own = int(layout.node_of[rank][1])
        first, second = f"n{own % 5 + 1}", f"n{(own + 1) % 5 + 1}"
        assert holding == Holding(first, ((rank,),), None, (Share(second, ((rank,),)),))


def test_what_a_peer_has_is_sent_only_where_that_is_not_enough() -> None:
    """HSDP 2x2: two nodes have each part, and two holders make three of them."""
    pairs: dict[int, Ranks] = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    segments: dict[int, dict[Ranks, int]] = {rank: {pair: 9} for rank, pair in pairs.items()}
    names = ("n1", "n2", "n3", "n4")
    assert choose_holders(segments, dict(enumerate(names)), Nodes(names), 2) == {
        0: Holding("n3", (), None, (Share("n4", ((0, 2),)),)),
        1: Holding("n4", (), None, (Share("n1", ((1, 3),)),)),
        2: Holding("n1", (), None, (Share("n2", ()),)),
        3: Holding("n2", (), None, (Share("n3", ()),)),
    }


def test_two_racks_of_two_hold_for_each_other_evenly() -> None:
    layout = ddp(4, 1)
    nodes = Nodes(layout.nodes.active, (), {"n1": "a", "n2": "a", "n3": "b", "n4": "b"})
    holders = choose_holders(layout.segments, layout.node_of, nodes)
    assert sorted(h.node for h in holders.values() if h) == ["n1", "n2", "n3", "n4"]


# ---------------------------------------------------------------- memory


@COUNT
@given(layouts(), st.integers(1, 3))
def test_need_is_three_slots_of_everything_kept(layout: Layout, factor: int) -> None:
    holders = holders_of(layout, factor)
    own = {rank: 5 for rank in layout.segments}
    found = needs(layout.segments, own, layout.node_of, holders)
    assert {rank for need in found.values() for rank in need.ranks} == set(layout.segments)
    held = {rank for need in found.values() for rank in need.held}
    assert held == {rank for rank, holding in holders.items() if holding is not None}
    for need in found.values():
        least = sum(sum(layout.segments[rank].values()) + 5 for rank in need.ranks)
        assert need.copy_nbytes >= least
        assert need.nbytes == SLOTS * (need.copy_nbytes + need.held_nbytes)
    sent = sum(
        layout.segments[rank][name]
        for rank, holding in holders.items()
        if holding is not None
        for share in holding.shares
        for name in share.segments
    )
    assert sum(need.held_nbytes for need in found.values()) >= sent


# ---------------------------------------------------------------- the step to go back to


def copies_of(
    layout: Layout, steps: dict[int, list[int]], epoch: int = 1, factor: int = 1
) -> dict[str, list[Copy]]:
    """Own copies of these steps on each rank's node, and the replicas at their holders."""
    copies: dict[str, list[Copy]] = {}
    for rank, holding in holders_of(layout, factor).items():
        everything = sorted(layout.segments[rank])
        for step in steps[rank]:
            own = Copy(rank, step, epoch, False, everything, [])
            copies.setdefault(layout.node_of[rank], []).append(own)
            for share in holding.shares if holding is not None else ():
                missing = [ranks for ranks in everything if ranks not in share.segments]
                replica = Copy(rank, step, epoch, True, list(share.segments), missing)
                copies.setdefault(share.node, []).append(replica)
    return copies


@COUNT
@given(layouts(), st.integers(0, 9), st.data())
def test_loss_of_any_node_leaves_the_step_whole(
    layout: Layout, step: int, data: st.DataObject
) -> None:
    if len(layout.nodes.active) + len(layout.nodes.spares) < 2:
        return
    copies = copies_of(layout, {rank: [step] for rank in layout.node_of})
    lost = data.draw(st.sampled_from(layout.nodes.active))
    node_of = {rank: "new" if at == lost else at for rank, at in layout.node_of.items()}
    left = {node: kept for node, kept in copies.items() if node != lost}
    agreement = agree(left, [], node_of)
    assert agreement.step == step
    check_fetches(layout, left, node_of, step, agreement.fetches)
    assert all(bool(agreement.fetches[rank]) == (node_of[rank] == "new") for rank in node_of)


@COUNT
@given(layouts(), st.integers(1, 4), st.booleans(), st.data())
def test_loss_of_as_many_nodes_or_domains_as_there_are_holders_leaves_the_step_whole(
    layout: Layout, factor: int, domains: bool, data: st.DataObject
) -> None:
    everywhere = (*layout.nodes.active, *layout.nodes.spares)
    place = {node: layout.nodes.domain(node) if domains else node for node in everywhere}
    places = sorted(set(place.values()))
    if factor >= len(places):
        return
    copies = copies_of(layout, {rank: [7] for rank in layout.node_of}, factor=factor)
    gone = data.draw(st.sets(st.sampled_from(places), min_size=factor, max_size=factor))
    node_of = {
        rank: f"new-{at}" if place[at] in gone else at for rank, at in layout.node_of.items()
    }
    left = {node: kept for node, kept in copies.items() if place[node] not in gone}
    agreement = agree(left, [], node_of)
    assert agreement.step == 7
    check_fetches(layout, left, node_of, 7, agreement.fetches)


def check_fetches(
    layout: Layout,
    copies: Mapping[str, list[Copy]],
    node_of: Mapping[int, str],
    step: int,
    fetches: Mapping[int, tuple[Fetch, ...]],
) -> None:
    """Every fetch is of something that is there, and together they are all that a rank needs."""
    for rank, pieces in fetches.items():
        if not pieces:
            own = [c for c in copies.get(node_of[rank], []) if c.rank == rank and c.step == step]
            assert any(not copy.replica for copy in own)
            continue
        assert [piece.base for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert pieces[0].rank == rank
        got = [ranks for piece in pieces for ranks in piece.segments]
        assert sorted(got) == sorted(layout.segments[rank])
        for piece in pieces:
            assert any(
                copy.rank == piece.rank
                and copy.replica == piece.replica
                and copy.step == step
                and set(piece.segments) <= set(copy.segments)
                for copy in copies[piece.node]
            )


@COUNT
@given(layouts(), st.data())
def test_agreement_is_the_dumb_model(layout: Layout, data: st.DataObject) -> None:
    steps = {
        rank: data.draw(st.lists(st.integers(0, 5), max_size=3, unique=True))
        for rank in layout.node_of
    }
    copies = copies_of(layout, steps)
    lost = set(data.draw(st.lists(st.sampled_from(layout.nodes.active), max_size=2)))
    refused = data.draw(st.sets(st.integers(0, 5), max_size=2))
    node_of = {rank: f"new-{at}" if at in lost else at for rank, at in layout.node_of.items()}
    left = {node: kept for node, kept in copies.items() if node not in lost}
    agreement = agree(left, [], node_of, refused)
    assert agreement.step == dumb_agreement(left, node_of, refused)
    if agreement.step is not None:
        check_fetches(layout, left, node_of, agreement.step, agreement.fetches)
    assert all(agreement.lacking.values())


def dumb_agreement(
    copies: dict[str, list[Copy]], node_of: dict[int, str], refused: set[int]
) -> int | None:
    """From the newest step down: has every rank some copy, and is each of its segments anywhere?"""
    every = [copy for kept in copies.values() for copy in kept]
    for step in range(5, -1, -1):
        here = [copy for copy in every if copy.step == step and step not in refused]
        there = {ranks for copy in here for ranks in copy.segments}
        if all(
            any(c.rank == rank and {*c.segments, *c.missing} <= there for c in here)
            for rank in node_of
        ):
            return step
    return None


def copy(rank: int, step: int, epoch: int = 1, replica: bool = False) -> Copy:
    return Copy(rank, step, epoch, replica, [] if replica else [(0, 1)], [(0, 1)] * replica)


def test_copy_of_a_step_that_was_undone_does_not_count() -> None:
    history = [(2, 20), (4, 25)]
    assert counts(copy(0, 20, epoch=1), history)
    assert not counts(copy(0, 21, epoch=1), history)
    assert counts(copy(0, 21, epoch=2), history)
    assert not counts(copy(0, 26, epoch=3), history)
    assert counts(copy(0, 99, epoch=4), history)


def test_undone_step_is_not_agreed_on_even_if_all_have_a_copy() -> None:
    copies = {
        "n1": [copy(0, 21, 1), copy(0, 20, 1)],
        "n2": [copy(1, 21, 1), copy(1, 20, 2)],
    }
    assert agree(copies, [(2, 20)], {0: "n1", 1: "n2"}).step == 20


def test_older_steps_that_may_be_needed_are_the_newest_with_replicas_that_count() -> None:
    copies = {
        "n1": [copy(0, step) for step in (8, 9, 10)] + [copy(1, step, 1, True) for step in (3, 6)],
        "n2": [copy(0, 9, 1, True), copy(0, 12, 1, True), copy(0, 8, 1, True), copy(0, 11, 3)],
    }
    assert replicated_before(11, copies, []) == (8, 9)
    assert replicated_before(9, copies, []) == (6, 8)
    assert replicated_before(11, copies, [(2, 7)]) == (3, 6)
    assert replicated_before(11, copies, [(2, -1)]) == ()


def test_copies_of_an_earlier_start_do_not_count() -> None:
    copies = {"n1": [copy(0, 0, 1)], "n2": [copy(1, 0, 1)]}
    agreement = agree(copies, [(2, -1)], {0: "n1", 1: "n2"})
    assert (agreement.step, agreement.lacking) == (None, {})


def test_newer_step_says_who_lacks_it() -> None:
    copies = {"n1": [copy(0, 21), copy(0, 20)], "n2": [copy(1, 20)]}
    agreement = agree(copies, [], {0: "n1", 1: "n2"})
    assert (agreement.step, agreement.lacking) == (20, {21: (1,)})
    assert agreement.fetches == {0: (), 1: ()}


def test_donors_on_the_same_node_come_first_and_others_take_turns() -> None:
    everyone = (0, 1, 2, 3)
    full = [Copy(rank, 7, 1, False, [everyone], []) for rank in everyone]
    replica = [Copy(rank, 7, 1, True, [], [everyone]) for rank in everyone]
    node_of = {0: "n1", 1: "n2", 2: "new", 3: "new"}
    copies = {"n1": [full[0], replica[2]], "n2": [full[1], replica[3]]}
    agreement = agree(copies, [], node_of)
    donors = [fetch[1].node for rank, fetch in agreement.fetches.items() if rank > 1]
    assert sorted(donors) == ["n1", "n2"]
    near = agree({**copies, "new": [full[0]]}, [], node_of)
    assert [near.fetches[rank][1].node for rank in (2, 3)] == ["new", "new"]
