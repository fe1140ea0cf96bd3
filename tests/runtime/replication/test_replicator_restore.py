"""Replicators in the midst of a recovery: what others still have to fetch stays where it is.

Ranks 0 and 1 were on node a, which is lost; node b keeps their replicas of step 4. What they have
in common is in that of rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from replicators import Node, Rank, World, world_in

from deadpool_runtime.protocol import Piece
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, Manifest
from deadpool_runtime.replication.messages import Assemble, Assembled, Confirmed, SnapshotSealed
from deadpool_runtime.replication.slotting import SLOTS

Ranks = tuple[int, ...]
SIZES = (2 * CHUNK_NBYTES + 1000, 5000)
SHARED = (0, 1)
STEP = 4
#: Where it lies.
SLOT = STEP % SLOTS


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Nodes, ranks and proxies of one test."""
    yield from world_in(tmp_path)


def lost_node(world: World) -> tuple[Node, Manifest]:
    """Node b, and what it keeps of rank 0."""
    a, b = world.node("a"), world.node("b")
    kept: dict[int, list[Ranks]] = {0: [SHARED, (0,)], 1: [(1,)]}
    manifests = []
    for number, segments in kept.items():
        rank = world.rank(a, number, SIZES, ranks=[SHARED, (number,)])
        rank.protect(b, segments=segments)
        manifests.append(rank.snapshot(STEP))
        assert rank.hear(Confirmed) == Confirmed(0, STEP)
    a.kill()
    b.fence(1)
    return b, manifests[0]


def restored(world: World, node: Node, number: int, source: Node) -> Rank:
    """A rank of epoch 1 that has its copy from ``source`` again."""
    rank = world.rank(node, number, SIZES, born=1, ranks=[SHARED, (number,)])
    pieces = [Piece(source.address, 0, True, [SHARED, (0,)], True)]
    if number == 1:
        pieces = [
            Piece(source.address, 1, True, [(1,)], True),
            Piece(source.address, 0, True, [SHARED], False),
        ]
    rank.client.send(Assemble(1, STEP, pieces, SLOT))
    assert rank.hear(Assembled) == Assembled(1, STEP)
    return rank


def test_a_rank_that_is_restored_early_takes_nothing_from_the_others(world: World) -> None:
    b, manifest = lost_node(world)
    c, d = world.node("c"), world.node("d")
    early = restored(world, c, 0, b)
    # No chunk of step 4 gets through: the replica that is there must do.
    proxy = world.proxy(b, stall_at=1000)
    early.protect(proxy.address, epoch=1, restoring=True)
    early.client.send(SnapshotSealed(manifest, SLOT))
    assert early.hear(Confirmed) == Confirmed(1, STEP)
    late = restored(world, d, 1, b)
    assert d.own(1, STEP) == late.manifest(STEP)
    # Its node is lost again: all is as it was.
    c.kill()
    b.fence(2)
    assert b.held(0, STEP) == manifest


def test_a_replica_that_lacks_something_is_replaced_when_all_are_restored(world: World) -> None:
    b, manifest = lost_node(world)
    c, d = world.node("c"), world.node("d")
    early = restored(world, c, 1, b)
    early.protect(b, epoch=1, restoring=True)
    early.client.send(SnapshotSealed(early.manifest(STEP), SLOT))
    other = restored(world, d, 0, b)
    other.protect(b, epoch=1, restoring=True)
    other.client.send(SnapshotSealed(manifest, SLOT))
    assert other.hear(Confirmed) == Confirmed(1, STEP)
    assert early.heard.empty()
    assert restored(world, world.node("e"), 1, b)
    early.protect(b, epoch=1)
    assert early.hear(Confirmed) == Confirmed(1, STEP)
    late = world.rank(world.node("f"), 1, SIZES, born=2, ranks=[SHARED, (1,)])
    pieces = [Piece(b.address, 1, True, [SHARED, (1,)], True)]
    late.client.send(Assemble(1, STEP, pieces, SLOT))
    assert late.hear(Assembled) == Assembled(1, STEP)
