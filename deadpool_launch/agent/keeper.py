"""A node that keeps a copy of the launcher's log, and starts the next launcher if the host of the
last one dies.

The agent itself keeps it: in memory, without a process or a port of its own until it is asked to.
An agent that has lost its launcher comes here with the hello that it has for launchers. Whether
enough have come is decided by ``succession.rules.Candidacy``; the next launcher then runs in a job
step of its own on this node, so that it needs neither this agent nor the batch host.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

from deadpool_launch.channel import BrokenOff, Guests, MessageStream
from deadpool_launch.refusals import Refusals
from deadpool_launch.succession import release
from deadpool_launch.succession.rules import Candidacy
from deadpool_runtime import protocol
from deadpool_slurm import access, environ, srun

#: How often it is looked whether the launcher is back, and whether enough agents have come.
_LOOK_S = 0.05
#: Between two claims of a term, and between two tries to start the launcher.
_AGAIN_S = 1.0
#: Connections that may wait to be accepted, and that may be without a proof of the secret.
BACKLOG = 1024
#: In the directory that the next launcher gets: the log, and where it writes its address.
LOG_NAME, ADDRESS_NAME = "log", "address"


class Line(Protocol):
    """What is asked of the agent's own connection to the launcher."""

    host: str

    def lost_for_s(self) -> float | None:
        """How long there has been no word from a launcher; None while there is one."""


