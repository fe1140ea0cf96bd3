"""Real replicators of several nodes on this machine, and ranks that leave copies in their arenas.

A node here is an arena and a replicator process; the test is its agent.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from deadpool_runtime import parking, protocol
from deadpool_runtime.replication import wire
from deadpool_runtime.replication.arena import Arena, SlotFile, copy_in
from deadpool_runtime.replication.client import ReplicatorClient
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, OWN, Manifest, Segment, chunk_hash
from deadpool_runtime.replication.messages import (
    ChunksCopied,
    FromReplicator,
    SetHolder,
    SnapshotBegun,
    SnapshotSealed,
)
from deadpool_runtime.replication.slotting import SLOTS, slot_file
from deadpool_runtime.replication.sockets import first_message

DEADLINE_S = 120.0
#: For a rank to find its replicator; in some tests there is none.
CONNECT_S = 10.0
T = TypeVar("T")


class Node:
    """An arena with a replicator."""

    def __init__(self, name: str, secret: Path, carriers: str) -> None:
        self.name = name
        self._secret = secret
        self._carriers = carriers
        self.arena = Arena.create(
            Path(f"/dev/shm/deadpool-test%2D{secrets.token_hex(6)}-{name}-e0")
        )
        self.start()

    def start(self) -> None:
        """Start the replicator, again after ``kill``."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "deadpool_runtime.replication.replicator"),
                    *("--arena", str(self.arena.path), "--host", "127.0.0.1"),
                    *("--node", self.name, "--secret", str(self._secret)),
                    *("--control", str(theirs.fileno()), "--parent", str(os.getpid())),
                    *("--carriers", self._carriers),
                ],
                pass_fds=[theirs.fileno()],
            )
        self.control = ours
        ours.settimeout(DEADLINE_S)
        up = first_message(ours, protocol.Codec(wire.ToAgent))
        assert isinstance(up, wire.Up)
        self.address = up.address

    def fence(self, epoch: int) -> None:
        """Declare an epoch and wait until nothing older is written any more."""
        self.control.sendall(protocol.frame(wire.Fence(epoch)))
        assert first_message(self.control, protocol.Codec(wire.ToAgent)) == wire.Fenced(epoch)

    def kill(self) -> None:
        """SIGKILL the replicator; the arena stays."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.control.close()

    def close(self) -> None:
        """End the replicator as an agent does, and remove the arena."""
        self.process.send_signal(parking.END_SIGNAL)
        assert self.process.wait(DEADLINE_S) in (0, -9)
        self.control.close()
        self.arena.remove()

    def held(self, rank: int, step: int) -> Manifest | None:
        """The sealed replica of that step; checked byte by byte."""
        return sealed_in(self.arena, True, rank, step)

    def own(self, rank: int, step: int) -> Manifest | None:
        """The sealed own copy of that step; checked byte by byte."""
        return sealed_in(self.arena, False, rank, step)


def sealed_in(arena: Arena, replica: bool, rank: int, step: int) -> Manifest | None:
    """The copy of ``step`` in the arena, if there is one; fails if it has a wrong byte."""
    found = copy_in(arena.path, replica, rank, step)
    if found is None:
        return None
    number, manifest, present = found
    with SlotFile.open(arena.path / slot_file(replica, rank, number)) as slot:
        assert slot.verify(manifest, present) == [], "it is sealed with wrong bytes"
    return manifest


def content(rank: int, step: int, segment: int, nbytes: int) -> bytes:
    """The bytes of a segment: different for each, the same each time."""
    seed = chunk_hash(f"{rank}/{step}/{segment}".encode())
    return (seed * (nbytes // len(seed) + 1))[:nbytes]


class Rank:
    """A rank of ``node`` that writes copies as training does, at the test's command.

    ``sizes``: nbytes of each segment; ``ranks`` names them, by default (rank, 1000 + index).
    """

    def __init__(
        self,
        node: Node,
        rank: int,
        sizes: Iterable[int],
        born: int = 0,
        ranks: list[tuple[int, ...]] | None = None,
    ) -> None:
        self.node = node
        self.rank = rank
        self.sizes = list(sizes)
        self.ranks = ranks or [(rank, 1000 + index) for index in range(len(self.sizes))]
        self.heard: queue.Queue[FromReplicator] = queue.Queue()
        self.client = ReplicatorClient(node.arena.path, rank, born, self.heard.put)
        # What is said of a copy that is not whole is forgotten while nobody is there to hear it.
        deadline = time.monotonic() + CONNECT_S
        while not self.client.connected and time.monotonic() < deadline:
            time.sleep(0.001)

    def protect(
        self,
        holder: Node | protocol.Address | None,
        epoch: int = 0,
        *,
        restoring: bool = False,
        segments: list[tuple[int, ...]] | None = None,
    ) -> None:
        """Let replicas of these segments, or of all, go to ``holder``."""
        address = holder.address if isinstance(holder, Node) else holder
        there = None
        if address is not None:
            name = holder.name if isinstance(holder, Node) else "proxy"
            names = self.ranks if segments is None else segments
            there = protocol.Holder(name, address, list(names))
        self.client.send(SetHolder(epoch, there, restoring))

    def manifest(self, step: int, epoch: int = 0, own: bytes = b"own") -> Manifest:
        """The manifest of what ``begin`` and ``copy`` write."""
        segments = []
        for index, (ranks, nbytes) in enumerate(zip(self.ranks, self.sizes, strict=True)):
            data = memoryview(self.bytes_of(step, index))
            hashes = [
                chunk_hash(data[at : at + CHUNK_NBYTES]) for at in range(0, nbytes, CHUNK_NBYTES)
            ]
            segments.append(Segment(ranks, (), nbytes, tuple(hashes)))
        return Manifest(self.rank, step, epoch, tuple(segments), len(own), chunk_hash(own))

    def bytes_of(self, step: int, index: int) -> bytes:
        """What a segment holds: equal on all ranks that have it in common."""
        first = min(self.ranks[index])
        return content(first, step, self.ranks[index][-1], self.sizes[index])

    def begin(self, step: int, epoch: int = 0) -> Manifest:
        """Begin a copy, and tell."""
        manifest = self.manifest(step, epoch)
        with SlotFile.open(self.node.arena.own_path(self.rank, step % SLOTS), create=True) as slot:
            slot.prepare(manifest.segments, (*range(len(manifest.segments)), OWN))
        bare = [Segment(s.ranks, s.entries, s.nbytes) for s in manifest.segments]
        self.client.send(
            SnapshotBegun(Manifest(self.rank, step, epoch, tuple(bare), 0, b""), step % SLOTS)
        )
        return manifest

    def copy(self, manifest: Manifest, index: int, tell: bool = True) -> None:
        """Copy a segment, and tell."""
        with SlotFile.open(self.node.arena.own_path(self.rank, manifest.step % SLOTS)) as slot:
            slot.prepare(manifest.segments, (*range(len(manifest.segments)), OWN))
            slot.segment_view(index)[:] = self.bytes_of(manifest.step, index)
        if tell:
            hashes = list(manifest.segments[index].hashes)
            self.client.send(ChunksCopied(manifest.step, index, 0, hashes))

    def seal(self, manifest: Manifest, own: bytes = b"own") -> None:
        """Finish a copy, and tell."""
        present = (*range(len(manifest.segments)), OWN)
        with SlotFile.open(self.node.arena.own_path(self.rank, manifest.step % SLOTS)) as slot:
            slot.seal(manifest, present, own)
        self.client.send(SnapshotSealed(manifest, manifest.step % SLOTS))

    def snapshot(self, step: int, epoch: int = 0) -> Manifest:
        """A whole copy."""
        manifest = self.begin(step, epoch)
        for index in range(len(self.sizes)):
            self.copy(manifest, index)
        self.seal(manifest)
        return manifest

    def hear(self, kind: type[T]) -> T:
        """The next message of that kind; others are passed over."""
        while True:
            message = self.heard.get(timeout=DEADLINE_S)
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        """Disconnect, as a rank's end does."""
        self.client.close()


