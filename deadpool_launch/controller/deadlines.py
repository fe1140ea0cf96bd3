"""What happens when patience ends: every phase and stage that can wait for ever has a deadline.

Names of limits are those of ``Config``; rungs those of ``ladder.Rung``.

=====================  ========================  ==================================================
waited for             limit                     then
=====================  ========================  ==================================================
an agent, warm         ``agent_start_s``         its node is lost: rung 2 (a spare, or the end)
a process, up          ``rank_start_s``          killed and started again on its node: rung 1
its script, begun as   none before the first     killed and started again on its node: rung 1
a replacement          step; ``build_s``
siblings of a loss     ``gather_s``              the rung is chosen (``rungs.py``)
a rank in a step,      ``unwind_s``; if others   killed and started again with the state that its
parked                 waited for it in vain     node has: rung 1, or 3 if none is left that parked
                       ``hang_park_s``
a rank that was        ``restore_s`` (from disk  the same
mended, parked again   ``load_s``)
the copies of a node   ``inventory_s``           the node is lost: rung 2
groups and state       ``restore_s`` (from disk  ranks behind the others are killed: rung 1; if
                       ``load_s``)               nobody is, it is a stall: tried again in place
                                                 (rung 0), the second time rung 3
groups connected       ``verdict_s``             it is asked which nodes reach each other
which nodes reach      ``verdict_s``             those that most others do not reach are lost:
each other                                       rung 2; if it cannot be told, a stall as above
the end of a process   ``kill_s``                its node is lost: rung 2
that was killed
a step                 ``collective_timeout_s``  tried again (rung 0), then rung 3, then the end
                                                 (``hangs.py``)
what ranks are doing   ``look_s``                decided by what was answered
all ranks at one       ``collective_timeout_s``  a planned move is made in the middle of a step
boundary                                         (rung 2)
the end before the     what is left              the job ends without it
time limit
a loss that explains   ``verdict_s``             the step is tried again once if connections broke
an exception                                     (rung 0); else it is the script's own: the end
=====================  ========================  ==================================================

``max_attempts`` bounds what these lead to: an incident that used up its attempts climbs to rung 3,
then to rung 5 if there is a durable checkpoint, and then ends the job (``ladder.climb``).
"""

from __future__ import annotations

from deadpool_launch.controller import drains, stops
from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.hangs import retry_echo, watch_steps
from deadpool_launch.controller.losses import kill_as_lost, restore_limit_s, stall
from deadpool_launch.controller.node import Cause
from deadpool_launch.controller.paths import judge as judge_paths
from deadpool_launch.controller.paths import when_connecting_takes_long
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.readmission import try_again
from deadpool_launch.controller.recovery import advance
from deadpool_launch.controller.rungs import choose_rung
from deadpool_launch.controller.stragglers import watch_paces
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.verdicts import give_notice, judge, raise_it
from deadpool_launch.controller.wording import ranks_text, seconds


def on_tick(turn: Turn) -> None:
    """Act on every deadline that has come; a tick that came too early changes nothing."""
    state = turn.state
    for node in state.nodes.values():
        if node.deadline is not None and node.deadline <= turn.at:
            limit = seconds(state.config.agent_start_s)
            on_node_gone(
                turn, node.name, f"was not ready within {limit} (--agent-start-timeout, seen)"
            )
    for node in turn.state.nodes.values():
        if node.inventory_by is not None and node.inventory_by <= turn.at:
            limit = seconds(state.config.inventory_s)
            on_node_gone(
                turn, node.name, f"lost (its copies were not told within {limit}, inferred)"
            )
    if not turn.over:
        try_again(turn)
    _late_ranks(turn)
    until = turn.state.gather_until
    if until is not None and until <= turn.at:
        choose_rung(turn)
    _late_halts(turn)
    connect_by = turn.state.connect_by
    if connect_by is not None and connect_by <= turn.at:
        when_connecting_takes_long(turn)
    paths = turn.state.paths
    if paths is not None and paths.by <= turn.at:
        judge_paths(turn)
    watch_steps(turn)
    watch_paces(turn)
    notice_at = turn.state.notice_at
    if notice_at is not None and notice_at <= turn.at:
        give_notice(turn)
    advance(turn)


def _late_halts(turn: Turn) -> None:
    stop, halt = turn.state.stop, turn.state.halt
    if turn.over:
        return
    if stop is not None and stop.by <= turn.at:
        stops.when_late(turn)
    elif halt is not None and not halt.stop and halt.by <= turn.at:
        drains.when_late(turn)


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
            Cause.SICK,
        )
    raised = _late(turn, Stage.ATTACHED)
    if raised and not turn.over and not retry_echo(turn):
        raise_it(turn, raised)
    if _late(turn, Stage.FAILED):
        judge(turn, waited=True)
    for stage, limit_s, what in (
        (Stage.STARTING, config.rank_start_s, "did not come up"),
        (Stage.UNWINDING, None, "did not park"),
        (Stage.SCRIPT, config.build_s, "did not come to the first step"),
    ):
        by_limit: dict[float, list[int]] = {}
        for rank in _late(turn, stage):
            limit = rank.patience_s if limit_s is None else limit_s
            by_limit.setdefault(limit, []).append(rank.rank)
        for limit, ranks in by_limit.items():
            if not turn.over:
                cause = f"{what} within {seconds(limit)} (seen)"
                kill_as_lost(turn, ranks, cause, cause)
    late = _late(turn, Stage.RESTORING)
    if late and not turn.over:
        _late_restore(turn, late)


def _late_restore(turn: Turn, late: list[Rank]) -> None:
    """Kill the ranks that hold the others up, if they can be told from those who wait for them.

    Groups are rebuilt together, so one stuck rank makes all of them late.
    When no rank is behind the others, or when all that trained before would go, all are revoked
    instead: whoever is truly stuck will not park, and is killed for that.
    """
    limit = seconds(restore_limit_s(turn))
    behind = [rank for rank in late if not rank.rebuilt] or late
    kept = [rank for rank in turn.state.present() if rank not in behind and rank.holds]
    if kept:
        cause = f"did not restore the state within {limit} (seen)"
        kill_as_lost(turn, [rank.rank for rank in behind], cause, cause)
        return
    who = ranks_text(rank.rank for rank in late)
    stall(turn, f"{who} did not restore the state within {limit}")
