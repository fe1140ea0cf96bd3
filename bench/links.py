"""Each carrier against its raw limit, and whole puts over real replicators, on this machine.

A carrier is used as a link uses it, chunk by chunk with tickets; its limit is what moves the same
bytes between the same files without it, in the same run: plain sockets for TCP, ``memmove`` for
memory, plain MPI for MPI (``links_mpi.py``). All of a carrier's rows are measured in turn, and a
ratio is the median over the rounds, with quartiles. A put adds control messages, hashing at the
holder, and the seal; no goal was set for it.

Prints a table and writes ``bench/results/links.json``.

``python bench/links.py [--nbytes 268435456] [--pairs 15] [--carriers tcp,memory,mpi] [--out FILE]``
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import itertools
import mmap
import os
import secrets
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("bench", "tests/support"):
    sys.path.insert(0, str(ROOT / folder))

import records  # noqa: E402
from node_movers import Movers, hear_carrier  # noqa: E402
from replicators import world_in  # noqa: E402

from deadpool_runtime.replication.arena import SLOTS, Arena, SlotFile  # noqa: E402
from deadpool_runtime.replication.carriers.base import Range  # noqa: E402
from deadpool_runtime.replication.carriers.files import Maps  # noqa: E402
from deadpool_runtime.replication.carriers.memory import MemoryKind  # noqa: E402
from deadpool_runtime.replication.carriers.tcp import (  # noqa: E402
    TcpReceiver,
    TcpSender,
    widen,
)
from deadpool_runtime.replication.manifest import CHUNK_NBYTES  # noqa: E402
from deadpool_runtime.replication.messages import Confirmed  # noqa: E402

#: The least ratio to the raw limit that was set as a goal.
GOAL = 0.85

#: Gives bytes a second.
Run = Callable[[], float]
Runs = dict[str, Run]
Rates = dict[str, list[float]]


@contextmanager
def files(nbytes: int) -> Iterator[tuple[Arena, Arena]]:
    """Two arenas: ``own-0-0`` with data in one, ``held-0-0`` of the same size in the other."""
    stem = f"/dev/shm/deadpool-bench%2D{secrets.token_hex(6)}"
    made = [Arena.create(Path(f"{stem}-{name}-e0")) for name in "ab"]
    try:
        for arena, name in zip(made, ("own-0-0", "held-0-0"), strict=True):
            with SlotFile.open(arena.path / name, create=True) as slot:
                slot.ensure(nbytes)
        with SlotFile.open(made[0].path / "own-0-0") as slot:
            slot.view(0, nbytes)[:] = os.urandom(1 << 20) * (nbytes >> 20)
        yield made[0], made[1]
        same = (made[0].path / "own-0-0").read_bytes() == (made[1].path / "held-0-0").read_bytes()
        if not same:
            raise SystemExit("the bytes that arrived are not those that were sent")
    finally:
        for arena in made:
            arena.remove()


def chunks(path: Path, nbytes: int) -> list[Range]:
    """The file, cut as links cut it."""
    return [Range(str(path), at, CHUNK_NBYTES) for at in range(0, nbytes, CHUNK_NBYTES)]


def timed(nbytes: int, run: Callable[[], None]) -> Run:
    """A run that moves so many bytes."""

    def rate() -> float:
        began = time.perf_counter()
        run()
        return nbytes / (time.perf_counter() - began)

    return rate


def mapped(path: Path) -> mmap.mmap:
    """The whole file."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@contextmanager
def tcp(nbytes: int) -> Iterator[Runs]:
    """The sender is another process. Raw: ``sendall`` and ``recv_into`` of the mappings."""
    with files(nbytes) as (source, target):
        server = socket.socket()
        widen(server)
        server.bind(("127.0.0.1", 0))
        server.listen()
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            near = socket.socket()
            widen(near)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            near.connect(server.getsockname())
            _send(theirs, near, source.path / "own-0-0", nbytes)
            os._exit(0)
        far, _ = server.accept()
        view = memoryview(mapped(target.path / "held-0-0"))
        receiver = TcpReceiver(far, Maps())
        pieces = chunks(target.path / "held-0-0", nbytes)

        def raw() -> None:
            ours.sendall(b"r")
            for begin in range(0, nbytes, CHUNK_NBYTES):
                far.recv_into(view[begin : begin + CHUNK_NBYTES], 0, socket.MSG_WAITALL)

        def carrier() -> None:
            ours.sendall(b"c")
            for piece in pieces:
                receiver.receive(_exactly(ours, 16), piece)

        yield {"plain sockets": timed(nbytes, raw), "carrier": timed(nbytes, carrier)}
        ours.sendall(b"e")
        os.waitpid(child, 0)


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    return sock.recv(nbytes, socket.MSG_WAITALL)


def _send(control: socket.socket, near: socket.socket, path: Path, nbytes: int) -> None:
    """The sender's process: send as often as it is told to."""
    view = memoryview(mapped(path))
    sender = TcpSender(near, Maps())
    pieces = chunks(path, nbytes)
    while (command := control.recv(1)) != b"e":
        if command == b"r":
            for begin in range(0, nbytes, CHUNK_NBYTES):
                near.sendall(view[begin : begin + CHUNK_NBYTES])
            continue
        for piece in pieces:
            ticket = sender.send(piece)
            control.sendall(ticket)
            sender.wait_sent(ticket)


