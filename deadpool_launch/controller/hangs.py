"""A step that does not end: find out who holds it up, and try it again in place.

1. An agent says that a rank has been in one step for long (``StandingsTold``).
2. When the step has lasted for ``collective_timeout_s``, every agent is asked what its ranks do.
3. The answers name those that the others wait for (``diagnosis.py``), and their stacks are taken.
4. The epoch is revoked with no process lost (rung 0). Who parks was alive and goes on in its
   process; a culprit that does not within ``hang_park_s`` is killed as usual (``deadlines.py``).
5. If the step hangs again, all processes are restarted with the state before it (rung 3).

A step that hangs even then hangs for a reason of the script, and the job ends. When connections
broke although every process lives, the step is tried again once (rung 0).
"""

from __future__ import annotations

import re

from deadpool_launch.controller.diagnosis import Hang, diagnose, stacks_text
from deadpool_launch.controller.events import StandingsTold, TakeStacks, TakeStandings
from deadpool_launch.controller.ladder import Rung
from deadpool_launch.controller.losses import open_epoch
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.recovery import advance
from deadpool_launch.controller.rungs import choose_rung
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Look
from deadpool_launch.controller.wording import nodes_text, ranks_text, seconds
from deadpool_launch.exits import ExitCode

#: How a broken connection or an ended wait shows in the exceptions of Gloo, NCCL and the runtime.
_ECHO = re.compile(
    r"^(RuntimeError|Dist\w*Error|GroupsAborted): .*("
    r"connection closed|connection reset|broken pipe|pair closure|read timeout"
    r"|timed out waiting \d+\s?ms|remote process exited|socket timeout"
    r"|the process groups of this process were aborted)",
    re.IGNORECASE,
)


# ---------------------------------------------------------------- steps that do not end


def on_standings(turn: Turn, event: StandingsTold) -> None:
    """Ranks are late, or have gone on; or a node answers what its ranks are doing."""
    for number, born in event.moved:
        if turn.state.ranks[number].born == born:
            turn.set_rank(number, overdue_at=None)
    look = turn.state.look
    if event.asked:
        if look is not None and look.number == event.asked and event.node in look.waiting:
            told = (*look.standings, *event.standings)
            waiting = look.waiting - {event.node}
            turn.set(look=Look(look.number, look.by, waiting, told))
            if not waiting:
                _judge(turn)
        return
    limit_s = turn.state.config.collective_timeout_s
    for standing in event.standings:
        rank = turn.state.ranks[standing.rank]
        current = (rank.born, turn.state.epoch) == (standing.born, standing.epoch)
        if current and _in_steps(rank):
            turn.set_rank(rank.rank, overdue_at=turn.at + max(0.0, limit_s - standing.step_s))


def _in_steps(rank: Rank) -> bool:
    return rank.stage is Stage.ATTACHED and not rank.steps_ended


def watch_steps(turn: Turn) -> None:
    """Time has come to a deadline: a step is overdue, or not every node has answered."""
    state = turn.state
    if state.look is not None:
        if state.look.by <= turn.at:
            _judge(turn)
        return
    due_at = state.next_overdue()
    if due_at is None or due_at > turn.at:
        return
    if any(rank.raised is not None or rank.stage is Stage.FAILED for rank in state.ranks):
        _patience(turn, state.config.verdict_wait_s)  # an exception is judged first
        return
    asked = {name for name in state.seats if state.nodes[name].stage is AgentStage.WARM}
    number = state.looks + 1
    by = turn.at + state.config.look_s
    turn.set(looks=number, look=Look(number, by, frozenset(asked), ()))
    for name in sorted(asked):
        turn.act(TakeStandings(name, number))


def _patience(turn: Turn, more_s: float) -> None:
    """Look at the late ranks again after that time."""
    late = [rank.rank for rank in turn.state.ranks if rank.overdue_at is not None]
    turn.set_ranks(late, overdue_at=turn.at + more_s)


