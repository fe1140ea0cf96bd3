"""From parked to training again: everything that happens once its conditions are met.

``advance`` is level-triggered: it looks at the state, not at the event, and is called after every
event that may have completed something. So no order of arrival needs a case of its own.
"""

from __future__ import annotations

from deadpool_launch.controller import drains, stops
from deadpool_launch.controller.checkpoints import give_up, next_text, still_valid
from deadpool_launch.controller.events import StartRanks
from deadpool_launch.controller.incident import Incident
from deadpool_launch.controller.ladder import restart_all, rung_text
from deadpool_launch.controller.losses import open_epoch
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.planning import (
    store_rank,
    when_all_parked,
    when_inventory_complete,
)
from deadpool_launch.controller.protection import (
    differing,
    differing_text,
    keep_holders,
    note_redundancy,
    when_all_attached,
)
from deadpool_launch.controller.rank import Rank, Stage, Trait, stage_traits
from deadpool_launch.controller.rungs import repair_in_place
from deadpool_launch.controller.shrinking import regain, verdict_of
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.tables import RankTable, changed
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import plural
from deadpool_runtime import protocol

#: After so many failed restores of one step it is not tried again.
RESTORE_TRIES = 2


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
                restart_all(turn)
                drains.let_leave(turn)
                _start_absent(turn)
                _begin_replacements(turn)
                when_all_parked(turn)
            case Phase.INVENTORY:
                when_inventory_complete(turn)
            case Phase.RESTORING:
                _when_all_restored(turn)
            case Phase.TRAINING:
                when_all_attached(turn)
                if turn.state.phase is Phase.TRAINING:
                    keep_holders(turn)
                    stops.proceed(turn)
                    drains.proceed(turn)
                    _take_back_in(turn)
            case _:
                pass


def _take_back_in(turn: Turn) -> None:
    """Ranks that were set aside come back the way in which lost ones are replaced."""
    if regain(turn):
        repair_in_place(turn)


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
    if not state.ranks.some(stage_traits(Stage.ABSENT)):
        return
    for seat, name in enumerate(state.seats):
        members = state.ranks_of_seat(seat)
        absent = tuple(rank for rank in members if _is_missing(state.ranks[rank]))
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


def _is_missing(rank: Rank) -> bool:
    return rank.stage is Stage.ABSENT and not rank.aside


def _when_all_up(turn: Turn) -> None:
    state = turn.state
    if not state.ranks.every(stage_traits(Stage.UP)):
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
        store=turn.address(store_rank(turn)),
        replacement=True,
        attempt=state.attempt,
    )
    turn.tell(ready, begin)
    turn.set_ranks(ready, stage=Stage.SCRIPT, deadline=turn.at + state.config.build_s)


# ---------------------------------------------------------------- restoring


def _when_all_restored(turn: Turn) -> None:
    state = turn.state
    if state.ranks.every(Trait.REBUILT):
        turn.mark("groups rebuilt", f"epoch {state.epoch}")
        if state.connect_by is not None:
            turn.set(connect_by=None)
    if not state.ranks.every(Trait.RESTORED):
        return
    step = turn.incident.step
    assert step is not None
    found = differing({rank.rank: rank.restored or () for rank in state.present()})
    if found is not None:
        _refuse(turn, step, differing_text(*found))
        return
    turn.tell((rank.rank for rank in state.present()), protocol.Resume(state.epoch))
    turn.mark("state restored", f"step {step} on every rank")
    turn.set(
        ranks=RankTable(rank if rank.aside else _resumed(rank, step) for rank in state.ranks),
        phase=Phase.TRAINING,
        paths=None,  # All are connected, whatever the agents have yet to answer.
        history=_history(state, step),
        checkpoints=still_valid(state.checkpoints, step),
        newest=max(state.newest, step),
    )
    if turn.incident.begins:
        turn.set(begun_at=step)
    # Steps after the plan's are computed again, so a refused one is no longer what was refused.
    turn.set_incident(resumed=True, refused=frozenset(), failed=())
    note_redundancy(turn)


def _history(state: State, step: int) -> tuple[tuple[int, int], ...]:
    """A plan with a durable checkpoint has its place there already: it starts from nothing."""
    if state.history and state.history[-1][0] == state.epoch:
        return state.history
    return (*state.history, (state.epoch, step))


