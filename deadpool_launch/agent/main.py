"""The agent's main loop: connect to the launcher, do what it says, report what happens on this
node.

It ends when told to, when its launcher goes away and no other comes, or when Slurm ends its step;
in each case nothing of the job is left on the node. Its ranks die with it (PR_SET_PDEATHSIG), so
that a node whose agent is gone holds nothing that could still take part.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from deadpool_launch.agent import paths
from deadpool_launch.agent.admission import Admission
from deadpool_launch.agent.devices import DeviceWatch
from deadpool_launch.agent.keeper import LogKeeper
from deadpool_launch.agent.line import LauncherGone, LauncherLine
from deadpool_launch.agent.ranks import POLL_S, NodeProcesses
from deadpool_launch.agent.replicator import NodeReplicator
from deadpool_launch.channel import SECRET_NAME, read_secret
from deadpool_launch.sites import interfaces
from deadpool_launch.succession.rules import Allegiance
from deadpool_runtime import parking, protocol
from deadpool_runtime.replication.arena import (
    Arena,
    arena_path,
    free_memory,
    inventory,
    remove_stale,
)
from deadpool_slurm import environ

#: After SIGTERM (scancel, time limit) the launcher's word is awaited this long before the agent
#: ends by itself. Longer than the launcher takes to end the job at its limit
#: (``watch.KILL_WAIT_LEFT_S``), shorter than Slurm waits before it kills (KillWait, 30 s).
TERMINATED_WAIT_S = 20.0


class Agent:
    """One node's agent; ``run`` returns its exit code."""

    def __init__(
        self,
        node: str,
        launcher: tuple[str, int],
        run_dir: Path,
        epoch: int,
        carriers: str = "",
        born: int = 1,
    ) -> None:
        self._node = node
        self._run_dir = run_dir
        self._epoch = epoch
        self._carriers = carriers
        self._born = born
        #: A node that comes back has to pass the admission checks first.
        self._admitted = born == 1
        self._line = LauncherLine(
            launcher,
            read_secret(run_dir),
            hello=self._hello,
            on_broken=self._complain,
            on_gone=self._end,
            on_part=lambda part, term: self._keeper.part(part, term),
        )
        self._keeper = LogKeeper(node, run_dir, read_secret(run_dir), self._line)
        self._processes: NodeProcesses | None = None
        self._warm_s: float | None = None
        self._replicator_at: protocol.Address | None = None
        self._ready = False
        #: Answers that are being found out.
        self._answers: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._told_to_stop = False
        self._launcherless = False

    async def run(self) -> int:
        """Serve until told to stop or cut off from the launcher."""
        line = self._line
        spec = await line.connect()
        self._keeper.job_id = spec.job_id
        try:
            remove_stale(spec.job_id, self._node)
            arena = Arena.create(arena_path(spec.job_id, self._node, self._epoch))
        except OSError as error:
            line.send(protocol.AgentFailed(f"no room for copies can be made: {error}"))
            await line.hang_up()
            return 1
        try:
            return await self._look_after(spec, line, arena)
        finally:
            arena.remove()

    def _hello(self, host: str, heard: int, to: Allegiance) -> protocol.AgentHello:
        return protocol.AgentHello(
            self._node,
            host,
            os.getpid(),
            importlib.metadata.version("deadpool-launch"),
            protocol.PROTOCOL_VERSION,
            to.term,
            heard,
            self._processes.living() if self._processes is not None else [],
            to.seen,
            self._born,
        )

    async def _look_after(self, spec: protocol.JobSpec, line: LauncherLine, arena: Arena) -> int:
        """Start what a node needs, serve, end everything."""
        # For all that is started here; what the user has set stays.
        os.environ.update(interfaces.variables(spec.interfaces, os.environ))
        logs = self._run_dir / "logs"
        replicator = NodeReplicator(
            arena=arena.path,
            host=line.host,
            node=self._node,
            secret=self._run_dir / SECRET_NAME,
            log_path=logs / f"replicator-{self._node}.log",
            environment={**os.environ, **spec.env},
            carriers=self._carriers,
            on_up=lambda address, reason: self._replicator_up(address, reason),
            on_failed=lambda reason: line.send(protocol.AgentFailed(reason)),
        )
        processes = NodeProcesses(
            spec,
            host=line.host,
            arena=arena.path,
            report=line.send,
            on_warm=self._parked_is_warm,
            helpers=lambda: {
                pid for pid in (replicator.pid, admission.pid, self._keeper.pid) if pid is not None
            },
        )
        self._processes = processes
        devices = DeviceWatch(
            spec.device_s, lambda lines: line.send(protocol.DeviceLines(lines)), self._note
        )
        admission = Admission(spec, self._node, processes.start_ranks, line.send)
        if not self._admitted:
            admission.check_first(self._passed_checks)
        await replicator.start()
        await processes.start_parked(logs / f"parked-{self._node}.log")
        loop = asyncio.get_running_loop()
        devices.start(loop.call_soon_threadsafe)
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        tasks = [
            asyncio.create_task(self._serve(spec, processes, admission, replicator, arena)),
            asyncio.create_task(self._beat(processes, devices, spec.heartbeat_s)),
        ]
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                traceback.print_exception(error)
            task.cancel()
        devices.close()
        grace_s = spec.stop_grace_s if self._told_to_stop else 0.0
        for task in self._answers:
            task.cancel()
        await admission.close()
        self._keeper.close()
        leftovers = await processes.stop_all(grace_s, replicator.stop)
        arena.remove()
        if arena.path.exists():
            leftovers.append(str(arena.path))
        line.send(protocol.AgentLeaving(leftovers))
        await line.hang_up()
        # The loop's wake-up descriptor goes with the loop; a late signal must not look for it.
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if not self._told_to_stop:
            print(f"agent on {self._node}: {self._stop_reason}", file=sys.stderr)
        for leftover in leftovers:
            print(f"agent on {self._node}: could not end {leftover}", file=sys.stderr)
        if self._launcherless:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            await self._keeper.give_back()
        return 0 if self._told_to_stop and not leftovers else 1

    def _passed_checks(self) -> None:
        self._admitted = True
        self._report_ready()

    def _parked_is_warm(self, warm_s: float) -> None:
        self._warm_s = warm_s
        self._report_ready()

    def _replicator_up(self, address: protocol.Address, reason: str) -> None:
        self._replicator_at = address
        if self._ready:
            self._line.send(protocol.ReplicatorUp(address, reason))
        else:
            self._report_ready()

    def _report_ready(self) -> None:
        """Ranks can start once they can be forked and their copies have a way to other nodes."""
        if self._ready or self._warm_s is None or self._replicator_at is None:
            return
        if not self._admitted:
            return
        self._ready = True
        nbytes, limit = free_memory()
        self._line.send(protocol.AgentReady(self._warm_s, self._replicator_at, nbytes, limit))

    async def _take_inventory(self, replicator: NodeReplicator, arena: Arena, epoch: int) -> None:
        """Silence says that the copies could not be fenced off; the launcher has a deadline."""
        if await replicator.fence(epoch):
            copies = await asyncio.to_thread(inventory, arena.path)
            self._line.send(protocol.Inventory(epoch, copies))

    async def _try_paths(self, order: protocol.TryPaths) -> None:
        secret = read_secret(self._run_dir)
        unreached = await paths.unreached(order.peers, secret, order.timeout_s)
        self._line.send(protocol.PathsTried(order.number, unreached))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _complain(self, text: str) -> None:
        """Into the agent's own log: something is wrong, and it does not end."""
        self._note(f"the connection to the launcher broke; {text}")

    def _note(self, text: str) -> None:
        print(
            f"{time.strftime('%H:%M:%S')} agent on {self._node}: {text}",
            file=sys.stderr,
            flush=True,
        )

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
        self,
        spec: protocol.JobSpec,
        processes: NodeProcesses,
        admission: Admission,
        replicator: NodeReplicator,
        arena: Arena,
    ) -> None:
        while True:
            try:
                orders = await self._line.orders(spec.launcher_grace_s)
            except LauncherGone as error:
                self._launcherless = True
                self._end(str(error))
                return
            for order in orders:
                match order:
                    case protocol.StartRanks():
                        admission.start_ranks(order)
                    case protocol.KillRanks(ranks=ranks):
                        for rank in ranks:
                            if not admission.kill(rank):
                                processes.kill(rank)
                    case protocol.TellRanks(ranks=ranks, body=body):
                        processes.tell(ranks, body)
                    case protocol.TakeInventory(epoch=epoch):
                        self._spawn(self._take_inventory(replicator, arena, epoch))
                    case protocol.TakeStandings(number=number):
                        processes.tell_standings(number)
                    case protocol.TryPaths():
                        self._spawn(self._try_paths(order))
                    case protocol.TakeStacks(ranks=ranks):
                        await processes.take_stacks(ranks)
                    case protocol.StopAgent(reason=reason):
                        self._told_to_stop = True
                        self._end(reason)
                        return

    async def _beat(
        self, processes: NodeProcesses, devices: DeviceWatch, heartbeat_s: float
    ) -> None:
        next_beat = time.monotonic()
        while True:
            devices.look()
            processes.poll()
            if time.monotonic() >= next_beat:
                self._line.beat()
                next_beat = time.monotonic() + heartbeat_s
            await asyncio.sleep(min(POLL_S, heartbeat_s))


