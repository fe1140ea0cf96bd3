"""What every carrier must do, whatever it is: one contract, run for each.

A new carrier adds a function to ``CARRIERS`` that yields both ends and the two arenas.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from mpi_world import mpi_world

from deadpool_runtime.replication.arena import Arena, SlotFile
from deadpool_runtime.replication.carriers.base import (
    MAX_TICKETS,
    CarrierBroken,
    Kind,
    Range,
    Receiver,
    Sender,
)
from deadpool_runtime.replication.carriers.choice import Choice, name_of
from deadpool_runtime.replication.carriers.files import Maps
from deadpool_runtime.replication.carriers.memory import MemoryKind
from deadpool_runtime.replication.carriers.tcp import TcpReceiver, TcpSender, widen

NBYTES = 4 << 20
DEADLINE_S = 120.0


@dataclass
class Ends:
    """Both ends of a carrier, and an arena for each."""

    sender: Sender
    receiver: Receiver
    source: Arena
    target: Arena


@contextmanager
def arenas() -> Iterator[tuple[Arena, Arena]]:
    """Two empty arenas."""
    made = [
        Arena.create(Path(f"/dev/shm/deadpool-test%2D{secrets.token_hex(6)}-{name}-e0"))
        for name in "ab"
    ]
    try:
        yield made[0], made[1]
    finally:
        for arena in made:
            arena.remove()


@contextmanager
def tcp_ends() -> Iterator[Ends]:
    with arenas() as (source, target), socket.socket() as server:
        widen(server)
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as near:
            far, _ = server.accept()
            with far:
                yield Ends(TcpSender(near, Maps()), TcpReceiver(far, Maps()), source, target)


@contextmanager
def memory_ends() -> Iterator[Ends]:
    with arenas() as (source, target):
        ours, theirs = MemoryKind(source.path, Maps()), MemoryKind(target.path, Maps())
        sender, receiver = ours.sender(offer_of(theirs)), theirs.receiver(offer_of(ours))
        assert sender is not None
        assert receiver is not None
        yield Ends(sender, receiver, source, target)


def offer_of(kind: Kind) -> bytes:
    offer = kind.offer()
    assert offer is not None
    return offer


@contextmanager
def mpi_ends() -> Iterator[Ends]:
    """Movers started by the wheel's ``mpiexec``."""
    with mpi_world() as world:
        sender, receiver = world.ends()
        yield Ends(sender, receiver, Arena(world.arenas["a"]), Arena(world.arenas["b"]))


CARRIERS: dict[str, Callable[[], AbstractContextManager[Ends]]] = {
    "tcp": tcp_ends,
    "memory": memory_ends,
    "mpi": mpi_ends,
}