def _resumed(rank: Rank, step: int) -> Rank:
    return changed(
        rank,
        stage=Stage.ATTACHED,
        deadline=None,
        replacement=False,
        holds=True,
        completed=step,
        adopts=min(rank.adopts, step),
        digests=(rank.digests[0], rank.digests[1] if step >= 1 else None),
        rebuilt=False,
        restored=None,
    )


def _refuse(turn: Turn, step: int, between: str) -> None:
    """Ranks restored different states: never train on that, go back to an older step."""
    reason = f"restored state of step {step} differs between {between}; step {step} is refused"
    turn.say(reason)
    if turn.incident.reading:
        give_up(turn, step)
    turn.set_incident(refused=turn.incident.refused | {step})
    open_epoch(turn, reason)
    if not turn.over:
        turn.set(phase=Phase.PARKING)


def on_restore_failed(turn: Turn, rank: Rank, body: protocol.RestoreFailed) -> None:
    """A copy is damaged or cannot be fetched: look again at what there is.

    A damaged copy was marked as such and will not be found again, and a node without ranks that
    cannot be reached is not asked again for what others have. So the attempts of the incident are
    not used up; but a step that fails for the second time is given up, and so is at once a durable
    checkpoint, of which there is only one.
    """
    step = turn.incident.step if turn.state.incident is not None else None
    if rank.stage is not Stage.RESTORING or body.epoch != turn.state.epoch or step is None:
        return
    failed = (*turn.incident.failed, step)
    why = body.reason.removesuffix(".")
    text = f"rank {rank.rank} could not restore step {step} ({why})"
    turn.mark("restore failed", f"rank {rank.rank}, step {step}: {why}")
    if turn.incident.reading:
        give_up(turn, step)
        text += f"; the checkpoint is given up and {next_text(turn.state)}"
    elif failed.count(step) >= RESTORE_TRIES:
        text += f"; step {step} is refused"
        turn.set_incident(refused=turn.incident.refused | {step})
    else:
        text += "; trying again without that copy"
    idle = set(turn.incident.sources.get(rank.rank, ())) - set(turn.state.seats)
    turn.set_incident(failed=failed, doubted=turn.incident.doubted | idle)
    turn.say(text)
    open_epoch(turn, text, counted=False)
    turn.set(phase=Phase.PARKING)


def on_inventory(turn: Turn, name: str, epoch: int, copies: tuple[protocol.Copy, ...]) -> None:
    """A node says which copies it has; an answer to an older question is of no use."""
    node = turn.state.nodes[name]
    if node.inventory_by is not None and epoch == turn.state.epoch:
        turn.set_node(name, inventory_by=None, copies=copies)
        advance(turn)


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

    ``replayed_steps`` is the newest step that every rank had completed before, less the plan's
    step: completed work done again. The interrupted step is not counted, even if some ranks had
    come to its end: all run it again.
    """
    incident = turn.state.incident
    if incident is None or not incident.resumed or incident.step is None:
        return
    step = incident.step
    if not turn.state.ranks.all_past(step):
        return
    replayed = max(0, incident.newest - step)
    after_s = turn.at - incident.opened_at
    verdict, with_fewer = verdict_of(turn)
    since = "after all had stopped" if incident.planned else "after the first sign"
    if incident.begins and incident.planned:
        since = "after every rank had come to its first step"
    text = (
        f"{_continued(incident, step)}{with_fewer} in {after_s:.1f} s {since} "
        f"({rung_text(incident.rung)}); "
        f"{plural(replayed, 'completed step')} run again"
    )
    if incident.bare_s is not None:
        text += f"; every rank had a replica again after {incident.bare_s:.1f} s"
    turn.say(text)
    turn.close_incident(verdict, text, replayed)
    advance(turn)


def _continued(incident: Incident, step: int) -> str:
    if incident.checkpoint is None:
        return f"continued from step {step}"
    how = "continued from" if incident.begins else "restarted from"
    text = f"{how} the durable checkpoint of step {incident.checkpoint}"
    return text if step == incident.checkpoint else f"{text} and continued from step {step}"
