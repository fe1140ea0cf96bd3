"""Drives the controller: feeds it events one by one, performs its actions, keeps the journal.

One asyncio task, one queue. Nothing here decides; ``core.step`` does. What only the driver has: the
back end's handles on agents, and the connections. Each event is in the state log before it is
answered, so that another driver can go on from there (``take_over``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from operator import is_
from pathlib import Path
from typing import Any, assert_never

import msgspec

from deadpool_launch import checkpoints, faults
from deadpool_launch.agents import AgentServer
from deadpool_launch.backends.base import AgentHandle, Backend
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.controller import core, events, mail, persist, roles, takeover
from deadpool_launch.controller.checkpoints import earlier
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.quarantine import left_out
from deadpool_launch.controller.states import Phase, State, initial_state
from deadpool_launch.controller.tables import NodeTable
from deadpool_launch.errors import DeadpoolError
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import Journal
from deadpool_launch.movers import MoverStep
from deadpool_launch.questions import Questions, stays_text
from deadpool_launch.statelog import StateLog
from deadpool_launch.succession import result
from deadpool_launch.succession.lead import CutOff, Lead, Superseded
from deadpool_launch.watch import Watch
from deadpool_runtime import protocol

#: Seconds between lines that say how far the training is.
PROGRESS_S = 60.0
#: Time that checkpoints have to be committed when the job is over.
COMMIT_S = 60.0
#: Time an agent has to end its ranks and leave, beyond the ranks' grace.
LEAVE_S = 4.0
#: In place of a node's name: the newest world of movers.
_MOVERS = ""
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
        self._fault_plan = fault_plan
        self._movers = movers
        self._mover_nodes: tuple[str, ...] = ()
        self._secret = secret
        self._term = 1
        self._state: State = initial_state(config)
        #: What each node is known to be by the journal, and what of the state that was read from.
        self._parts = roles.parts(self._state)
        self._watched: tuple[object, ...] | None = None
        #: Events, each with the number of the report it came with, 0 for none.
        self._queue: asyncio.Queue[tuple[events.Event, int]] = asyncio.Queue()
        self._mail: dict[str, mail.Mailbox] = {}
        #: What the back end needs to find each agent again.
        self._saved: dict[str, dict[str, Any]] = {}
        self._handles: dict[str, AgentHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        #: What ends the last agent of nodes that were given up.
        self._stopping: dict[str, asyncio.Task[Any]] = {}
        self._commits: set[asyncio.Task[None]] = set()
        #: One at a time, in the order in which they are asked for.
        self._commit_turn = asyncio.Lock()
        self._pids: dict[int, int] = {}
        self._finish: events.Finish | None = None
        #: Whether a node that keeps the log has to be given its beginning.
        self._begin_due = False
        #: The nodes when it was last settled which ones keep it.
        self._settled: NodeTable | None = None
        #: The time of the newest event.
        self._known_at = self._clock()
        self._lead = self._make_lead()
        self._questions = Questions(self._emit, lambda: self._clock(), self.standing, host)
        self._server = self._make_server()
        self._watch = Watch(
            backend,
            config.nodes,
            poll_s,
            reserve_s,
            ends_at,
            self._emit,
            journal.say,
            # Another launcher's clock may be put in its place later.
            lambda: self._clock(),
        )
        if movers is not None:
            movers.on_world = self._note_world
        self._progress_at = self._clock() + PROGRESS_S

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
        for task in (*self._tasks, *self._commits):
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
        self._saved, self._pids, self._finish = kept.handles, kept.pids, kept.finish
        nodes = self._state.nodes
        self._watch.was_told({name: node.slurm for name, node in nodes.items() if node.slurm})
        self._lead = self._make_lead()
        self._server = self._make_server()
        world = self._saved.get(_MOVERS)
        if self._movers is not None and world is not None:
            self._movers.take_over(world["world"])
        for node, handle in self._saved.items():
            if node != _MOVERS:
                self._handles[node] = self._backend.adopt(node, handle)

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
        self._lead.settle(self._fit())
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
            handle = self._handles.get(name)
            if node.stage is AgentStage.GONE and handle is not None:
                self._stopping[name] = self._spawn(self._handles.pop(name).stop(0.0))
            elif node.stage is AgentStage.STARTING and handle is None:
                self._spawn(self._start_agent(name, self._state.epoch, node.born))
            elif handle is not None:
                self._spawn(self._watch_agent(name, handle))
        for epoch, step in self._state.committing:
            self._perform(events.CommitCheckpoint(step, epoch))
        self._keep_movers()

    def _note_world(self, world_id: int) -> None:
        self._saved[_MOVERS] = {"world": world_id}
        self._log.started(_MOVERS, self._saved[_MOVERS])

    def _known(self) -> persist.Kept:
        return persist.Kept(
            self._term,
            self._known_at,
            self._state,
            self._mail,
            self._saved,
            self._pids,
            self._finish,
        )

    # ------------------------------------------------------------ events

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
        self._record(event)
        self._known_at = event.at
        self._state = state
        for action in actions:
            for node, order, body in mail.post(self._mail, self._state, action):
                self._server.send(node, order, body)
            self._perform(action)
        self._note_parts()
        self._keep_movers()
        self._settle_standbys()
        if self._begin_due or self._log.full:
            self._begin_due = False
            self.begin_log()
        await self._lead.count_anew()

    def _settle_standbys(self) -> None:
        """Have the log kept on nodes that serve, once all that are needed at first do."""
        nodes = self._state.nodes
        if nodes is not self._settled and self._state.phase not in (Phase.NEW, Phase.AGENTS):
            self._settled = nodes
            self._begin_due = self._lead.settle(self._fit()) or self._begin_due

    def _fit(self) -> list[str]:
        """The nodes whose agents serve, spares first."""
        nodes = self._state.nodes
        warm = [
            name
            for name in (*self._config.spares, *self._config.extras, *self._config.active)
            if nodes[name].stage is AgentStage.WARM
        ]
        trains = set(self._state.seats)
        return sorted(warm, key=trains.__contains__)

    def _note_parts(self) -> None:
        """Record what nodes are to the job, as far as that has changed."""
        watched = roles.watched(self._state)
        if self._watched is not None and all(map(is_, watched, self._watched)):
            return
        self._watched = watched
        now = roles.parts(self._state)
        for name, part in roles.changed(self._parts, now).items():
            self._journal.write(
                "node", node=name, role=part.role, why=part.why, lasting=part.lasting
            )
        self._parts = now

    def _keep_movers(self) -> None:
        """Have MPI's processes on the nodes that serve, once all that are needed at first do."""
        if self._movers is None or self._state.phase in (Phase.NEW, Phase.AGENTS, Phase.ENDED):
            return
        nodes = tuple(
            name for name, node in self._state.nodes.items() if node.stage is AgentStage.WARM
        )
        if nodes != self._mover_nodes:
            self._mover_nodes = nodes
            self._movers.restart(self._state.epoch, nodes)

    def _record(self, event: events.Event) -> None:
        match event:
            case events.RankSaid(node=node, rank=rank, body=body):
                self._record_message(node, rank, body)
            case events.Tick() | events.CheckpointCommitted() | events.CheckpointFailed():
                pass  # the latter two were recorded when it happened
            case events.InventoryTaken(node=node, epoch=epoch, copies=copies):
                kept = [[c.rank, c.step, c.epoch, c.replica] for c in copies]
                self._journal.write(
                    "event", name="InventoryTaken", node=node, epoch=epoch, copies=kept
                )
            case events.PacesTold(node=node, paces=paces):
                told = [
                    [p.rank, p.steps, round(p.own_s, 4), round(p.low_s, 4), round(p.step_s, 4)]
                    for p in paces
                ]
                self._journal.write("event", name="PacesTold", node=node, paces=told)
            case _:
                fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
                del fields["at"]
                if "kind" in fields:
                    fields["evidence_kind"] = fields.pop("kind")
                self._journal.write(
                    "event", name=type(event).__name__, **msgspec.to_builtins(fields)
                )

    def _record_message(self, node: str, rank: int, body: protocol.FromRank) -> None:
        match body:
            case protocol.StepDone():
                self._journal.write(
                    "step",
                    rank=rank,
                    step=body.step,
                    epoch=body.epoch,
                    duration_s=round(body.duration_s, 6),
                    blocked_s=round(body.blocked_s, 6),
                    loss=body.loss,
                    unprotected=body.unprotected,
                    confirmed=body.confirmed,
                )
                self._tell_progress(rank, body)
            case protocol.RankUp(pid=pid):
                self._pids[rank] = pid
                self._journal.write("rank", rank=rank, node=node, pid=pid, epoch=self._state.epoch)
            case protocol.FinalState(step=step, parts=parts):
                self._journal.write("final", rank=rank, step=step, parts=parts)
            case protocol.Note(text=text):
                self._journal.say(f"rank {rank}: {text}")
            case protocol.FaultPoint(step=step):
                self._inject(rank, step)
            case _:
                fields = msgspec.to_builtins(body)
                self._journal.write(
                    "event", name=fields.pop("type"), node=node, rank=rank, **fields
                )

    def _tell_progress(self, rank: int, done: protocol.StepDone) -> None:
        """A sign of life now and then, from the first rank that takes part."""
        now = self._clock()
        if now < self._progress_at or rank != min(one.rank for one in self._state.present()):
            return
        self._progress_at = now + PROGRESS_S
        if done.step > 0:
            loss = f", loss {done.loss:.4g}" if done.loss is not None else ""
            self._journal.say(f"step {done.step}{loss}, {done.duration_s:.3g} s a step")

    # ------------------------------------------------------------ actions

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.StartAgent(node=node, born=born):
                self._end_agent(node)
                self._saved.pop(node, None)
                self._spawn(self._start_agent(node, self._state.epoch, born))
            case events.FenceNode(node=node):
                self._end_agent(node)
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
                commit = asyncio.create_task(self._commit(action))
                self._commits.add(commit)
                commit.add_done_callback(self._commits.discard)
            case events.Say(text=text):
                self._journal.say(text)
            case events.IncidentOpened(number=number, reason=reason):
                opened = self._state.incident
                self._journal.write(
                    "incident",
                    number=number,
                    phase="opened",
                    detail=reason,
                    planned=opened is not None and opened.planned,
                )
            case events.IncidentMark(number=number, phase=phase, detail=detail):
                self._journal.write("incident", number=number, phase=phase, detail=detail)
            case events.IncidentClosed():
                self._journal.write(
                    "incident",
                    number=action.number,
                    phase="closed",
                    verdict=action.verdict,
                    detail=action.reason,
                    replayed_steps=action.replayed_steps,
                    rung=action.rung,
                )
            case events.Finish():
                self._finish = action
            case _:
                assert_never(action)

    def _end_agent(self, node: str) -> None:
        """Nothing that an agent of this node says counts any more."""
        self._server.drop(node)
        handle = self._handles.pop(node, None)
        if handle is not None:
            self._stopping[node] = self._spawn(handle.stop(0.0))

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start_agent(self, node: str, epoch: int, born: int) -> None:
        """Start the agent; report if it ends before it ever connected (the core has the deadline
        for silence).
        """
        # What ends an agent may end all that runs on its node.
        if (stopping := self._stopping.pop(node, None)) is not None:
            await asyncio.wait([stopping])
            known = self._state.nodes[node]
            if known.born != born or known.stage is not AgentStage.STARTING:
                return
        log_path = self._run_dir / "logs" / f"agent-{node}.log"
        try:
            # Whoever writes them later keeps the mode.
            for path in (log_path, Path(f"{log_path}.srun")):
                path.touch(mode=0o600)
            port = self._listening.getsockname()[1]
            argv = self._agent_argv(node, f"{self._launcher_host}:{port}", epoch, born)
            handle = await self._backend.start_agent(node, argv, log_path)
        except (OSError, DeadpoolError) as error:
            self._emit(events.AgentStartFailed(self._clock(), node, str(error)))
            return
        self._handles[node] = handle
        self._saved[node] = handle.saved()
        self._log.started(node, self._saved[node])
        await self._watch_agent(node, handle)

    async def _watch_agent(self, node: str, handle: AgentHandle) -> None:
        code = await handle.wait()
        if (
            self._finish is None
            and node not in self._server.links
            and self._handles.get(node) is handle
        ):
            del self._handles[node]
            words = handle.last_words()
            reason = f"its agent ended with exit code {code}{f': {words}' if words else ''}"
            self._emit(events.AgentStartFailed(self._clock(), node, reason))

    async def _commit(self, wanted: events.CommitCheckpoint) -> None:
        step, epoch = wanted.step, wanted.epoch
        directory = Path(self._config.checkpoint_dir)
        async with self._commit_turn:
            began_at = self._clock()
            try:
                kept = await asyncio.to_thread(
                    checkpoints.commit,
                    directory,
                    step,
                    epoch,
                    self._config.world_size,
                    self._config.checkpoint_keep,
                    earlier(self._state),
                )
            except checkpoints.NotCommitted as error:
                reason = str(error)
                self._journal.write("checkpoint", step=step, epoch=epoch, failed=reason)
                self._emit(events.CheckpointFailed(self._clock(), step, epoch, reason))
                return
            now = self._clock()
            self._journal.write(
                "checkpoint",
                step=step,
                epoch=epoch,
                directory=str(directory),
                kept=list(kept),
                commit_s=round(now - began_at, 6),
            )
            self._emit(events.CheckpointCommitted(now, step, epoch, kept))

    def _say_newest_checkpoint(self, finish: events.Finish) -> None:
        """Where a job that did not come to its end can be taken up."""
        if finish.exit_code != ExitCode.OK and self._state.checkpoints:
            step, directory = max(self._state.checkpoints), self._config.checkpoint_dir
            self._journal.say(f"the newest durable checkpoint is that of step {step}: {directory}")

    # ------------------------------------------------------------ rehearsed faults

    def _inject(self, rank: int, step: int) -> None:
        fault = self._fault_plan.get(rank)
        if fault is None:
            return
        node = self._state.node_of(rank)
        self._journal.write("fault", fault=str(fault), node=node, rank=rank, step=step)
        self._journal.say(
            f"rehearsal: {fault.kind} of {node if fault.node else f'rank {rank}'} at step {step}"
        )
        assert isinstance(self._backend, LocalBackend)
        match fault.kind:
            case faults.FaultKind.POWER_OFF:
                self._spawn(self._backend.power_off(node))
            case faults.FaultKind.VANISH:
                self._backend.vanish(node)
            case faults.FaultKind.FREEZE_NODE:
                self._backend.freeze(node)
            case faults.FaultKind.KILL:
                os.kill(self._pids[rank], signal.SIGKILL)
            case faults.FaultKind.FREEZE:
                os.kill(self._pids[rank], signal.SIGSTOP)
            case _:
                assert_never(fault.kind)

    # ------------------------------------------------------------ the end

    async def _end_everything(self) -> None:
        """Stop agents in order, then by force; nothing that this job started is left when it
        returns.
        """
        if self._movers is not None:
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
        await asyncio.gather(
            *(handle.stop(1.0) for handle in self._handles.values()), return_exceptions=True
        )
        if self._movers is not None:
            await self._movers.close()
        if self._commits:
            await asyncio.wait(self._commits, timeout=COMMIT_S)
        for task in (*self._tasks, *self._commits):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._commits, return_exceptions=True)
        await self._backend.close()


def describe_exit(finish: events.Finish) -> str:
    """The last line for the user."""
    code = ExitCode(finish.exit_code)
    return f"{finish.verdict}: {finish.reason} (exit code {code.value})"
