"""Messages and exits of ranks; each is known to come from the process behind the rank now."""

from __future__ import annotations

from typing import assert_never

from deadpool_launch.classify.model import Kind
from deadpool_launch.controller import drains, halts
from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.causes import cause_of_exit
from deadpool_launch.controller.checkpoints import on_saved
from deadpool_launch.controller.incident import Loss
from deadpool_launch.controller.losses import forget_processes, kill_as_lost, lose, open_epoch
from deadpool_launch.controller.node import Cause
from deadpool_launch.controller.paths import on_not_connected
from deadpool_launch.controller.protection import (
    note_unprotected,
    on_protected,
    on_snapshotted,
)
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.recovery import (
    advance,
    after_step,
    close_if_continued,
    on_restore_failed,
)
from deadpool_launch.controller.rungs import choose_rung
from deadpool_launch.controller.states import RECOVERING, Phase
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.verdicts import (
    judge,
    on_script_failed,
    on_step_raised,
    withdraw_notice,
)
from deadpool_launch.controller.wording import exit_text, ranks_text, seconds
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol
from deadpool_runtime.replication.naming import Ranks


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
            _on_attached(turn, rank, body)
        case protocol.Snapshotted():
            on_snapshotted(turn, rank, body)
        case protocol.Protected():
            on_protected(turn, rank, body)
            if turn.state.wishes and turn.state.bare_since is None:
                advance(turn)  # one of them may have waited for this
        case protocol.Saved():
            on_saved(turn, rank, body)
        case protocol.Parked():
            _on_parked(turn, rank, body)
        case protocol.GroupsRebuilt():
            if rank.stage is Stage.RESTORING and body.epoch == turn.state.epoch:
                turn.set_rank(rank.rank, rebuilt=True)
                advance(turn)
        case protocol.NotConnected():
            on_not_connected(turn, rank, body)
        case protocol.Restored():
            _on_restored(turn, rank, body)
        case protocol.RestoreFailed():
            on_restore_failed(turn, rank, body)
            advance(turn)
        case protocol.Holding():
            halts.on_holding(turn, rank, body)
            advance(turn)
        case protocol.AtBoundary():
            halts.on_at_boundary(turn, rank, body)
            advance(turn)
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
    3. ``StepDone`` of epoch 2 arrives. Rank 0 did complete step 21, and its copy may be whole.
    """
    epoch = turn.state.epoch
    training = rank.stage in (Stage.ATTACHED, Stage.SCRIPT) and body.epoch == epoch
    leaving = rank.stage is Stage.UNWINDING and body.epoch < epoch
    if rank.replacement or not (training or leaving):
        return
    step = body.step
    changes: dict[str, object] = {
        "completed": step,
        "holds": True,
    }
    if training:
        changes["stage"] = Stage.ATTACHED
    if rank.raised is not None:
        changes.update(raised=None, raise_told=False, deadline=None)
    turn.set_rank(rank.rank, **changes)
    if rank.raised is not None:
        withdraw_notice(turn)
    first = turn.state.newest < 1 <= step
    if step > turn.state.newest:
        turn.set(newest=step, attached=True)
    note_unprotected(turn, turn.state.ranks[rank.rank], body)
    if turn.state.incident is not None:
        after_step(turn, turn.state.ranks[rank.rank])
    if turn.state.drained:
        drains.release(turn)
    if first or rank.raised is not None:
        advance(turn)  # there is work to keep now, or no exception that waits


def _on_attached(turn: Turn, rank: Rank, body: protocol.Attached) -> None:
    """The script came to its first step, and waits for ``Protect``. A replacement says ``Parked``
    right after.

    1. Rank 1 comes to its first step and says so.
    2. The launcher sees a loss and tells ``Revoke`` to rank 1, which counted as not attached.
    3. ``Attached`` arrives: rank 1 can be unwound after all, and ``Revoke`` is already on its way.
    """
    if rank.stage is not Stage.SCRIPT or rank.replacement:
        return
    turn.set(attached=True)
    turn.set_rank(
        rank.rank,
        segments=_by_name(body.segments),
        own_nbytes=body.own_nbytes,
        save_nbytes=body.save_nbytes,
        replica=tuple(body.replica),
        fixed=body.fixed,
        shares=body.shares,
        brings_state=body.brings_state,
    )
    if turn.state.phase is Phase.TRAINING:
        turn.set_rank(rank.rank, stage=Stage.ATTACHED)
        advance(turn)
    else:
        patience_s = turn.state.config.unwind_s
        until = turn.at + patience_s
        turn.set_rank(rank.rank, stage=Stage.UNWINDING, deadline=until, patience_s=patience_s)


def _on_parked(turn: Turn, rank: Rank, body: protocol.Parked) -> None:
    """Only the current epoch's word counts: who parked for an older one will say it again."""
    if body.epoch != turn.state.epoch or rank.stage not in (Stage.UNWINDING, Stage.SCRIPT):
        return
    turn.set_rank(rank.rank, stage=Stage.PARKED, deadline=None)
    advance(turn)


