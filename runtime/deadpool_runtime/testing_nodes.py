"""What a ``testing.FakeLauncher`` runs: nodes on one machine, each an arena and a real replicator,
and the process that forks their ranks.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from deadpool_runtime import parking, protocol
from deadpool_runtime.replication import wire
from deadpool_runtime.replication.arena import Arena, arena_path, copy_in, inventory
from deadpool_runtime.replication.manifest import OWN, offsets
from deadpool_runtime.replication.slotting import slot_file

#: How long a replicator may take to start or to fence an epoch off (seconds).
DEADLINE_S = 30.0
_Kind = TypeVar("_Kind")


class ParkedProcess:
    """A process that has torch imported and forks ranks; use it as a context manager."""

    def __init__(self) -> None:
        # Ranks are forked twice and become children of this process, as they are of an agent.
        parking.prctl(parking.PR_SET_CHILD_SUBREAPER, 1)
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers = (str(theirs.fileno()), str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deadpool_runtime.zygote", *numbers],
            pass_fds=[theirs.fileno()],
            env=python_path(),
        )
        theirs.close()
        self._sock.settimeout(120)
        msgspec.msgpack.decode(self._sock.recv(4096), type=parking.Warm)

    def fork(self, request: parking.ForkRequest, channel: socket.socket) -> int:
        """Start a rank on its end of a socket pair; returns its process id."""
        data = msgspec.msgpack.encode(request)
        socket.send_fds(self._sock, [data], [channel.fileno()])
        return msgspec.msgpack.decode(self._sock.recv(4096), type=parking.Forked).pid

    def close(self) -> None:
        """End the process."""
        self._sock.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ParkedProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class FakeRank:
    """One process that is or was a rank."""

    rank: int
    born: int
    pid: int
    sock: socket.socket
    frames: protocol.Frames = field(default_factory=protocol.Frames)
    store_port: int = 0
    attached: bool = False
    parked: bool = False
    restored: list[protocol.SegmentDigest] | None = None
    at_end: bool = False
    ended: bool = False


class FakeNode:
    """One node. ``epoch``: the job's when the node is started."""

    def __init__(self, job_id: str, name: str, epoch: int, secret: Path, log_path: Path) -> None:
        self.name = name
        self._secret = secret
        self._log_path = log_path
        self._fenced = 0
        self.arena = Arena.create(arena_path(job_id, name, epoch))
        self.start_replicator()

    def start_replicator(self) -> None:
        """Start the replicator; ``address`` is where it listens."""
        ours, theirs = socket.socketpair()
        with theirs, self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "deadpool_runtime.replication.replicator"),
                    *("--arena", str(self.arena.path), "--host", "127.0.0.1"),
                    *("--node", self.name, "--secret", str(self._secret)),
                    *("--control", str(theirs.fileno()), "--parent", str(os.getpid())),
                ],
                pass_fds=[theirs.fileno()],
                env=python_path(),
                stdout=log,
                stderr=log,
            )
        ours.settimeout(DEADLINE_S)
        self._channel = ours
        self._frames = protocol.Frames()
        self.address = self._receive(wire.Up).address
        if self._fenced:
            self.fence(self._fenced)

    def _receive(self, kind: type[_Kind]) -> _Kind:
        codec = protocol.Codec(wire.ToAgent)
        while True:
            data = self._channel.recv(1 << 16)
            if not data:
                raise RuntimeError(f"the replicator of {self.name} ended; see {self._log_path}")
            for body in self._frames.feed(data):
                message = codec.decode(body)
                if isinstance(message, kind):
                    return message

    def fence(self, epoch: int) -> None:
        """Return when no copy of an older epoch is written here any more."""
        self._fenced = epoch
        self._channel.sendall(protocol.frame(wire.Fence(epoch)))
        while self._receive(wire.Fenced).epoch < epoch:
            pass

    def copies(self) -> list[protocol.Copy]:
        """Every sealed copy in the arena."""
        return inventory(self.arena.path)

    def restart_replicator(self) -> None:
        """SIGKILL it and start another one; the copies stay."""
        self._end_replicator()
        self.start_replicator()

    def damage(self, rank: int, step: int, *, replica: bool = False, offset: int = 0) -> None:
        """Invert a bit of a sealed copy: at ``offset`` of its first segment, of its own part if it
        has none.
        """
        found = copy_in(self.arena.path, replica, rank, step)
        if found is None:
            raise ValueError(f"{self.name} has no copy of step {step} of rank {rank}")
        slot, manifest, present = found
        path = self.arena.path / slot_file(replica, rank, slot)
        places = offsets(manifest.segments, present)
        first = min((index for index in present if index != OWN), default=OWN)
        with path.open("r+b") as file:
            file.seek(places[first] + offset)
            byte = file.read(1)[0]
            file.seek(places[first] + offset)
            file.write(bytes([byte ^ 1]))

    def _end_replicator(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def close(self) -> None:
        """End the replicator and remove the arena: what a power cut does to a node's memory."""
        self._end_replicator()
        self.arena.remove()


def python_path() -> dict[str, str]:
    """The environment of a process that finds this very package."""
    roots = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, roots)), OMP_NUM_THREADS="1")


def write_secret(run_dir: Path) -> Path:
    """A secret for the replicators of one job."""
    path = run_dir / "secret"
    path.write_bytes(secrets.token_bytes(32))
    return path
