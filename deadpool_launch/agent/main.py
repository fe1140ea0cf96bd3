"""The agent's main loop: connect to the launcher, do what it says, report what happens on this
node.

It ends when told to, when its launcher goes away, or when Slurm ends its step; in each case nothing
of the job is left on the node. Its ranks die with it (PR_SET_PDEATHSIG), so that a node whose agent
is gone holds nothing that could still take part.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

from deadpool_launch.agent.ranks import POLL_S, NodeProcesses
from deadpool_launch.channel import (
    MessageStream,
    connect_handshake,
    read_secret,
    set_dead_peer_limits,
)
from deadpool_runtime import parking, protocol

#: How long an agent tries to reach its launcher.
CONNECT_S = 30.0
#: A launcher that takes nothing for this long is gone, or this node is cut off from it. Generous:
#: it may be held up, and a node that is cut off takes no part in any later epoch anyway.
LAUNCHER_SILENT_S = 120.0
#: After SIGTERM (scancel, time limit) the launcher's word is awaited this long before the agent
#: ends by itself.
TERMINATED_WAIT_S = 3.0


class Agent:
    """One node's agent; ``run`` returns its exit code."""

    def __init__(self, node: str, launcher: tuple[str, int], run_dir: Path) -> None:
        self._node = node
        self._launcher = launcher
        self._run_dir = run_dir
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._told_to_stop = False

    async def run(self) -> int:
        """Serve until told to stop or cut off from the launcher."""
        reader, writer = await self._connect()
        await connect_handshake(reader, writer, read_secret(self._run_dir))
        stream = MessageStream(reader, writer, protocol.ToAgent)
        host = writer.get_extra_info("sockname")[0]
        version = importlib.metadata.version("deadpool-launch")
        stream.send(
            protocol.AgentHello(self._node, host, os.getpid(), version, protocol.PROTOCOL_VERSION)
        )
        messages = await stream.receive()
        if not messages or not isinstance(messages[0], protocol.JobSpec):
            print(f"agent on {self._node}: the launcher did not answer the hello", file=sys.stderr)
            return 1
        spec = messages[0]
        set_dead_peer_limits(writer.get_extra_info("socket"), LAUNCHER_SILENT_S)
        processes = NodeProcesses(spec, host, stream.send)
        await processes.start_parked(self._run_dir / "logs" / f"parked-{self._node}.log")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        tasks = [
            asyncio.create_task(self._serve(stream, processes, messages[1:])),
            asyncio.create_task(self._beat(stream, processes, spec.heartbeat_s)),
        ]
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                traceback.print_exception(error)
            task.cancel()
        grace_s = spec.stop_grace_s if self._told_to_stop else 0.0
        leftovers = await processes.stop_all(grace_s)
        stream.send(protocol.AgentLeaving(leftovers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await stream.drain()
        stream.close()
        # The loop's wake-up descriptor goes with the loop; a late signal must not look for it.
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for leftover in leftovers:
            print(f"agent on {self._node}: could not end {leftover}", file=sys.stderr)
        return 0 if self._told_to_stop and not leftovers else 1

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                return await asyncio.open_connection(*self._launcher)
            except OSError as error:
                if time.monotonic() > deadline:
                    host, port = self._launcher
                    raise SystemExit(
                        f"agent on {self._node}: cannot reach the launcher at "
                        f"{host}:{port}: {error}"
                    ) from error
                await asyncio.sleep(0.2)

    def _terminated(self) -> None:
        """Slurm ends the step. The launcher is being told as well and stops us in good order; if
        not, we leave.
        """
        loop = asyncio.get_running_loop()
        loop.call_later(TERMINATED_WAIT_S, self._end, "terminated")

    def _end(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason
        self._stop.set()

    async def _serve(
        self, stream: MessageStream, processes: NodeProcesses, first: list[protocol.Message]
    ) -> None:
        messages = list(first)
        while True:
            for message in messages:
                match message:
                    case protocol.StartRanks():
                        processes.start_ranks(message)
                    case protocol.KillRanks(ranks=ranks):
                        for rank in ranks:
                            processes.kill(rank)
                    case protocol.TellRanks(ranks=ranks, body=body):
                        processes.tell(ranks, body)
                    case protocol.StopAgent(reason=reason):
                        self._told_to_stop = True
                        self._end(reason)
                        return
            messages = await stream.receive()
            if not messages:
                self._end("the launcher is gone")
                return

    async def _beat(
        self, stream: MessageStream, processes: NodeProcesses, heartbeat_s: float
    ) -> None:
        sequence = 0
        next_beat = time.monotonic()
        while True:
            processes.poll()
            if time.monotonic() >= next_beat:
                stream.send(protocol.Heartbeat(sequence))
                sequence += 1
                next_beat = time.monotonic() + heartbeat_s
            await asyncio.sleep(min(POLL_S, heartbeat_s))


def main() -> None:
    """``python -m deadpool_launch.agent --node NODE --connect HOST:PORT --run-dir DIR``."""
    parser = argparse.ArgumentParser(prog="deadpool_launch.agent")
    parser.add_argument("--node", required=True)
    parser.add_argument("--connect", required=True, metavar="HOST:PORT")
    parser.add_argument("--run-dir", required=True, type=Path)
    options = parser.parse_args()
    host, _, port = options.connect.rpartition(":")
    # Orphans of ranks come to us instead of to init, so that whole trees can be ended.
    parking.prctl(parking.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent = Agent(options.node, (host, int(port)), options.run_dir)
    try:
        code = asyncio.run(agent.run())
    except protocol.ProtocolError as error:
        print(f"agent on {options.node} ({socket.gethostname()}): {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