def main() -> None:
    """``python -m deadpool_launch.agent --node NODE --connect HOST:PORT --run-dir DIR --epoch N``.

    ``N``: the job's epoch at this moment. ``--carriers`` goes on to the replicator. ``--born M``:
    it is the node's ``M``th agent, and the node comes back.
    """
    parser = argparse.ArgumentParser(prog="deadpool_launch.agent")
    parser.add_argument("--node", required=True)
    parser.add_argument("--connect", required=True, metavar="HOST:PORT")
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--epoch", required=True, type=int)
    parser.add_argument("--carriers", default="")
    parser.add_argument("--born", type=int, default=1)
    options = parser.parse_args()
    host, _, port = options.connect.rpartition(":")
    # Orphans of ranks come to us instead of to init, so that whole trees can be ended.
    parking.prctl(parking.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # sbatch --signal=USR1@120, without B:, sends it to every step; what is to be done is the
    # launcher's matter, and a rank's if its script has a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ.update(environ.shared_network(os.environ))
    try:
        launcher = (host, int(port))
        agent = Agent(
            options.node,
            launcher,
            options.run_dir,
            options.epoch,
            options.carriers,
            options.born,
        )
        code = asyncio.run(agent.run())
    except (protocol.ProtocolError, LauncherGone) as error:
        print(f"agent on {options.node} ({socket.gethostname()}): {error}", file=sys.stderr)
        code = 1
    sys.exit(code)