@pytest.fixture(params=CARRIERS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with CARRIERS[request.param]() as made:
        yield made
        made.sender.close()
        made.receiver.close()


def fill(arena: Arena, name: str, data: bytes) -> Range:
    """A slot file with these bytes."""
    path = arena.path / name
    with SlotFile.open(path, create=True) as slot:
        slot.ensure(max(1, len(data)))
        slot.view(0, len(data))[:] = data
    return Range(str(path), 0, len(data))


def bytes_in(place: Range) -> bytes:
    with SlotFile.open(Path(place.path)) as slot:
        return bytes(slot.view(place.offset, place.nbytes))


class Sending:
    """The sender's thread: hands out tickets, at most ``MAX_TICKETS`` ahead of ``done``."""

    def __init__(self, sender: Sender, ranges: list[Range]) -> None:
        self.tickets: queue.Queue[bytes | CarrierBroken] = queue.Queue()
        self.done = threading.Semaphore(MAX_TICKETS)
        self._thread = threading.Thread(target=self._run, args=(sender, ranges))
        self._thread.start()

    def _run(self, sender: Sender, ranges: list[Range]) -> None:
        try:
            for source in ranges:
                self.done.acquire()
                ticket = sender.send(source)
                self.tickets.put(ticket)
                sender.wait_sent(ticket, DEADLINE_S)
        except CarrierBroken as error:
            self.tickets.put(error)

    def ticket(self) -> bytes:
        got = self.tickets.get(timeout=DEADLINE_S)
        assert isinstance(got, bytes), got
        return got

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def test_ranges_arrive_in_order_and_exactly_there(ends: Ends) -> None:
    data = os.urandom(3 * NBYTES + 12345)
    source = fill(ends.source, "own-0-0", data)
    target = fill(ends.target, "held-0-0", b"\xff" * (len(data) + 2000))
    cuts = [0, NBYTES, 2 * NBYTES, 2 * NBYTES + 1, 3 * NBYTES, len(data)]
    spans = list(itertools.pairwise(cuts)) * 4
    sending = Sending(ends.sender, [Range(source.path, a, b - a) for a, b in spans])
    for begin, end in spans:
        ends.receiver.receive(
            sending.ticket(), Range(target.path, 1000 + begin, end - begin), DEADLINE_S
        )
        sending.done.release()
    sending.join()
    whole = bytes_in(Range(target.path, 0, len(data) + 2000))
    assert whole == b"\xff" * 1000 + data + b"\xff" * 1000


def test_what_is_discarded_does_not_disturb_what_follows(ends: Ends) -> None:
    wanted, unwanted = os.urandom(NBYTES), os.urandom(NBYTES + 7)
    ranges = [fill(ends.source, "own-0-0", unwanted), fill(ends.source, "own-0-1", wanted)] * 3
    target = fill(ends.target, "held-0-0", bytes(NBYTES))
    sending = Sending(ends.sender, ranges)
    for _ in range(3):
        ends.receiver.discard(sending.ticket(), len(unwanted), DEADLINE_S)
        sending.done.release()
        ends.receiver.receive(sending.ticket(), target, DEADLINE_S)
        sending.done.release()
        assert bytes_in(target) == wanted
    sending.join()


def test_source_and_target_may_grow_between_ranges(ends: Ends) -> None:
    source = fill(ends.source, "own-0-0", b"a" * 5000)
    target = fill(ends.target, "held-0-0", bytes(5000))
    for nbytes in (5000, 300_000, 2_000_000):
        data = os.urandom(nbytes)
        source = fill(ends.source, "own-0-0", data)
        target = fill(ends.target, "held-0-0", bytes(nbytes))
        sending = Sending(ends.sender, [source])
        ends.receiver.receive(sending.ticket(), target, DEADLINE_S)
        sending.join()
        assert bytes_in(target) == data


def test_a_range_of_another_size_is_refused(ends: Ends) -> None:
    source = fill(ends.source, "own-0-0", b"a" * 5000)
    target = fill(ends.target, "held-0-0", bytes(6000))
    ticket = ends.sender.send(source)
    with pytest.raises(CarrierBroken):
        ends.receiver.receive(ticket, target, DEADLINE_S)


def test_a_closed_receiver_raises_and_writes_nothing_more(ends: Ends) -> None:
    source = fill(ends.source, "own-0-0", b"a" * NBYTES)
    target = fill(ends.target, "held-0-0", bytes(NBYTES))
    ticket = ends.sender.send(source)
    ends.receiver.close()
    ends.receiver.close()
    with pytest.raises(CarrierBroken):
        ends.receiver.receive(ticket, target, DEADLINE_S)
    before = bytes_in(target)
    with contextlib.suppress(CarrierBroken):
        ends.sender.wait_sent(ticket, 1.0)
    assert bytes_in(target) == before


def test_a_closed_sender_raises(ends: Ends) -> None:
    source = fill(ends.source, "own-0-0", b"a" * NBYTES)
    ends.sender.close()
    ends.sender.close()
    with pytest.raises(CarrierBroken):
        ends.sender.wait_sent(ends.sender.send(source), DEADLINE_S)


# ---------------------------------------------------------------- each carrier's own


def test_tcp_receiver_that_waits_is_freed_by_close() -> None:
    with tcp_ends() as ends:
        target = fill(ends.target, "held-0-0", bytes(NBYTES))
        ticket = ends.sender.send(fill(ends.source, "own-0-0", bytes(NBYTES)))
        failed: queue.Queue[CarrierBroken] = queue.Queue()

        def receive() -> None:
            try:
                ends.receiver.receive(ticket, target, DEADLINE_S)
            except CarrierBroken as error:
                failed.put(error)

        thread = threading.Thread(target=receive)
        thread.start()
        ends.receiver.close()
        failed.get(timeout=DEADLINE_S)
        thread.join()


def test_tcp_gives_a_silent_peer_up_after_its_time() -> None:
    with tcp_ends() as ends:
        target = fill(ends.target, "held-0-0", bytes(NBYTES))
        ticket = ends.sender.send(fill(ends.source, "own-0-0", bytes(NBYTES)))
        with pytest.raises(CarrierBroken, match="nothing came"):
            ends.receiver.receive(ticket, target, 0.1)


def test_tcp_sender_with_a_reader_that_stopped_gives_up_after_its_time() -> None:
    with tcp_ends() as ends:
        source = fill(ends.source, "own-0-0", bytes(64 << 20))
        with pytest.raises(CarrierBroken, match="could be sent"):
            ends.sender.wait_sent(ends.sender.send(source), 0.2)


def test_memory_needs_the_same_directory_on_the_same_machine() -> None:
    with arenas() as (source, target):
        ours, theirs = MemoryKind(source.path, Maps()), MemoryKind(target.path, Maps())
        offer = offer_of(theirs)
        assert ours.sender(offer) is not None
        elsewhere = target.path.with_name(target.path.name + "-moved")
        target.path.rename(elsewhere)
        target.path.mkdir()
        assert ours.sender(offer) is None
        target.path.rmdir()
        elsewhere.rename(target.path)
        assert ours.sender(b"nonsense") is None


def test_memory_refuses_a_ticket_that_leaves_the_arena() -> None:
    with memory_ends() as ends:
        outside = fill(ends.source, "own-0-0", b"a" * 100)
        target = fill(ends.target, "held-0-0", bytes(100))
        for file in ("../x", "/etc/passwd", "missing"):
            with pytest.raises(CarrierBroken):
                ends.receiver.receive(msgspec.msgpack.encode((file, 0, 100)), target, DEADLINE_S)
        ends.receiver.receive(ends.sender.send(outside), target, DEADLINE_S)


# ---------------------------------------------------------------- which is used


class Switch(Kind):
    """A carrier that can be turned on and off, and says how often it made ends."""

    name = "mpi"

    def __init__(self) -> None:
        self.world: bytes | None = None
        self.made: list[Sender] = []

    def offer(self) -> bytes | None:
        return self.world

    def sender(self, theirs: bytes) -> Sender | None:
        if theirs != self.world:
            return None
        self.made.append(TcpSender(socket.socket(), Maps()))
        return self.made[-1]

    def receiver(self, theirs: bytes) -> Receiver | None:
        return TcpReceiver(socket.socket(), Maps()) if theirs == self.world else None


def a_choice(kind: Kind) -> tuple[Choice, list[str]]:
    notes: list[str] = []
    fallback = TcpSender(socket.socket(), Maps()), TcpReceiver(socket.socket(), Maps())
    return Choice([kind], "b", fallback, notes.append), notes


def test_a_carrier_is_used_from_when_both_offer_it_until_it_breaks() -> None:
    kind = Switch()
    choice, notes = a_choice(kind)
    choice.choose({})
    assert choice.sender()[0] == "tcp"
    kind.world = b"1"
    assert choice.choose() == {"mpi": b"1"}
    assert choice.sender()[0] == "tcp"
    choice.choose({"mpi": b"1"})
    label, sender = choice.sender()
    assert (name_of(label), sender) == ("mpi", kind.made[0])
    assert choice.receiver(label) is not None
    assert choice.drop_sender(label, "the world ended")
    assert not choice.drop_sender(label, "the world ended")
    assert choice.sender()[0] == "tcp"
    choice.choose()
    assert choice.sender()[0] == "tcp"
    assert notes == [
        "chunks to b go by mpi, not tcp any more",
        "chunks to b go by tcp, not mpi any more: mpi broke, the world ended",
    ]


def test_a_new_world_is_another_carrier() -> None:
    kind = Switch()
    choice, _ = a_choice(kind)
    kind.world = b"1"
    choice.choose({"mpi": b"1"})
    first, _ = choice.sender()
    kind.world = b"2"
    choice.choose()
    assert choice.sender()[0] == "tcp"
    choice.choose({"mpi": b"2"})
    second, _ = choice.sender()
    assert name_of(second) == "mpi"
    assert second != first
    assert choice.receiver(first) is None
    choice.close()
    assert choice.sender()[0] == "tcp"
