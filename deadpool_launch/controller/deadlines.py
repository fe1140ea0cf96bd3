"""What happens when patience ends: each stage's deadline escalates to the next rung."""

from __future__ import annotations

from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.losses import kill_as_lost, open_epoch
from deadpool_launch.controller.recovery import advance
from deadpool_launch.controller.rungs import choose_rung
from deadpool_launch.controller.states import Phase, Rank, Stage
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.verdicts import give_notice, judge, raise_it
from deadpool_launch.controller.wording import ranks_text, seconds


def on_tick(turn: Turn) -> None:
    """Act on every deadline that has come; a tick that came too early changes nothing."""
    state = turn.state
    for node in state.nodes.values():
        if node.deadline is not None and node.deadline <= turn.at:
            limit = seconds(state.config.agent_start_s)
            on_node_gone(turn, node.name, f"was not ready within {limit} (seen)")
    _late_ranks(turn)
    until = turn.state.gather_until
    if until is not None and until <= turn.at:
        choose_rung(turn)
    notice_at = turn.state.notice_at
    if notice_at is not None and notice_at <= turn.at:
        give_notice(turn)
    advance(turn)


def _late(turn: Turn, stage: Stage) -> list[Rank]:
    return [
        rank
        for rank in turn.staged(stage)
        if rank.deadline is not None and rank.deadline <= turn.at
    ]


def _late_ranks(turn: Turn) -> None:
    config = turn.state.config
    for node in dict.fromkeys(turn.state.node_of(r.rank) for r in _late(turn, Stage.DYING)):
        on_node_gone(
            turn,
            node,
            f"lost (a process outlives SIGKILL by {seconds(config.kill_s)}, inferred)",
        )
    raised = _late(turn, Stage.ATTACHED)
    if raised and not turn.over:
        raise_it(turn, raised)
    if _late(turn, Stage.FAILED):
        judge(turn, waited=True)
    for stage, limit_s, what in (
        (Stage.STARTING, config.rank_start_s, "did not come up"),
        (Stage.UNWINDING, config.park_s, "did not park"),
        (Stage.SCRIPT, config.build_s, "did not come to the first step"),
    ):
        late = _late(turn, stage)
        if late and not turn.over:
            cause = f"{what} within {seconds(limit_s)} (seen)"
            kill_as_lost(turn, [rank.rank for rank in late], cause, cause)
    late = _late(turn, Stage.RESTORING)
    if late and not turn.over:
        _late_restore(turn, late)


def _late_restore(turn: Turn, late: list[Rank]) -> None:
    """Kill the ranks that hold the others up, if they can be told from those who wait for them.

    Rebuilding groups and sending state are done together, so one stuck rank makes all of them late.
    When no rank is behind the others, or when nobody would be left who holds the plan's step, all
    are revoked instead: whoever is truly stuck will not park, and is killed for that.
    """
    limit = seconds(turn.state.config.restore_s)
    behind = [rank for rank in late if not rank.rebuilt] or late
    kept = [rank for rank in turn.state.ranks if rank not in behind and rank.holds]
    if kept:
        cause = f"did not restore the state within {limit} (seen)"
        kill_as_lost(turn, [rank.rank for rank in behind], cause, cause)
        return
    who = ranks_text(rank.rank for rank in late)
    text = f"{who} did not restore the state within {limit}; trying again"
    turn.say(text)
    open_epoch(turn, text)
    if not turn.over:
        turn.set(phase=Phase.PARKING)