def _on_restored(turn: Turn, rank: Rank, body: protocol.Restored) -> None:
    if rank.stage is not Stage.RESTORING or body.epoch != turn.state.epoch:
        return
    if body.step == turn.incident.step:
        turn.set_rank(rank.rank, rebuilt=True, restored=tuple(body.segments), deadline=None)
        if body.sizes and (sizes := _by_name(body.sizes)) != rank.segments:
            # Its shard is another one; holders are chosen again when the ranks train.
            turn.set_rank(rank.rank, segments=sizes)
            turn.set(electors=())
        advance(turn)


def _by_name(sizes: list[protocol.SegmentSize]) -> dict[Ranks, int]:
    return {segment.ranks: segment.nbytes for segment in sizes}


def _on_steps_ended(turn: Turn, rank: Rank, body: protocol.StepsEnded) -> None:
    if rank.stage is not Stage.ATTACHED or body.epoch != turn.state.epoch:
        return
    turn.set_rank(rank.rank, steps_ended=True)
    close_if_continued(turn)
    ranks = turn.state.present()
    if all(other.steps_ended or other.stage is Stage.ENDED for other in ranks):
        turn.tell(
            (other.rank for other in ranks if other.stage is Stage.ATTACHED),
            protocol.AllEnded(),
        )
        turn.set(steps_over=True)
        halts.forget(turn)
    if turn.state.halt is not None:
        advance(turn)


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
    if all(other.stage is Stage.ENDED for other in turn.state.present()):
        turn.finish(ExitCode.OK, _ended_text(turn.state.aside()))
    advance(turn)


def _ended_text(aside: tuple[int, ...]) -> str:
    text = "the script ended on every rank"
    if not aside:
        return text
    return f"{text} but {ranks_text(aside)}, set aside for want of nodes"


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
            cause = cause_of_exit(turn.state, rank, exit_code, signal)
            if cause is not None and cause.kind is Kind.JOB:
                text = f"rank {rank.rank} on {node} died ({how}, seen; {cause.text})"
                turn.finish(ExitCode.JOB_FAULT, text)
                return
            step = rank.completed + 1
            own_doing = rank.stage is Stage.ATTACHED and rank.holds and not rank.steps_ended
            if own_doing and rank.died_in == step:
                turn.finish(
                    ExitCode.RECOVERY_FAILED,
                    f"rank {rank.rank} died twice at step {step} ({how}); not a node fault",
                )
                return
            if own_doing:
                turn.set_rank(rank.rank, died_in=step)
            if cause is not None and cause.kind is Kind.PERMANENT:
                text = f"is given up (rank {rank.rank} died: {how}, seen; {cause.text})"
                on_node_gone(turn, node, text, Cause.SICK)
                return
            forget_processes(turn, (rank.rank,))
            lose(turn, [Loss(node, (rank.rank,), f"died ({how}, seen)", False)])
            advance(turn)


def on_stopped(turn: Turn, rank: Rank, for_s: float) -> None:
    """A stopped process blocks every peer and answers nothing: only killing it helps."""
    node = turn.state.node_of(rank.rank)
    stopped = seconds(round(for_s, 1))
    turn.say(f"rank {rank.rank} on {node} is frozen (stopped for {stopped}, seen); killed")
    kill_as_lost(turn, (rank.rank,), f"frozen for {stopped} (seen)", "frozen")