#: More than what comes before the chunks of a data connection.
_HEAD_NBYTES = 1000


class Proxy:
    """Forwards TCP connections to a node, and strikes a link's data connection on its way there.

    ``flips``: offsets in the bytes towards the node at which one bit is inverted, ``flips_back`` in
    those from it; ``stall_at``: no byte towards the node goes on from there until ``release`` is
    set (``stalled`` says that it came to that); ``cut_at``: the connection ends there. All are for
    the first data connection only.
    """

    def __init__(
        self,
        node: Node,
        flips: Iterable[int] = (),
        flips_back: Iterable[int] = (),
        stall_at: int | None = None,
        cut_at: int | None = None,
    ) -> None:
        self._target = (node.address.host, node.address.port)
        self._flips = sorted(flips)
        self._flips_back = sorted(flips_back)
        self._stall_at = stall_at
        self._cut_at = cut_at
        self.stalled = threading.Event()
        self.release = threading.Event()
        #: The first data connection, as its end on this side; a dial that took too long may come
        #: before it.
        self._struck: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = protocol.Address("127.0.0.1", self._server.getsockname()[1])
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, target in ((near, far), (far, near)):
                    thread = threading.Thread(target=self._pass, args=(source, target, near))
                    self._threads.append(thread)
                    thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, near: socket.socket) -> None:
        at, head = 0, b""
        there = source is near
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if there and at < _HEAD_NBYTES:
                    head += data[: _HEAD_NBYTES - at]
                    if self._struck is None and wire.DataHello.__name__.encode() in head:
                        self._struck = near
                if self._struck is near:
                    for flip in self._flips if there else self._flips_back:
                        if at <= flip < at + len(data):
                            data[flip - at] ^= 1
                if self._struck is near and there:
                    if self._stall_at is not None and at + len(data) > self._stall_at:
                        self.stalled.set()
                        self.release.wait(DEADLINE_S)
                    if self._cut_at is not None and at + len(data) > self._cut_at:
                        break
                target.sendall(data)
                at += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End everything."""
        self.release.set()
        for sock in [self._server, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()


class World:
    """Makes nodes, ranks and proxies, and ends them."""

    def __init__(self, folder: Path) -> None:
        self._secret = folder / "secret"
        self._secret.write_bytes(secrets.token_bytes(32))
        self._folder = folder
        self._made: list[Any] = []

    def node(self, name: str, carriers: str = "", secret: bytes | None = None) -> Node:
        """A node whose links use these carriers and TCP."""
        path = self._secret
        if secret is not None:
            path = self._folder / f"secret-{name}"
            path.write_bytes(secret)
        return self._keep(Node(name, path, carriers))

    def rank(self, node: Node, rank: int, *args: Any, **options: Any) -> Rank:
        """A rank of the node."""
        return self._keep(Rank(node, rank, *args, **options))

    def proxy(self, node: Node, **options: Any) -> Proxy:
        """A proxy in front of the node."""
        return self._keep(Proxy(node, **options))

    def _keep(self, made: T) -> T:
        self._made.append(made)
        return made

    def close(self) -> None:
        """End all, the newest first."""
        for made in reversed(self._made):
            made.close()


def world_in(folder: Path) -> Iterator[World]:
    """For a fixture."""
    world = World(folder)
    try:
        yield world
    finally:
        world.close()
