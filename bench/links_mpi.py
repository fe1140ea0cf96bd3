"""The MPI carrier, and plain MPI (``Isend``/``Irecv`` of the same ranges of the same files).

Both over the same MPI library and network module. Plain MPI waits in two ways: inside MPI, which
keeps the processors busy, and by looking and sleeping. Which is faster depends on how busy the
processors are, so both are measured and the faster one is the limit. Each run of plain MPI is a
world of its own, and moves everything once before it is measured, so that the connection is there.
The carrier's world stays up and sleeps meanwhile. ``links.py`` uses this and prints the figures.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from mpi_world import MpiWorld, mpi_world  # noqa: E402

from deadpool_launch.movers import MPICH_OVER_TCP  # noqa: E402
from deadpool_runtime.replication.carriers.base import MAX_TICKETS, Range  # noqa: E402
from deadpool_runtime.replication.manifest import CHUNK_NBYTES  # noqa: E402

#: How plain MPI waits, and the pause between two looks; 0 to wait inside MPI.
PAUSES_S = {"busy": 0.0, "sleeping": 5e-5}


def carrier_rate(world: MpiWorld, source: str, target: str, nbytes: int) -> float:
    """Bytes a second through the carrier, used as a link uses it: one thread sends, one hears of
    tickets, one receives.
    """
    sender, receiver = world.ends()
    tickets: queue.SimpleQueue[tuple[bytes, Range] | None] = queue.SimpleQueue()
    room = threading.Semaphore(MAX_TICKETS)

    def send() -> None:
        waiting: deque[bytes] = deque()
        for offset in range(0, nbytes, CHUNK_NBYTES):
            room.acquire()
            ticket = sender.send(Range(source, offset, CHUNK_NBYTES))
            place = Range(target, offset, CHUNK_NBYTES)
            receiver.expect(ticket, place)
            tickets.put((ticket, place))
            waiting.append(ticket)
            if len(waiting) == MAX_TICKETS:
                sender.wait_sent(waiting.popleft(), 60.0)
        for ticket in waiting:
            sender.wait_sent(ticket, 60.0)
        tickets.put(None)

    started = time.perf_counter()
    sending = threading.Thread(target=send)
    sending.start()
    while (item := tickets.get()) is not None:
        receiver.receive(*item, 60.0)
        room.release()
    sending.join()
    return nbytes / (time.perf_counter() - started)


def plain_rate(source: str, target: str, nbytes: int, pause_s: float) -> float:
    """Bytes a second by MPI alone."""
    command = [
        *(str(Path(sys.executable).with_name("mpiexec")), "-launcher", "fork", "-n", "2"),
        *(sys.executable, str(ROOT / "bench" / "scripts" / "plain_mpi.py"), source, target),
        *(str(number) for number in (nbytes, CHUNK_NBYTES, MAX_TICKETS, 1, pause_s)),
    ]
    done = subprocess.run(
        command, env=os.environ | MPICH_OVER_TCP, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


@contextmanager
def runs(nbytes: int) -> Iterator[dict[str, Callable[[], float]]]:
    """The carrier and both ways of plain MPI; each call gives bytes a second."""
    with mpi_world() as world:
        source, target = world.arenas["a"] / "own-0-0", world.arenas["b"] / "held-0-0"
        source.write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
        target.write_bytes(bytes(nbytes))
        ways = str(source), str(target), nbytes
        yield {
            "carrier": lambda: carrier_rate(world, *ways),
            "busy": lambda: plain_rate(*ways, PAUSES_S["busy"]),
            "sleeping": lambda: plain_rate(*ways, PAUSES_S["sleeping"]),
        }
        if source.read_bytes() != target.read_bytes():
            raise SystemExit("the bytes that arrived are not those that were sent")


def libraries() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "mpich": version("mpich"),
        "mpi4py": version("mpi4py"),
        "variables": dict(MPICH_OVER_TCP),
    }
