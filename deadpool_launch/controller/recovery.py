"""From parked to training again: everything that happens once its conditions are met.

``advance`` is level-triggered: it looks at the state, not at the event, and is called after every
event that may have completed something. So no order of arrival needs a case of its own.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_launch.controller.agreement import agree_on_step, choose_sources
from deadpool_launch.controller.events import StartRanks
from deadpool_launch.controller.losses import open_epoch
from deadpool_launch.controller.rungs import start_anew
from deadpool_launch.controller.states import LIVE, AgentStage, Phase, Rank, Stage
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import plural, ranks_text
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def advance(turn: Turn) -> None:
    """Do what the state allows, until nothing more follows."""
    before = None
    while before is not turn.state and not turn.over:
        before = turn.state
        match turn.state.phase:
            case Phase.AGENTS:
                _when_agents_are_warm(turn)
            case Phase.CLEARING:
                _when_clear(turn)
            case Phase.LAUNCHING:
                _start_absent(turn)
                _when_all_up(turn)
            case Phase.PARKING:
                _start_absent(turn)
                _begin_replacements(turn)
                _when_all_parked(turn)
            case Phase.RESTORING:
                _when_all_restored(turn)
            case _:
                pass


# ---------------------------------------------------------------- bringing processes up


def _when_agents_are_warm(turn: Turn) -> None:
    """Spares are not waited for."""
    nodes = turn.state.nodes
    if all(nodes[name].stage is AgentStage.WARM for name in turn.state.seats):
        turn.set(phase=Phase.LAUNCHING)


def _when_clear(turn: Turn) -> None:
    """New processes need the devices and ports that the old ones hold until they are gone."""
    if not turn.staged(Stage.DYING):
        turn.set(phase=Phase.LAUNCHING)


def _start_absent(turn: Turn) -> None:
    """Start missing ranks wherever the agent is warm."""
    state = turn.state
    for seat, name in enumerate(state.seats):
        members = state.ranks_of_seat(seat)
        absent = tuple(rank for rank in members if state.ranks[rank].stage is Stage.ABSENT)
        if not absent or state.nodes[name].stage is not AgentStage.WARM:
            continue
        turn.act(StartRanks(name, state.epoch, seat, absent))
        turn.set_ranks(
            absent,
            stage=Stage.STARTING,
            born=state.epoch,
            deadline=turn.at + state.config.rank_start_s,
            replacement=state.begun,
        )


def _when_all_up(turn: Turn) -> None:
    state = turn.state
    if any(rank.stage is not Stage.UP for rank in state.ranks):
        return
    everyone = range(len(state.ranks))
    begin = protocol.Begin(
        epoch=state.epoch, store=turn.address(0), replacement=False, attempt=state.attempt
    )
    turn.tell(everyone, begin)
    turn.set_ranks(everyone, stage=Stage.SCRIPT)
    turn.set(phase=Phase.TRAINING, begun=True)
    if state.incident is not None:
        after_s = turn.at - turn.incident.opened_at
        text = f"all ranks begin again {after_s:.1f} s after the first sign, epoch {state.epoch}"
        turn.close_incident("restarted", text, 0)
        turn.say(text)


def _begin_replacements(turn: Turn) -> None:
    state = turn.state
    ready = [rank.rank for rank in turn.staged(Stage.UP)]
    if not ready:
        return
    begin = protocol.Begin(
        epoch=state.epoch,
        store=turn.address(_store_rank(turn)),
        replacement=True,
        attempt=state.attempt,
    )
    turn.tell(ready, begin)
    turn.set_ranks(ready, stage=Stage.SCRIPT, deadline=turn.at + state.config.build_s)


def _store_rank(turn: Turn) -> int:
    """The lowest rank with a store server, a survivor before a replacement."""
    up = [rank for rank in turn.state.ranks if rank.stage in LIVE and rank.store_port]
    return min(up, key=lambda rank: (rank.replacement, rank.rank)).rank


# ---------------------------------------------------------------- agreeing on the step


def _when_all_parked(turn: Turn) -> None:
    state = turn.state
    _mark_parked(turn)
    if turn.over or any(rank.stage is not Stage.PARKED for rank in state.ranks):
        return
    incident = turn.incident
    slots = {rank.rank: rank.slots for rank in state.ranks}
    own = {rank.rank: rank.own for rank in state.ranks}
    agreement = agree_on_step(slots, own, incident.refused)
    step = agreement.step
    if step is None:
        _without_agreement(turn, agreement.reason)
        return
    holders = [rank.rank for rank in state.ranks if step in rank.slots]
    needing = [rank.rank for rank in state.ranks if step not in rank.slots]
    sources = choose_sources(needing, {rank: state.node_of(rank) for rank in holders})
    everyone = range(len(state.ranks))
    plan = protocol.Plan(
        epoch=state.epoch,
        step=step,
        store=turn.address(holders[0]),
        sources=sources,
        own=b"",
    )
    turn.tell(everyone, plan)
    detail = agreement.reason
    if needing:
        donors = sorted(set(sources.values()))
        detail += f"; {ranks_text(donors)} to {ranks_text(needing)}"
    turn.mark("plan", detail)
    newest = max(rank.completed for rank in state.ranks)
    turn.set_ranks(everyone, stage=Stage.RESTORING, deadline=turn.at + state.config.restore_s)
    turn.set_incident(step=step, newest=max(incident.newest, newest))
    turn.set(phase=Phase.RESTORING)


def _without_agreement(turn: Turn, reason: str) -> None:
    """Starting anew takes a new epoch: replacements born in this one are about to be killed."""
    if turn.state.newest >= 1:
        turn.finish(ExitCode.STATE_LOST, reason)
        return
    open_epoch(turn, reason)
    if not turn.over:
        start_anew(turn, turn.incident.reason, reason)


def _mark_parked(turn: Turn) -> None:
    """Two marks, whichever comes first: the survivors are parked; the replacements are ready."""
    state = turn.state
    new = [rank for rank in state.ranks if rank.replacement or rank.stage not in LIVE]
    old = [rank for rank in state.ranks if not rank.replacement and rank.stage in LIVE]
    if old and all(rank.stage is Stage.PARKED for rank in old):
        turn.mark("parked", ranks_text(rank.rank for rank in old))
    if new and all(rank.stage is Stage.PARKED for rank in new):
        nodes = dict.fromkeys(state.node_of(rank.rank) for rank in new)
        where = ", ".join(nodes)
        turn.mark("spare ready", f"{ranks_text(rank.rank for rank in new)} on {where}")


# ---------------------------------------------------------------- restoring


def _when_all_restored(turn: Turn) -> None:
    state = turn.state
    if all(rank.rebuilt for rank in state.ranks):
        turn.mark("groups rebuilt", f"epoch {state.epoch}")
    if any(rank.restored is None for rank in state.ranks):
        return
    step = turn.incident.step
    assert step is not None
    by_digest: dict[str, list[int]] = {}
    for rank in state.ranks:
        by_digest.setdefault(rank.restored or "", []).append(rank.rank)
    if len(by_digest) > 1:
        _refuse(turn, step, by_digest)
        return
    turn.tell(range(len(state.ranks)), protocol.Resume(state.epoch))
    turn.mark("state restored", f"step {step}, the same on every rank")
    turn.set(ranks=tuple(_resumed(rank, step) for rank in state.ranks), phase=Phase.TRAINING)
    # Steps after the plan's are computed again, so a refused one is no longer what was refused.
    turn.set_incident(resumed=True, refused=frozenset())


def _resumed(rank: Rank, step: int) -> Rank:
    return replace(
        rank,
        stage=Stage.ATTACHED,
        deadline=None,
        replacement=False,
        holds=True,
        completed=step,
        own=tuple(kept for kept in rank.own if kept <= step),
        slots=(),
        rebuilt=False,
        restored=None,
    )


def _refuse(turn: Turn, step: int, by_digest: dict[str, list[int]]) -> None:
    """Ranks restored different states: never train on that, go back to an older step."""
    groups = " and ".join(ranks_text(ranks) for ranks in by_digest.values())
    reason = f"restored state of step {step} differs between {groups}; step {step} is refused"
    turn.say(reason)
    turn.set_incident(refused=turn.incident.refused | {step})
    open_epoch(turn, reason)
    if not turn.over:
        turn.set(phase=Phase.PARKING)


def after_step(turn: Turn, rank: Rank) -> None:
    """A rank completed a step while the incident is open: is the job out of it?"""
    incident = turn.state.incident
    if incident is None or not incident.resumed or incident.step is None:
        return
    if rank.completed > incident.step:
        turn.mark("first step", f"step {incident.step + 1} on rank {rank.rank}")
    close_if_continued(turn)


def close_if_continued(turn: Turn) -> None:
    """The incident is over when every rank is past the plan's step, or has no step left to run.

    ``replayed_steps`` is the newest step that any rank had completed before, less the plan's step:
    completed work done again. The interrupted step is not counted, it had not been completed.
    """
    incident = turn.state.incident
    if incident is None or not incident.resumed or incident.step is None:
        return
    step = incident.step
    for rank in turn.state.ranks:
        if rank.completed <= step and not rank.steps_ended and rank.stage is not Stage.ENDED:
            return
    replayed = max(0, incident.newest - step)
    after_s = turn.at - incident.opened_at
    text = (
        f"continued from step {step} in {after_s:.1f} s after the first sign; "
        f"{plural(replayed, 'completed step')} run again"
    )
    turn.say(text)
    turn.close_incident("continued", text, replayed)
