"""Movers of several nodes on this machine as one real MPI world, for tests and benchmarks.

The node's arenas and the replicators' side of the carrier are in the calling process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from deadpool_launch import movers
from deadpool_runtime.replication.arena import Arena, arena_path
from deadpool_runtime.replication.carriers.mpi import MpiKind, MpiReceiver, MpiSender

#: Generous: starting takes a second on a free machine.
LONG_S = 120.0


class MpiWorld:
    """``nodes`` with an arena and an ``MpiKind`` each; ``start`` starts a world of movers."""

    def __init__(self, nodes: Sequence[str] = ("a", "b")) -> None:
        self.job = f"test-{os.getpid()}-{secrets.token_hex(2)}"
        self.secret = secrets.token_bytes(32)
        self.secret_path = Path(f"/dev/shm/deadpool-{self.job}-secret")
        self.secret_path.write_bytes(self.secret)
        made = {node: Arena.create(arena_path(self.job, node, 1)) for node in nodes}
        self._made = list(made.values())
        self.arenas = {node: arena.path for node, arena in made.items()}
        self.kinds: dict[str, MpiKind] = {}
        self._changed = threading.Condition()
        for node, arena in self.arenas.items():
            self.kinds[node] = MpiKind(arena, node, self.secret)
            self.kinds[node].watch(self._note_change)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, world_id: int = 1, nodes: Sequence[str] = (), secret: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start movers on ``nodes`` (all of them if none is named), without waiting for them.

        One that dies leaves the others alone: harder for these than what a site does.
        """
        argv = movers.mover_argv(
            sys.executable,
            self.job,
            world_id,
            secret or self.secret_path,
            start_timeout_s=LONG_S / 2,
        )
        command = movers.mpiexec_argv(
            str(Path(sys.executable).with_name("mpiexec")),
            [(node, {}) for node in nodes or self.arenas],
            argv,
            end_together=False,
        )
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=os.environ | movers.MPICH_OVER_TCP
        )
        self._started.append(process)
        return process

    def wait_world(self, world_id: int = 1, nodes: Sequence[str] = ()) -> None:
        """Wait until every node's replicator has a mover of that world."""

        def up() -> bool:
            found = [self.kinds[node].mover for node in nodes or self.arenas]
            return all(mover and mover.hello.world_id == world_id for mover in found)

        with self._changed:
            assert self._changed.wait_for(up, LONG_S), "the movers did not come up"

    def wait_gone(self, node: str) -> None:
        """Wait until this node's replicator has no mover."""
        with self._changed:
            gone = self._changed.wait_for(lambda: self.kinds[node].offer() is None, LONG_S)
            assert gone, "the mover is still there"

    def ends(self, source: str = "a", target: str = "b") -> tuple[MpiSender, MpiReceiver]:
        """Both ends of one direction of a link."""
        offers = {node: self.kinds[node].offer() for node in (source, target)}
        sender = self.kinds[source].sender(offers[target] or b"")
        receiver = self.kinds[target].receiver(offers[source] or b"")
        assert sender is not None
        assert receiver is not None
        return sender, receiver

    def process(self, node: str) -> psutil.Process:
        """The mover of a node."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("DEADPOOL_MOVER_NODE") == node and (
                    "deadpool_runtime.replication.mover" in process.cmdline()
                ):
                    return process
        raise AssertionError(f"no mover runs on {node}")

    def close(self) -> None:
        """End everything and remove the arenas."""
        for kind in self.kinds.values():
            kind.close()
        for process in self._started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                process.kill()
                process.wait()
        for arena in self._made:
            arena.remove()
        self.secret_path.unlink()

    def _note_change(self) -> None:
        with self._changed:
            self._changed.notify_all()


@contextlib.contextmanager
def mpi_world(nodes: Sequence[str] = ("a", "b"), start: bool = True) -> Iterator[MpiWorld]:
    """A world that is up; everything of it is gone afterwards."""
    world = MpiWorld(nodes)
    try:
        if start:
            world.start()
            world.wait_world()
        yield world
    finally:
        world.close()
