"""The end before the time limit: at the end of a step, with a durable checkpoint of it.

``LimitNear`` says how much time there is. All ranks are brought to the end of the same step
(``halts.py``), each writes its part of a checkpoint if the job has a place for them, and when that
is committed the job ends. If the time is over before, it ends all the same.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_launch.controller import halts
from deadpool_launch.controller.events import LimitNear
from deadpool_launch.controller.states import State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Stop
from deadpool_launch.controller.wording import seconds
from deadpool_launch.exits import ExitCode


def on_limit_near(turn: Turn, event: LimitNear) -> None:
    """Begin the end. A later word can only shorten the time."""
    by = turn.at + event.left_s
    stop = turn.state.stop
    if stop is not None:
        turn.set(stop=replace(stop, by=min(stop.by, by), ending=stop.ending or event.ending))
        return
    turn.set(stop=Stop(event.why, by, event.ending))
    if not turn.state.protecting:
        _end(turn, "; the script does not use deadpool_runtime, or had not come to its first step")
        return
    turn.say(
        f"{event.why}: the job ends at the end of a step, within {seconds(round(event.left_s, 1))}"
    )


def proceed(turn: Turn) -> None:
    """Go on with the end, as far as the state allows. Called while the job trains."""
    state = turn.state
    stop, halt = state.stop, state.halt
    if stop is None:
        return
    if halt is None:
        if halts.is_quiet(state):
            halts.begin(turn, stop.by, stop=True)
        return
    if not halt.stop:
        halts.cancel(turn)
        return
    if not halts.all_there(state):
        return
    # (One of that step may be there from an earlier launch, which counted its own steps.)
    if halt.step is not None and state.checkpoints.get(halt.step, 0) > 0:
        _end(turn, f" after step {halt.step}, whose checkpoint is complete")
    elif not state.config.checkpoint_dir:
        _end(turn, f" after step {halt.step}; no durable checkpoint was asked for")
    elif not halts.writes_checkpoint(state):
        _end(turn, f" after step {halt.step}; no checkpoint is written while ranks are set aside")
    elif stop.unsaved:
        _end(turn, f" after step {halt.step}, whose checkpoint could not be written")


def when_late(turn: Turn) -> None:
    """The time is over."""
    halt = turn.state.halt
    if halt is not None and halts.all_there(turn.state):
        _end(turn, f" after step {halt.step}, whose checkpoint was not complete in time")
    else:
        _end(turn, "; not every rank came to the end of a step in time")


def when_struck(turn: Turn, reason: str) -> None:
    """A loss while everything is being terminated is the end, not a fault."""
    _end(turn, f"; meanwhile {reason}")


def on_not_saved(turn: Turn, step: int) -> None:
    """The checkpoint of this step could not be committed."""
    stop, halt = turn.state.stop, turn.state.halt
    if stop is not None and halt is not None and halt.step == step:
        turn.set(stop=replace(stop, unsaved=True))


def _end(turn: Turn, how: str) -> None:
    stop = turn.state.stop
    assert stop is not None
    turn.finish(ExitCode.STOPPED_IN_TIME, f"stopped before the time limit ({stop.why}){how}")


def is_ending(state: State) -> bool:
    """Whether the job's processes are being terminated."""
    return state.stop is not None and state.stop.ending
