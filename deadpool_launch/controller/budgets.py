"""Budgets: how often a node's processes may fail before the node counts as the fault, and how many
incidents a job survives. Both are unlimited unless a policy says otherwise.

Decides only; ``losses.py`` and ``rungs.py`` call it and act.
"""

from __future__ import annotations

from collections.abc import Iterable

from deadpool_launch.controller.incident import Loss
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Wish
from deadpool_launch.controller.wording import loss_text, plural, seconds
from deadpool_launch.exits import ExitCode


def charge_job(turn: Turn, reason: str) -> None:
    """Count an incident that was just opened; ends the job if it is one too many."""
    config = turn.state.config
    if config.max_incidents is None:
        return
    recent = _recent(turn.state.incidents_at, turn.at, config.incidents_within_s)
    turn.set(incidents_at=recent)
    if len(recent) > config.max_incidents:
        budget = _budget(config.max_incidents, "incident", config.incidents_within_s)
        turn.finish(ExitCode.RECOVERY_FAILED, f"{reason}; the job's budget of {budget} is used up")


def worn_out(turn: Turn) -> Loss | None:
    """Count what began this epoch against its node; the loss of the node if that is once too often.

    Only the first loss is counted: the others may be its echoes. A node that cannot be spared
    stays, and people are told why. One with copies that may be on no other node is not touched
    before they are: it is left like one that is drained.
    """
    state, config = turn.state, turn.state.config
    losses = state.incident.losses if state.incident is not None else ()
    if config.node_restarts is None or state.phase is not Phase.GATHERING or not losses:
        return None
    first = losses[0]
    if first.whole_node or state.nodes[first.node].stage is AgentStage.GONE:
        return None
    within_s = config.node_restarts_within_s
    recent = _recent(state.node_restarts.get(first.node, ()), turn.at, within_s)
    turn.set(node_restarts={**state.node_restarts, first.node: recent})
    if len(recent) <= config.node_restarts:
        return None
    budget = f"its budget of {_budget(config.node_restarts, 'restart', within_s)} is used up"
    if state.steps_over or any(rank.stage is Stage.ENDED for rank in state.ranks):
        return None
    if not _has_spare(state):
        turn.say(f"{first.node} stays in use although {budget}: no spare is left")
        return None
    if state.incident is not None and state.incident.bare:
        _leave_later(turn, first, budget)
        return None
    seat = state.seats.index(first.node)
    cause = f"is given up ({loss_text(first)}; {budget})"
    return Loss(first.node, tuple(state.ranks_of_seat(seat)), cause, True)


def _leave_later(turn: Turn, loss: Loss, budget: str) -> None:
    """The ranks of the node move to a spare once every rank has a replica elsewhere."""
    if any(wish.node == loss.node for wish in turn.state.wishes):
        return
    why = f"is to be given up ({loss_text(loss)}; {budget})"
    turn.set(wishes=(*turn.state.wishes, Wish(loss.node, why, replicated=True)))
    turn.say(
        f"{loss.node} {why}: not before every rank has a replica again, as copies may be on this "
        "node only"
    )


def back_in_use(state: State) -> str | None:
    """A worn or drained node that takes ranks again because nothing else is left: better than no
    job.
    """
    usable = (
        name
        for name in (*state.worn, *state.drained)
        if name not in state.seats and state.nodes[name].stage is AgentStage.WARM
    )
    return next(usable, None)


def _has_spare(state: State) -> bool:
    """Whether there is a spare beyond those that lost nodes need."""
    stages = [state.nodes[name].stage for name in state.seats]
    usable = [name for name in state.free if state.nodes[name].stage is not AgentStage.GONE]
    return len(usable) > stages.count(AgentStage.GONE)


def _recent(times: Iterable[float], at: float, within_s: float) -> tuple[float, ...]:
    """The times that still count, with this one."""
    return (*(time for time in times if time > at - within_s), at)


def _budget(count: int, word: str, within_s: float) -> str:
    return f"{plural(count, word)} within {seconds(within_s)}"
