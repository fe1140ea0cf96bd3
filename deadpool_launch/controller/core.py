"""The controller: ``step(state, event) -> (state, actions)``.

Pure. It decides; the driver acts and tells what came of it by further events. Start with
``states.initial_state(config)`` and ``JobStarted``; after each event ask ``State.next_deadline()``
and send ``Tick`` when that time has come. After ``Finish`` every event is answered by nothing.

The story of a fault, and where each part is told:

1. A rank or node goes away (``messages.py``, ``agents.py``, ``deadlines.py``).
2. The incident opens, the epoch is revoked, siblings are gathered (``losses.py``).
3. Repair in place, start anew or give up; spares take places (``rungs.py``, ``placement.py``).
4. All ranks park; the nodes say which copies they have; a step is agreed on (``planning.py``);
   groups and state come back (``recovery.py``). If the copies are not enough for any step, the
   state comes from a durable checkpoint (``checkpoints.py``).
5. Every rank has a replica elsewhere again (``protection.py``).
6. A step that does not end, or breaks although every process lives, is tried again in place
   (``hangs.py``, ``diagnosis.py``).
7. A node that was given up comes back as a spare (``readmission.py``, ``quarantine.py``).
8. A rank that is slower than its peers is named (``stragglers.py``), and a GPU that shows a fault
   makes what follows the node's (``devices.py``).
9. Or no fault explains a script's exception, and it is the script's own (``verdicts.py``).
10. Nothing is wrong, and all ranks come to the end of the same step (``halts.py``): those of a node
    move (``drains.py``), or the job ends before its time limit (``stops.py``).

What must hold between two events is in ``invariants.py``.
"""

from __future__ import annotations

from typing import assert_never

from deadpool_launch.controller import drains, stops
from deadpool_launch.controller.agents import (
    on_agent_connected,
    on_agent_warm,
    on_job_started,
    on_node_gone,
    on_replicator_up,
)
from deadpool_launch.controller.checkpoints import on_committed, on_not_committed
from deadpool_launch.controller.deadlines import on_tick
from deadpool_launch.controller.devices import on_device_lines
from deadpool_launch.controller.events import (
    Action,
    AgentConnected,
    AgentLost,
    AgentStartFailed,
    AgentWarm,
    CheckpointCommitted,
    CheckpointFailed,
    DeviceLines,
    DrainRequested,
    Event,
    InventoryTaken,
    JobStarted,
    LimitNear,
    NodeReady,
    NodeStateSeen,
    PacesTold,
    PathsTried,
    RankExited,
    RankSaid,
    RankStopped,
    ReplicatorUp,
    StackNotTaken,
    StandingsTold,
    StopRequested,
    Tick,
)
from deadpool_launch.controller.hangs import on_standings
from deadpool_launch.controller.messages import on_exited, on_said, on_stopped
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.paths import on_paths_tried
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.readmission import on_node_ready, on_node_resumed
from deadpool_launch.controller.recovery import advance, on_inventory
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.stragglers import on_paces
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
        case StandingsTold():
            on_standings(turn, event)
        case PacesTold(paces=paces):
            on_paces(turn, paces)
        case DeviceLines(node=node, lines=lines):
            on_device_lines(turn, node, lines)
            advance(turn)
        case StackNotTaken(rank=number, reason=reason):
            turn.say(f"the stack of rank {number} could not be taken: {reason}")
        case PathsTried(node=node, number=number, unreached=unreached):
            on_paths_tried(turn, node, number, unreached)
        case Tick():
            on_tick(turn)
        case AgentConnected():
            on_agent_connected(turn, event.node, event.host)
        case AgentWarm():
            on_agent_warm(turn, event)
        case ReplicatorUp():
            on_replicator_up(turn, event.node, event.replicator, event.reason)
        case InventoryTaken():
            on_inventory(turn, event.node, event.epoch, event.copies)
        case CheckpointCommitted():
            on_committed(turn, event)
            advance(turn)
        case CheckpointFailed():
            on_not_committed(turn, event)
            stops.on_not_saved(turn, event.step)
            advance(turn)
        case AgentStartFailed():
            warm = state.nodes[event.node].stage is AgentStage.WARM
            what = "cannot serve any longer" if warm else "did not start"
            on_node_gone(turn, event.node, f"{what} ({event.reason}, seen)")
        case AgentLost():
            said = state.nodes[event.node].slurm
            slurms = f"; Slurm has it as {said}, inferred" if said else ""
            on_node_gone(turn, event.node, f"lost ({event.evidence}, {event.kind}{slurms})")
        case NodeReady(node=node, why=why):
            on_node_ready(turn, node, why)
        case DrainRequested():
            drains.on_drain_requested(turn, event)
            advance(turn)
        case NodeStateSeen():
            drains.on_node_state(turn, event)
            on_node_resumed(turn, event, state.nodes.get(event.node))
            advance(turn)
        case LimitNear():
            stops.on_limit_near(turn, event)
            advance(turn)
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
