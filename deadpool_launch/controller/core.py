"""The controller: ``step(state, event) -> (state, actions)``.

Pure. It decides; the driver acts and tells what came of it by further events. Start with
``states.initial_state(config)`` and ``JobStarted``; after each event ask ``State.next_deadline()``
and send ``Tick`` when that time has come. After ``Finish`` every event is answered by nothing.

The story of a fault, and where each part is told:

1. A rank or node goes away (``messages.py``, ``agents.py``, ``deadlines.py``).
2. The incident opens, the epoch is revoked, siblings are gathered (``losses.py``).
3. Repair in place, start anew or give up; spares take places (``rungs.py``, ``placement.py``).
4. All ranks park; a step is agreed on; groups and state come back (``recovery.py``,
   ``agreement.py``).
5. Or no fault explains a script's exception, and it is the script's own (``verdicts.py``).

What must hold between two events is in ``invariants.py``.
"""

from __future__ import annotations

from typing import assert_never

from deadpool_launch.controller.agents import (
    on_agent_connected,
    on_agent_warm,
    on_job_started,
    on_node_gone,
)
from deadpool_launch.controller.deadlines import on_tick
from deadpool_launch.controller.events import (
    Action,
    AgentConnected,
    AgentLost,
    AgentStartFailed,
    AgentWarm,
    Event,
    JobStarted,
    RankExited,
    RankSaid,
    RankStopped,
    StopRequested,
    Tick,
)
from deadpool_launch.controller.messages import on_exited, on_said, on_stopped
from deadpool_launch.controller.states import Phase, Rank, Stage, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.exits import ExitCode

_SIGINT = 2
_SIGNAL_NAMES = {2: "SIGINT", 15: "SIGTERM"}


def step(state: State, event: Event) -> tuple[State, list[Action]]:
    """The next state, and what the driver is to do, in order."""
    if state.phase is Phase.ENDED:
        return state, []
    turn = Turn(state, event.at)
    match event:
        case RankSaid():
            rank = _speaker(state, event)
            if rank is not None:
                on_said(turn, rank, event.body)
        case RankExited():
            rank = _speaker(state, event)
            if rank is not None:
                on_exited(turn, rank, event.exit_code, event.signal)
        case RankStopped():
            rank = _speaker(state, event)
            if rank is not None:
                on_stopped(turn, rank, event.for_s)
        case Tick():
            on_tick(turn)
        case AgentConnected():
            on_agent_connected(turn, event.node, event.host)
        case AgentWarm():
            on_agent_warm(turn, event.node)
        case AgentStartFailed():
            on_node_gone(turn, event.node, f"did not start ({event.reason}, seen)")
        case AgentLost():
            on_node_gone(turn, event.node, f"lost ({event.evidence}, {event.kind})")
        case StopRequested():
            name = _SIGNAL_NAMES.get(event.signal, "a signal")
            interrupted = event.signal == _SIGINT
            code = ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED
            turn.finish(code, f"stopped by {name} ({event.signal})")
        case JobStarted():
            on_job_started(turn)
        case _:
            assert_never(event)
    return turn.state, turn.actions


def _speaker(state: State, event: RankSaid | RankExited | RankStopped) -> Rank | None:
    """The rank, if the event is about the process that stands behind it now.

    1. Node n2 is lost and fenced; n4 takes its ranks in epoch 3.
    2. A last message or the exit of n2's process (born in epoch 1) arrives late.
    3. Taking it for n4's process would count a replacement as lost, or as parked.
    A condemned process (``DYING``) is listened to only for its exit.
    """
    rank = state.ranks[event.rank]
    if rank.born != event.born or rank.stage is Stage.ABSENT:
        return None
    if state.node_of(event.rank) != event.node:
        return None
    if not isinstance(event, RankExited) and rank.stage in (
        Stage.DYING,
        Stage.FAILED,
        Stage.ENDED,
    ):
        return None
    return rank
