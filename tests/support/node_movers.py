"""Worlds of movers over the nodes of ``replicators.World``, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import psutil
from replicators import Node, Rank

from deadpool_launch import movers
from deadpool_runtime.replication.messages import LinkNote


class Movers:
    """Starts real MPI worlds by the wheel's ``mpiexec``."""

    def __init__(self, secret: Path) -> None:
        self._secret = secret
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, world_id: int, *nodes: Node) -> None:
        """Start a world, without waiting for it."""
        mpiexec = str(Path(sys.executable).with_name("mpiexec"))
        command = [mpiexec, "-launcher", "fork", "-disable-auto-cleanup"]
        for index, node in enumerate(nodes):
            name = node.arena.path.name.removeprefix("deadpool-").removesuffix(f"-{node.name}-e0")
            command += [":"] if index else []
            command += ["-n", "1", "-env", "DEADPOOL_MOVER_NODE", node.name]
            command += movers.mover_argv(sys.executable, unquote(name), world_id, self._secret)
        environ = os.environ | movers.MPICH_OVER_TCP
        self._started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environ))

    def strike(self, node: Node, number: signal.Signals) -> None:
        """Send a signal to the living mover of a node."""
        for process in psutil.Process(self._started[-1].pid).children(recursive=True):
            # The one of another node may be ending.
            with contextlib.suppress(psutil.Error):
                if (
                    "deadpool_runtime.replication.mover" in process.cmdline()
                    and process.environ()["DEADPOOL_MOVER_NODE"] == node.name
                ):
                    process.send_signal(number)

    def close(self) -> None:
        """End what is left."""
        for process in self._started:
            family = []
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            process.wait()


def hear_carrier(rank: Rank, name: str) -> str:
    """Wait until the rank is told that its chunks go by ``name``; the whole sentence."""
    while f"go by {name}" not in (text := rank.hear(LinkNote).text):
        pass
    return text
