"""A script's exception: the script's own fault, or the echo of a peer's death?

When a node dies, the first thing its peers show is often an exception from a collective; the loss
itself is noticed up to a heartbeat timeout later. So every exception waits ``verdict_s`` for a loss
that explains it. Only then is it the script's own, and the first one in time is the root cause.

Rules (``causes.py``) may know better. An exception that is the hardware's costs the rank or its
node, one of the whole job ends that at once, and one that is an echo is never the root cause.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_launch.classify.model import Kind, Verdict
from deadpool_launch.classify.traces import root_error
from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.causes import LOSING, cause_of, step_of
from deadpool_launch.controller.hangs import retry_echo
from deadpool_launch.controller.incident import Loss
from deadpool_launch.controller.losses import forget_processes, kill_as_lost, lose
from deadpool_launch.controller.node import Cause
from deadpool_launch.controller.rank import LIVE, Rank, Stage, Trait
from deadpool_launch.controller.states import Phase
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import seconds, short_error
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol

#: What the runtime raises where a script cannot be recovered; see ``deadpool_runtime.errors``.
_REFUSALS = frozenset({"Misuse", "CorruptState", "UnsupportedState", "UnsupportedLayout"})


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
        traceback=body.error,
    )
    fault = _set_patience(turn, rank)
    if _all_raised(turn, body.step) and not retry_echo(turn):
        live = [other for other in turn.state.ranks if other.stage in LIVE]
        raise_it(turn, [other for other in live if not other.raise_told])
    elif fault is Kind.JOB:
        raise_it(turn, [turn.state.ranks[rank.rank]])


def _all_raised(turn: Turn, step: int) -> bool:
    """Whether an exception left the body of this step on every rank that lives."""
    ranks = turn.state.ranks
    if ranks.some(Trait.LIVE_NOT_RAISED):
        return False
    return all(rank.raised == step for rank in ranks if rank.stage in LIVE)


def _set_patience(turn: Turn, rank: Rank) -> Kind | None:
    """How long the exception that was just noted waits; returns what a rule calls it.

    No loss would explain a fault of the node: only the same one on every rank would, and that
    follows closely.
    """
    cause = cause_of(turn.state, turn.state.ranks[rank.rank])
    fault = cause.kind if cause is not None else None
    config = turn.state.config
    wait_s = config.verdict_wait_s
    if fault is Kind.PERMANENT:
        wait_s = min(wait_s, config.notice_s)
    turn.set_rank(rank.rank, fault=fault, deadline=turn.at + wait_s)
    return fault


def _plan_notice(turn: Turn) -> None:
    """With the first sign, set the time at which people are told of the wait for its explanation.

    A job of one rank has nobody to lose, and one whose ranks all show the same has its verdict
    before that time.
    """
    if not turn.state.ranks.some(Trait.SIGN):
        turn.set(notice_at=turn.at + turn.state.config.notice_s)


def _signs(turn: Turn) -> list[Rank]:
    """Ranks with an exception that is not explained, the first sign first."""
    return sorted(turn.state.ranks.having(Trait.SIGN), key=lambda rank: (rank.sign_at, rank.rank))


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
    """No peer's loss explains the exceptions of these ranks: hand them back to the script.

    With the cause among them or without: a script that fails for an echo must not be the first
    that is known to fail.
    """
    if _lose_by_rule(turn):
        return
    causes = [sign for sign in _signs(turn) if sign.fault is not Kind.ECHO]
    if causes and causes[0].stage is Stage.ATTACHED and not causes[0].raise_told:
        ranks = list({rank.rank: rank for rank in (*ranks, causes[0])}.values())
    by_step: dict[int, list[int]] = {}
    for rank in ranks:
        assert rank.raised is not None
        by_step.setdefault(rank.raised, []).append(rank.rank)
    for step, members in by_step.items():
        turn.tell(members, protocol.RaiseIt(step))
        turn.set_ranks(members, raise_told=True, deadline=None)


def _lose_by_rule(turn: Turn) -> bool:
    """Count a rank or its node as lost if that is what a rule says of the exceptions.

    A node's fault counts whatever else was shown; else the first that is no echo decides.
    """
    signs = [sign for sign in _signs(turn) if sign.fault is not Kind.ECHO]
    nodes_own = [sign for sign in signs if sign.fault is Kind.PERMANENT]
    for sign in (*nodes_own, *signs[:1]):
        cause = cause_of(turn.state, sign)
        if cause is not None and cause.kind in LOSING:
            _lose(turn, sign, cause)
            return True
    return False


def _lose(turn: Turn, rank: Rank, cause: Verdict) -> None:
    """The rank is lost by its exception, and with it its node if that is what the rule says."""
    node = turn.state.node_of(rank.rank)
    step = step_of(rank)
    if rank.holds:
        turn.set_rank(rank.rank, died_in=step)
    what = "failed" if rank.raised is None else f"raised in step {rank.raised}"
    root = short_error(root_error(rank.traceback) or rank.error)
    evidence = f"{root}, seen; {cause.text}"
    if cause.kind is Kind.PERMANENT:
        cause_text = f"is given up (rank {rank.rank} {what}: {evidence})"
        on_node_gone(turn, node, cause_text, Cause.SICK)
        return
    if rank.exited:
        forget_processes(turn, (rank.rank,))
    else:
        turn.kill((rank.rank,), f"{what} by a fault that passes")
    lose(turn, [Loss(node, (rank.rank,), f"{what} ({evidence})", False)])


def on_script_failed(turn: Turn, rank: Rank, body: protocol.ScriptFailed) -> None:
    """The script ended with an exception on one rank."""
    error = short_error(body.error)
    if turn.state.phase is not Phase.TRAINING:
        if _is_ours(body.error):
            turn.finish(
                ExitCode.RECOVERY_FAILED,
                f"rank {rank.rank} cannot be recovered: {error}",
                body.traceback,
            )
            return
        failing = replace(rank, error=error, traceback=body.traceback or body.error, raised=None)
        cause = cause_of(turn.state, failing)
        if cause is not None and cause.kind is Kind.JOB:
            turn.finish(ExitCode.JOB_FAULT, _verdict_text(failing, cause), body.traceback)
            return
        if cause is not None and cause.kind is Kind.PERMANENT:
            _lose(turn, failing, cause)
            return
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
    )
    fault = _set_patience(turn, rank)
    judge(turn, waited=fault is Kind.JOB)


def _is_ours(error: str) -> bool:
    """Whether the runtime itself refuses to recover this script: the next try ends the same way."""
    name = error.partition(":")[0]
    return name.startswith("deadpool_runtime.") and name.rpartition(".")[2] in _REFUSALS


def judge(turn: Turn, *, waited: bool) -> None:
    """Give the verdict on failed scripts if nothing can change it any more.

    Without waiting that is so when no rank is left that could still be lost, or when the first rank
    that showed anything has already waited for its ``RaiseIt``.
    """
    failed = turn.staged(Stage.FAILED)
    if not failed or turn.over:
        return
    root = min(failed, key=lambda rank: (rank.fault is Kind.ECHO, rank.sign_at, rank.rank))
    live = [rank for rank in turn.state.ranks if rank.stage in LIVE]
    first = [rank for rank in live if rank.raised is not None and rank.fault is not Kind.ECHO]
    if root.fault is not Kind.ECHO:
        first = [rank for rank in first if rank.sign_at < root.sign_at]
    if not waited and live and (first or not root.raise_told):
        return
    if _lose_by_rule(turn):
        return
    cause = cause_of(turn.state, root)
    whole_job = cause is not None and cause.kind is Kind.JOB
    code = ExitCode.JOB_FAULT if whole_job else ExitCode.SCRIPT_FAILED
    left = _left_early(turn) if root.fault is Kind.ECHO else ""
    turn.finish(code, left + _verdict_text(root, cause), root.traceback or _where_it_printed(root))


def _left_early(turn: Turn) -> str:
    """Which ranks ended well while the others went on, who then lost their connections to them."""
    if turn.state.steps_over:
        return ""
    ended = [rank for rank in turn.staged(Stage.ENDED) if rank.holds]
    return "".join(
        f"rank {rank.rank} ended with exit code 0 "
        + (f"after step {rank.completed}" if rank.steps_ended else f"in step {step_of(rank)}")
        + ", before the others; "
        for rank in ended
    )


def _where_it_printed(rank: Rank) -> str:
    """For a script that ended itself, as ``argparse`` does: what it said is nowhere else."""
    name = f"logs/rank-{rank.rank:05d}.epoch-{rank.born}.log"
    return f"what rank {rank.rank} printed is in {name} of the run directory"


def _verdict_text(rank: Rank, cause: Verdict | None) -> str:
    return f"rank {rank.rank}: {rank.error}" + (f" ({cause.text})" if cause is not None else "")
