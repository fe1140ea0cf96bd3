"""The process of a rank, as a small machine that obeys the launcher as the real runtime does.

    new -> script -> attached -> compute <-> collective -> confirm -> (compute | waiting) -> over
                                    |  a Revoke, from anywhere in the steps
                                    v
               parking -> parked -> rebuild -> fetch (-> share) -> restored -> compute

A message or a timer finds the process in some mode and does nothing if it is no longer wanted
there. What ranks do together is in ``training.py``, how copies leave a rank in ``copying.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

from deadpool_launch.sim.modes import IN_STEP, UNWINDS, Mode
from deadpool_launch.sim.training import SHARING, Meeting
from deadpool_launch.sim.values import State, after_step
from deadpool_runtime import protocol
from deadpool_runtime.replication.naming import members
from deadpool_runtime.replication.slotting import SlotTable

if TYPE_CHECKING:
    from deadpool_launch.sim.agents import Agent

#: How long an exception waits for the launcher's word.
VERDICT_S = 120.0
#: How long a rank tries to connect to its peers.
CONNECT_S = 1.5
#: What a lost peer looks like to those that wait for it.
PEER_GONE = "RuntimeError: Connection closed by peer [10.0.0.1]:4242"
#: How long a script without the runtime runs.
BARE_SCRIPT_S = 2.4


class Process:
    """One process of one rank."""

    def __init__(self, agent: Agent, rank: int, born: int) -> None:
        self.agent = agent
        self.cluster = agent.cluster
        self.queue = agent.cluster.queue
        self.node = agent.node
        self.rank = rank
        self.born = born
        self.mode = Mode.NEW
        #: The newest epoch that was declared, and the one whose groups the steps use.
        self.newest = 0
        self.epoch = 0
        self.state: State = self.cluster.layout.expected(rank, 0)
        self.announced = False
        self.plan: protocol.Plan | None = None
        #: Ranks that take no part in the groups that were built last.
        self.aside: frozenset[int] = frozenset()
        self.meeting: Meeting | None = None
        #: The past and value of the shards that it brings, by rank.
        self.brought: dict[int, tuple[int, int]] = {}
        #: The newest step whose replica is confirmed, or known not to be made.
        self.confirmed = -1
        self.given_up = -1
        #: What was confirmed when a confirmation was last given up; None if none was.
        self.gave_up_at: int | None = None
        self.unprotected = 0
        #: The sum that the optimizer's step waits with.
        self._total = 0
        self.holder: protocol.Holder | None = None
        #: Whether the launcher has chosen a holder, and in which epoch.
        self.chosen = 0
        #: Other ranks still fetch what they need, and a replica waits for that.
        self.restoring = False
        self.postponed = False
        self.protected = 0
        #: The copy that is being made, and the newest that is whole.
        self.unsealed: State | None = None
        self.sealed: protocol.Copy | None = None
        self.sealed_state: State = self.state
        #: The newest of which there are to be replicas.
        self.offered: tuple[protocol.Copy, State] | None = None
        self.slots = SlotTable(self.cluster.config.replication_interval)
        #: When the present step began, and since when its collective is waited in.
        self.since = 0.0
        self.waits_since = 0.0
        #: It does not come to the collective of its step.
        self.hung = False
        #: The script came to its end, and no peer waits for this process any more.
        self.ended = False
        #: The script ended with an exception.
        self.failed = False
        self.frozen = False
        self.deaf = False
        #: The launcher's word to begin no step after this one; None if there is none.
        self.halt: protocol.Hold | protocol.HoldAfter | None = None
        self._halt_after = 0
        #: It parks from a boundary, where every copy becomes whole.
        self.at_rest = False
        self.unkillable = False
        self.corrupt = False
        self._postponed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    # ------------------------------------------------------------ time

    def when(self, most_s: float, what: Callable[..., None], *args: Any) -> None:
        """Do something after a random while, unless the process is gone; later if it is frozen."""
        delay_s = self.queue.delay(most_s) * self.cluster.network.factor(self.node)
        self.queue.later(delay_s, self._do, what, args)

    def _do(self, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.mode is Mode.GONE:
            return
        if self.frozen:
            self._postponed.append((what, args))
        else:
            what(*args)

    def freeze(self) -> None:
        """The process stops."""
        self.frozen = True

    def thaw(self) -> None:
        """It goes on."""
        self.frozen = False
        postponed, self._postponed = self._postponed, []
        for what, args in postponed:
            self.when(0.01, what, *args)

    def say(self, body: protocol.FromRank) -> None:
        """Tell the launcher, through the agent."""
        self.agent.pass_on(self, body)

    # ------------------------------------------------------------ the begin and the end

    def start(self) -> None:
        """The process was forked."""
        if self.node not in self.cluster.slow_starts:
            self.when(0.2, self.say, protocol.RankUp(1, 9000))

    def exit(self, code: int | None = None, signal: int | None = None) -> None:
        """The process ends, and its agent sees it."""
        if self.vanish():
            self.agent.report_exit(self, code, signal)
            if code != 0 and not self.ended:
                self.cluster.training.peer_lost(self.epoch)

    def vanish(self) -> bool:
        """The process is gone and nobody says so; False if it was before."""
        if self.mode is Mode.GONE:
            return False
        self.mode = Mode.GONE
        self._leave_meeting()
        return True

    def fail(self, error: str) -> None:
        """An exception ends the script."""
        self._leave_meeting()
        self.mode, self.failed = Mode.OVER, True
        self.say(protocol.ScriptFailed(error, "traceback", 1))
        self.when(0.2, self.exit, 1)

    def say_last(self) -> None:
        """What the process said before its end arrives, whatever stands behind its rank by then."""
        self.say(protocol.RankUp(1, 9000))
        self.say(protocol.ScriptFailed(PEER_GONE, "traceback", 1))

    def end(self) -> None:
        """The script comes to its end."""
        self.mode, self.ended = Mode.OVER, True
        self.say(protocol.ScriptEnded())
        self.when(0.2, self.exit, 0)

    def waits_in(self, epoch: int) -> bool:
        """Whether the process waits for others in this epoch."""
        meets = Mode.COLLECTIVE, Mode.REBUILD, Mode.SHARE
        return self.newest == epoch and self.mode in meets

    def _leave_meeting(self) -> None:
        if self.meeting is not None:
            self.meeting.leave(self)
            self.meeting = None

    # ------------------------------------------------------------ the launcher's word

    def take(self, body: protocol.ToRank) -> None:
        """A message arrives at the process."""
        if self.mode is not Mode.GONE:
            self._do(self._hear, (body,))

    def _hear(self, body: protocol.ToRank) -> None:
        match body:
            case protocol.Begin():
                self.newest = self.epoch = max(self.newest, body.epoch)
                self.mode = Mode.BUILDING if body.replacement else Mode.SCRIPT
                self.when(0.5, self._first_step, body.epoch)
            case protocol.Revoke(epoch=epoch):
                self._revoke(epoch)
            case protocol.Protect(epoch=epoch, holder=holder):
                self.cluster.copying.choose(self, epoch, holder)
                if self.mode is Mode.ATTACHED and self.newest == self.epoch:
                    self.begin_step()
            case protocol.Plan():
                if self.mode is Mode.PARKED and body.epoch == self.newest and not self.deaf:
                    self.plan, self.aside = body, frozenset(body.aside)
                    self.cluster.arenas.aside_in[body.epoch] = self.aside
                    self.mode = Mode.REBUILD
                    self.when(0.05, self._come_to_rebuild, body.epoch)
            case protocol.Resume(epoch=epoch):
                if self.mode is Mode.RESTORED and self.newest == epoch:
                    self._resume(epoch)
            case protocol.Hold() | protocol.HoldAfter() | protocol.GoOn():
                if body.epoch == self.newest == self.epoch and not self.deaf:
                    self._hold_back(body)
            case protocol.RaiseIt():
                if self.mode is Mode.RAISED:
                    self.fail("raised in a step")
            case protocol.AllEnded():
                if self.mode is Mode.WAITING:
                    self.mode = Mode.OVER
                    self.when(0.2, self.end)
            case _:
                assert_never(body)

    def _revoke(self, epoch: int) -> None:
        if epoch <= self.newest or self.deaf:
            return
        self.newest = epoch
        if self.mode in UNWINDS:
            self.at_rest = self.mode is Mode.HELD
            self.hung = False
            self._park()
        elif self.mode is Mode.SCRIPT and self.queue.dice.random() < 0.5:
            # Its peers are gone in the middle of what it builds with them.
            self.when(0.2, self._fail_in_script)
        elif self.mode is Mode.SCRIPT and self.cluster.scenario.attaches:
            self.mode = Mode.BUILDING

    def _fail_in_script(self) -> None:
        if self.mode in (Mode.SCRIPT, Mode.BUILDING):
            self.fail(PEER_GONE)

    # ------------------------------------------------------------ held back

    def _hold_back(self, body: protocol.Hold | protocol.HoldAfter | protocol.GoOn) -> None:
        same = self.halt is not None and self.halt.number == body.number
        match body:
            case protocol.Hold():
                begun = self.state.step + (self.mode in IN_STEP or self.mode is Mode.RAISED)
                self.halt, self._halt_after = body, begun
                self.say(protocol.Holding(self.epoch, body.number, begun))
            case protocol.HoldAfter() if same:
                self.halt, self._halt_after = body, body.step
                self._go_on()
            case protocol.GoOn() if same:
                self.halt = None
                self._go_on()

    def _go_on(self) -> None:
        if self.mode is Mode.HELD:
            self.begin_step()

    def _is_held(self) -> bool:
        """Whether the next step may not begin; says so where all are to wait."""
        halt = self.halt
        if halt is None or self.state.step < self._halt_after:
            return False
        self.mode = Mode.HELD
        if isinstance(halt, protocol.HoldAfter):
            if halt.save:
                self.cluster.copying.save(self)
            self.say(protocol.AtBoundary(self.epoch, halt.number, self.state.step))
        return True

    # ------------------------------------------------------------ steps

    def _first_step(self, epoch: int) -> None:
        if self.mode is Mode.BUILDING:
            self._park()
            return
        if self.mode is not Mode.SCRIPT:
            return
        if not self.cluster.scenario.attaches:
            self.when(BARE_SCRIPT_S, self._bare_end)
            return
        self._announce()
        self.mode = Mode.ATTACHED
        self._completed()

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            segments = self.cluster.layout.segments[self.rank]
            sizes = [protocol.SegmentSize(ranks, 100) for ranks in segments]
            replica, fixed = self.cluster.layout.replica_of(self.rank)
            shares = self.cluster.layout.shares
            self.say(protocol.Attached("simulated", sizes, 10, 0, list(replica), fixed, shares))

    def _bare_end(self) -> None:
        if self.mode is Mode.SCRIPT:
            self.end()

    def begin_step(self) -> None:
        """Begin the step after the present state, if there is one."""
        if self.state.step == self.cluster.scenario.last_step:
            self.mode = Mode.WAITING
            self.say(protocol.StepsEnded(self.epoch, self.state.step))
            return
        if self._is_held():
            return
        self.mode = Mode.COMPUTE
        self.since = self.queue.now
        self.cluster.training.begun(self.epoch, self.state.step)
        self.when(0.3, self._come_to_collective, self.epoch, self.state.step)

    def _come_to_collective(self, epoch: int, step: int) -> None:
        if self.mode is Mode.COMPUTE and self._is_at(epoch, step) and not self.hung:
            self.mode = Mode.COLLECTIVE
            self.waits_since = self.queue.now
            self.meeting = self.cluster.training.meet(self, epoch, step)

    def standing(self) -> protocol.Standing | None:
        """What its agent can see of the step that it is in; None if it is in none."""
        if self.mode not in IN_STEP:
            return None
        now = self.queue.now
        waits = self.mode is Mode.COLLECTIVE
        entered = self.state.step + (self.mode is not Mode.COMPUTE)
        wait_s = now - self.waits_since if waits else 0.0
        group = protocol.GroupStanding("0", entered, entered, waits, "all_reduce", wait_s)
        step = self.state.step + 1
        return protocol.Standing(self.rank, self.born, self.epoch, step, now - self.since, [group])

    def _is_at(self, epoch: int, step: int) -> bool:
        return self.epoch == epoch == self.newest and self.state.step == step

    def summed(self, epoch: int, step: int, total: int) -> None:
        """The collective of the step after ``step`` is over on this rank."""
        if self.mode is not Mode.COLLECTIVE or not self._is_at(epoch, step):
            return
        self.meeting = None
        wanted = self.slots.newest_replicated(step)
        if wanted < 1 or self.confirmed >= wanted:
            self._optimize(total)
        elif self.gave_up_at is not None and self.confirmed <= self.gave_up_at:
            self.unprotected += 1
            self._optimize(total)
        else:
            self.mode = Mode.CONFIRM
            self._total = total
            if self.given_up >= wanted:
                self._go_unprotected(epoch, step)
            else:
                self.queue.later(
                    self.cluster.confirm_s, self._do, self._go_unprotected, (epoch, step)
                )

    def _go_unprotected(self, epoch: int, step: int) -> None:
        if self.mode is Mode.CONFIRM and self._is_at(epoch, step):
            self.unprotected += 1
            self.gave_up_at = self.confirmed
            self._optimize(self._total)

    def confirm(self, epoch: int, step: int) -> None:
        """A replica of the step is kept elsewhere."""
        if epoch < self.epoch or self.mode is Mode.GONE:
            return
        self.confirmed = max(self.confirmed, step)
        if self.protected < epoch == self.chosen:
            self.protected = epoch
            self.say(protocol.Protected(epoch, step))
        wanted = self.slots.newest_replicated(self.state.step)
        if self.mode is Mode.CONFIRM and self.confirmed >= wanted:
            self._optimize(self._total)

    def _optimize(self, total: int) -> None:
        lineage = self.cluster.lineages.extend(self.state.lineage, self.state.step + 1, self.epoch)
        self.state = after_step(self.state, total, lineage)
        self._completed()
        self.begin_step()

    def _completed(self) -> None:
        """The state of a step is complete: tell, and copy it."""
        self.cluster.promises.completed(self.rank, self.node, self.state)
        done = protocol.StepDone(
            epoch=self.epoch,
            step=self.state.step,
            duration_s=0.1,
            blocked_s=0.0,
            loss=None,
            unprotected=self.unprotected,
        )
        self.say(done)
        self.cluster.copying.begin(self)

    def broken(self, epoch: int, step: int | None) -> None:
        """The process notices that a peer which it waits for is lost."""
        if step is None or step == SHARING:
            self._not_connected(epoch)
        elif self.mode is Mode.COLLECTIVE and self._is_at(epoch, step):
            self.raise_in_step(PEER_GONE)

    def break_script(self, epoch: int) -> None:
        """A script without the runtime notices that a peer is lost."""
        if self.mode is Mode.SCRIPT and self.epoch == epoch:
            self.fail(PEER_GONE)

    def raise_in_step(self, error: str) -> None:
        """An exception leaves the body of the step."""
        self._leave_meeting()
        self.mode = Mode.RAISED
        self.say(protocol.StepRaised(self.epoch, self.state.step + 1, error))
        self.queue.later(VERDICT_S, self._do, self._no_verdict, (self.epoch, self.state.step))

    def _no_verdict(self, epoch: int, step: int) -> None:
        if self.mode is Mode.RAISED and self._is_at(epoch, step):
            self.fail("raised in a step")

    # ------------------------------------------------------------ recovery

    def _park(self) -> None:
        self._leave_meeting()
        self.mode = Mode.PARKING
        self.when(0.2, self._parked)

    def _parked(self) -> None:
        if self.mode is Mode.PARKING:
            self.cluster.copying.settle(self)
            self._announce()
            self.mode = Mode.PARKED
            self.say(protocol.Parked(self.newest, 0.01))

    def _come_to_rebuild(self, epoch: int) -> None:
        if self.mode is Mode.REBUILD and self.newest == epoch:
            self.meeting = self.cluster.training.meet(self, epoch, None)
            self.queue.later(CONNECT_S, self._do, self._not_connected, (epoch,))

    def rebuilt(self, epoch: int) -> None:
        """All ranks rebuilt their groups."""
        if self.mode is Mode.REBUILD and self.newest == epoch:
            self.meeting = None
            self.mode = Mode.FETCH
            self.say(protocol.GroupsRebuilt(epoch, 1))
            self.when(0.2, self._restore, epoch)

    def _not_connected(self, epoch: int) -> None:
        """A peer did not come, cannot be reached or was lost: a newer epoch is to follow."""
        if self.mode in (Mode.REBUILD, Mode.SHARE) and self.newest == epoch:
            self._leave_meeting()
            self.mode = Mode.REFUSED
            self.say(protocol.NotConnected(epoch, "connection timed out"))

    def _restore(self, epoch: int) -> None:
        plan = self.plan
        if self.mode is not Mode.FETCH or self.newest != epoch or plan is None:
            return
        found = self.cluster.copying.fetched(self, plan)
        brought = {} if isinstance(found, str) else self.cluster.copying.shards(self, plan, found)
        if isinstance(found, str) or isinstance(brought, str):
            self.mode = Mode.REFUSED
            why = found if isinstance(found, str) else str(brought)
            self.say(protocol.RestoreFailed(epoch, plan.step, why))
            return
        self.state, self.sealed, self.brought = found.state, found.copy, brought
        self.sealed_state = found.state
        if not plan.former:
            self._restored(epoch, plan)
            return
        self.mode = Mode.SHARE
        self.meeting = self.cluster.training.meet(self, epoch, SHARING)
        self.queue.later(CONNECT_S, self._do, self._not_connected, (epoch,))

    def shared(self, epoch: int, shards: dict[int, int]) -> None:
        """All ranks have brought their shards: this one takes what falls to it."""
        if self.mode is Mode.SHARE and self.newest == epoch and self.plan is not None:
            self.meeting = None
            self.state = self.cluster.layout.shared_anew(self.rank, self.state, shards)
            if self.plan.checkpoint or self.rank not in members(self.plan.former):
                self.sealed = self.cluster.copying.anew(self, epoch)
                self.sealed_state = self.state
            self._restored(epoch, self.plan)

    def _restored(self, epoch: int, plan: protocol.Plan) -> None:
        if self.corrupt:
            self.corrupt = False
            self.state = self.cluster.spoilt(self.rank, self.state)
        self.mode = Mode.RESTORED
        digests = self.cluster.arenas.digests(self.rank, self.state)
        self.say(protocol.Restored(epoch, plan.step, digests))
        self.offered = None if self.sealed is None else (self.sealed, self.sealed_state)
        self.cluster.copying.choose(self, epoch, plan.holder, restoring=True)

    def _resume(self, epoch: int) -> None:
        self.epoch = epoch
        self.halt = None
        waited_for = self.cluster.config.replication_interval > 1 and self.protected < epoch
        self.confirmed = self.state.step - 1 if waited_for else self.state.step
        self.given_up, self.gave_up_at = -1, None
        self.cluster.copying.resumed(self)
        self.cluster.resumed(self, epoch)
        self.begin_step()
