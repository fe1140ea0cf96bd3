"""What the journal says of a job while it runs: its events, its incidents, what its nodes are to
it, and now and then, for people, how far the training is.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import msgspec

from deadpool_launch.controller import events, roles
from deadpool_launch.controller.states import State
from deadpool_launch.journal import Journal
from deadpool_runtime import protocol

#: Seconds between lines that say how far the training is.
PROGRESS_S = 60.0


class Recorder:
    """``state``: the one that the job begins with."""

    def __init__(self, journal: Journal, clock: Callable[[], float], state: State) -> None:
        self._journal = journal
        self._clock = clock
        self._progress_at = clock() + PROGRESS_S
        #: What each node is known to be by the journal, and what of the state that was read from.
        self._parts = roles.parts(state)
        self._watched: tuple[object, ...] | None = None

    def event(self, state: State, event: events.Event) -> None:
        """Record an event; ``state``: the one before it."""
        match event:
            case events.RankSaid(node=node, rank=rank, body=body):
                self._message(state, node, rank, body)
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

    def _message(self, state: State, node: str, rank: int, body: protocol.FromRank) -> None:
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
                self.tell_progress(state, rank, body)
            case protocol.RankUp(pid=pid):
                self._journal.write("rank", rank=rank, node=node, pid=pid, epoch=state.epoch)
            case protocol.FinalState(step=step, parts=parts):
                self._journal.write("final", rank=rank, step=step, parts=parts)
            case protocol.Note(text=text):
                self._journal.say(f"rank {rank}: {text}")
            case protocol.FaultPoint():
                pass  # recorded with what is done there
            case _:
                fields = msgspec.to_builtins(body)
                self._journal.write(
                    "event", name=fields.pop("type"), node=node, rank=rank, **fields
                )

    def tell_progress(self, state: State, rank: int, done: protocol.StepDone) -> None:
        """A sign of life now and then, from the first rank that takes part."""
        now = self._clock()
        if now < self._progress_at or rank != min(one.rank for one in state.present()):
            return
        self._progress_at = now + PROGRESS_S
        if done.step > 0:
            loss = f", loss {done.loss:.4g}" if done.loss is not None else ""
            self._journal.say(f"step {done.step}{loss}, {done.duration_s:.3g} s a step")

    def incident(
        self,
        state: State,
        action: events.IncidentOpened | events.IncidentMark | events.IncidentClosed,
    ) -> None:
        """Record how an incident goes on; ``state``: the one that came with it."""
        match action:
            case events.IncidentOpened(number=number, reason=reason):
                opened = state.incident
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

    def parts(self, state: State) -> None:
        """Record what nodes are to the job, as far as that has changed."""
        watched = roles.watched(state)
        if self._watched is not None and all(map(is_, watched, self._watched)):
            return
        self._watched = watched
        now = roles.parts(state)
        for name, part in roles.changed(self._parts, now).items():
            self._journal.write(
                "node", node=name, role=part.role, why=part.why, lasting=part.lasting
            )
        self._parts = now
