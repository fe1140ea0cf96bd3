"""All ranks brought to the end of the same step, where nothing is under way between them.

1. ``Hold``: every rank says which step it is in, and begins no later one.
2. The newest of these is one that every rank can come to the end of: nobody has begun a later one.
   ``HoldAfter`` tells all of it. A job that is to be stopped runs one step more, so that every rank
   knows before its last step that it is the last.
3. ``AtBoundary``: the rank has completed it and waits.

What happens there is decided in ``drains.py`` and ``stops.py``. An epoch that is opened meanwhile
ends the halt, as it ends all else that ranks wait for.
"""

from __future__ import annotations

from deadpool_launch.controller.rank import Rank, Stage, Trait, stage_traits
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Halt
from deadpool_runtime import protocol


def is_quiet(state: State) -> bool:
    """Whether every rank trains and has steps before it, and nothing waits for a verdict."""
    return (
        state.phase is Phase.TRAINING
        and state.incident is None
        and state.protecting
        and state.look is None
        and state.paths is None
        and state.newest >= 1
        and not state.steps_over
        and not state.ranks.some(Trait.SIGN)
        and state.ranks.every(stage_traits(Stage.ATTACHED))
        and not any(rank.steps_ended for rank in state.ranks)
    )


def writes_checkpoint(state: State) -> bool:
    """Whether a durable checkpoint can be written: one without all ranks would be of no use."""
    return bool(state.config.checkpoint_dir) and not state.aside()


def begin(turn: Turn, by: float, *, stop: bool) -> None:
    """Ask every rank which step it is in."""
    number = turn.state.halts + 1
    turn.set(halts=number, halt=Halt(number, by, stop))
    everyone = [rank.rank for rank in turn.state.present()]
    turn.tell(everyone, protocol.Hold(turn.state.epoch, number))


def forget(turn: Turn) -> None:
    """The ranks hear of something else that ends the halt."""
    if turn.state.halt is None:
        return
    turn.set(halt=None)
    turn.set_ranks(range(len(turn.state.ranks)), held=None, there=False)


def cancel(turn: Turn) -> None:
    """Let the ranks go on."""
    halt = turn.state.halt
    if halt is None:
        return
    attached = (rank.rank for rank in turn.staged(Stage.ATTACHED))
    turn.tell(attached, protocol.GoOn(turn.state.epoch, halt.number))
    forget(turn)


def all_there(state: State) -> bool:
    """Whether every rank waits at the boundary."""
    halt = state.halt
    return halt is not None and halt.step is not None and not state.ranks.some(Trait.NOT_THERE)


def on_holding(turn: Turn, rank: Rank, body: protocol.Holding) -> None:
    """A rank begins no later step than this for now; with the last answer the step is known."""
    halt = turn.state.halt
    if halt is None or halt.step is not None or not _is_about(turn.state, rank, halt, body):
        return
    turn.set_rank(rank.rank, held=body.step)
    if turn.state.ranks.some(Trait.NOT_HELD):
        return
    step = max(other.held for other in turn.state.ranks if other.held is not None) + halt.stop
    turn.set(halt=Halt(halt.number, halt.by, halt.stop, step))
    save = halt.stop and writes_checkpoint(turn.state)
    turn.tell(
        (other.rank for other in turn.staged(Stage.ATTACHED)),
        protocol.HoldAfter(turn.state.epoch, halt.number, step, last=halt.stop, save=save),
    )


def on_at_boundary(turn: Turn, rank: Rank, body: protocol.AtBoundary) -> None:
    """A rank has come to the boundary."""
    halt = turn.state.halt
    if halt is not None and body.step == halt.step and _is_about(turn.state, rank, halt, body):
        turn.set_rank(rank.rank, there=True)


def _is_about(
    state: State, rank: Rank, halt: Halt, body: protocol.Holding | protocol.AtBoundary
) -> bool:
    """An answer to an older question says where the rank was before it was let go on."""
    current = (body.epoch, body.number) == (state.epoch, halt.number)
    return current and rank.stage is Stage.ATTACHED
