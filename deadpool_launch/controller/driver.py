"""Drives the controller: feeds it events one by one, performs its actions, keeps the journal.

One asyncio task, one queue. Nothing here decides; ``core.step`` does. What only the driver has: the
back end's handles on agents, and the connections. Each event is in the state log before it is
answered, so that another driver can go on from there (``take_over``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

from deadpool_launch import faults
from deadpool_launch.agents import AgentServer
from deadpool_launch.backends.base import Backend
from deadpool_launch.controller import core, events, mail, persist, roles, takeover
from deadpool_launch.controller.checkpoints import earlier
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.quarantine import left_out
from deadpool_launch.controller.states import Phase, State, initial_state
from deadpool_launch.driving.agent_processes import AgentProcesses
from deadpool_launch.driving.commits import Commits
from deadpool_launch.driving.mover_world import MoverWorld
from deadpool_launch.driving.recorder import Recorder
from deadpool_launch.driving.strikes import Strikes
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import Journal
from deadpool_launch.movers import MoverStep
from deadpool_launch.questions import Questions, stays_text
from deadpool_launch.statelog import StateLog
from deadpool_launch.succession import result
from deadpool_launch.succession.lead import CutOff, Lead, Superseded
from deadpool_launch.watch import Watch
from deadpool_runtime import protocol

#: Time an agent has to end its ranks and leave, beyond the ranks' grace.
LEAVE_S = 4.0
_LAST_ORDER = (1 << 63) - 1
_RESULT_POLL_S = 0.5
_CUT_OFF = events.Finish(
    "stopped",
    ExitCode.NO_SPARE,
    "more than half of the nodes cannot be reached, and nobody says that another launcher leads",
    "",
)
#: How a launcher comes about that its supervisor starts.
IN_PLACE = "started again from its journal"
#: What reaches beyond the agents, so that none of them can refuse it.
_NO_TERM_FENCES_OFF = (
    events.StartAgent,
    events.FenceNode,
    events.CommitCheckpoint,
    events.Finish,
    # An operator takes it for what will happen.
    events.Answered,
)


class JobDriver:
    """Runs one job from the first agent to the verdict; ``run`` returns the exit code."""

    def __init__(
        self,
        *,
        config: Config,
        backend: Backend,
        journal: Journal,
        spec: protocol.JobSpec,
        secret: bytes,
        state_log: StateLog,
        listening: socket.socket,
        run_dir: Path,
        agent_argv: Callable[[str, str, int, int], list[str]],
        launcher_host: str,
        fault_plan: dict[int, faults.Fault],
        movers: MoverStep | None = None,
        poll_s: float = 0.0,
        reserve_s: float = 0.0,
        ends_at: float | None = None,
        standby_launchers: int = 0,
        host: str | None = None,
    ) -> None:
        #: Another host's clock is another one: it is made to go on from that of the last launcher.
        self._clock: Callable[[], float] = time.monotonic
        self._standby_launchers = standby_launchers
        self._host = host
        self._config = config
        self._backend = backend
        self._journal = journal
        self._log = state_log
        self._listening = listening
        self._spec = spec
        self._run_dir = run_dir
        self._agent_argv = agent_argv
        self._launcher_host = launcher_host
        self._secret = secret
        self._term = 1
        self._state: State = initial_state(config)
        #: Events, each with the number of the report it came with, 0 for none.
        self._queue: asyncio.Queue[tuple[events.Event, int]] = asyncio.Queue()
        self._mail: dict[str, mail.Mailbox] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pids: dict[int, int] = {}
        self._finish: events.Finish | None = None
        #: Whether a node that keeps the log has to be given its beginning.
        self._begin_due = False
        #: The nodes when it was last settled which ones keep it.
        #: What decided on the nodes that keep the log when they were last chosen.
        self._settled: tuple[object, object] = (None, None)
        #: The time of the newest event.
        self._known_at = self._clock()
        self._lead = self._make_lead()
        self._questions = Questions(self._emit, self._now, self.standing, host)
        self._server = self._make_server()
        self._watch = Watch(
            backend,
            config.nodes,
            poll_s,
            reserve_s,
            ends_at,
            self._emit,
            journal.say,
            self._now,
        )
        self._agents = AgentProcesses(
            backend=backend,
            log=state_log,
            directory=run_dir / "logs",
            argv=self._argv_of,
            spawn=self._spawn,
            wanted=self._is_to_start,
            awaited=lambda node: self._finish is None and node not in self._server.links,
            failed=lambda node, reason: self._emit(
                events.AgentStartFailed(self._clock(), node, reason)
            ),
        )
        self._commits = Commits(config, journal, self._emit, self._now)
        self._recorder = Recorder(journal, self._now, self._state)
        self._strikes = Strikes(fault_plan, backend, journal, self._spawn)
        self._movers = MoverWorld(movers, state_log)

    def begin_log(self) -> None:
        """Write down what is known: from then on another launcher can take over."""
        self._log.begin(self._known())

    async def run(self) -> int:
        """Run the job to its verdict, end everything it started, return the exit code.

        Only a defect raises; what was started is left as it is then, for ``end`` or for another
        launcher.
        """
        await self._server.listen(self._listening)
        self._emit(events.JobStarted(self._clock()))
        return await self._to_the_end()

    async def go_on(self, ended: str, ended_at: float, how: str = IN_PLACE) -> int:
        """``run``, after ``take_over``. ``ended``: how the launcher before ended; ``ended_at``:
        when, on the launcher's clock; ``how`` this one came about.
        """
        # The term is on record before any agent hears of it.
        self.begin_log()
        await self._server.listen(self._listening)
        if self._state.phase is Phase.NEW:
            self._emit(events.JobStarted(self._clock()))
        else:
            try:
                await self._resume(ended, ended_at, how)
            except CutOff:
                self._finish = _CUT_OFF
            except Superseded as other:
                return await self.stand_by(str(other))
        return await self._to_the_end()

    async def end(self, finish: events.Finish) -> int:
        """Give the job this verdict, after ``run`` raised or after ``take_over``; ends everything
        that was started, and returns the exit code.
        """
        if self._finish is None:
            self._finish = finish
        await self._server.listen(self._listening)
        await self._server.returned(
            takeover.expected_back(self._state), self._config.heartbeat_timeout_s
        )
        return await self._to_the_end()

    async def _to_the_end(self) -> int:
        self._spawn(self._watch.run())
        try:
            while self._finish is None:
                await self._handle(*await self._next_event())
        except CutOff:
            self._finish = _CUT_OFF
        except Superseded as other:
            return await self.stand_by(str(other))
        finish = self._finish
        self._questions.refuse(f"the job has ended: {finish.reason}")
        # Said before the nodes are tidied up, which may take seconds where one is dead.
        self._journal.say(describe_exit(finish))
        self._say_newest_checkpoint(finish)
        await self._end_everything()
        self._journal.write(
            "end",
            verdict=finish.verdict,
            exit_code=finish.exit_code,
            reason=finish.reason,
            exclude=list(left_out(self._state)),
        )
        ended = result.Result(
            finish.verdict, finish.exit_code, finish.reason, self._host or "", self._term
        )
        # In this order: a launcher that is started again between the two knows that all is over.
        result.record(self._run_dir, ended)
        self._log.remove()
        return finish.exit_code

    async def stand_by(self, node: str) -> int:
        """Another launcher leads: do nothing more, and end with its exit code. Not before it: the
        end of the batch script is the end of the job.
        """
        print(
            f"deadpool-launch: the launcher on {node} has taken over; this one waits for its "
            "verdict and does nothing else",
            file=sys.stderr,
            flush=True,
        )
        self._questions.refuse(f"the launcher on {node} leads this job now: ask once more")
        for task in (*self._tasks, *self._commits.tasks):
            task.cancel()
        await self._server.close()
        self._backend.leave()
        result.wait_for_verdict(self._run_dir)
        while (found := result.recorded(self._run_dir)) is None:
            while not self._queue.empty():
                event, _ = self._queue.get_nowait()
                if isinstance(event, events.StopRequested):
                    return 128 + event.signal
            await asyncio.sleep(_RESULT_POLL_S)
        return found.exit_code

    def _make_server(self) -> AgentServer:
        return AgentServer(
            secret=self._secret,
            spec=self._spec,
            expected=set(self._config.nodes),
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
            emit=self._emit,
            note=self._journal.say,
            mail=self._mail,
            answer=self._questions.ask,
            term=self._term,
            clock=self._clock,
            lead=self._lead,
            on_admitted=self._admitted,
        )

    def _make_lead(self) -> Lead:
        lead = Lead(
            wanted=self._standby_launchers,
            host=self._host,
            nodes=self._config.nodes,
            send=lambda node, message: self._server.tell(node, message),
            linked=lambda: self._server.links,
            followed_by=lambda: result.successor(self._run_dir, self._term),
            heartbeat_timeout_s=self._config.heartbeat_timeout_s,
            give_up_s=self._spec.launcher_grace_s,
            note=self._journal.say,
            clock=self._clock,
        )
        self._log.on_record = lead.record
        return lead

    def _admitted(self, node: str) -> None:
        """An agent connected: one that keeps the log is given its beginning with the next event.
        (Not now: an event may be in the log and not yet in what is known.)
        """
        if self._lead.came(node):
            self._begin_due = True

    @property
    def finish(self) -> events.Finish | None:
        """The verdict, once there is one."""
        return self._finish

    def standing(self) -> protocol.JobStanding:
        """How the job stands."""
        return roles.standing(self._state, self._term)

    @property
    def job_id(self) -> str:
        """The job's, by which its site knows it."""
        return self._spec.job_id

    @property
    def made_progress(self) -> bool:
        """Whether the same job run again would come further: a step was completed, or the script
        keeps its steps to itself.
        """
        state = self._state
        return state.newest > state.begun_at or (state.begun and not state.attached)

    def request_stop(self, signum: int) -> None:
        """The launcher got a signal that asks for the end."""
        if signum == signal.SIGUSR1:
            self._watch.asked_to_end()
        elif signum != signal.SIGTERM or not self._watch.terminated():
            self._emit(events.StopRequested(self._clock(), signum))

    # ------------------------------------------------------------ after another launcher

    def take_over(
        self, kept: persist.Kept, term: int | None = None, lost_for_s: float | None = None
    ) -> None:
        """Know what the launcher before knew (``takeover.replayed``), and have the next term, or
        this one. ``lost_for_s``: on another host, how long ago that launcher was heard last.
        """
        self._term = term or kept.term + 1
        if lost_for_s is not None:
            ahead_s = kept.at + lost_for_s - time.monotonic()
            self._clock = lambda: time.monotonic() + ahead_s
        self._known_at, self._state, self._mail = kept.at, kept.state, kept.mail
        self._pids, self._finish = kept.pids, kept.finish
        nodes = self._state.nodes
        self._watch.was_told({name: node.slurm for name, node in nodes.items() if node.slurm})
        self._lead = self._make_lead()
        self._server = self._make_server()
        saved = dict(kept.handles)
        self._movers.take_over(saved)
        self._agents.adopt(saved)

    async def _resume(self, ended: str, ended_at: float, how: str) -> None:
        """Wait for the agents, then do again what the launcher before may not have come to.

        No patience is used up while nobody listened. What an agent said meanwhile, and what it was
        told and did not hear, is in the mail. An agent that is not back within the heartbeat
        time-out is lost like one that falls silent.
        """
        missing = await self._server.returned(
            takeover.expected_back(self._state), self._config.heartbeat_timeout_s
        )
        now = self._clock()
        there = {rank for link in self._server.links.values() for rank in link.ranks}
        who = takeover.who_is_back(self._state, missing, there)
        self._state = takeover.with_later_deadlines(self._state, now - self._known_at)
        self._known_at = now
        self._lead.settle(roles.serving(self._state))
        self.begin_log()
        # What the launcher before ordered is done again; it may have been another one's turn since.
        await self._lead.confirmed(now)
        self._journal.say(
            f"the launcher ended ({ended}); {how} in "
            f"{now - ended_at:.1f} s, term {self._term}; {who}"
        )
        for name in sorted(missing):
            evidence = "its agent did not come to the new launcher"
            self._emit(events.AgentLost(now, name, evidence, "inferred"))
        for name, node in self._state.nodes.items():
            if node.stage is AgentStage.GONE:
                self._agents.end(name)
            elif name in self._agents:
                self._agents.watch(name)
            elif node.stage is AgentStage.STARTING:
                self._agents.begin(name, self._state.epoch, node.born)
        for epoch, step in self._state.committing:
            self._perform(events.CommitCheckpoint(step, epoch))
        self._movers.keep(self._state)

    def _known(self) -> persist.Kept:
        return persist.Kept(
            self._term,
            self._known_at,
            self._state,
            self._mail,
            {**self._agents.saved, **self._movers.saved},
            self._pids,
            self._finish,
        )

    # ------------------------------------------------------------ events

    def _now(self) -> float:
        """The time; another launcher's clock may be put in the place of this one's later."""
        return self._clock()

    def _emit(self, event: events.Event, number: int = 0) -> None:
        self._queue.put_nowait((event, number))

    async def _next_event(self) -> tuple[events.Event, int]:
        deadline = self._state.next_deadline()
        if deadline is None:
            return await self._queue.get()
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                return await self._queue.get()
        except TimeoutError:
            return events.Tick(self._clock()), 0

    async def _handle(self, event: events.Event, number: int) -> None:
        state, actions = core.step(self._state, event)
        if self._clock() > self._server.awake_at + self._config.heartbeat_timeout_s / 2:
            # This process stood still: what it knows may be long out of date.
            await self._lead.confirmed(self._clock())
        elif isinstance(event, events.AgentLost) or any(
            isinstance(action, _NO_TERM_FENCES_OFF) for action in actions
        ):
            await self._lead.confirmed(event.at)
        self._log.event(event, number)
        if actions:
            await self._lead.copied()
        mail.note_heard(self._mail, event, number)
        self._recorder.event(self._state, event)
        if isinstance(event, events.RankSaid):
            self._note_message(event)
        self._known_at = event.at
        self._state = state
        for action in actions:
            for node, order, body in mail.post(self._mail, self._state, action):
                self._server.send(node, order, body)
            self._perform(action)
        self._recorder.parts(self._state)
        self._movers.keep(self._state)
        self._settle_standbys()
        if self._begin_due or self._log.full:
            self._begin_due = False
            self.begin_log()
        await self._lead.count_anew()

    def _settle_standbys(self) -> None:
        """Have the log kept on nodes that serve, once all that are needed at first do."""
        if self._state.phase in (Phase.NEW, Phase.AGENTS):
            return
        stages, seats = self._state.nodes.stages, self._state.seats
        if stages is not self._settled[0] or seats is not self._settled[1]:
            self._settled = (stages, seats)
            self._begin_due = self._lead.settle(roles.serving(self._state)) or self._begin_due

    def _note_message(self, said: events.RankSaid) -> None:
        """What the driver itself makes of what a rank says."""
        match said.body:
            case protocol.RankUp(pid=pid):
                self._pids[said.rank] = pid
            case protocol.FaultPoint(step=step):
                node = self._state.node_of(said.rank)
                self._strikes.strike(node, said.rank, step, self._pids)

    # ------------------------------------------------------------ actions

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.StartAgent(node=node, born=born):
                self._server.drop(node)
                self._agents.begin(node, self._state.epoch, born)
            case events.FenceNode(node=node):
                # Nothing that an agent of this node says counts any more.
                self._server.drop(node)
                self._agents.end(node)
            case events.Answered():
                self._questions.answered(action)
            case events.ReleaseNode(node=node):
                if node == self._host:
                    self._journal.say(stays_text(node))
            case (
                events.StartRanks()
                | events.KillRanks()
                | events.Tell()
                | events.TakeInventory()
                | events.TakeStandings()
                | events.TakeStacks()
                | events.TryPaths()
            ):
                pass  # a message; it is in the mail
            case events.CommitCheckpoint():
                self._commits.begin(action, lambda: earlier(self._state))
            case events.Say(text=text):
                self._journal.say(text)
            case events.IncidentOpened() | events.IncidentMark() | events.IncidentClosed():
                self._recorder.incident(self._state, action)
            case events.Finish():
                self._finish = action
            case _:
                assert_never(action)

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _argv_of(self, node: str, epoch: int, born: int) -> list[str]:
        port = self._listening.getsockname()[1]
        return self._agent_argv(node, f"{self._launcher_host}:{port}", epoch, born)

    def _is_to_start(self, node: str, born: int) -> bool:
        known = self._state.nodes[node]
        return known.born == born and known.stage is AgentStage.STARTING

    def _say_newest_checkpoint(self, finish: events.Finish) -> None:
        """Where a job that did not come to its end can be taken up."""
        if finish.exit_code != ExitCode.OK and self._state.checkpoints:
            step, directory = max(self._state.checkpoints), self._config.checkpoint_dir
            self._journal.say(f"the newest durable checkpoint is that of step {step}: {directory}")

    # ------------------------------------------------------------ the end

    async def _end_everything(self) -> None:
        """Stop agents in order, then by force; nothing that this job started is left when it
        returns.
        """
        self._movers.stop()
        reason = self._finish.reason if self._finish is not None else "the launcher failed"
        links = list(self._server.links.values())
        for link in links:
            # The last order there is, whatever launchers before this one have said.
            link.stream.send(protocol.Order(self._term, _LAST_ORDER, protocol.StopAgent(reason)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._spec.stop_grace_s + LEAVE_S):
                await asyncio.gather(*(link.left.wait() for link in links))
        for link in links:
            for leftover in link.leftovers:
                self._journal.say(f"{link.node}: could not end {leftover}")
        await self._server.close()
        await self._agents.end_all(1.0)
        await self._movers.close()
        await self._commits.settle()
        begun = (*self._tasks, *self._commits.tasks)
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)
        await self._backend.close()


def describe_exit(finish: events.Finish) -> str:
    """The last line for the user."""
    code = ExitCode(finish.exit_code)
    return f"{finish.verdict}: {finish.reason} (exit code {code.value})"
