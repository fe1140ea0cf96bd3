"""The begin of training from a durable checkpoint that an earlier launch of the job left.

1. Every rank has come to its first step (``protection.when_all_attached``), with the state that the
   script builds. If that has made steps already, the script has loaded a checkpoint of its own, and
   goes on from that.
2. Else no step is begun. An incident that is no fault opens, every rank parks, and reads the newest
   checkpoint (``planning.py``), as after the loss of all copies.
3. One that is damaged is passed over. Where none is left the job ends: it must not begin at its
   beginning without a word.
"""

from __future__ import annotations

from deadpool_launch.controller.checkpoints import newest_usable, why_none
from deadpool_launch.controller.losses import open_epoch
from deadpool_launch.controller.rank import Stage, stage_traits
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.exits import ExitCode


def is_due(state: State) -> bool:
    """Whether the state of the earlier launch is still to be read: no step may be begun before."""
    return _is_possible(state) and not _brings_state(state)


def _is_possible(state: State) -> bool:
    """Whether there is such a state, and training has not begun with anything else."""
    return state.config.resume and bool(state.config.checkpoints) and state.newest < 1


def _brings_state(state: State) -> bool:
    return any(rank.brings_state for rank in state.ranks)


def begin(turn: Turn) -> bool:
    """Send all ranks back to the checkpoint before they begin a step; False if they may begin."""
    state = turn.state
    if not _is_possible(state):
        return False
    if _brings_state(state):
        turn.say(
            "the script brings a state that steps were made in, and begins with that; what an "
            "earlier launch left is used only if all copies are lost"
        )
        return False
    if not state.ranks.every(stage_traits(Stage.ATTACHED)):
        return False
    if give_up_if_none(turn):
        return True
    open_epoch(turn, "an earlier launch of this job left a durable checkpoint", planned=True)
    if not turn.over:
        turn.set(phase=Phase.PARKING)
    return True


def give_up_if_none(turn: Turn) -> bool:
    """End the job if there is a state to go on from and it cannot be read; whether it was ended."""
    state = turn.state
    if newest_usable(state) is not None:
        return False
    directory = state.config.checkpoint_dir
    turn.finish(
        ExitCode.STATE_LOST,
        f"training cannot go on where an earlier launch of this job stopped: {why_none(state)}; "
        f"to begin at the beginning, move {directory} away",
    )
    return True
