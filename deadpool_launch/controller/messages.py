"""Messages and exits of ranks; each is known to come from the process behind the rank now."""

from __future__ import annotations

from typing import assert_never

from deadpool_launch.controller.losses import forget_processes, kill_as_lost, lose, open_epoch
from deadpool_launch.controller.recovery import advance, after_step, close_if_continued
from deadpool_launch.controller.rungs import choose_rung
from deadpool_launch.controller.states import RECOVERING, Loss, Phase, Rank, Stage
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.verdicts import (
    judge,
    on_script_failed,
    on_step_raised,
    withdraw_notice,
)
from deadpool_launch.controller.wording import exit_text, seconds
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol

#: How many steps' own parts are kept for each rank.
OWN_KEPT = 3
#: Steps whose digests are compared between ranks.
COMPARED_STEPS = (0, 1)


def on_said(turn: Turn, rank: Rank, body: protocol.FromRank) -> None:
    """One message of a live process."""
    match body:
        case protocol.StepDone():
            _on_step_done(turn, rank, body)
        case protocol.RankUp():
            if rank.stage is Stage.STARTING:
                turn.set_rank(rank.rank, stage=Stage.UP, store_port=body.store_port, deadline=None)
                advance(turn)
        case protocol.Attached():
            _on_attached(turn, rank)
        case protocol.Parked():
            _on_parked(turn, rank, body)
        case protocol.GroupsRebuilt():
            if rank.stage is Stage.RESTORING and body.epoch == turn.state.epoch:
                turn.set_rank(rank.rank, rebuilt=True)
                advance(turn)
        case protocol.Restored():
            _on_restored(turn, rank, body)
        case protocol.StepRaised():
            on_step_raised(turn, rank, body)
        case protocol.StepsEnded():
            _on_steps_ended(turn, rank, body)
        case protocol.ScriptFailed():
            on_script_failed(turn, rank, body)
        case protocol.ScriptEnded():
            _on_ended(turn, rank, exited=False)
        case protocol.Note() | protocol.FaultPoint() | protocol.FinalState():
            pass  # for the driver's journal and its rehearsals
        case _:
            assert_never(body)


def _on_step_done(turn: Turn, rank: Rank, body: protocol.StepDone) -> None:
    """A step is complete in one rank.

    A report of an older epoch counts until the rank has parked:

    1. Rank 0 completes step 21 in epoch 2 and says so.
    2. The launcher opens epoch 3; ``Revoke`` is under way.
    3. ``StepDone`` of epoch 2 arrives. Rank 0 does hold step 21 and will list it when it parks.
    """
    epoch = turn.state.epoch
    training = rank.stage in (Stage.ATTACHED, Stage.SCRIPT) and body.epoch == epoch
    leaving = rank.stage is Stage.UNWINDING and body.epoch < epoch
    if rank.replacement or not (training or leaving):
        return
    step = body.step
    changes: dict[str, object] = {
        "completed": step,
        "own": (*(kept for kept in rank.own if kept < step), step)[-OWN_KEPT:],
        "holds": True,
    }
    if training:
        changes["stage"] = Stage.ATTACHED
    if rank.raised is not None:
        changes.update(raised=None, raise_told=False, deadline=None)
    if body.digest and step in COMPARED_STEPS:
        first, second = rank.digests
        changes["digests"] = (body.digest, second) if step == 0 else (first, body.digest)
    turn.set_rank(rank.rank, **changes)
    if rank.raised is not None:
        withdraw_notice(turn)
    if step > turn.state.newest:
        turn.set(newest=step, attached=True)
    turn.tell((rank.rank,), protocol.Confirmed(step))
    if body.digest and step in COMPARED_STEPS:
        _compare_digests(turn, step)
    if turn.state.incident is not None and not turn.over:
        after_step(turn, turn.state.ranks[rank.rank])


def _compare_digests(turn: Turn, step: int) -> None:
    """A peer's state can replace a lost one only if the ranks are replicas of each other."""
    seen = set()
    for rank in turn.state.ranks:
        if not rank.digests[step]:
            return
        seen.add(rank.digests[step])
    if len(seen) > 1:
        turn.finish(
            ExitCode.SCRIPT_FAILED,
            f"ranks hold different state after step {step}; only plain data-parallel replicas "
            "(DDP) are covered",
        )


