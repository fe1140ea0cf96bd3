"""Replicators as processes: copies reach the holder whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace
from replicators import DEADLINE_S, Node, Proxy, Rank, World, world_in

from deadpool_runtime import parking
from deadpool_runtime.protocol import Piece
from deadpool_runtime.replication.arena import Arena, SlotFile
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, OWN, Manifest, chunk_hash
from deadpool_runtime.replication.messages import (
    Assemble,
    Assembled,
    AssembleFailed,
    ChunksCopied,
    Confirmed,
    LinkNote,
    SnapshotSealed,
    Unconfirmed,
)

#: Two chunks and a bit, and a segment smaller than a chunk.
SIZES = (2 * CHUNK_NBYTES + 1000, 5000)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Nodes, ranks and proxies of one test."""
    yield from world_in(tmp_path)


def flip(path: Path, offset: int) -> None:
    """Invert a bit of a slot file."""
    with SlotFile.open(path) as slot:
        slot.view(offset, 1)[0] ^= 1


class StalledPut(NamedTuple):
    """Rank 0 on a has sealed its copy of step 0, and what goes to b stands still within the second
    chunk until ``proxy.release`` is set.
    """

    a: Node
    b: Node
    proxy: Proxy
    rank: Rank
    manifest: Manifest


def stalled_put(world: World) -> StalledPut:
    """Let it come to that."""
    a, b = world.node("a"), world.node("b")
    proxy = world.proxy(b, stall_at=CHUNK_NBYTES)
    rank = world.rank(a, 0, SIZES)
    rank.protect(proxy.address)
    manifest = rank.snapshot(0)
    assert proxy.stalled.wait(DEADLINE_S)
    return StalledPut(a, b, proxy, rank, manifest)


def test_starts_without_torch(world: World) -> None:
    node = world.node("a")
    maps = Path(f"/proc/{node.process.pid}/maps").read_text()
    assert "/torch/lib/" not in maps


@pytest.mark.parametrize("carriers", ["", "memory"])
def test_every_step_is_confirmed_by_the_holder(world: World, carriers: str) -> None:
    a, b = world.node("a", carriers), world.node("b", carriers)
    rank = world.rank(a, 0, SIZES)
    rank.protect(b)
    for step in range(5):
        manifest = rank.snapshot(step)
        assert rank.hear(Confirmed) == Confirmed(0, step)
        assert b.held(0, step) == manifest
    assert [b.held(0, step) is not None for step in range(5)] == [False, False, True, True, True]


