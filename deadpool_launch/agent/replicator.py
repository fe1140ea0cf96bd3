"""The node's replicator as its agent sees it: started, started again when it ends, fenced, ended.

The copies are in the arena and do not depend on it; only their way to other nodes does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from deadpool_runtime import protocol
from deadpool_runtime.parking import END_SIGNAL
from deadpool_runtime.replication import wire

#: How often it is started before the node counts as unfit, the first time included.
MOST_STARTS = 20
#: How often in a row it may end without ever having listened.
MOST_FAILED_STARTS = 3
#: How long it may take to fence an epoch off; one that takes longer is replaced.
FENCE_S = 5.0
#: How long an epoch may take to be fenced off in all, with a new replicator that comes up for it.
FENCE_PATIENCE_S = 15.0
#: From the end of its channel to its own end, before it is killed.
EXIT_S = 1.0
#: From the signal that ends it to SIGKILL.
STOP_S = 2.0


class NodeReplicator:
    """Keeps one replicator running.

    ``on_up(address, reason)`` is called each time one listens; ``reason`` says what became of the
    one before, and is empty the first time. ``on_failed(reason)``: it cannot be kept running.
    ``carriers``: names of those that it may use besides TCP; empty for all.
    """

    def __init__(
        self,
        *,
        arena: Path,
        host: str,
        node: str,
        secret: Path,
        log_path: Path,
        environment: Mapping[str, str],
        carriers: str = "",
        on_up: Callable[[protocol.Address, str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._arena = arena
        self._host = host
        self._node = node
        self._secret = secret
        self._log_path = log_path
        self._environment = environment
        self._carriers = carriers
        self._on_up = on_up
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._codec = protocol.Codec(wire.ToAgent)
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._frames = protocol.Frames()
        self._listens = False
        self._starts = 0
        self._failed_starts = 0
        #: Newest epoch that was declared, and the newest that is fenced off.
        self._epoch = 0
        self._fenced = 0
        self._changed = asyncio.Condition()
        self._killed_for = ""
        self._reason = ""
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """Its process id, while its exit status was not taken."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start it, without waiting until it listens."""
        self._starts += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            with contextlib.closing(theirs):
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "deadpool_runtime.replication.replicator"),
                    *("--arena", str(self._arena), "--host", self._host, "--node", self._node),
                    *("--secret", str(self._secret), "--control", str(theirs.fileno())),
                    *("--parent", str(os.getpid())),
                    *(("--carriers", self._carriers) if self._carriers else ()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    pass_fds=(theirs.fileno(),),
                )
        except OSError as error:
            ours.close()
            self._on_failed(f"the replicator cannot be started: {error}")
            return
        finally:
            os.close(log)
        self._channel, self._frames, self._listens = ours, protocol.Frames(), False
        self._loop.add_reader(ours, self._readable, ours)

    def _readable(self, channel: socket.socket) -> None:
        try:
            data = channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            try:
                for body in self._frames.feed(data):
                    self._heard(self._codec.decode(body))
                return
            except protocol.ProtocolError as error:
                self._kill(f"said what is no message: {error}")
        self._loop.remove_reader(channel)
        channel.close()
        if self._channel is channel:
            self._channel = None
            self._spawn(self._ended())

    def _heard(self, message: wire.ToAgent) -> None:
        match message:
            case wire.Up(address=address):
                self._listens, self._failed_starts = True, 0
                if self._epoch:
                    self._tell(wire.Fence(self._epoch))
                self._on_up(address, self._reason)
            case wire.Fenced(epoch=epoch):
                self._fenced = max(self._fenced, epoch)
                self._spawn(self._notify())

    def _tell(self, message: wire.FromAgent) -> None:
        """It reads at once or not at all: what does not fit into the socket's buffer is lost."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(protocol.frame(message))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _ended(self) -> None:
        """Its channel closed: it is gone, or as good as gone."""
        process = self._process
        assert process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), EXIT_S)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
        self._process = None
        self._fenced = 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._reason, self._killed_for = self._killed_for or f"ended ({how})", ""
        if self._stopping:
            return
        self._failed_starts += not self._listens
        if self._failed_starts >= MOST_FAILED_STARTS or self._starts >= MOST_STARTS:
            self._on_failed(f"the replicator {self._reason}{self._last_words()}")
            return
        await self.start()

    def _last_words(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f": {lines[-1]}" if lines else ""

    def _kill(self, reason: str) -> None:
        self._killed_for = reason
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def fence(self, epoch: int) -> bool:
        """Let no copy of an older epoch be written on this node any more; False if that cannot be
        had.

        A replicator that does not answer in time is replaced, and the new one asked. What is not
        running writes nothing, but the next one must know the epoch before it listens to anybody.
        """
        self._epoch = max(self._epoch, epoch)
        give_up_at = self._loop.time() + FENCE_PATIENCE_S
        while self._loop.time() < give_up_at:
            asked = self._process if self._listens else None
            if asked is not None:
                self._tell(wire.Fence(epoch))
            try:
                async with asyncio.timeout(FENCE_S), self._changed:
                    await self._changed.wait_for(lambda: self._fenced >= epoch)
                    return True
            except TimeoutError:
                # One that is still coming up is given its time.
                if asked is not None and asked is self._process:
                    self._kill(f"did not answer within {FENCE_S:g} s")
        return False

    async def stop(self) -> None:
        """End it; returns when it is gone."""
        self._stopping = True
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(END_SIGNAL)
                process.send_signal(signal.SIGCONT)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in list(self._tasks):
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._channel is not None:
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._channel = None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