@contextmanager
def memory(nbytes: int) -> Iterator[Runs]:
    """Raw: ``memmove`` between the mappings."""
    with files(nbytes) as (source, target):
        maps = Maps()
        ours, theirs = MemoryKind(source.path, maps), MemoryKind(target.path, maps)
        offers = ours.offer(), theirs.offer()
        assert offers[0] is not None
        assert offers[1] is not None
        sender, receiver = ours.sender(offers[1]), theirs.receiver(offers[0])
        assert sender is not None
        assert receiver is not None
        names = source.path / "own-0-0", target.path / "held-0-0"
        buffers = [ctypes.c_char.from_buffer(mapped(name)) for name in names]
        begins = [ctypes.addressof(buffer) for buffer in buffers]
        moves = list(zip(*(chunks(name, nbytes) for name in names), strict=True))

        def raw() -> None:
            for at in range(0, nbytes, CHUNK_NBYTES):
                ctypes.memmove(begins[1] + at, begins[0] + at, CHUNK_NBYTES)

        def carrier() -> None:
            for theirs, ours in moves:
                receiver.receive(sender.send(theirs), ours)

        yield {"memmove": timed(nbytes, raw), "carrier": timed(nbytes, carrier)}


@contextmanager
def mpi(nbytes: int) -> Iterator[Runs]:
    """See ``links_mpi.py``."""
    with importlib.import_module("links_mpi").runs(nbytes) as runs:
        yield {
            "plain MPI, busy": runs["busy"],
            "plain MPI, sleeping": runs["sleeping"],
            "carrier": runs["carrier"],
        }


CARRIERS: dict[str, Callable[[int], AbstractContextManager[Runs]]] = {
    "tcp": tcp,
    "memory": memory,
    "mpi": mpi,
}


@contextmanager
def puts(name: str, nbytes: int) -> Iterator[Run]:
    """Whole puts: from the seal of a copy to its confirmation."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = stack.enter_context(contextmanager(world_in)(folder))
        carriers = "" if name == "tcp" else name
        a, b = world.node("a", carriers), world.node("b", carriers)
        rank = world.rank(a, 0, [nbytes])
        rank.protect(b)
        steps = itertools.count()

        def put() -> float:
            step = next(steps)
            copy = rank.manifest(step)
            with SlotFile.open(a.arena.own_path(0, step % SLOTS), create=True) as slot:
                slot.prepare(copy.segments, (0, -1))
                slot.segment_view(0)[:] = rank.bytes_of(step, 0)
            began = time.perf_counter()
            rank.seal(copy)
            while rank.hear(Confirmed).step != step:
                pass
            return nbytes / (time.perf_counter() - began)

        put()
        if name == "mpi":
            movers = Movers(folder / "secret")
            stack.callback(movers.close)
            movers.start(1, a, b)
            hear_carrier(rank, "mpi")
        # The first use of each of the three slots makes its file.
        for _ in range(SLOTS):
            put()
        yield put


def alternate(pairs: int, runs: Runs) -> Rates:
    """One unmeasured round, then so many rounds, each in the other order than the one before."""
    rates: Rates = {name: [] for name in runs}
    for number in range(pairs + 1):
        for name in list(runs) if number % 2 else reversed(runs):
            rate = runs[name]()
            if number:
                rates[name].append(rate)
    return rates


def quartiles(numbers: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(numbers, n=4)
    return low, middle, high


def describe(numbers: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = quartiles(numbers)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def rows(name: str, rates: Rates) -> dict[str, object]:
    """Print a carrier's rows; what the file tells of it.

    The limit is the faster one where there are several: that of the greatest median.
    """
    limits = [each for each in rates if each not in ("carrier", "put")]
    limit = max(limits, key=lambda each: statistics.median(rates[each]))
    told: dict[str, object] = {"limit": limit, "goal": GOAL, "rates": rates}
    for what in ("carrier", "put"):
        pairs = zip(rates[what], rates[limit], strict=True)
        ratios = [rate / most for rate, most in pairs]
        goal = ""
        if what == "carrier":
            goal = f"{GOAL}: {'met' if quartiles(ratios)[1] >= GOAL else 'MISSED'}"
        gib = {each: [rate / 2**30 for rate in rates[each]] for each in (what, limit)}
        told[f"{what}_ratio"] = quartiles(ratios)
        print(
            f"{name:6} {'carrier alone' if what == 'carrier' else 'whole puts':13} "
            f"{describe(gib[what]):20} {limit:19} {describe(gib[limit]):20} "
            f"{describe(ratios):20} {goal}",
            flush=True,
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nbytes", type=int, default=256 << 20)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--carriers", default=",".join(CARRIERS))
    parser.add_argument("--out", type=Path, default=records.RESULTS / "links.json")
    options = parser.parse_args()
    print("GiB/s and ratio of each pair: median (quartiles)")
    print(
        f"{'':20} {'measured':20} {'raw limit':19} {'':20} {'ratio':20} goal",
        flush=True,
    )
    for name in options.carriers.split(","):
        loads = [os.getloadavg()]
        with CARRIERS[name](options.nbytes) as runs, puts(name, options.nbytes) as put:
            told = rows(name, alternate(options.pairs, {**runs, "put": put}))
        loads.append(os.getloadavg())
        print(f"{name:6} load average before and after: {loads[0][0]:.2f}, {loads[1][0]:.2f}")
        told |= {"nbytes": options.nbytes, "pairs": options.pairs, "loads": loads}
        if name == "mpi":
            told |= importlib.import_module("links_mpi").libraries()
        records.keep(options.out, "python bench/links.py", {name: told})


if __name__ == "__main__":
    main()
