"""Drives the controller: feeds it events one by one, performs its actions, keeps the journal.

One asyncio task, one queue. Nothing here decides; ``core.step`` does. What only the driver has: the
back end's handles on agents, the connections, and the opaque parts of state (``StepDone.own``) that
the launcher keeps for every rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_never

import msgspec

from deadpool_launch import faults
from deadpool_launch.agents import AgentServer
from deadpool_launch.backends.base import AgentHandle, Backend
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.controller import core, events
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.states import State, initial_state
from deadpool_launch.errors import DeadpoolError
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import Journal
from deadpool_runtime import protocol

#: Own parts kept for each rank. A rank holds three slots, so older ones can never be asked for.
OWN_PARTS_KEPT = 4
#: Seconds between lines that say how far the training is.
PROGRESS_S = 60.0
#: Time an agent has to end its ranks and leave, beyond the ranks' grace.
LEAVE_S = 4.0


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
        run_dir: Path,
        agent_argv: Callable[[str, str], list[str]],
        launcher_host: str,
        fault_plan: dict[int, faults.Fault],
    ) -> None:
        self._config = config
        self._backend = backend
        self._journal = journal
        self._spec = spec
        self._run_dir = run_dir
        self._agent_argv = agent_argv
        self._launcher_host = launcher_host
        self._fault_plan = fault_plan
        self._state: State = initial_state(config)
        self._queue: asyncio.Queue[events.Event] = asyncio.Queue()
        self._own: dict[int, OrderedDict[int, bytes]] = {}
        self._handles: dict[str, AgentHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pids: dict[int, int] = {}
        self._finish: events.Finish | None = None
        self._server = AgentServer(
            secret=secret,
            spec=spec,
            expected=set(config.active) | set(config.spares),
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            emit=self._queue.put_nowait,
            store_own=self._store_own,
            note=journal.say,
        )
        self._port = 0
        self._progress_at = time.monotonic() + PROGRESS_S

    async def run(self) -> int:
        """Run the job to its verdict, end everything it started, return the exit code."""
        self._port = await self._server.listen("127.0.0.1" if self._spec_is_local() else "0.0.0.0")
        self._queue.put_nowait(events.JobStarted(time.monotonic()))
        try:
            while self._finish is None:
                self._handle(await self._next_event())
            # Said before the nodes are tidied up, which may take seconds where one is dead.
            self._journal.say(describe_exit(self._finish))
        finally:
            await self._end_everything()
        finish = self._finish
        self._journal.write(
            "end", verdict=finish.verdict, exit_code=finish.exit_code, reason=finish.reason
        )
        return finish.exit_code

    @property
    def finish(self) -> events.Finish | None:
        """The verdict, once there is one."""
        return self._finish

    def request_stop(self, signum: int) -> None:
        """The launcher got a signal that asks for the end."""
        self._queue.put_nowait(events.StopRequested(time.monotonic(), signum))

    def _spec_is_local(self) -> bool:
        return self._launcher_host.startswith("127.")

    # ------------------------------------------------------------ events

    async def _next_event(self) -> events.Event:
        deadline = self._state.next_deadline()
        if deadline is None:
            return await self._queue.get()
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                return await self._queue.get()
        except TimeoutError:
            return events.Tick(time.monotonic())

    def _handle(self, event: events.Event) -> None:
        self._record(event)
        self._state, actions = core.step(self._state, event)
        for action in actions:
            self._perform(action)

    def _record(self, event: events.Event) -> None:
        match event:
            case events.RankSaid(node=node, rank=rank, body=body):
                self._record_message(node, rank, body)
            case events.Tick():
                pass
            case _:
                fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
                del fields["at"]
                if "kind" in fields:
                    fields["evidence_kind"] = fields.pop("kind")
                self._journal.write("event", name=type(event).__name__, **fields)

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
        """A sign of life now and then, from the first rank."""
        now = time.monotonic()
        if rank != 0 or now < self._progress_at:
            return
        self._progress_at = now + PROGRESS_S
        if done.step > 0:
            loss = f", loss {done.loss:.4g}" if done.loss is not None else ""
            self._journal.say(f"step {done.step}{loss}, {done.duration_s:.3g} s a step")

    def _store_own(self, rank: int, step: int, data: bytes) -> None:
        parts = self._own.setdefault(rank, OrderedDict())
        parts.pop(step, None)
        parts[step] = data
        while len(parts) > OWN_PARTS_KEPT:
            parts.popitem(last=False)

    # ------------------------------------------------------------ actions

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.StartAgent(node=node):
                self._spawn(self._start_agent(node))
            case events.FenceNode(node=node):
                self._server.drop(node)
                handle = self._handles.pop(node, None)
                if handle is not None:
                    self._spawn(handle.stop(0.0))
            case events.StartRanks(node=node, epoch=epoch, node_index=index, ranks=ranks):
                first = index * self._spec.nproc_per_node
                local = [rank - first for rank in ranks]
                self._server.send(node, protocol.StartRanks(epoch, index, list(ranks), local))
            case events.KillRanks(node=node, ranks=ranks, reason=reason):
                self._server.send(node, protocol.KillRanks(list(ranks), reason))
            case events.Tell(ranks=ranks, body=body):
                self._tell(ranks, body)
            case events.Say(text=text):
                self._journal.say(text)
            case events.IncidentOpened(number=number, reason=reason):
                self._journal.write("incident", number=number, phase="opened", detail=reason)
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
                )
            case events.Finish():
                self._finish = action
            case _:
                assert_never(action)

    def _tell(self, ranks: tuple[int, ...], body: protocol.ToRank) -> None:
        if isinstance(body, protocol.Plan):
            # Each rank that has no state gets its own part with the plan; nobody gets another
            # rank's.
            for rank in ranks:
                parts = self._own.get(rank) if rank in body.sources else None
                own = parts.get(body.step, b"") if parts is not None else b""
                self._tell_nodes((rank,), msgspec.structs.replace(body, own=own))
            return
        self._tell_nodes(ranks, body)

    def _tell_nodes(self, ranks: tuple[int, ...], body: protocol.ToRank) -> None:
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._state.node_of(rank), []).append(rank)
        for node, on_node in by_node.items():
            self._server.send(node, protocol.TellRanks(on_node, body))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_agent(self, node: str) -> None:
        """Start the agent; report if it ends before it ever connected (the core has the deadline
        for silence).
        """
        log_path = self._run_dir / "logs" / f"agent-{node}.log"
        try:
            # Whoever writes them later keeps the mode.
            for path in (log_path, Path(f"{log_path}.srun")):
                path.touch(mode=0o600)
            handle = await self._backend.start_agent(
                node, self._agent_argv(node, f"{self._launcher_host}:{self._port}"), log_path
            )
        except (OSError, DeadpoolError) as error:
            self._queue.put_nowait(events.AgentStartFailed(time.monotonic(), node, str(error)))
            return
        self._handles[node] = handle
        code = await handle.wait()
        if (
            self._finish is None
            and node not in self._server.links
            and self._handles.get(node) is handle
        ):
            del self._handles[node]
            words = handle.last_words()
            reason = f"its agent ended with exit code {code}{f': {words}' if words else ''}"
            self._queue.put_nowait(events.AgentStartFailed(time.monotonic(), node, reason))

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
        reason = self._finish.reason if self._finish is not None else "the launcher failed"
        links = list(self._server.links.values())
        for link in links:
            link.stream.send(protocol.StopAgent(reason))
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
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backend.close()


def describe_exit(finish: events.Finish) -> str:
    """The last line for the user."""
    code = ExitCode(finish.exit_code)
    return f"{finish.verdict}: {finish.reason} (exit code {code.value})"
