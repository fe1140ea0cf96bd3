"""A launcher for tests: real rank processes and collectives on one machine, no agent, no Slurm.

``ParkedProcess`` is the nodes' parked process; it is slow to start and can serve many jobs.
``FakeLauncher`` runs one job in the calling thread. It is agent and controller in one, with the
simplest rules that work: a rank whose connection ends without ``ScriptEnded`` is lost, every loss
is a new epoch, and the step is the newest one that the copies on the nodes make whole.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from deadpool_runtime import parking, protocol
from deadpool_runtime.durable import index
from deadpool_runtime.replication.agreement import Fetch, agree, replicated_before
from deadpool_runtime.replication.naming import Ranks
from deadpool_runtime.replication.placement import Nodes, choose_holders
from deadpool_runtime.testing_nodes import FakeNode, FakeRank, ParkedProcess, write_secret

__all__ = ["FakeLauncher", "FakeNode", "JobFailed", "Outcome", "ParkedProcess"]

#: A rank's exception is its own when no loss is seen for so long (seconds).
RAISE_AFTER_S = 1.0
#: A step that could not be restored so often is not tried again.
RESTORE_TRIES = 2


class JobFailed(Exception):
    """The job did not end well; the message tells what happened and what the ranks printed."""


@dataclass
class Outcome:
    """What came of a job. ``plans``: (epoch, step) of each recovery that got as far as a plan;
    ``fetches``: what each rank was told to fetch, for each of them. ``committed``: steps of durable
    checkpoints, in order; ``from_disk``: (epoch, step) of the plans that were to read one.
    """

    final: dict[int, protocol.FinalState] = field(default_factory=dict)
    plans: list[tuple[int, int]] = field(default_factory=list)
    fetches: list[dict[int, tuple[Fetch, ...]]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    from_disk: list[tuple[int, int]] = field(default_factory=list)
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

    ``nproc_per_node``: so many ranks share a node, that is an arena and a replicator.
    ``on_message(launcher, rank, message)`` sees every message before it is acted on, which is
    where a test kills. ``confirm``: if false, every holder is at an address where nobody listens,
    so that no replica is ever confirmed. ``domains``: failure domain of nodes ("node0", …).
    ``factor``: how many holders each rank has; ``interval``: every so manieth step is replicated.
    ``checkpoint_dir``, ``checkpoint_every``: durable checkpoints, see ``protocol.JobSpec``.
    ``allow_failure``: a script that fails ends the job, and all its ranks, instead of raising
    ``JobFailed``.
    """

    def __init__(
        self,
        parked: ParkedProcess,
        script: str,
        args: list[str],
        *,
        world_size: int,
        run_dir: Path,
        nproc_per_node: int = 1,
        env: dict[str, str] | None = None,
        on_message: Callable[[FakeLauncher, int, Any], None] | None = None,
        fault_steps: dict[int, int] | None = None,
        confirm: bool = True,
        domains: dict[str, str] | None = None,
        factor: int = 1,
        interval: int = 1,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        allow_failure: bool = False,
        deadline_s: float = 90.0,
    ) -> None:
        self._parked_process = parked
        self._script = script
        self._args = args
        self.world_size = world_size
        self.run_dir = run_dir
        self._env = env or {}
        self._on_message = on_message
        self._fault_steps = fault_steps or {}
        self._confirm = confirm
        self._allow_failure = allow_failure
        self._deadline_s = deadline_s
        self._codec = protocol.Codec(protocol.FromRank)
        self._ranks: dict[int, FakeRank] = {}
        self._nproc_per_node = nproc_per_node
        self._domains = domains
        self._factor = factor
        self._interval = interval
        self._checkpoint_dir = checkpoint_dir
        self._checkpoint_every = checkpoint_every
        self._saved: dict[tuple[int, int], set[int]] = {}
        self._damaged_checkpoints: set[int] = set()
        self._job_id = f"test.{secrets.token_hex(6)}"
        self._secret = write_secret(run_dir)
        self._nodes: list[FakeNode] = []
        self._segments: dict[int, dict[Ranks, int]] = {}
        self._holders: dict[int, protocol.Holder | None] = {}
        self._history: list[tuple[int, int]] = []
        self._failed_steps: list[int] = []
        self._begun_training = False
        self._digests: dict[tuple[int, Ranks], str] = {}
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

    def node(self, rank: int) -> FakeNode:
        """The node that the rank is on now."""
        return self._nodes[rank // self._nproc_per_node]

    def holder(self, rank: int) -> FakeNode:
        """The node that keeps the rank's replica now."""
        holder = self._holders[rank]
        assert holder is not None
        return next(node for node in self._nodes if node.name == holder.node)

    def power_off(self, rank: int) -> None:
        """Kill everything on the rank's node at once; a new node takes its ranks."""
        seat = rank // self._nproc_per_node
        gone = [each for each in self._ranks.values() if each.rank // self._nproc_per_node == seat]
        for each in gone:
            self.kill(each.rank)
        for each in gone:
            if each.pid:
                os.waitpid(each.pid, 0)
                each.pid = 0
        self._nodes[seat].close()
        self._nodes[seat] = self._new_node(seat, self._epoch + 1)
        self._lose([each for each in gone if not each.ended])

    def restart_replicator(self, rank: int) -> None:
        """Replace the replicator of the rank's node; who sends replicas there is told."""
        node = self.node(rank)
        node.restart_replicator()
        for who, holder in self._choose_holders().items():
            if holder is not None and holder.node == node.name:
                self._tell(who, protocol.Protect(self._epoch, holder))

    @property
    def epoch(self) -> int:
        """The present epoch; 1 until the first loss."""
        return self._epoch

    def run(self) -> Outcome:
        """Run the job to its end. Raises ``JobFailed``; no process is left either way."""
        deadline = time.monotonic() + self._deadline_s
        try:
            for seat in range(self.world_size // self._nproc_per_node):
                self._nodes.append(self._new_node(seat, self._epoch))
            for rank in range(self.world_size):
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

    def _new_node(self, seat: int, epoch: int) -> FakeNode:
        name = f"node{seat}" if epoch == 1 else f"node{seat}.{epoch}"
        log = self.run_dir / f"replicator-{name}.log"
        return FakeNode(self._job_id, name, epoch, self._secret, log)

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        request = parking.ForkRequest(
            rank=rank,
            local_rank=rank % self._nproc_per_node,
            born=self._epoch,
            host="127.0.0.1",
            arena=str(self.node(rank).arena.path),
            run_dir=str(self.run_dir),
            log_path=str(self._log_path(rank)),
            script=self._script,
            script_args=self._args,
            world_size=self.world_size,
            nproc_per_node=self._nproc_per_node,
            node_index=rank // self._nproc_per_node,
            job_id="test",
            env=self._env,
            record_final_state=True,
            fault_step=self._fault_steps.get(rank),
            confirm_timeout_s=8.0,
            agent_pid=os.getpid(),
            checkpoint_dir=str(self._checkpoint_dir or ""),
            checkpoint_every=self._checkpoint_every,
            replication_interval=self._interval,
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
        for node in self._nodes:
            node.close()

    def _story(self) -> str:
        lines = [
            f"rank {rank} (born {born}): {str(body)[:200]}"
            for rank, born, body in self.outcome.said
        ]
        for rank in range(self.world_size):
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
                if self._ranks.get(rank.rank) is not rank:
                    break  # replaced meanwhile
                message = self._codec.decode(body)
                self.outcome.said.append((rank.rank, rank.born, message))
                if self._on_message is not None:
                    self._on_message(self, rank.rank, message)
                if self._ranks.get(rank.rank) is rank:
                    self._hear(rank, message)
        lost = [rank for rank in lost if self._ranks.get(rank.rank) is rank]
        gone = [rank for rank in lost if not rank.ended]
        for rank in lost:
            if rank.pid:
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
            case protocol.Attached(segments=segments):
                rank.attached = True
                self._segments[rank.rank] = {each.ranks: each.nbytes for each in segments}
                if not self._begun_training and all(r.attached for r in self._ranks.values()):
                    self._begun_training = True
                    for who, holder in self._choose_holders().items():
                        self._tell(who, protocol.Protect(self._epoch, holder))
            case protocol.Snapshotted(step=step, segments=segments):
                for each in segments:
                    known = self._digests.setdefault((step, each.ranks), each.digest)
                    if known != each.digest:
                        text = f"rank {rank.rank} differs at step {step} in what {each.ranks} have"
                        raise JobFailed(f"{text}\n{self._story()}")
            case protocol.Saved():
                self._on_saved(rank.rank, message)
            case protocol.Parked(epoch=epoch) if epoch == self._epoch:
                rank.parked = True
                if all(each.parked for each in self._ranks.values()):
                    self._plan()
            case protocol.Restored(epoch=epoch, segments=segments) if epoch == self._epoch:
                rank.restored = segments
                if all(each.restored is not None for each in self._ranks.values()):
                    self._resume()
            case protocol.RestoreFailed(epoch=epoch, step=step) if epoch == self._epoch:
                self._failed_steps.append(step)
                if (epoch, step) in self.outcome.from_disk:
                    self._damaged_checkpoints.add(step)
                self._lose([])
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
            each.parked = each.at_end = False
            each.restored = None
            self._tell(rank, protocol.Revoke(self._epoch))
        for each in gone:
            each.sock.close()
            self._start(each.rank)

    def _choose_holders(self) -> dict[int, protocol.Holder | None]:
        nodes = {node.name: node for node in self._nodes}
        node_of = {rank: self.node(rank).name for rank in self._segments}
        among = Nodes(tuple(nodes), (), self._domains)
        nowhere = protocol.Address("127.0.0.1", 1)
        self._holders = {}
        for rank, holding in choose_holders(self._segments, node_of, among, self._factor).items():
            self._holders[rank] = None
            if holding is not None:
                first, *more = (
                    protocol.Holder(
                        share.node,
                        nodes[share.node].address if self._confirm else nowhere,
                        list(share.segments),
                    )
                    for share in holding.shares
                )
                deputy = None if holding.deputy is None else nodes[holding.deputy].address
                self._holders[rank] = structs.replace(first, deputy=deputy, more=more)
        return self._holders

    def _plan(self) -> None:
        """Fence, count the copies, agree on a step, tell each rank what to fetch."""
        for node in self._nodes:
            node.fence(self._epoch)
        copies = {node.name: node.copies() for node in self._nodes}
        node_of = {rank: self.node(rank).name for rank in self._ranks}
        failed = self._failed_steps
        refused = {step for step in failed if failed.count(step) >= RESTORE_TRIES}
        refused |= self._damaged_checkpoints
        agreement = agree(copies, self._history, node_of, refused)
        if agreement.step is None:
            self._read_checkpoint(dict(agreement.lacking))
            return
        self.outcome.plans.append((self._epoch, agreement.step))
        self.outcome.fetches.append(dict(agreement.fetches))
        address_of = {node.name: node.address for node in self._nodes}
        holders = self._choose_holders()
        keep = replicated_before(agreement.step, copies, self._history)
        for rank, fetches in agreement.fetches.items():
            pieces = [
                protocol.Piece(
                    address_of[fetch.node],
                    fetch.rank,
                    fetch.replica,
                    list(fetch.segments),
                    fetch.base,
                )
                for fetch in fetches
            ]
            holder = holders.get(rank)
            plan = protocol.Plan(
                self._epoch, agreement.step, self._store, pieces, holder, keep=list(keep)
            )
            self._tell(rank, plan)

    def _on_saved(self, rank: int, body: protocol.Saved) -> None:
        """Commit the checkpoint once every rank has written it, if its step still counts."""
        assert self._checkpoint_dir is not None
        if any(epoch > body.epoch and body.step > step for epoch, step in self._history):
            return
        there = self._saved.setdefault((body.epoch, body.step), set())
        there.add(rank)
        if len(there) == self.world_size:
            index.commit(self._checkpoint_dir, body.step, self.world_size)
            index.prune(self._checkpoint_dir)
            self.outcome.committed.append(body.step)

    def _read_checkpoint(self, lacking: dict[int, Ranks]) -> None:
        """Nothing in memory is whole: let the ranks read the newest checkpoint that is good.

        Copies of older epochs do not count after that.
        """
        directory = self._checkpoint_dir
        steps = index.list_complete(directory) if directory is not None else []
        usable = [step for step in steps if step not in self._damaged_checkpoints]
        if not usable:
            bad = sorted(self._damaged_checkpoints)
            text = f"no step is whole: {lacking}; damaged checkpoints: {bad}"
            raise JobFailed(f"{text}\n{self._story()}")
        plan = self._epoch, usable[0]
        self.outcome.plans.append(plan)
        self.outcome.from_disk.append(plan)
        self._history.append((self._epoch, -1))
        holders = self._choose_holders()
        for rank in self._ranks:
            holder = holders.get(rank)
            self._tell(rank, protocol.Plan(*plan, self._store, [], holder, str(directory)))

    def _resume(self) -> None:
        """Every rank restored: compare what they have in common, then let them go on."""
        seen: dict[Ranks, str] = {}
        for rank in self._ranks.values():
            for each in rank.restored or ():
                if seen.setdefault(each.ranks, each.digest) != each.digest:
                    text = f"restored states of {each.ranks} differ"
                    raise JobFailed(f"{text}\n{self._story()}")
        if self.outcome.plans[-1] not in self.outcome.from_disk:
            self._history.append(self.outcome.plans[-1])
        self._failed_steps.clear()
        self._tell_all(protocol.Resume(self._epoch))