def _judge(turn: Turn) -> None:
    """Every node has answered, or has had its time."""
    look = turn.state.look
    assert look is not None
    turn.set(look=None)
    state = turn.state
    limit_s = state.config.collective_timeout_s
    known = [
        standing
        for standing in look.standings
        if (state.ranks[standing.rank].born, state.epoch) == (standing.born, standing.epoch)
        and _in_steps(state.ranks[standing.rank])
    ]
    hang = diagnose(known, limit_s)
    if hang is None:
        _patience(turn, limit_s)
        advance(turn)
        return
    _act(turn, hang, min(standing.step for standing in known))


def _act(turn: Turn, hang: Hang, step: int) -> None:
    """Name the culprits, then try the step again in place; but not a second time."""
    names = [stack_name(turn.state.ranks[rank]) for rank in hang.culprits]
    by_node: dict[str, list[int]] = {}
    for rank in hang.culprits:
        by_node.setdefault(turn.state.node_of(rank), []).append(rank)
    for node, members in by_node.items():
        turn.act(TakeStacks(node, tuple(members)))
    text = hang.text
    if hang.culprits:
        text = f"{ranks_text(hang.culprits)} on {nodes_text(by_node)} {text}"
    again = turn.state.hung_step == step
    if again and not _can_restart(turn.state):
        turn.finish(
            ExitCode.RECOVERY_FAILED,
            f"{text}{stacks_text(names)}; step {step} hung before, so no fault of a node explains "
            f"it; if it needs more than {seconds(turn.state.config.collective_timeout_s)}, give "
            "--collective-timeout",
        )
        return
    turn.set(hung_step=step)
    if again:
        restart(turn, f"{text}{stacks_text(names)}; step {step} hung before")
        return
    retry(turn, text, f"{stacks_text(names)}; step {step} is tried again")
    if not turn.over:
        patience_s = turn.state.config.hang_park_s
        stuck = [r for r in hang.culprits if turn.state.ranks[r].stage is Stage.UNWINDING]
        turn.set_ranks(stuck, patience_s=patience_s, deadline=turn.at + patience_s)


def _can_restart(state: State) -> bool:
    """Whether processes may be at fault: not if all were new ones in the present incident."""
    return state.incident is None or state.incident.rung < Rung.WARM_RESTART


def stack_name(rank: Rank) -> str:
    """Where the stacks of the rank's process are, seen from the run directory."""
    return f"logs/rank-{rank.rank:05d}.epoch-{rank.born}.stack"


def retry(turn: Turn, reason: str, then: str) -> None:
    """Rung 0: rebuild the groups of living processes, and run the step again."""
    turn.say(reason + then)
    open_epoch(turn, reason)
    _go_on(turn)


def restart(turn: Turn, reason: str) -> None:
    """Trust no living process any more: the next rung."""
    open_epoch(turn, reason, next_rung=True)
    _go_on(turn)


def _go_on(turn: Turn) -> None:
    if not turn.over:
        choose_rung(turn)
        advance(turn)


# ---------------------------------------------------------------- connections that broke


def is_echo(error: str) -> bool:
    """Whether the exception only says that a peer, or the way to it, is gone."""
    return _ECHO.search(error) is not None


def retry_echo(turn: Turn) -> bool:
    """Try a step again whose collectives broke although no rank was lost; False if that does not
    explain every exception that waits, or was tried with this step before.
    """
    state = turn.state
    raised = [rank for rank in state.ranks if rank.raised is not None]
    alive = state.phase is Phase.TRAINING and not any(
        rank.stage in (Stage.FAILED, Stage.ENDED) or rank.raise_told for rank in state.ranks
    )
    if not raised or not alive or not all(is_echo(rank.error) for rank in raised):
        return False
    step = min(rank.raised for rank in raised if rank.raised is not None)
    if state.retried_step == step:
        return False
    turn.set(retried_step=step)
    first = min(raised, key=lambda rank: (rank.sign_at, rank.rank))
    who = ranks_text(rank.rank for rank in raised)
    text = f"{who} raised in step {step} ({first.error}, seen), and every rank lives"
    retry(turn, text, "; the step is tried again")
    return True