class LogKeeper:
    """``job_id`` is known once the agent has been welcomed."""

    def __init__(self, node: str, run_dir: Path, secret: bytes, line: Line) -> None:
        self._node = node
        self._run_dir = run_dir
        self._secret = secret
        self._line = line
        self.job_id = ""
        self._candidacy = Candidacy(0)
        self._parts: list[bytes] = []
        #: The node of the launcher whose log it is.
        self._host = ""
        self._guests = Guests(secret, BACKLOG)
        self._refusals = Refusals()
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[object]] = set()
        self._streams: dict[str, MessageStream] = {}
        self._claimed_at = 0.0
        self._launcher: protocol.Address | None = None
        self._step: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process that watches the step of a launcher started here, if any."""
        return None if self._step is None else self._step.pid

    def part(self, part: protocol.LogPart, term: int) -> protocol.LogKept:
        """Keep a part of the log of the launcher of this term."""
        if part.fresh:
            self._parts.clear()
        self._parts.append(part.data)
        self._candidacy.mark, self._candidacy.node_index = (term, part.index), part.slot
        if part.voters is not None:
            self._candidacy.voters = frozenset(part.voters)
        self._host = part.host
        if self._socket is None:
            self._socket = socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
            self._spawn(self._listen(self._socket))
            self._spawn(self._watch())
        port = self._socket.getsockname()[1]
        return protocol.LogKept(part.index, protocol.Address(self._line.host, port))

    def close(self) -> None:
        """End what serves here; a launcher that was started goes on."""
        for task in self._tasks:
            task.cancel()
        for stream in self._streams.values():
            stream.close()
        if self._step is not None and self._step.returncode is None:
            # The whole group at once: the second process of srun would end the step otherwise.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._step.pid, signal.SIGKILL)

    async def give_back(self) -> None:
        """No launcher was to be had: end the job, if Slurm agrees that there is none."""
        if self._host and "SLURM_JOB_ID" in os.environ:
            client = access.client()
            if await release.give_back(client, self.job_id, self._host, self._candidacy.mark[0]):
                print(f"agent on {self._node}: the job is ended, {self._host} being dead")

    def _spawn(self, work: object) -> None:
        assert asyncio.iscoroutine(work)
        task: asyncio.Task[object] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ agents that look for a launcher

    async def _listen(self, sock: socket.socket) -> None:
        server = await asyncio.start_server(self._serve, sock=sock, backlog=BACKLOG)
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = MessageStream(reader, writer, protocol.ToLauncher)
        node = ""
        try:
            await self._guests.prove(reader, writer)
            match await stream.receive():
                case [protocol.AgentHello() as hello]:
                    node = hello.node
                case _:
                    raise protocol.ProtocolError("the first message is not an agent's hello")
            reason = self._why_not(hello)
            if self._launcher is not None:
                stream.send(protocol.LauncherAt(self._launcher))
            elif reason:
                stream.send(protocol.NoLauncher(reason))
            else:
                self._streams[node] = stream
                if self._candidacy.claimed:
                    self._send_claim(stream)
                while messages := await stream.receive():
                    for message in messages:
                        if not isinstance(message, protocol.Granted):
                            raise protocol.ProtocolError("not the answer to a claim")
                        if self._candidacy.granted(node, message.term):
                            self._spawn(self._start_launcher(self._candidacy.claimed))
            await stream.drain()
        except BrokenOff:
            pass
        except protocol.ProtocolError as error:
            peer = (writer.get_extra_info("peername") or ("a stranger",))[0]
            if (text := self._refusals.text(peer, str(error))) is not None:
                print(f"agent on {self._node}: {text}", file=sys.stderr, flush=True)
        finally:
            if self._streams.get(node) is stream:
                del self._streams[node]
                self._candidacy.left(node)
            writer.close()

    def _why_not(self, hello: protocol.AgentHello) -> str:
        """Why it is of no use to the agent to wait here; empty if it is."""
        if self._line.lost_for_s() is None:
            return f"{self._node} has a launcher"
        if not self._candidacy.came(hello.node, hello.term, hello.seen):
            return f"the log on {self._node} is older"
        return ""

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._line.lost_for_s() is None:
                if self._launcher is None and self._streams:
                    self._candidacy.found()
                    for stream in self._streams.values():
                        stream.send(protocol.NoLauncher(f"{self._node} has a launcher again"))
                if self._launcher is not None:
                    self._launcher = None
                    self._candidacy.found()
            elif self._launcher is not None:
                # The one that was started here may have ended before it had an agent.
                if self._step is None or self._step.returncode is not None:
                    self._launcher = None
                    self._candidacy.found()
            elif (
                self._streams
                and not self._candidacy.won
                and time.monotonic() >= self._claimed_at + _AGAIN_S
                and self._candidacy.claim()
            ):
                self._claimed_at = time.monotonic()
                for stream in self._streams.values():
                    self._send_claim(stream)

    def _send_claim(self, stream: MessageStream) -> None:
        stream.send(protocol.Claim(self._candidacy.claimed, self._candidacy.mark))

    # ------------------------------------------------------------ the next launcher

    async def _start_launcher(self, term: int) -> None:
        """Start it, again and again until it says where it listens: Slurm may be away too."""
        lost_for_s = self._line.lost_for_s() or 0.0
        directory = Path(
            tempfile.mkdtemp(prefix=f"deadpool-{self.job_id}-launcher-", dir="/dev/shm")
        )
        try:
            (directory / LOG_NAME).write_bytes(b"".join(self._parts))
            address = directory / ADDRESS_NAME
            while not address.exists():
                self._step = await asyncio.create_subprocess_exec(
                    *self._step_argv(directory, term, lost_for_s),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sys.stderr,
                    stderr=sys.stderr,
                    env=environ.for_srun(os.environ, self.job_id),
                    start_new_session=True,
                )
                while self._step.returncode is None and not address.exists():
                    await asyncio.sleep(_LOOK_S)
                if not address.exists():
                    await asyncio.sleep(_AGAIN_S)
            host, _, port = address.read_text().partition(" ")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        self._launcher = protocol.Address(host, int(port))
        for stream in self._streams.values():
            stream.send(protocol.LauncherAt(self._launcher))

    def _step_argv(self, directory: Path, term: int, lost_for_s: float) -> list[str]:
        return srun.agent_step(
            job_id=self.job_id,
            node=self._node,
            cpus=1,
            name=release.launcher_step(term),
            log_path=self._run_dir / "logs" / f"launcher-{self._node}.log",
            argv=[
                *(sys.executable, "-P", "-m", "deadpool_launch.succession.successor"),
                *("--node", self._node, "--host", self._line.host, "--term", str(term)),
                *("--lost-for", f"{lost_for_s:.3f}", "--from", str(directory)),
                str(self._run_dir),
            ],
        )
