"""Durable checkpoints: written by the ranks, committed when all have, gone back to at need.

A checkpoint counts while its step is of the history that the job went on from. ``State.history``
says so for what was saved and not yet committed; each resume strikes out what it undid of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deadpool_launch.controller.events import (
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
)
from deadpool_launch.controller.rank import Rank
from deadpool_launch.controller.states import State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import short_error, size, steps_text
from deadpool_runtime import protocol

#: People are told of the first checkpoint, and then of one after so many seconds.
TELL_S = 600.0


def on_saved(turn: Turn, rank: Rank, body: protocol.Saved) -> None:
    """A rank's part is on disk; when the last one is, the checkpoint can be committed.

    The copy may be of an older epoch:

    1. Rank 0 completes step 20 in epoch 1, and its copy of it is being written.
    2. Rank 1 is lost; all resume in epoch 2 from step 20. Rank 0 says that its part is on disk.
    3. Had they resumed from step 19, the part would be of a step that never was.
    """
    state = turn.state
    key = body.epoch, body.step
    if not _is_of_history(key, state.history) or key in state.committing or state.aside():
        return
    parts = {**state.saved.get(key, {}), rank.rank: body}
    if len(parts) < len(state.ranks):
        turn.set(saved={**state.saved, key: parts})
        return
    nbytes = sum(part.nbytes for part in parts.values())
    took_s = max(part.duration_s for part in parts.values())
    turn.set(
        # A rank writes one checkpoint after the other: those before have all the parts they get.
        saved={other: them for other, them in state.saved.items() if other[1] > body.step},
        committing={**state.committing, key: (nbytes, took_s)},
    )
    turn.act(CommitCheckpoint(body.step, body.epoch))


def on_committed(turn: Turn, event: CheckpointCommitted) -> None:
    """A checkpoint is complete, and older ones may have been removed for it."""
    key = event.epoch, event.step
    written = turn.state.committing.get(key)
    checkpoints = dict(turn.state.checkpoints)
    if written is not None:
        _no_longer_committing(turn, key)
        if _is_of_history(key, turn.state.history):
            checkpoints[event.step] = event.epoch
    kept = {step: epoch for step, epoch in checkpoints.items() if step in event.kept}
    turn.set(checkpoints=kept)
    told_at = turn.state.checkpoint_told_at
    if written is None or event.step not in kept:
        return
    if told_at is None or turn.at >= told_at + TELL_S:
        nbytes, took_s = written
        turn.say(f"checkpoint of step {event.step} is on disk, {size(nbytes)} in {took_s:.1f} s")
        turn.set(checkpoint_told_at=turn.at)


def on_not_committed(turn: Turn, event: CheckpointFailed) -> None:
    """People are told of the first, second, fourth, eighth such checkpoint and so on."""
    key = event.epoch, event.step
    if key not in turn.state.committing:
        return
    _no_longer_committing(turn, key)
    total = turn.state.checkpoints_failed + 1
    turn.set(checkpoints_failed=total)
    if _is_of_history(key, turn.state.history) and total & (total - 1) == 0:
        so_far = f" ({total} such checkpoints so far)" if total > 1 else ""
        turn.say(f"no checkpoint of step {event.step}: {short_error(event.reason)}{so_far}")


def _no_longer_committing(turn: Turn, key: tuple[int, int]) -> None:
    rest = {other: it for other, it in turn.state.committing.items() if other != key}
    turn.set(committing=rest)


def _is_of_history(key: tuple[int, int], history: Sequence[tuple[int, int]]) -> bool:
    """Whether what was copied in this epoch after this step is of the history that counts."""
    epoch, step = key
    return all(step <= resumed for later, resumed in history if later > epoch)


# ---------------------------------------------------------------- going back to one


def still_valid(checkpoints: Mapping[int, int], resumed: int) -> dict[int, int]:
    """The checkpoints that are left when all ranks resume from that step.

    Those of an earlier launcher are of a training of their own, which nothing here undoes.
    """
    return {step: epoch for step, epoch in checkpoints.items() if epoch == 0 or step <= resumed}


def newest_usable(state: State) -> int | None:
    """The newest step that can be had from disk; None if none can.

    Those of an earlier launcher only if there is none of this one: steps are counted from 1 in each
    launch, so their numbers say nothing here.
    """
    refused = state.incident.refused if state.incident is not None else frozenset()
    usable = {step: epoch for step, epoch in state.checkpoints.items() if step not in refused}
    own = [step for step, epoch in usable.items() if epoch > 0]
    return max(own or usable, default=None)


def earlier(state: State) -> frozenset[int]:
    """Steps of the checkpoints of an earlier launcher."""
    return frozenset(step for step, epoch in state.checkpoints.items() if epoch == 0)


def give_up(turn: Turn, step: int) -> None:
    """The checkpoint of this step cannot be used: never try it again."""
    left = {other: epoch for other, epoch in turn.state.checkpoints.items() if other != step}
    turn.set(checkpoints=left)
    turn.set_incident(
        refused=turn.incident.refused | {step}, unusable=(*turn.incident.unusable, step)
    )


def next_text(state: State) -> str:
    """What is tried instead of a checkpoint that was given up."""
    older = newest_usable(state)
    return "there is no other" if older is None else f"that of step {older} is tried"


def why_none(state: State) -> str:
    """Why there is no checkpoint to go back to."""
    directory = state.config.checkpoint_dir
    unusable = state.incident.unusable if state.incident is not None else ()
    if not directory:
        return "no durable checkpoint was asked for (--checkpoint-dir)"
    if unusable:
        some = "checkpoint" if len(unusable) == 1 else "checkpoints"
        of = steps_text(sorted(unusable))
        return f"the durable {some} of {of} in {directory} cannot be used, and there is no other"
    if state.checkpoints:
        return f"the durable checkpoint of {steps_text(sorted(state.checkpoints))} is refused too"
    return f"no durable checkpoint was complete yet in {directory}"