def _on_attached(turn: Turn, rank: Rank) -> None:
    """The script came to its first step. A replacement says ``Parked`` right after.

    1. Rank 1 comes to its first step and says so.
    2. The launcher sees a loss and tells ``Revoke`` to rank 1, which counted as not attached.
    3. ``Attached`` arrives: rank 1 can be unwound after all, and ``Revoke`` is already on its way.
    """
    if rank.stage is not Stage.SCRIPT or rank.replacement:
        return
    turn.set(attached=True)
    if turn.state.phase is Phase.TRAINING:
        turn.set_rank(rank.rank, stage=Stage.ATTACHED)
    else:
        park_s = turn.state.config.park_s
        turn.set_rank(rank.rank, stage=Stage.UNWINDING, deadline=turn.at + park_s)


def _on_parked(turn: Turn, rank: Rank, body: protocol.Parked) -> None:
    """Only the current epoch's word counts: who parked for an older one will say it again."""
    if body.epoch != turn.state.epoch or rank.stage not in (Stage.UNWINDING, Stage.SCRIPT):
        return
    turn.set_rank(
        rank.rank,
        stage=Stage.PARKED,
        deadline=None,
        slots=tuple(body.slots),
        holds=bool(body.slots),
    )
    advance(turn)


def _on_restored(turn: Turn, rank: Rank, body: protocol.Restored) -> None:
    if rank.stage is not Stage.RESTORING or body.epoch != turn.state.epoch:
        return
    if body.step == turn.incident.step:
        turn.set_rank(rank.rank, rebuilt=True, restored=body.digest, deadline=None)
        advance(turn)


def _on_steps_ended(turn: Turn, rank: Rank, body: protocol.StepsEnded) -> None:
    if rank.stage is not Stage.ATTACHED or body.epoch != turn.state.epoch:
        return
    turn.set_rank(rank.rank, steps_ended=True)
    close_if_continued(turn)
    ranks = turn.state.ranks
    if all(other.steps_ended or other.stage is Stage.ENDED for other in ranks):
        turn.tell(
            (other.rank for other in ranks if other.stage is Stage.ATTACHED),
            protocol.AllEnded(),
        )
        turn.set(steps_over=True)


def _on_ended(turn: Turn, rank: Rank, *, exited: bool) -> None:
    """The script came to its end on one rank."""
    if rank.replacement or rank.stage in (Stage.STARTING, Stage.UP):
        cause = "ended before its first step (seen)"
        if exited:
            node = turn.state.node_of(rank.rank)
            forget_processes(turn, (rank.rank,))
            lose(turn, [Loss(node, (rank.rank,), cause, False)])
        else:
            kill_as_lost(turn, (rank.rank,), cause, "its script ended before its first step")
        return
    turn.set_rank(rank.rank, stage=Stage.ENDED, exited=exited, deadline=None)
    if turn.state.phase is Phase.GATHERING:
        return  # the choice at the end of the window sees it
    if turn.state.phase in RECOVERING:
        open_epoch(turn, f"rank {rank.rank} ended its script during recovery")
        if not turn.over:
            choose_rung(turn)
            advance(turn)
        return
    close_if_continued(turn)
    judge(turn, waited=False)
    if all(other.stage is Stage.ENDED for other in turn.state.ranks):
        turn.finish(ExitCode.OK, "the script ended on every rank")


def on_exited(turn: Turn, rank: Rank, exit_code: int | None, signal: int | None) -> None:
    """A process is gone; whether that is a loss depends on what it said before."""
    node = turn.state.node_of(rank.rank)
    match rank.stage:
        case Stage.DYING:
            forget_processes(turn, (rank.rank,))
            advance(turn)
        case Stage.FAILED | Stage.ENDED:
            turn.set_rank(rank.rank, exited=True)
        case _ if exit_code == 0:
            _on_ended(turn, rank, exited=True)
        case _:
            how = exit_text(exit_code, signal)
            step = rank.completed + 1
            own_doing = rank.stage is Stage.ATTACHED and rank.holds and not rank.steps_ended
            if own_doing and rank.died_in == step:
                turn.finish(
                    ExitCode.RECOVERY_FAILED,
                    f"rank {rank.rank} died twice at step {step} ({how}); not a node fault",
                )
                return
            forget_processes(turn, (rank.rank,))
            if own_doing:
                turn.set_rank(rank.rank, died_in=step)
            lose(turn, [Loss(node, (rank.rank,), f"died ({how}, seen)", False)])
            advance(turn)


def on_stopped(turn: Turn, rank: Rank, for_s: float) -> None:
    """A stopped process blocks every peer and answers nothing: only killing it helps."""
    node = turn.state.node_of(rank.rank)
    turn.say(f"rank {rank.rank} on {node} is frozen (stopped for {seconds(for_s)}, seen); killed")
    kill_as_lost(turn, (rank.rank,), f"frozen for {seconds(for_s)} (seen)", "frozen")
