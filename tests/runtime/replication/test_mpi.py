"""The MPI carrier over a real MPI world: bytes arrive, and a mover's death costs the carrier only.

Two or three movers started by the wheel's ``mpiexec``; the replicators' ends are in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mpi_world import LONG_S, MpiWorld, mpi_world

from deadpool_runtime import protocol
from deadpool_runtime.replication import mover_messages as messages
from deadpool_runtime.replication.carriers.base import (
    MAX_TICKETS,
    CarrierBroken,
    Range,
)
from deadpool_runtime.replication.carriers.mpi import MpiReceiver, MpiSender
from deadpool_runtime.replication.manifest import CHUNK_NBYTES

LARGE_NBYTES = 192 << 20


@pytest.fixture
def world() -> Iterator[MpiWorld]:
    with mpi_world() as running:
        yield running


def slot(world: MpiWorld, node: str, name: str, data: bytes | int) -> str:
    """Make a slot file with these bytes, or so many zeros."""
    path = world.arenas[node] / name
    if isinstance(data, int):
        with path.open("wb") as file:
            file.truncate(data)
    else:
        path.write_bytes(data)
    return str(path)


def pattern(nbytes: int, seed: str = "x") -> bytes:
    """Bytes of which no two pages are the same."""
    pages = (hashlib.sha512(f"{seed} {at}".encode()).digest() for at in range(0, nbytes, 4096))
    return b"".join(page * 64 for page in pages)[:nbytes]


class Stream:
    """Moves a file chunk by chunk as a link does, in two threads; ``broken`` says how it ended."""

    def __init__(
        self, sender: MpiSender, receiver: MpiReceiver, source: str, target: str, nbytes: int
    ) -> None:
        self.broken: dict[str, str] = {}
        self.ended_at: dict[str, float] = {}
        self.begun = threading.Event()
        self._tickets: queue.Queue[tuple[bytes, int] | None] = queue.Queue()
        self._room = threading.Semaphore(MAX_TICKETS)
        self._offsets = range(0, nbytes, CHUNK_NBYTES)
        self._threads = [
            threading.Thread(target=self._guard, args=("send", self._send, sender, source)),
            threading.Thread(target=self._guard, args=("receive", self._receive, receiver, target)),
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(LONG_S)
            assert not thread.is_alive()

    def _guard(self, name: str, work: object, end: object, path: str) -> None:
        try:
            work(end, path)  # type: ignore[operator]
        except CarrierBroken as error:
            self.broken[name] = str(error)
            # As the control connection would tell the other end.
            self._tickets.put(None)
            for _ in range(MAX_TICKETS):
                self._room.release()
        self.ended_at[name] = time.monotonic()

    def _send(self, sender: MpiSender, path: str) -> None:
        sent: deque[bytes] = deque()
        for offset in self._offsets:
            self._room.acquire()
            ticket = sender.send(Range(path, offset, CHUNK_NBYTES))
            sent.append(ticket)
            self._tickets.put((ticket, offset))
            if len(sent) == MAX_TICKETS:
                sender.wait_sent(sent.popleft(), 5.0)
        for ticket in sent:
            sender.wait_sent(ticket, 5.0)
        self._tickets.put(None)

    def _receive(self, receiver: MpiReceiver, path: str) -> None:
        while (item := self._tickets.get()) is not None:
            ticket, offset = item
            receiver.receive(ticket, Range(path, offset, CHUNK_NBYTES), 5.0)
            self._room.release()
            if offset > 2 * MAX_TICKETS * CHUNK_NBYTES:
                self.begun.set()


def test_ranges_arrive_in_both_directions_at_the_same_time(world: MpiWorld) -> None:
    nbytes = 24 << 20
    data = {node: pattern(nbytes, node) for node in ("a", "b")}
    source = {node: slot(world, node, "own-0-0", data[node]) for node in ("a", "b")}
    target = {node: slot(world, node, "held-1-0", nbytes) for node in ("a", "b")}
    streams = [
        Stream(*world.ends(one, other), source[one], target[other], nbytes)
        for one, other in (("a", "b"), ("b", "a"))
    ]
    for stream in streams:
        stream.join()
        assert stream.broken == {}
    assert Path(target["b"]).read_bytes() == data["a"]
    assert Path(target["a"]).read_bytes() == data["b"]


def test_odd_sizes_and_places_arrive_and_nothing_else_is_touched(world: MpiWorld) -> None:
    sender, receiver = world.ends()
    data = pattern(3 << 20)
    source = slot(world, "a", "own-0-1", data)
    target = slot(world, "b", "held-0-1", 3 << 20)
    expected = bytearray(3 << 20)
    for offset, nbytes in ((1, 1), (4096, 4095), (8191, 1), (1 << 20, 65_537), (2 << 20, 1 << 20)):
        ticket = sender.send(Range(source, offset, nbytes))
        receiver.receive(ticket, Range(target, offset, nbytes))
        sender.wait_sent(ticket)
        expected[offset : offset + nbytes] = data[offset : offset + nbytes]
    assert Path(target).read_bytes() == expected


def test_a_discarded_ticket_does_not_hold_up_the_next(world: MpiWorld) -> None:
    sender, receiver = world.ends()
    source = slot(world, "a", "own-0-0", pattern(2 * CHUNK_NBYTES))
    target = slot(world, "b", "held-0-0", CHUNK_NBYTES)
    tickets = [sender.send(Range(source, at, CHUNK_NBYTES)) for at in (0, CHUNK_NBYTES)]
    receiver.discard(tickets[0], CHUNK_NBYTES)
    receiver.receive(tickets[1], Range(target, 0, CHUNK_NBYTES))
    for ticket in tickets:
        sender.wait_sent(ticket)
    assert Path(target).read_bytes() == pattern(2 * CHUNK_NBYTES)[CHUNK_NBYTES:]


def test_a_file_that_grew_or_was_made_anew_is_seen(world: MpiWorld) -> None:
    sender, receiver = world.ends()
    target = slot(world, "b", "held-0-0", 1 << 20)
    for nbytes, anew in ((4096, False), (8192, False), (8192, True), (4096, True)):
        if anew:
            (world.arenas["a"] / "own-0-0").unlink()
        data = pattern(nbytes, f"{nbytes} {anew}")
        source = slot(world, "a", "own-0-0", data)
        ticket = sender.send(Range(source, 0, nbytes))
        receiver.receive(ticket, Range(target, 0, nbytes))
        assert Path(target).read_bytes()[:nbytes] == data


def test_a_mover_killed_in_the_middle_costs_the_carrier_at_both_ends(world: MpiWorld) -> None:
    source = slot(world, "a", "own-0-0", pattern(LARGE_NBYTES))
    target = slot(world, "b", "held-0-0", LARGE_NBYTES)
    stream = Stream(*world.ends(), source, target, LARGE_NBYTES)
    assert stream.begun.wait(LONG_S)
    world.process("a").kill()
    killed_at = time.monotonic()
    stream.join()
    assert set(stream.broken) == {"send", "receive"}
    assert "ended" in stream.broken["send"]
    assert max(stream.ended_at.values()) - killed_at < 5.0 + 5.0
    # The receiver gave up a chunk, so its mover was ended too; both replicators go on.
    world.wait_gone("a")
    world.wait_gone("b")
    world.start(2)
    world.wait_world(2)
    again = Stream(*world.ends(), source, target, LARGE_NBYTES)
    again.join()
    assert again.broken == {}
    assert Path(target).read_bytes() == pattern(LARGE_NBYTES)


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_mover_that_stands_still_is_ended_after_the_deadline(world: MpiWorld, node: str) -> None:
    sender, receiver = world.ends()
    source = slot(world, "a", "own-0-0", pattern(CHUNK_NBYTES))
    target = slot(world, "b", "held-0-0", CHUNK_NBYTES)
    stopped = world.process(node)
    stopped.send_signal(signal.SIGSTOP)
    ticket = sender.send(Range(source, 0, CHUNK_NBYTES))
    began_at = time.monotonic()
    with pytest.raises(CarrierBroken, match="within 1 s"):
        receiver.receive(ticket, Range(target, 0, CHUNK_NBYTES), timeout_s=1.0)
    assert time.monotonic() - began_at < 30.0
    with pytest.raises(CarrierBroken):
        sender.wait_sent(ticket, timeout_s=1.0)
    world.wait_gone("b")
    # The other mover wakes up too late: nothing writes into the arena any more.
    Path(target).write_bytes(bytes(CHUNK_NBYTES))
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.send_signal(signal.SIGCONT)
    if node == "a":
        with pytest.raises(CarrierBroken):
            sender.wait_sent(sender.send(Range(source, 0, CHUNK_NBYTES)), timeout_s=0.5)
    assert Path(target).read_bytes() == bytes(CHUNK_NBYTES)


def test_a_send_that_nobody_takes_breaks_its_own_link_only(world: MpiWorld) -> None:
    source = slot(world, "a", "own-0-0", pattern(CHUNK_NBYTES))
    target = slot(world, "b", "held-0-0", CHUNK_NBYTES)
    lonely, _ = world.ends()
    ticket = lonely.send(Range(source, 0, CHUNK_NBYTES))
    with pytest.raises(CarrierBroken, match="did not take"):
        lonely.wait_sent(ticket, timeout_s=0.2)
    sender, receiver = world.ends()
    ticket = sender.send(Range(source, 0, CHUNK_NBYTES))
    receiver.receive(ticket, Range(target, 0, CHUNK_NBYTES))
    sender.wait_sent(ticket)
    assert Path(target).read_bytes() == pattern(CHUNK_NBYTES)


def test_closing_a_receiver_that_waits_ends_the_wait_and_the_mover(world: MpiWorld) -> None:
    _, receiver = world.ends()
    target = slot(world, "b", "held-0-0", 4096)
    closer = threading.Timer(0.2, receiver.close)
    closer.start()
    with pytest.raises(CarrierBroken, match="closed"):
        receiver.receive((7).to_bytes(4, "big") + (4096).to_bytes(8, "big"), Range(target, 0, 4096))
    closer.join()
    world.wait_gone("b")


def test_ranges_that_are_expected_arrive_in_their_places(world: MpiWorld) -> None:
    sender, receiver = world.ends()
    data = pattern(MAX_TICKETS * CHUNK_NBYTES)
    source = slot(world, "a", "own-0-0", data)
    target = slot(world, "b", "held-0-0", len(data))
    offsets = range(0, len(data), CHUNK_NBYTES)
    places = {
        sender.send(Range(source, at, CHUNK_NBYTES)): Range(target, at, CHUNK_NBYTES)
        for at in offsets
    }
    for ticket, place in places.items():
        receiver.expect(ticket, place)
    for ticket, place in places.items():
        receiver.receive(ticket, place)
        sender.wait_sent(ticket)
    assert Path(target).read_bytes() == data


def test_nothing_is_written_for_what_was_expected_once_its_receive_has_failed(
    world: MpiWorld,
) -> None:
    sender, receiver = world.ends()
    source = slot(world, "a", "own-0-0", pattern(2 * CHUNK_NBYTES))
    target = slot(world, "b", "held-0-0", 2 * CHUNK_NBYTES)
    stopped = world.process("a")
    stopped.send_signal(signal.SIGSTOP)
    places = {
        sender.send(Range(source, at, CHUNK_NBYTES)): Range(target, at, CHUNK_NBYTES)
        for at in (0, CHUNK_NBYTES)
    }
    for ticket, place in places.items():
        receiver.expect(ticket, place)
    receiver.close()
    for ticket, place in places.items():
        with pytest.raises(CarrierBroken, match="closed"):
            receiver.receive(ticket, place)
    # It may have been ended together with the one of b.
    with contextlib.suppress(psutil.NoSuchProcess):
        stopped.send_signal(signal.SIGCONT)
    for ticket in places:
        with pytest.raises(CarrierBroken):
            sender.wait_sent(ticket, timeout_s=0.5)
    assert Path(target).read_bytes() == bytes(2 * CHUNK_NBYTES)


def test_closing_a_sender_that_waits_ends_the_wait(world: MpiWorld) -> None:
    sender, _ = world.ends()
    source = slot(world, "a", "own-0-0", pattern(CHUNK_NBYTES))
    ticket = sender.send(Range(source, 0, CHUNK_NBYTES))
    closer = threading.Timer(0.2, sender.close)
    closer.start()
    with pytest.raises(CarrierBroken, match="closed"):
        sender.wait_sent(ticket)
    closer.join()
    assert world.kinds["a"].offer() is not None


@pytest.mark.parametrize(
    "name", ["../{other}/own-0-0", "mover.sock", "lock", "sub/own-0-0", "/etc/hostname"]
)
def test_nothing_but_slot_files_can_be_named(world: MpiWorld, name: str) -> None:
    sender, _ = world.ends()
    path = world.arenas["a"] / name.format(other=world.arenas["b"].name)
    with pytest.raises(CarrierBroken, match="not a slot file"):
        sender.send(Range(str(path), 0, 1))


def test_the_mover_itself_refuses_what_is_no_range_of_a_slot_file(world: MpiWorld) -> None:
    mover = world.kinds["a"].mover
    assert mover is not None
    slot(world, "a", "own-0-0", 4096)
    (world.arenas["a"] / "own-0-1").symlink_to("/etc/hostname")
    os.mkfifo(world.arenas["a"] / "own-0-2")
    for file, offset, nbytes, rank in (
        ("../passwd", 0, 1, 1),
        ("mover.sock", 0, 1, 1),
        ("own-0-1", 0, 1, 1),
        ("own-0-2", 0, 1, 1),
        ("own-0-3", 0, 1, 1),
        ("own-0-0", -1, 1, 1),
        ("own-0-0", 0, 0, 1),
        ("own-0-0", 4000, 97, 1),
        ("own-0-0", 0, 1, 2),
    ):
        _, move = mover.send(file, offset, nbytes, rank, 1)
        assert move.settled.wait(LONG_S)
        assert "refused" in (move.error or ""), (file, offset, nbytes)
    assert world.kinds["a"].offer() is not None


def test_a_later_world_takes_the_place_of_an_older_one_and_never_the_reverse() -> None:
    with mpi_world() as world:
        old = world.ends()
        first = world.kinds["a"].mover
        world.start(5)
        world.wait_world(5)
        assert first is not None
        assert first.gone.wait(LONG_S)
        source = slot(world, "a", "own-0-0", pattern(4096))
        with pytest.raises(CarrierBroken):
            old[0].send(Range(source, 0, 4096))
        assert world.start(4).wait(LONG_S) != 0
        world.wait_world(5)


def test_ends_exist_only_within_one_world() -> None:
    with mpi_world(("a", "b", "c"), start=False) as world:
        assert world.kinds["a"].offer() is None
        world.start(1, ["a", "b"])
        world.wait_world(1, ["a", "b"])
        offers = {node: world.kinds[node].offer() for node in ("a", "b", "c")}
        assert offers["c"] is None
        assert world.kinds["c"].sender(offers["a"] or b"") is None
        assert world.kinds["a"].sender(offers["a"] or b"") is None
        assert world.kinds["a"].sender(b"nonsense") is None
        assert world.kinds["a"].sender(offers["b"] or b"") is not None


def test_names_of_nodes_may_be_longer_than_an_address_of_a_socket() -> None:
    with mpi_world(("a" * 100, "b" * 100)) as world:
        sender, receiver = world.ends(*world.arenas)
        source = slot(world, "a" * 100, "own-0-0", pattern(4096))
        target = slot(world, "b" * 100, "held-0-0", 4096)
        receiver.receive(sender.send(Range(source, 0, 4096)), Range(target, 0, 4096))
        assert Path(target).read_bytes() == pattern(4096)


def test_a_mover_without_the_secret_is_turned_away() -> None:
    with mpi_world(start=False) as world:
        stranger = socket.socket(socket.AF_UNIX)
        with stranger:
            stranger.connect(str(world.arenas["a"] / messages.SOCKET_NAME))
            stranger.recv(protocol.NONCE_NBYTES)
            stranger.sendall(bytes(protocol.NONCE_NBYTES + protocol.PROOF_NBYTES))
            assert stranger.recv(1) == b""
        assert world.kinds["a"].offer() is None


def test_a_mover_ends_with_its_replicator() -> None:
    with mpi_world() as world:
        process = world.process("a")
        world.kinds["a"].close()
        process.wait(LONG_S)
        assert world.kinds["b"].offer() is not None


def test_an_idle_mover_uses_no_processor(world: MpiWorld) -> None:
    process = world.process("a")
    deadline = time.monotonic() + LONG_S
    while True:  # It settles soon after its start.
        before = sum(process.cpu_times()[:2]), process.num_ctx_switches().voluntary
        time.sleep(1.0)
        after = sum(process.cpu_times()[:2]), process.num_ctx_switches().voluntary
        if after[0] == before[0] and after[1] - before[1] <= 2:
            return
        assert time.monotonic() < deadline, f"{before} {after}"


def test_without_mpi_the_mover_says_so_and_ends(tmp_path: Path) -> None:
    import subprocess

    secret = tmp_path / "secret"
    secret.write_bytes(bytes(32))
    hide = "import sys, runpy; sys.modules['mpi4py'] = None; sys.argv = ['mover', *sys.argv[1:]]; "
    run = "runpy.run_module('deadpool_runtime.replication.mover', run_name='__main__')"
    done = subprocess.run(
        [
            *(sys.executable, "-c", hide + run, "--job-id=7"),
            *("--world-id=1", f"--secret={secret}"),
        ],
        env={**os.environ, "DEADPOOL_MOVER_NODE": "a"},
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == messages.NO_MPI_EXIT
    assert "mpi4py cannot be used" in done.stderr
