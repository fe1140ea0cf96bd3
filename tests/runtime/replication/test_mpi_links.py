"""Real replicators whose chunks go by MPI while they can: copies arrive whatever befalls a mover.

The movers are one real MPI world, started by the wheel's ``mpiexec``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mpi_world import LONG_S, MpiWorld, mpi_world
from node_movers import Movers, hear_carrier
from replicators import Node, Rank, World, world_in

from deadpool_runtime.replication.carriers.base import MOVE_TIMEOUT_S, CarrierBroken, Range
from deadpool_runtime.replication.carriers.choice import label_of
from deadpool_runtime.replication.carriers.files import Maps
from deadpool_runtime.replication.events import (
    ChunkReceived,
    Event,
    Outcome,
    Part,
    ReceiveChunk,
    SlotName,
    StreamKey,
)
from deadpool_runtime.replication.link import Home, Link
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, chunk_hash
from deadpool_runtime.replication.messages import Confirmed

SIZES = (2 * CHUNK_NBYTES + 1000, 5000)
LARGE_NBYTES = 192 << 20


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield from world_in(tmp_path)


@pytest.fixture
def mpi(world: World, tmp_path: Path) -> Iterator[Movers]:
    running = Movers(tmp_path / "secret")
    yield running
    running.close()


def pair(world: World, mpi: Movers, *sizes: int) -> tuple[Node, Node, Rank]:
    """Two nodes in an MPI world, and a rank of the first whose replicas go to the second."""
    a, b = world.node("a", "mpi"), world.node("b", "mpi")
    rank = world.rank(a, 0, sizes or SIZES)
    rank.protect(b)
    rank.snapshot(0)
    assert rank.hear(Confirmed).step == 0
    mpi.start(1, a, b)
    hear_carrier(rank, "mpi")
    return a, b, rank


def test_chunks_go_by_mpi_as_soon_as_both_nodes_are_in_a_world(world: World, mpi: Movers) -> None:
    _, b, rank = pair(world, mpi)
    for step in (1, 2, 3):
        manifest = rank.snapshot(step)
        assert rank.hear(Confirmed).step == step
        assert b.held(0, step) == manifest


@pytest.mark.parametrize("struck", ["sender", "receiver"])
def test_a_mover_that_dies_is_replaced_by_tcp_and_a_new_world_takes_over(
    world: World, mpi: Movers, struck: str
) -> None:
    a, b, rank = pair(world, mpi)
    mpi.strike(a if struck == "sender" else b, signal.SIGKILL)
    rank.snapshot(1)
    assert rank.hear(Confirmed).step == 1
    mpi.start(2, a, b)
    hear_carrier(rank, "mpi")
    manifest = rank.snapshot(2)
    assert rank.hear(Confirmed).step == 2
    assert b.held(0, 2) == manifest


@pytest.mark.parametrize("struck", ["sender", "receiver"])
def test_a_mover_that_dies_in_the_middle_of_a_copy_does_not_spoil_it(
    world: World, mpi: Movers, struck: str
) -> None:
    a, b, rank = pair(world, mpi, LARGE_NBYTES)
    manifest = rank.snapshot(1)
    held = b.arena.held_path(0, 1)
    while not held.exists():
        time.sleep(0.001)
    mpi.strike(a if struck == "sender" else b, signal.SIGKILL)
    assert rank.hear(Confirmed).step == 1
    assert b.held(0, 1) == manifest


def test_a_mover_that_stands_still_costs_its_deadline_once(world: World, mpi: Movers) -> None:
    _, b, rank = pair(world, mpi)
    mpi.strike(b, signal.SIGSTOP)
    began_at = time.monotonic()
    rank.snapshot(1)
    assert rank.hear(Confirmed).step == 1
    assert time.monotonic() - began_at > MOVE_TIMEOUT_S / 2
    began_at = time.monotonic()
    manifest = rank.snapshot(2)
    assert rank.hear(Confirmed).step == 2
    assert time.monotonic() - began_at < MOVE_TIMEOUT_S
    assert b.held(0, 2) == manifest


def test_a_fence_in_the_middle_of_a_copy_is_answered_soon(world: World, mpi: Movers) -> None:
    a, b, rank = pair(world, mpi, LARGE_NBYTES)
    rank.snapshot(1)
    held = b.arena.held_path(0, 1)
    while not held.exists():
        time.sleep(0.001)
    began_at = time.monotonic()
    b.fence(1)
    a.fence(1)
    assert time.monotonic() - began_at < 30.0
    rank.protect(b, epoch=1)
    manifest = rank.snapshot(2, epoch=1)
    while rank.hear(Confirmed).step != 2:
        pass
    assert b.held(0, 2) == manifest


# ---------------------------------------------------------------- one link, chunk by chunk


class Receiving:
    """Node b's end of a link from a, in this process; the test is a.

    ``data``: two chunks, to be received into the two chunks of ``target``.
    """

    SLOT = SlotName(True, 0, 0, 0)
    #: The tag of a chunk that is announced before it is sent.
    LATE_TAG = 9999

    def __init__(self, world: MpiWorld) -> None:
        self.world = world
        self.data = os.urandom(2 * CHUNK_NBYTES)
        source = world.arenas["a"] / "own-0-0"
        source.write_bytes(self.data)
        self.target = world.arenas["b"] / self.SLOT.file
        self.target.write_bytes(bytes(2 * CHUNK_NBYTES))
        self._ranges = [Range(str(source), at * CHUNK_NBYTES, CHUNK_NBYTES) for at in (0, 1)]
        self._offers = {node: world.kinds[node].offer() or b"" for node in ("a", "b")}
        self.label = label_of("mpi", self._offers["a"], self._offers["b"])
        self._heard: queue.Queue[Event] = queue.Queue()
        home = Home("b", world.arenas["b"], [world.kinds["b"]], Maps(), self._heard.put)
        self._sockets = [*socket.socketpair(), *socket.socketpair()]
        self.link = Link(1, home, "a", None, self._sockets[0], self._sockets[2])
        self.link.start({"mpi": self._offers["a"]}, None)
        sender = world.kinds["a"].sender(self._offers["b"])
        assert sender is not None
        self.sender = sender

    def announce_late(self, number: int) -> None:
        """Let the link receive a chunk that is not sent yet."""
        self._announce(number, struct.pack("!IQ", self.LATE_TAG, CHUNK_NBYTES))

    def send_late(self, number: int) -> None:
        """Send the chunk that was announced before."""
        mover = self.world.kinds["a"].mover
        assert mover is not None
        mover.send("own-0-0", self._ranges[number].offset, CHUNK_NBYTES, 1, self.LATE_TAG)

    def send(self, number: int) -> bytes:
        """Send a chunk and let the link receive it; its ticket."""
        ticket = self.sender.send(self._ranges[number])
        self._announce(number, ticket)
        return ticket

    def _announce(self, number: int, ticket: bytes) -> None:
        offset, nbytes = self._ranges[number][1:]
        self.link.do_receive(
            ReceiveChunk(
                key=StreamKey(1, 1),
                part=Part(0, number),
                slot=self.SLOT,
                offset=offset,
                nbytes=nbytes,
                hash=chunk_hash(self.data[offset : offset + nbytes]),
                carrier=self.label,
                ticket=ticket,
            )
        )

    def received(self) -> tuple[int, Outcome]:
        """What became of the next chunk."""
        while not isinstance(event := self._heard.get(timeout=LONG_S), ChunkReceived):
            pass
        return event.part.chunk, event.outcome

    def close(self) -> None:
        self.link.end("the test is over")
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    with mpi_world() as world:
        made = Receiving(world)
        yield made
        made.close()


def test_a_chunk_comes_in_while_an_earlier_one_is_under_way(receiving: Receiving) -> None:
    receiving.announce_late(0)
    # Sent means taken by the other end's mover.
    receiving.sender.wait_sent(receiving.send(1), MOVE_TIMEOUT_S / 2)
    receiving.send_late(0)
    assert [receiving.received() for _ in range(2)] == [(0, Outcome.RIGHT), (1, Outcome.RIGHT)]
    assert receiving.target.read_bytes() == receiving.data


def test_when_a_link_ends_chunks_are_lost_once_nothing_writes_them(receiving: Receiving) -> None:
    stopped = receiving.world.process("a")
    stopped.send_signal(signal.SIGSTOP)
    tickets = [receiving.send(number) for number in (0, 1)]
    receiving.link.end("the test ends it")
    assert [receiving.received() for _ in range(2)] == [(0, Outcome.LOST), (1, Outcome.LOST)]
    receiving.target.write_bytes(bytes(2 * CHUNK_NBYTES))
    # It may have been ended together with the one of b.
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.send_signal(signal.SIGCONT)
    for ticket in tickets:
        with pytest.raises(CarrierBroken):
            receiving.sender.wait_sent(ticket, 0.5)
    assert receiving.target.read_bytes() == bytes(2 * CHUNK_NBYTES)


def test_a_carrier_that_is_dropped_loses_the_chunks_it_expects(receiving: Receiving) -> None:
    receiving.announce_late(0)
    receiving.sender.wait_sent(receiving.send(1), MOVE_TIMEOUT_S / 2)
    receiving.link.choice.drop_receiver(receiving.label)
    assert [receiving.received() for _ in range(2)] == [(0, Outcome.LOST), (1, Outcome.LOST)]
    receiving.world.wait_gone("b")
