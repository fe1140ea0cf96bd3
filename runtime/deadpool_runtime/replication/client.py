"""The rank's side of the connection to its node's replicator.

A rank trains on when the replicator is gone: messages are kept for a later one or forgotten, and
steps go unprotected meanwhile. What a replicator must know anew is the holder and the sealed
copies, so these are repeated on each connection; what tells of a copy in the making is not, since
``SnapshotSealed`` says all of it again. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from deadpool_runtime import protocol
from deadpool_runtime.replication.messages import (
    Assemble,
    Assembled,
    AssembleFailed,
    Confirmed,
    FromReplicator,
    RankHello,
    SetHolder,
    SnapshotBegun,
    SnapshotDropped,
    SnapshotSealed,
    ToReplicator,
    Unconfirmed,
)
from deadpool_runtime.replication.sockets import short_path

#: Messages that wait for the replicator to read; more of them are not worth their memory.
MAX_WAITING = 4096
#: Time between two attempts to connect.
RETRY_S = 0.1
#: An assembly that waits for a new replicator this long has failed.
ASSEMBLE_PATIENCE_S = 10.0


class Memory:
    """What a new connection must repeat."""

    def __init__(self) -> None:
        self.holder: SetHolder | None = None
        self.sealed: dict[int, SnapshotSealed] = {}
        self.assemble: Assemble | None = None

    def keep(self, message: ToReplicator) -> None:
        """Take note of what is said."""
        match message:
            case SetHolder():
                if self.holder is not None and message.epoch > self.holder.epoch:
                    # Copies of the older epoch's history need not be those that count.
                    self.sealed.clear()
                self.holder = message
            case SnapshotBegun(slot=slot):
                self._overwritten(slot)
            case SnapshotSealed(manifest=manifest, slot=slot):
                self._overwritten(slot)
                self.sealed[manifest.step] = message
            case SnapshotDropped(step=step):
                self.sealed.pop(step, None)
            case Assemble():
                self.assemble = message
            case _:
                pass

    def _overwritten(self, slot: int) -> None:
        for step in [step for step, other in self.sealed.items() if other.slot == slot]:
            del self.sealed[step]

    def heard(self, message: FromReplicator) -> None:
        """Forget what was answered, but for the newest copy: its replica may be lost yet."""
        match message:
            case Confirmed(step=step) | Unconfirmed(step=step):
                if self.sealed and step < max(self.sealed):
                    self.sealed.pop(step, None)
            case Assembled(step=step, epoch=epoch) | AssembleFailed(step=step, epoch=epoch):
                asked = self.assemble
                if asked is not None and (asked.epoch, asked.step) == (epoch, step):
                    self.assemble = None
            case _:
                pass

    def repeat(self) -> list[ToReplicator]:
        """What to say first."""
        said: list[ToReplicator] = []
        if self.holder is not None:
            said.append(self.holder)
        said += [self.sealed[step] for step in sorted(self.sealed)]
        if self.assemble is not None:
            said.append(self.assemble)
        return said


class ReplicatorClient:
    """Connected to the replicator of the arena at ``arena`` whenever there is one.

    ``on_message`` is called in this object's own thread. ``send`` may be called from any thread
    and never waits.
    """

    def __init__(
        self, arena: Path, rank: int, born: int, on_message: Callable[[FromReplicator], None]
    ) -> None:
        self._path = arena / "replicator.sock"
        self._hello = RankHello(rank, born)
        self._on_message = on_message
        self._lock = threading.Lock()
        self._memory = Memory()
        self._waiting: deque[ToReplicator] = deque()
        self._connected = False
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="deadpool-replicator", daemon=True)
        self._thread.start()

    def send(self, message: ToReplicator) -> bool:
        """Say something. False if it is forgotten: no replicator is there, or it does not read.
        What a later replicator must know is repeated to it all the same.
        """
        with self._lock:
            self._memory.keep(message)
            if len(self._waiting) >= MAX_WAITING:
                # Only a new connection, which repeats what matters, can catch up.
                self._connected = False
                self._waiting.clear()
            kept = self._connected
            if kept:
                self._waiting.append(message)
        self._wake_up()
        return kept

    @property
    def connected(self) -> bool:
        """Whether a replicator is there, as far as is known."""
        with self._lock:
            return self._connected

    def close(self) -> None:
        """Disconnect and end the thread."""
        with self._lock:
            self._closed = True
        self._wake_up()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        codec = protocol.Codec(FromReplicator)
        lonely_since = time.monotonic()
        while not self._closed:
            sock = self._connect()
            if sock is None:
                self._lose_patience(time.monotonic() - lonely_since)
                self._pause(RETRY_S)
                continue
            with sock:
                self._talk(sock, codec)
            with self._lock:
                self._connected = False
                self._waiting.clear()
            lonely_since = time.monotonic()
        self._wake.close()
        self._woken.close()

    def _connect(self) -> socket.socket | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with short_path(self._path) as path:
                sock.connect(path)
        except OSError:
            sock.close()
            return None
        sock.setblocking(False)
        with self._lock:
            self._waiting.clear()
            self._waiting.append(self._hello)
            self._waiting.extend(self._memory.repeat())
            self._connected = True
        return sock

    def _pause(self, timeout_s: float) -> None:
        """Let time pass; ``close`` ends it early."""
        until = time.monotonic() + timeout_s
        while not self._closed and (left_s := until - time.monotonic()) > 0:
            select.select([self._woken], [], [], left_s)
            self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096, socket.MSG_DONTWAIT)

    def _lose_patience(self, lonely_s: float) -> None:
        with self._lock:
            asked = self._memory.assemble
            if asked is None or lonely_s < ASSEMBLE_PATIENCE_S:
                return
            self._memory.assemble = None
        self._on_message(
            AssembleFailed(asked.epoch, asked.step, "the replicator of this node is gone")
        )

    def _talk(self, sock: socket.socket, codec: protocol.Codec) -> None:
        """Until the connection ends."""
        frames = protocol.Frames()
        unsent = memoryview(b"")
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(sock, selectors.EVENT_READ)
            while True:
                with self._lock:
                    if self._closed or not self._connected:
                        return
                    if not unsent and self._waiting:
                        # All at once: the fewer times the replicator wakes, the less often it
                        # takes a processor from a rank.
                        unsent = memoryview(b"".join(map(protocol.frame, self._waiting)))
                        self._waiting.clear()
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.modify(sock, wanted)
                ready = {key.fileobj: events for key, events in selector.select()}
                if self._woken in ready:
                    self._drain()
                events = ready.get(sock, 0)
                try:
                    if events & selectors.EVENT_WRITE:
                        unsent = unsent[sock.send(unsent, socket.MSG_NOSIGNAL) :]
                    if events & selectors.EVENT_READ and not self._hear(sock, frames, codec):
                        return
                except BlockingIOError:
                    continue
                except (OSError, protocol.ProtocolError):
                    return

    def _hear(self, sock: socket.socket, frames: protocol.Frames, codec: protocol.Codec) -> bool:
        """Pass messages on; False if the connection ended."""
        data = sock.recv(1 << 16)
        for body in frames.feed(data):
            message = codec.decode(body)
            with self._lock:
                self._memory.heard(message)
            self._on_message(message)
        return bool(data)
