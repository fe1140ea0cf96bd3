"""The processes of one node: the parked process and the ranks it forks.

``NodeProcesses`` starts them, reads their messages, notices their ends and stops first-hand, and
ends whole process trees. It decides nothing; what it sees goes to one callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from deadpool_launch.agent.orphans import GRACE_S, Orphans, children, reap
from deadpool_launch.agent.stacks import NoStack, take_stack
from deadpool_launch.agent.watch import ProgressWatch
from deadpool_runtime import parking, protocol
from deadpool_runtime.stacks import stack_path

#: How often processes are looked at for what the kernel does not report by itself (stopped,
#: orphaned).
POLL_S = 0.25
#: How often a node's parked process is started, the first time included.
PARKED_STARTS = 4


@dataclass
class RankProcess:
    """One process of a rank on this node."""

    rank: int
    born: int
    pid: int
    channel: socket.socket
    pidfd: int = -1
    frames: protocol.Frames = field(default_factory=protocol.Frames)
    stopped_since: float | None = None
    stop_reported: bool = False


def rank_tag(job_id: str, rank: int, born: int) -> str:
    """Value of DEADPOOL_RANK_TAG, by which programs that a rank started are told from others'."""
    return f"{job_id}:{rank}:{born}"


class NodeProcesses:
    """Starts and ends the node's processes; ``report`` gets ``FromAgent`` messages as they
    happen, ``on_warm`` the time it took until ranks can be forked.

    ``arena``: where the ranks keep copies of their state. ``helpers``: the process ids of children
    that are neither ranks nor the parked process.
    """

    def __init__(
        self,
        spec: protocol.JobSpec,
        *,
        host: str,
        arena: Path,
        report: Callable[[protocol.FromAgent], None],
        on_warm: Callable[[float], None],
        helpers: Callable[[], set[int]],
    ) -> None:
        self._spec = spec
        self._host = host
        self._arena = arena
        self._report = report
        self._on_warm = on_warm
        self._helpers = helpers
        self._codec = protocol.Codec(protocol.FromRank)
        self._loop = asyncio.get_running_loop()
        self._watch = ProgressWatch(arena, spec.collective_timeout_s, report, spec.pace_s)
        self._ranks: dict[int, RankProcess] = {}
        self._waiting: dict[tuple[int, int], socket.socket] = {}
        self._tags: set[str] = set()
        self._parked: socket.socket | None = None
        self._parked_process: asyncio.subprocess.Process | None = None
        self._answers = msgspec.msgpack.Decoder(parking.Warm | parking.Forked)
        self._killed_before_fork: set[tuple[int, int]] = set()
        self._parked_log = Path(spec.run_dir)
        self._warm = False
        self._reported_warm = False
        self._parked_starts = 0
        #: Starts another parked process; held here so that it is not collected before its end.
        self._restart: asyncio.Task[None] | None = None
        self._orphans = Orphans()
        self._postponed: list[protocol.StartRanks] = []
        self._stopping = False

    # ------------------------------------------------------------ parked process

    async def start_parked(self, log_path: Path) -> None:
        """Start the parked process.

        ``on_warm`` is called when torch is imported. One that ends is replaced, since the
        ranks do not depend on it; ``AgentFailed`` is reported if it ends before it was ready, or
        too often.
        """
        self._parked_log = log_path
        self._parked_starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **self._spec.env}
        environment.setdefault("OMP_NUM_THREADS", "1")
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with contextlib.closing(theirs):
            self._parked_process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "deadpool_runtime.zygote",
                str(theirs.fileno()),
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(theirs.fileno(),),
            )
        os.close(log)
        ours.setblocking(False)
        self._parked = ours
        self._loop.add_reader(ours, self._parked_answered)

    def _parked_answered(self) -> None:
        assert self._parked is not None
        try:
            data = self._parked.recv(parking.MAX_REQUEST_NBYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._parked_ended()
            return
        match self._answers.decode(data):
            case parking.Warm(warm_s=warm_s):
                self._warm = True
                if not self._reported_warm:
                    self._reported_warm = True
                    self._on_warm(warm_s)
                postponed, self._postponed = self._postponed, []
                for request in postponed:
                    self.start_ranks(request)
            case parking.Forked(rank=rank, born=born, pid=pid):
                self._adopt(rank, born, pid)

    def _parked_ended(self) -> None:
        assert self._parked is not None
        self._loop.remove_reader(self._parked)
        self._parked.close()
        self._parked = None
        was_warm, self._warm = self._warm, False
        if self._stopping:
            return
        # What it was asked to fork and did not: as good as started and lost.
        waiting, self._waiting = self._waiting, {}
        for (rank, born), channel in waiting.items():
            channel.close()
            self._report(protocol.RankExited(rank, born, exit_code=None, signal=signal.SIGKILL))
        if was_warm and self._parked_starts < PARKED_STARTS:
            self._restart = self._loop.create_task(self.start_parked(self._parked_log))
            return
        lines = self._parked_log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no output"
        self._report(protocol.AgentFailed(f"the parked process ended: {last}"))

    # ------------------------------------------------------------ ranks

    def start_ranks(self, request: protocol.StartRanks) -> None:
        """Ask the parked process to fork these ranks; a running process of the same rank is ended
        first.
        """
        if self._parked is None or not self._warm:
            self._postponed.append(request)
            return
        for rank, local_rank in zip(request.ranks, request.local_ranks, strict=True):
            if rank in self._ranks:
                self.kill(rank)
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            tag = rank_tag(self._spec.job_id, rank, request.epoch)
            self._tags.add(tag)
            fork = parking.ForkRequest(
                rank=rank,
                local_rank=local_rank,
                born=request.epoch,
                host=self._host,
                arena=str(self._arena),
                run_dir=self._spec.run_dir,
                log_path=str(rank_log_path(Path(self._spec.run_dir), rank, request.epoch)),
                script=self._spec.script,
                script_args=self._spec.script_args,
                world_size=self._spec.world_size,
                nproc_per_node=self._spec.nproc_per_node,
                node_index=request.node_index,
                job_id=self._spec.job_id,
                env={**self._spec.env, "DEADPOOL_RANK_TAG": tag},
                record_final_state=self._spec.record_final_state,
                fault_step=self._spec.fault_steps.get(rank),
                confirm_timeout_s=self._spec.confirm_timeout_s,
                agent_pid=os.getpid(),
                checkpoint_dir=self._spec.checkpoint_dir,
                checkpoint_every=self._spec.checkpoint_every,
                replication_interval=self._spec.replication_interval,
            )
            with contextlib.closing(theirs):
                socket.send_fds(self._parked, [msgspec.msgpack.encode(fork)], [theirs.fileno()])
            self._waiting[rank, request.epoch] = ours

    def _adopt(self, rank: int, born: int, pid: int) -> None:
        process = RankProcess(rank, born, pid, self._waiting.pop((rank, born)))
        # The process is our child (we are its subreaper) and nobody else waits for it: its pid
        # stays its own until we have taken its exit status, even when it has ended already.
        process.pidfd = os.pidfd_open(pid)
        self._ranks[rank] = process
        self._loop.add_reader(process.channel, self._channel_readable, process)
        self._loop.add_reader(process.pidfd, self._ended, process)
        if (rank, born) in self._killed_before_fork:
            self.kill(rank)

    def _channel_readable(self, process: RankProcess) -> None:
        if not self._drain(process, 1):
            self._loop.remove_reader(process.channel)

    def _drain(self, process: RankProcess, reads: int) -> bool:
        """Forward what the rank has said; False when its end of the pair is closed."""
        for _ in range(reads):
            try:
                data = process.channel.recv(1 << 20)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            for body in process.frames.feed(data):
                message = self._codec.decode(body)
                self._report(protocol.RankSaid(process.rank, process.born, message))
        return True

    def _ended(self, process: RankProcess) -> None:
        self._loop.remove_reader(process.pidfd)
        os.close(process.pidfd)
        # What it said before it died comes first, whole: the last step it confirmed may be there.
        self._loop.remove_reader(process.channel)
        self._drain(process, 1 << 20)
        process.channel.close()
        try:
            _pid, status = os.waitpid(process.pid, 0)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            code = 255
        if self._ranks.get(process.rank) is process:
            del self._ranks[process.rank]
        self._watch.forget((process.rank, process.born))
        stack_path(self._arena, process.rank, process.born).unlink(missing_ok=True)
        tag = rank_tag(self._spec.job_id, process.rank, process.born)
        self._orphans.rank_ended(process.pid, tag, self._known())
        self._report(
            protocol.RankExited(
                process.rank,
                process.born,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
            )
        )

    def tell(self, ranks: list[int], body: Any) -> None:
        """Pass a message to these ranks; a rank that is gone is skipped (its exit is reported
        anyway).
        """
        data = protocol.frame(body)
        for rank in ranks:
            process = self._ranks.get(rank)
            if process is None:
                continue
            try:
                process.channel.setblocking(True)
                process.channel.settimeout(5.0)
                process.channel.sendall(data)
            except OSError:
                continue
            finally:
                process.channel.setblocking(False)

    def living(self) -> list[tuple[int, int]]:
        """Rank and birth of every process of a rank whose end was not reported."""
        return [(process.rank, process.born) for process in self._ranks.values()]

    # ------------------------------------------------------------ ending

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send ``signum`` to the rank's process; with SIGKILL its whole tree follows when its end
        is seen.
        """
        process = self._ranks.get(rank)
        if process is None:
            for waiting_rank, born in self._waiting:
                if waiting_rank == rank:
                    self._killed_before_fork.add((rank, born))
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)

    def poll(self) -> None:
        """Look for stopped ranks and collect orphans that have ended. Called every ``POLL_S``."""
        now = time.monotonic()
        for process in list(self._ranks.values()):
            if _is_stopped(process.pid):
                if process.stopped_since is None:
                    process.stopped_since = now
                stopped_s = now - process.stopped_since
                if stopped_s >= self._spec.frozen_after_s and not process.stop_reported:
                    process.stop_reported = True
                    self._report(protocol.RankStopped(process.rank, process.born, stopped_s))
            else:
                process.stopped_since = None
                process.stop_reported = False
        self._watch.look(self._processes(), now)
        self._orphans.look(self._known())

    def _processes(self) -> list[tuple[int, int]]:
        return [(process.rank, process.born) for process in self._ranks.values()]

    def tell_standings(self, number: int) -> None:
        """Report what every rank is doing, as the answer to question ``number``."""
        self._watch.answer(self._processes(), number)

    async def take_stacks(self, ranks: list[int]) -> None:
        """Write the stacks of these ranks into the run directory, all at once."""
        processes = [process for rank in ranks if (process := self._ranks.get(rank)) is not None]
        await asyncio.gather(*(self._take_stack(process) for process in processes))

    async def _take_stack(self, process: RankProcess) -> None:
        rank, born = process.rank, process.born
        target = rank_log_path(Path(self._spec.run_dir), rank, born).with_suffix(".stack")
        try:
            await take_stack(self._arena, rank, born, process.pid, target)
        except NoStack as error:
            self._report(protocol.StackNotTaken(rank, born, str(error)))

    def _known(self) -> set[int]:
        known = {process.pid for process in self._ranks.values()}
        if self._parked_process is not None:
            known.add(self._parked_process.pid)
        return known | self._helpers()

    async def stop_all(
        self, grace_s: float, stop_helpers: Callable[[], Awaitable[None]]
    ) -> list[str]:
        """End every process of the job on this node: SIGTERM, ``grace_s``, SIGKILL. Returns what
        would not go. ``stop_helpers`` is called when the ranks need them no more.
        """
        self._stopping = True
        leave = protocol.frame(protocol.Leave())
        for rank, process in list(self._ranks.items()):
            # One that reads nothing is killed after the grace.
            with contextlib.suppress(OSError):
                process.channel.send(leave)
            self.kill(rank, signal.SIGTERM)
            self.kill(rank, signal.SIGCONT)
        deadline = time.monotonic() + grace_s
        while self._ranks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._parked_process is not None and self._parked_process.returncode is None:
            self._parked_process.kill()
            await self._parked_process.wait()
        for rank in list(self._ranks):
            self.kill(rank)
        await stop_helpers()
        if await self._all_gone(GRACE_S):
            return []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        if await self._all_gone(5.0):
            return []
        return [f"process {child.pid} ({child.name()})" for child in psutil.Process().children()]

    async def _all_gone(self, patience_s: float) -> bool:
        """Whether every child of this agent ends within that time."""
        deadline = time.monotonic() + patience_s
        while self._ranks or children():
            if time.monotonic() > deadline:
                return False
            reap(self._known())
            await asyncio.sleep(0.02)
        return True


def rank_log_path(run_dir: Path, rank: int, born: int) -> Path:
    """Where a rank's process writes its output: one file per process of the rank."""
    return run_dir / "logs" / f"rank-{rank:05d}.epoch-{born}.log"


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal. One under a debugger (state t) is not counted."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"
