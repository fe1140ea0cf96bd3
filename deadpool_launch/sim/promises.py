"""What must hold in every simulated job, whatever strikes it.

Each promise is checked where it could be broken: after every event, with every plan, with every
step that a rank completes, and at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from deadpool_launch.controller.events import (
    Action,
    FenceNode,
    Finish,
    IncidentClosed,
    IncidentOpened,
    KillRanks,
    ReleaseNode,
    StartRanks,
    Tell,
)
from deadpool_launch.controller.invariants import validate
from deadpool_launch.controller.states import Phase
from deadpool_launch.controller.states import State as JobState
from deadpool_launch.exits import ExitCode
from deadpool_launch.sim.faults import NODE_KINDS, SCRIPT_KINDS, Fault, FaultKind
from deadpool_launch.sim.scenario import CONFIRM_S
from deadpool_launch.sim.values import State
from deadpool_runtime import protocol

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster

#: After one of these a step may be gone from memory though the job was told of each.
_COPY_KINDS = frozenset({FaultKind.DAMAGE, FaultKind.CORRUPT})


def _has_unheld(state: JobState) -> bool:
    """Whether some rank has no holder, though copies are made."""
    return state.protecting and None in state.holders.values()


def _covers(state: JobState) -> int:
    """How many nodes can be lost at once: as many as each rank has holders, once all confirmed."""
    if state.phase is not Phase.TRAINING or not state.ranks.all_protected(state.epoch):
        return 0
    holders = [state.holders.get(rank.rank) for rank in state.present()]
    return min((0 if each is None else 1 + len(each.more) for each in holders), default=0)


class PromiseBroken(AssertionError):
    """Something happened that must never happen; the text says what."""


class Promises:
    """Watches one job. ``struck``: the faults that found their target."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.struck: list[Fault] = []
        #: Nodes that may be given up: something of them was struck.
        self.hurt_nodes: set[str] = set()
        #: Nodes that somebody wants drained: they may cost a spare each.
        self.unwanted: set[str] = set()
        #: Nodes of which anything was struck, be it a process: they may use up their budget.
        self.touched: set[str] = set()
        #: The newest step that every rank has completed in the history that counts, and its past.
        self.common_step = -1
        self.common = 0
        #: Step of each plan, and the newest that every rank had completed then.
        self.plans: list[tuple[int, int]] = []
        #: With rules of the user's a fault is what they call it; a healthy node may be given up.
        self._ruled = bool(cluster.config.rules)
        self._having: dict[int, set[int]] = {}
        self._opened: list[int] = []
        self._closed: list[int] = []
        self._born: set[tuple[int, int]] = set()
        #: How many nodes could be lost without a step when the first fault struck.
        self._covers = 0
        #: Ranks were set aside: the numbers are no longer those of an undisturbed run.
        self._shrunk = False
        #: Until when some rank had no holder, and when a fault last struck then or shortly after;
        #: one from before an incident was opened is forgiven until that closes.
        self._unheld_until = -CONFIRM_S
        self._struck_bare_at = -inf
        self._opened_at = 0.0
        self._forgiven_until = -inf

    def hit(self, fault: Fault, node: str) -> None:
        """A fault found its target on ``node``."""
        state, now = self._cluster.launcher.state, self._cluster.queue.now
        # A holder that has just been found has nothing yet.
        bare = now <= self._unheld_until + CONFIRM_S or _has_unheld(state)
        if bare:
            self._struck_bare_at = now
        if not self.struck:
            self._covers = 0 if bare else _covers(state)
        self.struck.append(fault)
        self.touched.add(node)
        if fault.kind in NODE_KINDS:
            self.hurt_nodes.add(node)
        if fault.kind is FaultKind.DRAIN:
            self.unwanted.add(node)

    # ------------------------------------------------------------ training

    def completed(self, rank: int, node: str, state: State) -> None:
        """A rank has completed a step: its state is that of an undisturbed run.

        What a process computes on a node that was given up counts for nothing.
        """
        if not self._shrunk and not state.equals(self._cluster.layout.expected(rank, state.step)):
            raise PromiseBroken(f"rank {rank} has a wrong value after step {state.step}")
        if self._cluster.launcher.state.node_of(rank) != node:
            return
        having = self._having.setdefault(state.lineage, set())
        having.add(rank)
        if having.issuperset(rank.rank for rank in self._cluster.launcher.state.present()):
            self._is_common(state)

    def _is_common(self, state: State) -> None:
        self.common_step, self.common = state.step, state.lineage
        self._cluster.disk.common = state.lineage

    def resumed(self, states: Mapping[int, State], *, shrunk: bool) -> None:
        """All ranks that take part go on from these states. ``shrunk``: others are set aside."""
        if len({state.lineage for state in states.values()}) != 1:
            raise PromiseBroken("ranks resume from states of different pasts")
        self._shrunk |= shrunk
        for rank, state in states.items():
            if not self._shrunk and not state.equals(
                self._cluster.layout.expected(rank, state.step)
            ):
                raise PromiseBroken(f"rank {rank} resumes from a wrong value of step {state.step}")
        self._is_common(next(iter(states.values())))

    # ------------------------------------------------------------ decisions

    def decided(self, before: JobState, after: JobState, actions: Sequence[Action]) -> None:
        """The controller answered an event."""
        validate(after, before)
        if after.epoch < before.epoch:
            raise PromiseBroken("the epoch went back")
        if after.holders is not before.holders and _has_unheld(before):
            self._unheld_until = self._cluster.queue.now
        planned = False
        for action in actions:
            match action:
                case Tell(body=protocol.Plan() as plan) if not planned:
                    planned = True
                    self._planned(before, after, plan)
                case FenceNode(node=node, reason=reason):
                    self._reasoned(action, reason)
                    if node not in self.hurt_nodes and not self._ruled:
                        raise PromiseBroken(f"{node} is given up ({reason}) though it is well")
                case ReleaseNode(node=node, reason=reason):
                    self._reasoned(action, reason)
                    used_up = node in self.touched and node in after.drained
                    if not (node in self.unwanted or used_up) or node in after.seats:
                        raise PromiseBroken(f"{node} is let go ({reason}) though it is wanted")
                case KillRanks(ranks=ranks, reason=reason):
                    self._reasoned(action, reason)
                    self._killed(ranks, reason)
                case StartRanks(epoch=epoch, ranks=ranks):
                    for rank in ranks:
                        if (rank, epoch) in self._born:
                            raise PromiseBroken(f"rank {rank} is started twice in epoch {epoch}")
                        self._born.add((rank, epoch))
                case IncidentOpened(number=number, reason=reason):
                    self._reasoned(action, reason)
                    if all(fault.kind is FaultKind.DRAIN for fault in self.struck):
                        self._planned_well(before, after)
                    self._opened.append(number)
                    self._opened_at = self._cluster.queue.now
                case IncidentClosed(number=number, reason=reason, replayed_steps=replayed):
                    self._reasoned(action, reason)
                    self._closed.append(number)
                    self._forgiven_until = self._opened_at
                    if replayed and all(f.kind is FaultKind.DRAIN for f in self.struck):
                        raise PromiseBroken(f"a planned move runs {replayed} steps again")
                case Finish(reason=reason):
                    self._reasoned(action, reason)
                    self._finished(before, after, action)
                case _:
                    pass
        if after.phase is not Phase.ENDED and not self._ruled:
            used = sum(name not in after.config.active for name in after.seats)
            # (Of those that are drained some are not asked for, but used up their budget.)
            hurt = len(self.hurt_nodes | self.unwanted | {*after.worn, *after.drained})
            if used > hurt:
                raise PromiseBroken(f"{used} spares are used for {hurt} nodes")

    def _killed(self, ranks: Sequence[int], reason: str) -> None:
        """A process is killed for what it did itself, not for what an older one said."""
        if not reason.startswith("its script failed"):
            return
        for rank in ranks:
            if not self._cluster.current[rank].failed:
                raise PromiseBroken(f"rank {rank} is killed ({reason}) though its script goes on")

    def _planned_well(self, before: JobState, after: JobState) -> None:
        """Nothing is wrong but that a node is unwanted: its ranks move from the end of a step."""
        halt, incident = before.halt, after.incident
        if incident is None or not incident.planned or halt is None:
            raise PromiseBroken("an incident is opened though nothing is wrong")
        there = [process.state.step == halt.step for process in self._cluster.current.values()]
        if not all(there):
            raise PromiseBroken(f"ranks move that do not stand at the end of step {halt.step}")

    def _reasoned(self, action: Action, reason: str) -> None:
        if not reason:
            raise PromiseBroken(f"{type(action).__name__} has no reason")

    def _planned(self, before: JobState, after: JobState, plan: protocol.Plan) -> None:
        """The step that all go back to is the newest that can be had, and not far back."""
        cluster = self._cluster
        refused = before.incident.refused if before.incident is not None else frozenset()
        if plan.checkpoint:
            newest = cluster.disk.newest(refused)
            if newest is not None and plan.step < newest:
                raise PromiseBroken(f"step {plan.step} is read though checkpoint {newest} is good")
        whole = cluster.newest_whole(after, refused)
        if plan.step < whole and not plan.checkpoint:
            raise PromiseBroken(f"all go back to step {plan.step} though step {whole} is whole")
        if plan.checkpoint and whole >= 0:
            raise PromiseBroken(f"a checkpoint is read though step {whole} is whole in memory")
        self.plans.append((plan.step, self.common_step))
        # Copies of the state of a checkpoint that the incident went back to are older for good.
        went_back = after.incident is not None and after.incident.checkpoint is not None
        interval = after.config.replication_interval
        if plan.checkpoint or went_back or plan.step >= self.common_step - interval:
            return
        told = after.unprotected > 0 or any(fault.kind in _COPY_KINDS for fault in self.struck)
        if not told and self._struck_bare_at <= self._forgiven_until:
            raise PromiseBroken(
                f"all go back to step {plan.step} though every rank has completed step "
                f"{self.common_step}"
            )

    def _finished(self, before: JobState, after: JobState, finish: Finish) -> None:
        """The verdict is true."""
        if self._opened != self._closed or self._opened != list(range(1, len(self._opened) + 1)):
            raise PromiseBroken(f"incidents {self._opened} opened, {self._closed} closed")
        if self._ruled and finish.exit_code not in (ExitCode.OK, ExitCode.STATE_LOST):
            return
        kinds = {fault.kind for fault in self.struck}
        match finish.exit_code:
            case ExitCode.OK:
                self._trained()
            case ExitCode.SCRIPT_FAILED:
                # Connections that break again in the same step are taken for the script's doing.
                twice = sum(fault.kind is FaultKind.LINK for fault in self.struck) > 1
                failed = twice or bool(kinds & SCRIPT_KINDS)
                self._require(finish, failed, "the script did not fail")
            case ExitCode.NO_SPARE:
                spares = len(before.config.spares) + len(before.config.extras)
                hurt = len(self.hurt_nodes | self.unwanted)
                self._require(finish, hurt > spares, "a spare is left")
                self._require(finish, not after.free, "a spare is left")
            case ExitCode.STATE_LOST:
                self._lost(before, after, finish)
            case ExitCode.STOPPED_IN_TIME:
                self._require(finish, FaultKind.LIMIT in kinds, "the limit is far")
            case ExitCode.START_FAILED | ExitCode.RECOVERY_FAILED:
                self._require(finish, bool(kinds), "nothing was struck")
            case _:
                pass
        if len(self.struck) == 1 and before.config.spares and before.begun:
            self._one_fault(before, finish)

    def _trained(self) -> None:
        """Every rank came to the last step, and has what an undisturbed run has."""
        cluster = self._cluster
        if not cluster.scenario.attaches:
            return
        last = cluster.scenario.last_step
        for rank in (each.rank for each in cluster.launcher.state.present()):
            state = cluster.current[rank].state
            if self._shrunk and state.step != last:
                raise PromiseBroken(f"rank {rank} ends at step {state.step}, not {last}")
            if not self._shrunk and not state.equals(cluster.layout.expected(rank, last)):
                raise PromiseBroken(f"rank {rank} ends with a wrong value, step {state.step}")

    def _lost(self, before: JobState, after: JobState, finish: Finish) -> None:
        """No step was whole in memory or on disk, where that is what the verdict says; not even if
        a node was given up just before because it did not tell what it has.
        """
        if "no step is whole" not in finish.reason and "no copy of any step" not in finish.reason:
            return
        refused = before.incident.refused if before.incident is not None else frozenset()
        whole = self._cluster.newest_whole(after, refused)
        self._require(finish, whole < 0, f"step {whole} is whole in memory")
        newest = self._cluster.disk.newest(refused)
        self._require(finish, newest is None, f"the checkpoint of step {newest} is good")
        copied = before.unprotected == 0 and not any(f.kind in _COPY_KINDS for f in self.struck)
        if copied and len(self.struck) <= self._covers:
            raise PromiseBroken(f"{len(self.struck)} faults of {self._covers}: {finish.reason}")

    def _one_fault(self, before: JobState, finish: Finish) -> None:
        """One fault never ends a job that trains while a spare is left, unless it is the script's
        own.
        """
        fault = self.struck[0]
        if fault.kind in SCRIPT_KINDS or finish.exit_code in (
            ExitCode.OK,
            ExitCode.TERMINATED,
            ExitCode.INTERRUPTED,
            ExitCode.STOPPED_IN_TIME,
        ):
            return
        if before.steps_over or any(rank.steps_ended for rank in before.present()):
            return  # ranks that have left their steps cannot be unwound
        held = all(before.holders.get(rank.rank) for rank in before.present())
        if self._struck_bare_at > -inf or not held:
            return  # no other node was up that could hold a replica, and people were told so
        if not self._covers and self.common_step < 1:
            return  # in the first steps, before each rank's first replica was confirmed
        if fault.kind is FaultKind.SLOW and "give --collective-timeout" in finish.reason:
            return  # its steps take longer than the user said that any does
        raise PromiseBroken(f"one fault ({fault}) ends the job: {finish.reason}")

    def _require(self, finish: Finish, holds: bool, otherwise: str) -> None:
        if not holds:
            raise PromiseBroken(f"the verdict is false ({otherwise}): {finish.reason}")