def test_chunks_travel_while_the_copy_is_being_made(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    proxy = world.proxy(b, stall_at=CHUNK_NBYTES)
    rank = world.rank(a, 0, SIZES)
    rank.protect(proxy.address)
    manifest = rank.begin(0)
    rank.copy(manifest, 0)
    assert proxy.stalled.wait(DEADLINE_S)
    proxy.release.set()
    rank.copy(manifest, 1)
    rank.seal(manifest)
    assert rank.hear(Confirmed).step == 0


def test_both_directions_and_several_ranks_share_the_nodes(world: World) -> None:
    nodes = [world.node("a"), world.node("b")]
    ranks = [world.rank(nodes[r // 2], r, SIZES) for r in range(4)]
    for rank in ranks:
        rank.protect(nodes[1 - rank.rank // 2])
    for step in range(3):
        for rank in ranks:
            rank.snapshot(step)
        for rank in ranks:
            assert rank.hear(Confirmed).step == step
    for rank in ranks:
        assert nodes[1 - rank.rank // 2].held(rank.rank, 2) is not None


def test_without_a_holder_the_own_copy_counts_and_it_is_noted_once(world: World) -> None:
    rank = world.rank(world.node("a"), 0, SIZES)
    rank.protect(None)
    rank.snapshot(0)
    rank.snapshot(1)
    heard = [rank.heard.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [type(message) for message in heard].count(LinkNote) == 1
    assert [m for m in heard if isinstance(m, Confirmed)] == [Confirmed(0, 0), Confirmed(0, 1)]


def test_empty_segments_and_an_empty_own_part(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    rank = world.rank(a, 0, (0, 10))
    rank.protect(b)
    manifest = rank.manifest(0, own=b"")
    rank.begin(0)
    rank.copy(manifest, 1)
    rank.seal(manifest, own=b"")
    assert rank.hear(Confirmed).step == 0
    assert b.held(0, 0) == manifest


def test_own_part_may_be_larger_than_a_chunk(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    rank = world.rank(a, 0, (10,))
    rank.protect(b)
    own = os.urandom(CHUNK_NBYTES + 17)
    manifest = rank.manifest(0, own=own)
    rank.begin(0)
    rank.copy(manifest, 0)
    rank.seal(manifest, own=own)
    assert rank.hear(Confirmed).step == 0
    assert b.held(0, 0) == manifest


# ---------------------------------------------------------------- wrong bytes


def test_a_bit_flipped_in_the_source_is_refused_and_the_source_unsealed(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    rank = world.rank(a, 0, SIZES)
    manifest = rank.snapshot(0)
    flip(a.arena.own_path(0, 0), 4096 + CHUNK_NBYTES + 5)
    rank.protect(b)
    rank.client.send(SnapshotSealed(manifest, 0))
    assert "damaged" in rank.hear(Unconfirmed).reason
    assert a.own(0, 0) is None
    assert b.held(0, 0) is None
    rank.snapshot(1)
    assert rank.hear(Confirmed).step == 1


def test_a_source_damaged_before_its_seal_is_unsealed_after_it(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    rank = world.rank(a, 0, SIZES)
    rank.protect(b)
    manifest = rank.begin(0)
    rank.copy(manifest, 0, tell=False)
    flip(a.arena.own_path(0, 0), 5000)
    rank.client.send(ChunksCopied(0, 0, 0, list(manifest.segments[0].hashes)))
    assert "damaged" in rank.hear(Unconfirmed).reason
    rank.copy(manifest, 1)
    rank.seal(manifest)
    rank.snapshot(1)
    assert rank.hear(Confirmed).step == 1
    assert a.own(0, 0) is None
    assert b.held(0, 0) is None


def test_a_bit_flipped_on_the_way_is_sent_again(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    proxy = world.proxy(b, flips=[CHUNK_NBYTES])
    rank = world.rank(a, 0, SIZES)
    rank.protect(proxy.address)
    manifest = rank.snapshot(0)
    assert rank.hear(Confirmed).step == 0
    assert b.held(0, 0) == manifest


def test_a_way_that_flips_every_time_is_refused_and_the_source_kept(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    proxy = world.proxy(b, flips=range(1000, 40 * CHUNK_NBYTES, 100_000))
    rank = world.rank(a, 0, SIZES)
    rank.protect(proxy.address)
    manifest = rank.snapshot(0)
    assert "arrived damaged twice" in rank.hear(Unconfirmed).reason
    assert b.held(0, 0) is None
    assert a.own(0, 0) == manifest


# ---------------------------------------------------------------- losses


def test_killed_holder_that_comes_back_gets_the_newest_copy(world: World) -> None:
    put = stalled_put(world)
    b, rank = put.b, put.rank
    b.kill()
    assert b.held(0, 0) is None
    b.start()
    rank.protect(b)
    assert rank.hear(Confirmed).step == 0
    assert b.held(0, 0) is not None


def test_killed_sender_that_comes_back_sends_what_was_under_way(world: World) -> None:
    put = stalled_put(world)
    put.a.kill()
    put.proxy.release.set()
    assert put.b.held(0, 0) is None
    put.a.start()
    # Nobody says anything: the client repeats holder and copy by itself.
    assert put.rank.hear(Confirmed).step == 0
    assert put.b.held(0, 0) == put.manifest


def test_a_broken_link_is_dialled_anew(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    proxy = world.proxy(b, cut_at=CHUNK_NBYTES)
    rank = world.rank(a, 0, SIZES)
    rank.protect(proxy.address)
    rank.snapshot(0)
    assert rank.hear(Confirmed).step == 0


def test_a_rank_that_dies_still_has_its_sealed_copy_sent(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    proxy = world.proxy(b, stall_at=CHUNK_NBYTES)
    script = (
        "import sys; sys.path[:0] = sys.argv[1].split(':')\n"
        "import signal, time\n"
        "from types import SimpleNamespace\n"
        "from pathlib import Path\n"
        "from deadpool_runtime.protocol import Address\n"
        "from deadpool_runtime.replication.arena import Arena\n"
        "from deadpool_runtime.replication.messages import SnapshotDropped\n"
        "from replicators import Rank\n"
        "node = SimpleNamespace(arena=Arena.open(Path(sys.argv[2])))\n"
        f"rank = Rank(node, 0, {SIZES})\n"
        "rank.protect(Address('127.0.0.1', int(sys.argv[3])))\n"
        "rank.snapshot(0)\n"
        # Messages go one by one: once this one is on its way, all before it have gone.
        "rank.client.send(SnapshotDropped(99))\n"
        "while rank.client._waiting: time.sleep(0.01)\n"
        "print('sealed', flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", script),
            ":".join(path for path in sys.path if path.endswith("support")),
            *(str(a.arena.path), str(proxy.address.port)),
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    # Chunks travel before the copy is whole.
    assert process.stdout.readline() == b"sealed\n"
    assert proxy.stalled.wait(DEADLINE_S)
    process.kill()
    process.stdout.close()
    process.wait(DEADLINE_S)
    proxy.release.set()
    wait_until(lambda: b.held(0, 0) is not None)


def wait_until(true: Callable[[], bool]) -> None:
    """For what no message tells: the files of another process."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_arena_goes_with_the_agent(world: World, tmp_path: Path) -> None:
    arena = Arena.create(Path(f"/dev/shm/deadpool-test%2Dagent{os.getpid()}-a-e0"))
    secret = tmp_path / "agents-secret"
    secret.write_bytes(b"x" * 32)
    agent = (
        "import os, signal, socket, subprocess, sys\n"
        "ours, theirs = socket.socketpair()\n"
        "subprocess.Popen([sys.executable, '-P', '-m', 'deadpool_runtime.replication.replicator',"
        " '--arena', sys.argv[1], '--host', '127.0.0.1', '--node', 'a', '--secret', sys.argv[2],"
        " '--control', str(theirs.fileno()), '--parent', str(os.getpid())],"
        " pass_fds=[theirs.fileno()])\n"
        "ours.recv(1)\n"
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", agent, str(arena.path), str(secret)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert arena.socket_path.exists()
    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    process.stdout.close()
    wait_until(lambda: not arena.path.exists())
    arena.remove()


def test_end_by_a_living_agent_leaves_the_arena(world: World) -> None:
    node = world.node("a")
    node.process.send_signal(parking.END_SIGNAL)
    assert node.process.wait(DEADLINE_S) == 0
    assert node.arena.socket_path.exists()


def test_sigterm_at_the_time_limit_stops_no_replica(world: World) -> None:
    a, b = world.node("a"), world.node("b")
    for node in (a, b):
        node.process.send_signal(signal.SIGTERM)
    rank = world.rank(a, 0, SIZES)
    rank.protect(b)
    manifest = rank.snapshot(0)
    assert rank.hear(Confirmed) == Confirmed(0, 0)
    assert b.held(0, 0) == manifest


# ---------------------------------------------------------------- epochs


def test_after_a_fence_nothing_older_is_kept(world: World) -> None:
    put = stalled_put(world)
    b, rank = put.b, put.rank
    b.fence(1)
    put.proxy.release.set()
    assert "epoch" in rank.hear(Unconfirmed).reason
    assert b.held(0, 0) is None
    rank.protect(b, epoch=1)
    manifest = rank.snapshot(1, epoch=1)
    assert rank.hear(Confirmed) == Confirmed(1, 1)
    assert b.held(0, 1) == manifest


def test_a_fence_does_not_wait_for_a_silent_sender(world: World) -> None:
    put = stalled_put(world)
    began = time.monotonic()
    put.b.fence(1)
    assert time.monotonic() - began < DEADLINE_S / 2


def test_the_wrong_secret_is_refused(world: World) -> None:
    a, b = world.node("a"), world.node("b", secret=b"y" * 32)
    good = world.node("c")
    rank, other = world.rank(a, 0, SIZES), world.rank(a, 1, SIZES)
    rank.protect(b)
    rank.snapshot(0)
    other.protect(good)
    other.snapshot(0)
    assert other.hear(Confirmed).step == 0
    assert rank.heard.empty()
    assert b.held(0, 0) is None
    target = world.rank(a, 2, SIZES)
    target.client.send(Assemble(0, 0, [Piece(b.address, 0, True, [], True)], 0))
    assert "secret" in target.hear(AssembleFailed).reason


# ---------------------------------------------------------------- assembling

SHARED = (0, 1)


def two_owners(world: World) -> tuple[list[Node], list[Rank]]:
    """Ranks 0 and 1 have segment 0 in common; rank 1's other segment and own part are on node c."""
    nodes = [world.node(name) for name in "abc"]
    ranks = [world.rank(nodes[r], r, SIZES, ranks=[SHARED, (r,)]) for r in range(2)]
    for rank in ranks:
        rank.protect(nodes[2], segments=[(rank.rank,)])
        rank.snapshot(4)
        assert rank.hear(Confirmed).step == 4
    return nodes, ranks


def pieces_for_rank_1(nodes: list[Node]) -> list[Piece]:
    """Its replica, and what it has in common with rank 0 from that rank's own copy."""
    return [
        Piece(nodes[2].address, 1, True, [(1,)], True),
        Piece(nodes[0].address, 0, False, [SHARED], False),
    ]


def test_a_copy_is_put_together_from_base_and_peer(world: World) -> None:
    nodes, ranks = two_owners(world)
    held = nodes[2].held(1, 4)
    assert held == ranks[1].manifest(4)
    spare = world.node("d")
    newcomer = world.rank(spare, 1, SIZES, born=1)
    newcomer.client.send(Assemble(1, 4, pieces_for_rank_1(nodes), 1))
    assert newcomer.hear(Assembled) == Assembled(1, 4)
    assert spare.own(1, 4) == held
    with SlotFile.open(spare.arena.own_path(1, 1)) as slot:
        found = slot.read()
        assert found is not None
        assert found[1] == (OWN, 0, 1)
        assert slot.own_bytes() == b"own"
        assert bytes(slot.segment_view(0)) == ranks[0].bytes_of(4, 0)


@pytest.mark.parametrize("replica", [True, False])
def test_a_part_of_another_ranks_copy_is_kept_as_its_replica(world: World, replica: bool) -> None:
    nodes, ranks = two_owners(world)
    there = world.node("d")
    other = world.rank(there, 2, SIZES)
    source = nodes[2] if replica else nodes[1]
    piece = Piece(source.address, 1, replica, [(1,)], True)
    other.client.send(Assemble(1, 4, [piece], -1, held=True))
    assert other.hear(Assembled) == Assembled(1, 4)
    assert there.held(1, 4) == ranks[1].manifest(4)
    assert there.own(2, 4) is None
    with SlotFile.open(there.arena.held_path(1, 1)) as slot:
        found = slot.read()
        assert found is not None
        assert found[1] == (OWN, 1)
        assert slot.own_bytes() == b"own"
        assert bytes(slot.segment_view(1)) == ranks[1].bytes_of(4, 1)
    other.client.send(Assemble(1, 4, pieces_for_rank_1(nodes), -1, held=True))
    assert "in one piece" in other.hear(AssembleFailed).reason


@pytest.mark.parametrize("which", ["replica", "peer"])
def test_a_damaged_source_is_unsealed_and_refused(world: World, which: str) -> None:
    nodes, _ = two_owners(world)
    if which == "replica":
        path, where = nodes[2].arena.held_path(1, 1), "replica of rank 1 after step 4 on c"
    else:
        path, where = nodes[0].arena.own_path(0, 1), "copy of rank 0 after step 4 on a"
    flip(path, 4096 + 100)
    spare = world.node("d")
    newcomer = world.rank(spare, 1, SIZES, born=1)
    newcomer.client.send(Assemble(1, 4, pieces_for_rank_1(nodes), 1))
    assert f"the {where} is damaged" in newcomer.hear(AssembleFailed).reason
    assert spare.own(1, 4) is None
    with SlotFile.open(path) as slot:
        assert slot.read() is None
    newcomer.client.send(Assemble(2, 4, pieces_for_rank_1(nodes), 1))
    assert f"there is no {where}" in newcomer.hear(AssembleFailed).reason


def test_a_piece_that_differs_from_the_base_is_refused(world: World) -> None:
    nodes, ranks = two_owners(world)
    with SlotFile.open(nodes[0].arena.own_path(0, 1)) as slot:
        other = Rank.manifest(ranks[0], 4)
        slot.prepare(other.segments, (0, 1, OWN))
        slot.segment_view(0)[:] = bytes(SIZES[0])
        slot.segment_view(1)[:] = ranks[0].bytes_of(4, 1)
    zeros = bytes(SIZES[0])
    hashes = tuple(
        chunk_hash(zeros[at : at + CHUNK_NBYTES]) for at in range(0, SIZES[0], CHUNK_NBYTES)
    )
    segments = (replace(other.segments[0], hashes=hashes), other.segments[1])
    with SlotFile.open(nodes[0].arena.own_path(0, 1)) as slot:
        slot.seal(replace(other, segments=segments), (0, 1, OWN), b"own")
    spare = world.node("d")
    newcomer = world.rank(spare, 1, SIZES, born=1)
    newcomer.client.send(Assemble(1, 4, pieces_for_rank_1(nodes), 1))
    assert "differs from the base" in newcomer.hear(AssembleFailed).reason
    assert spare.own(1, 4) is None
    assert nodes[0].own(0, 4) is not None


def test_pieces_that_do_not_make_a_whole_are_refused(world: World) -> None:
    nodes, _ = two_owners(world)
    newcomer = world.rank(world.node("d"), 1, SIZES, born=1)
    newcomer.client.send(Assemble(1, 4, pieces_for_rank_1(nodes)[:1], 1))
    assert "no piece brought the segment of ranks [0, 1]" in newcomer.hear(AssembleFailed).reason
    newcomer.client.send(Assemble(1, 5, pieces_for_rank_1(nodes), 2))
    assert "there is no replica" in newcomer.hear(AssembleFailed).reason


def test_a_source_that_cannot_be_reached_fails_the_assembly(world: World) -> None:
    nodes, _ = two_owners(world)
    nodes[2].kill()
    newcomer = world.rank(world.node("d"), 1, SIZES, born=1)
    newcomer.client.send(Assemble(1, 4, pieces_for_rank_1(nodes), 1))
    assert "cannot be reached" in newcomer.hear(AssembleFailed).reason


def test_a_bit_flipped_while_fetching_is_fetched_again(world: World) -> None:
    nodes, ranks = two_owners(world)
    spare = world.node("d", "")
    newcomer = world.rank(spare, 1, SIZES, born=1)
    proxy = world.proxy(nodes[0], flips_back=[CHUNK_NBYTES])
    pieces = pieces_for_rank_1(nodes)
    pieces[1] = Piece(proxy.address, 0, False, [SHARED], False)
    newcomer.client.send(Assemble(1, 4, pieces, 1))
    assert newcomer.hear(Assembled).step == 4
    assert spare.own(1, 4) == ranks[1].manifest(4)
