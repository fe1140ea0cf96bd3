"""A script's exception: the script's own fault, or the echo of a peer's death?

When a node dies, the first thing its peers show is often an exception from a collective; the loss
itself is noticed up to a heartbeat timeout later. So every exception waits ``verdict_s`` for a loss
that explains it. Only then is it the script's own, and the first one in time is the root cause.
"""

from __future__ import annotations

from deadpool_launch.controller.losses import kill_as_lost
from deadpool_launch.controller.states import LIVE, Phase, Rank, Stage
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import seconds, short_error
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def on_step_raised(turn: Turn, rank: Rank, body: protocol.StepRaised) -> None:
    """An exception left a step; the rank is held until a ``Revoke`` or ``RaiseIt`` answers.

    1. Rank 0 raises in step 21 and says so, in epoch 2.
    2. The launcher opens epoch 3 for another reason; ``Revoke`` is under way to rank 0.
    3. ``StepRaised`` of epoch 2 arrives. It is dropped: the ``Revoke`` answers it.
    """
    if (
        rank.stage is not Stage.ATTACHED
        or body.epoch != turn.state.epoch
        or rank.raised is not None
    ):
        return
    _plan_notice(turn)
    turn.set_rank(
        rank.rank,
        raised=body.step,
        sign_at=turn.at,
        error=short_error(body.error),
        deadline=turn.at + turn.state.config.verdict_wait_s,
    )
    live = [other for other in turn.state.ranks if other.stage in LIVE]
    if all(other.raised == body.step for other in live):
        raise_it(turn, [other for other in live if not other.raise_told])


def _plan_notice(turn: Turn) -> None:
    """With the first sign, set the time at which people are told of the wait for its explanation.

    A job of one rank has nobody to lose, and one whose ranks all show the same has its verdict
    before that time.
    """
    if not _signs(turn):
        turn.set(notice_at=turn.at + turn.state.config.notice_s)


def _signs(turn: Turn) -> list[Rank]:
    """Ranks with an exception that is not explained, the first sign first."""
    signs = [
        rank for rank in turn.state.ranks if rank.raised is not None or rank.stage is Stage.FAILED
    ]
    return sorted(signs, key=lambda rank: (rank.sign_at, rank.rank))


def withdraw_notice(turn: Turn) -> None:
    """Forget the notice if no exception is left that waits."""
    if not _signs(turn):
        turn.set(notice_at=None)


def give_notice(turn: Turn) -> None:
    """Tell people what is waited for, if anything still is."""
    turn.set(notice_at=None)
    signs = _signs(turn)
    if not signs or signs[0].raise_told:
        return
    first = signs[0]
    where = "failed" if first.stage is Stage.FAILED else f"raised in step {first.raised}"
    limit = seconds(turn.state.config.verdict_wait_s)
    turn.say(
        f"rank {first.rank} {where} ({first.error}); "
        f"waiting at most {limit} for a loss that explains it"
    )


def raise_it(turn: Turn, ranks: list[Rank]) -> None:
    """No peer's loss explains the exceptions of these ranks: hand them back to the script."""
    by_step: dict[int, list[int]] = {}
    for rank in ranks:
        assert rank.raised is not None
        by_step.setdefault(rank.raised, []).append(rank.rank)
    for step, members in by_step.items():
        turn.tell(members, protocol.RaiseIt(step))
        turn.set_ranks(members, raise_told=True, deadline=None)


def on_script_failed(turn: Turn, rank: Rank, body: protocol.ScriptFailed) -> None:
    """The script ended with an exception on one rank."""
    error = short_error(body.error)
    if turn.state.phase is not Phase.TRAINING:
        kill_as_lost(
            turn,
            (rank.rank,),
            f"failed ({error}, seen) during recovery",
            "its script failed during recovery",
        )
        return
    _plan_notice(turn)
    turn.set_rank(
        rank.rank,
        stage=Stage.FAILED,
        sign_at=rank.sign_at if rank.raised is not None else turn.at,
        error=error,
        traceback=body.traceback,
        deadline=turn.at + turn.state.config.verdict_wait_s,
    )
    judge(turn, waited=False)


def judge(turn: Turn, *, waited: bool) -> None:
    """Give the verdict on failed scripts if nothing can change it any more.

    Without waiting that is so when no rank is left that could still be lost, or when the first rank
    that showed anything has already waited for its ``RaiseIt``.
    """
    failed = turn.staged(Stage.FAILED)
    if not failed or turn.over:
        return
    root = min(failed, key=lambda rank: (rank.sign_at, rank.rank))
    live = [rank for rank in turn.state.ranks if rank.stage in LIVE]
    earlier = [rank for rank in live if rank.raised is not None and rank.sign_at < root.sign_at]
    if waited or not live or (root.raise_told and not earlier):
        turn.finish(ExitCode.SCRIPT_FAILED, f"rank {root.rank}: {root.error}", root.traceback)
