"""Short names of segments: they mean what the lists of ranks mean, and change no decision."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_runtime import protocol
from deadpool_runtime.protocol import Copy
from deadpool_runtime.replication.agreement import agree
from deadpool_runtime.replication.naming import MOST_RANKS, Ranks, members, packed
from deadpool_runtime.replication.placement import Holding, Nodes, choose_holders

COUNT = settings(max_examples=60, deadline=None)
Segments = dict[int, dict[Ranks, int]]


@COUNT
@given(st.sets(st.integers(0, 60), min_size=1), st.integers(1, 5))
def test_a_name_says_its_ranks(ranks: set[int], distance: int) -> None:
    for listed in (tuple(sorted(ranks)), tuple(range(min(ranks), 61, distance))):
        assert members(packed(listed)) == listed
        assert len(packed(listed)) <= len(listed)
        assert packed(members(packed(listed))) == packed(listed)


@COUNT
@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40), min_size=1))
def test_other_ranks_have_another_name(one: set[int], other: set[int]) -> None:
    names = packed(tuple(sorted(one))), packed(tuple(sorted(other)))
    assert (names[0] == names[1]) == (one == other)


def test_groups_of_a_mesh_have_short_names() -> None:
    assert packed(tuple(range(0, 16384, 4))) == (0, 16380, -4)
    assert packed(tuple(range(8))) == tuple(range(8))
    blocks = tuple(rank for first in range(0, 16384, 512) for rank in range(first, first + 32))
    assert len(packed(blocks)) == 3 * 32


@pytest.mark.parametrize("name", [(-1,), (1, -1), (5, 5, -1), (7, 3, -1), (0, MOST_RANKS, -1)])
def test_what_is_no_name_is_refused(name: Ranks) -> None:
    with pytest.raises(ValueError, match="is no name of a segment"):
        members(name)


# ---------------------------------------------------------------- the same decisions


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Segments, dict[int, str], Nodes]:
    """Ranks in rows and columns, with segments of each; the names list all ranks."""
    nproc, count = draw(st.integers(2, 4)), draw(st.integers(4, 8))
    world = nproc * count
    everyone = tuple(range(world))
    groups = [everyone[i::nproc] for i in range(nproc)] + [everyone]
    groups += [everyone[i : i + nproc] for i in range(0, world, nproc)]
    segments: Segments = {rank: {} for rank in everyone}
    for group in draw(st.lists(st.sampled_from(groups), max_size=6)):
        size = draw(st.integers(0, 3))
        for rank in group:
            segments[rank][group] = size
    names = tuple(f"n{i}" for i in range(count))
    racks = {name: str(draw(st.integers(0, 2))) for name in names}
    nodes = Nodes(names, ("s0",), racks if draw(st.booleans()) else None)
    return segments, {rank: names[rank // nproc] for rank in everyone}, nodes


def with_lists(holding: Holding | None) -> Holding | None:
    if holding is None:
        return None
    return replace(holding, segments=tuple(members(name) for name in holding.segments))


@COUNT
@given(meshes())
def test_short_names_choose_the_same_holders(mesh: tuple[Segments, dict[int, str], Nodes]) -> None:
    segments, node_of, nodes = mesh
    short = {
        rank: {packed(name): size for name, size in own.items()} for rank, own in segments.items()
    }
    listed = choose_holders(segments, node_of, nodes)
    found = choose_holders(short, node_of, nodes)
    assert {rank: with_lists(holding) for rank, holding in found.items()} == listed


@COUNT
@given(meshes(), st.data())
def test_donors_are_those_of_a_look_at_every_copy(
    mesh: tuple[Segments, dict[int, str], Nodes], data: st.DataObject
) -> None:
    segments, node_of, nodes = mesh
    copies: dict[str, list[Copy]] = defaultdict(list)
    for rank, holding in choose_holders(segments, node_of, nodes).items():
        own = list(segments[rank])
        copies[node_of[rank]].append(Copy(rank, 5, 1, False, own, []))
        if holding is not None:
            kept = list(holding.segments)
            missing = [name for name in own if name not in kept]
            copies[holding.node].append(Copy(rank, 5, 1, True, kept, missing))
    lost = data.draw(st.sets(st.sampled_from(nodes.active), max_size=4))
    spares = {name: data.draw(st.sampled_from(["new1", "new2", *nodes.active])) for name in lost}
    after = {rank: spares.get(name, name) for rank, name in node_of.items()}
    left = {name: kept for name, kept in copies.items() if name not in lost}
    found = agree(left, [], after)
    if found.step is None:
        return
    given_so_far: dict[str, int] = defaultdict(int)
    having = [(name, copy) for name in sorted(left) for copy in left[name]]
    for rank, fetches in found.fetches.items():
        if not fetches:
            continue
        base = next(c for n, c in having if n == fetches[0].node and c.rank == rank and c.replica)
        expected: dict[tuple[str, int, bool], list[Ranks]] = defaultdict(list)
        for segment in base.missing:
            where, copy = min(
                ((name, copy) for name, copy in having if segment in copy.segments),
                key=lambda each: (
                    each[0] != after[rank],
                    each[1].replica,
                    given_so_far[each[0]],
                    each[0],
                    each[1].rank,
                ),
            )
            expected[where, copy.rank, copy.replica].append(segment)
        got = {(f.node, f.rank, f.replica): list(f.segments) for f in fetches[1:]}
        assert got == expected
        for giver in (fetches[0].node, *(key[0] for key in expected)):
            given_so_far[giver] += 1


def test_a_message_about_a_copy_stays_small_with_many_ranks() -> None:
    name = packed(tuple(range(0, 16384, 4)))
    attached = protocol.Attached("layout", [protocol.SegmentSize(name, 1 << 30)], 1000)
    assert len(protocol.frame(protocol.RankSaid(5, 1, attached))) < 200
