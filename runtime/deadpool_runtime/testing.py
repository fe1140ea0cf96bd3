"""A launcher for tests: real rank processes and collectives on one machine, no agent, no Slurm.

``ParkedProcess`` is the node's parked process; it is slow to start and can serve many jobs.
``FakeLauncher`` runs one job in the calling thread. It is agent and controller in one, with the
simplest rules that work: a rank whose connection ends without ``ScriptEnded`` is lost, every loss
is a new epoch, and the step is the newest one that every rank can have.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from deadpool_runtime import parking, protocol

#: A rank's exception is its own when no loss is seen for so long (seconds).
RAISE_AFTER_S = 1.0
#: Own parts kept of each rank, in steps.
KEPT_STEPS = 8


class JobFailed(Exception):
    """The job did not end well; the message tells what happened and what the ranks printed."""


class ParkedProcess:
    """A process that has torch imported and forks ranks; use it as a context manager."""

    def __init__(self) -> None:
        # Ranks are forked twice and become children of this process, as they are of an agent.
        parking.prctl(parking.PR_SET_CHILD_SUBREAPER, 1)
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        roots = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, roots)))
        numbers = (str(theirs.fileno()), str(os.getpid()))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "deadpool_runtime.zygote", *numbers],
            pass_fds=[theirs.fileno()],
            env=environment | {"OMP_NUM_THREADS": "1"},
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
    parked: list[int] | None = None
    restored: str | None = None
    at_end: bool = False
    ended: bool = False


@dataclass
class Outcome:
    """What came of a job. ``plans``: (epoch, step) of each recovery that got as far as a plan."""

    final: dict[int, protocol.FinalState] = field(default_factory=dict)
    plans: list[tuple[int, int]] = field(default_factory=list)
    said: list[tuple[int, int, Any]] = field(default_factory=list)
    failed: dict[int, protocol.ScriptFailed] = field(default_factory=dict)
    pids: dict[int, list[int]] = field(default_factory=dict)

    def messages(self, kind: type[Any], rank: int | None = None) -> list[Any]:
        """Everything of one type that the ranks (or one rank) said, in order of arrival."""
        return [
            body for who, _, body in self.said if isinstance(body, kind) and rank in (None, who)
        ]


class FakeLauncher:
    """Runs a script as a job of ``world_size`` ranks and replaces those that die.

    ``on_message(launcher, rank, message)`` sees every message before it is acted on, which is
    where a test kills. ``confirm``: answer ``StepDone`` with ``Confirmed``. ``allow_failure``: a
    script that fails ends the job, and all its ranks, instead of raising ``JobFailed``.
    """

    def __init__(
        self,
        parked: ParkedProcess,
        script: str,
        args: list[str],
        *,
        world_size: int,
        run_dir: Path,
        env: dict[str, str] | None = None,
        on_message: Callable[[FakeLauncher, int, Any], None] | None = None,
        fault_steps: dict[int, int] | None = None,
        confirm: bool = True,
        allow_failure: bool = False,
        deadline_s: float = 90.0,
    ) -> None:
        self._parked_process = parked
        self._script = script
        self._args = args
        self._world_size = world_size
        self.run_dir = run_dir
        self._env = env or {}
        self._on_message = on_message
        self._fault_steps = fault_steps or {}
        self._confirm = confirm
        self._allow_failure = allow_failure
        self._deadline_s = deadline_s
        self._codec = protocol.Codec(protocol.FromRank)
        self._ranks: dict[int, FakeRank] = {}
        self._own: dict[int, dict[int, bytes]] = {rank: {} for rank in range(world_size)}
        self._digests: dict[int, str] = {}
        self._frozen: list[int] = []
        self._raised: dict[int, tuple[float, int]] = {}
        self._epoch = 1
        self._begun = False
        self._store = protocol.Address("127.0.0.1", 0)
        self.outcome = Outcome()

    # ------------------------------------------------------------ for tests

    def kill(self, rank: int) -> None:
        """SIGKILL the rank's present process, unless it is gone already."""
        pid = self._ranks[rank].pid
        if pid:  # 0 would mean this process's whole group
            os.kill(pid, signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """Stop the rank's process and give it up for lost; its connections stay open."""
        frozen = self._ranks[rank]
        os.kill(frozen.pid, signal.SIGSTOP)
        self._frozen.append(frozen.pid)
        self._lose([frozen])

    @property
    def epoch(self) -> int:
        """The present epoch; 1 until the first loss."""
        return self._epoch

    def run(self) -> Outcome:
        """Run the job to its end. Raises ``JobFailed``; no process is left either way."""
        deadline = time.monotonic() + self._deadline_s
        try:
            for rank in range(self._world_size):
                self._start(rank)
            while not all(rank.ended for rank in self._ranks.values()):
                if time.monotonic() > deadline:
                    raise JobFailed(f"not done after {self._deadline_s} s\n{self._story()}")
                self._turn()
                if self.outcome.failed:
                    if self._allow_failure:
                        break
                    raise JobFailed(f"a script failed\n{self._story()}")
            return self.outcome
        finally:
            self._clean_up()

    # ------------------------------------------------------------ processes

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        request = parking.ForkRequest(
            rank=rank,
            local_rank=rank,
            born=self._epoch,
            host="127.0.0.1",
            run_dir=str(self.run_dir),
            log_path=str(self._log_path(rank)),
            script=self._script,
            script_args=self._args,
            world_size=self._world_size,
            nproc_per_node=self._world_size,
            node_index=0,
            job_id="test",
            env=self._env,
            record_final_state=True,
            fault_step=self._fault_steps.get(rank),
            confirm_timeout_s=8.0,
            agent_pid=os.getpid(),
        )
        with theirs:
            pid = self._parked_process.fork(request, theirs)
        self._ranks[rank] = FakeRank(rank, self._epoch, pid, ours)
        self.outcome.pids.setdefault(rank, []).append(pid)

    def _log_path(self, rank: int) -> Path:
        return self.run_dir / f"rank{rank}.log"

    def _clean_up(self) -> None:
        for pid in [*self._frozen, *(rank.pid for rank in self._ranks.values() if rank.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for rank in self._ranks.values():
            rank.sock.close()

    def _story(self) -> str:
        lines = [
            f"rank {rank} (born {born}): {str(body)[:200]}"
            for rank, born, body in self.outcome.said
        ]
        for rank in range(self._world_size):
            path = self._log_path(rank)
            if path.exists():
                lines.append(f"--- {path.name}\n{path.read_text()[-3000:]}")
        return "\n".join(lines)

    # ------------------------------------------------------------ one turn of the loop

    def _turn(self) -> None:
        by_sock = {rank.sock: rank for rank in self._ranks.values() if not rank.ended}
        readable, _, _ = select.select(list(by_sock), [], [], 0.2)
        lost: list[FakeRank] = []
        for sock in readable:
            rank = by_sock[sock]
            try:
                data = sock.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                lost.append(rank)
            for body in rank.frames.feed(data):
                message = self._codec.decode(body)
                self.outcome.said.append((rank.rank, rank.born, message))
                if self._on_message is not None:
                    self._on_message(self, rank.rank, message)
                self._hear(rank, message)
        gone = [rank for rank in lost if not rank.ended]
        for rank in lost:
            os.waitpid(rank.pid, 0)
            rank.pid = 0
        if gone:
            self._lose(gone)
        for who, (at, step) in list(self._raised.items()):
            if time.monotonic() > at + RAISE_AFTER_S:
                del self._raised[who]
                self._tell(who, protocol.RaiseIt(step))

    def _tell(self, rank: int, message: Any) -> None:
        with suppress(OSError):
            self._ranks[rank].sock.sendall(protocol.frame(message))

    def _tell_all(self, message: Any) -> None:
        for rank in self._ranks:
            self._tell(rank, message)

    def _hear(self, rank: FakeRank, message: Any) -> None:
        match message:
            case protocol.RankUp(store_port=port):
                rank.store_port = port
                if self._begun:
                    # A replacement builds its program without peers, so it needs no one else's
                    # store for that, and must not wait for one whose host dies meanwhile.
                    own = self._address_of(rank.rank)
                    self._tell(rank.rank, protocol.Begin(self._epoch, own, True, 0))
                elif all(each.store_port for each in self._ranks.values()):
                    self._begun = True
                    self._store = self._address_of(0)
                    self._tell_all(protocol.Begin(self._epoch, self._store, False, 0))
            case protocol.StepDone(step=step, own=own, digest=digest):
                self._own[rank.rank][step] = own
                self._own[rank.rank].pop(step - KEPT_STEPS, None)
                if digest and self._digests.setdefault(step, digest) != digest:
                    raise JobFailed(f"rank {rank.rank} differs at step {step}\n{self._story()}")
                if self._confirm:
                    self._tell(rank.rank, protocol.Confirmed(step))
            case protocol.Parked(epoch=epoch, slots=slots) if epoch == self._epoch:
                rank.parked = slots
                if all(each.parked is not None for each in self._ranks.values()):
                    self._plan()
            case protocol.Restored(epoch=epoch, digest=digest) if epoch == self._epoch:
                rank.restored = digest
                digests = {each.restored for each in self._ranks.values()}
                if None not in digests:
                    if len(digests) > 1:
                        raise JobFailed(f"restored states differ: {digests}\n{self._story()}")
                    self._tell_all(protocol.Resume(self._epoch))
            case protocol.StepRaised(epoch=epoch, step=step) if epoch == self._epoch:
                self._raised[rank.rank] = (time.monotonic(), step)
            case protocol.StepsEnded(epoch=epoch) if epoch == self._epoch:
                rank.at_end = True
                if all(each.at_end for each in self._ranks.values()):
                    self._tell_all(protocol.AllEnded())
            case protocol.FinalState():
                self.outcome.final[rank.rank] = message
            case protocol.ScriptEnded():
                rank.ended = True
            case protocol.ScriptFailed():
                rank.ended = True
                self.outcome.failed[rank.rank] = message
            case _:
                pass

    def _address_of(self, rank: int) -> protocol.Address:
        return protocol.Address("127.0.0.1", self._ranks[rank].store_port)

    def _lose(self, gone: list[FakeRank]) -> None:
        """A new epoch: revoke the old one and start replacements."""
        self._epoch += 1
        self._raised.clear()
        lost = {rank.rank for rank in gone}
        living = [rank for rank in self._ranks if rank not in lost]
        usable = [rank for rank in living if self._ranks[rank].store_port]
        if not usable or not self._begun:
            raise JobFailed(f"nobody is left\n{self._story()}")
        self._store = self._address_of(usable[0])
        for rank in living:
            each = self._ranks[rank]
            each.parked = each.restored = None
            each.at_end = False
            self._tell(rank, protocol.Revoke(self._epoch))
        for each in gone:
            each.sock.close()
            self._start(each.rank)

    def _plan(self) -> None:
        slots = {rank: set(each.parked or ()) for rank, each in self._ranks.items()}
        for step in sorted(set[int]().union(*slots.values()), reverse=True):
            holders = [rank for rank, steps in slots.items() if step in steps]
            lacking = [rank for rank in slots if rank not in holders]
            if all(step in self._own[rank] for rank in lacking):
                break
        else:
            raise JobFailed(f"no common step in {slots}\n{self._story()}")
        self.outcome.plans.append((self._epoch, step))
        sources = {rank: holders[index % len(holders)] for index, rank in enumerate(lacking)}
        for rank in self._ranks:
            own = self._own[rank][step] if rank in sources else b""
            self._tell(rank, protocol.Plan(self._epoch, step, self._store, sources, own))
        for kept in self._own.values():
            for newer in [number for number in kept if number > step]:
                del kept[newer]
