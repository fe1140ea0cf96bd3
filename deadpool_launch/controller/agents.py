"""Events of agents: a node becomes usable, or stops being so."""

from __future__ import annotations

from deadpool_launch.controller.events import AgentWarm
from deadpool_launch.controller.incident import Loss
from deadpool_launch.controller.losses import forget_processes, lose
from deadpool_launch.controller.node import AgentStage, Cause
from deadpool_launch.controller.protection import is_too_small, small_text
from deadpool_launch.controller.quarantine import next_try_text
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.recovery import advance
from deadpool_launch.controller.rungs import pending_seat_lost, take_seats
from deadpool_launch.controller.states import Phase
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import ranks_text
from deadpool_launch.exits import ExitCode
from deadpool_runtime.protocol import Address


def on_job_started(turn: Turn) -> None:
    """Order the agents; ranks wait for all active ones."""
    config = turn.state.config
    if turn.state.phase is not Phase.NEW:
        return
    turn.set(phase=Phase.AGENTS)
    for name in config.active:
        turn.start_agent(name)
    if config.spare_start == "at-start":
        for name in config.spares:
            turn.start_agent(name)


def on_agent_connected(turn: Turn, name: str, host: str) -> None:
    """The agent's host is known; its ranks may be ordered once it is warm."""
    if turn.state.nodes[name].stage is AgentStage.STARTING:
        turn.set_node(name, stage=AgentStage.CONNECTED, host=host)


def on_agent_warm(turn: Turn, event: AgentWarm) -> None:
    """Ranks can start at once on this node, and replicas can go there."""
    name = event.node
    if turn.state.nodes[name].stage not in (AgentStage.STARTING, AgentStage.CONNECTED):
        return
    turn.set_node(
        name,
        stage=AgentStage.WARM,
        deadline=None,
        replicator=event.replicator,
        memory_nbytes=event.memory_nbytes,
        memory_limit=event.memory_limit,
    )
    node = turn.state.nodes[name]
    if is_too_small(turn.state, node):
        on_node_gone(turn, name, small_text(turn.state, node), Cause.UNFIT)
    elif node.born > 1:
        turn.set_node(name, tries=0)
        if name in turn.state.free:
            turn.say(f"{name} is back as a spare")
    advance(turn)


def on_replicator_up(turn: Turn, name: str, replicator: Address, reason: str) -> None:
    """Replicas go to the new replicator; the copies on the node are as they were.

    While a plan is carried out, ranks may have been told the old address. Who fails to fetch for
    that says so, and the next plan has the new one.
    """
    if turn.state.nodes[name].stage is not AgentStage.WARM:
        return
    turn.set_node(name, replicator=replicator)
    turn.say(f"the replicator of {name} {reason} and was started again")
    advance(turn)


def on_node_gone(turn: Turn, name: str, text: str, cause: Cause = Cause.PASSING) -> None:
    """The node's agent failed to start, was lost or is condemned: the node is given up.

    ``text`` continues a sentence that starts with the node's name.
    """
    state = turn.state
    node = state.nodes[name]
    if node.stage is AgentStage.GONE or turn.over:
        return
    if name not in state.seats:
        idle = name in state.worn or name in state.drained
        turn.drop_node(node, text, Cause.UNFIT if idle else cause)
        what = f"{name}, which had no ranks any more," if idle else f"spare {name}"
        came_back = node.born > 1 and node.stage is not AgentStage.WARM
        then = next_try_text(turn.state.nodes[name], turn.at) if came_back else " while waiting"
        turn.say(f"{what} {text}{then}")
        advance(turn)
        return
    seat = state.ranks_of_seat(state.seats.index(name))
    forget_processes(turn, (rank for rank in seat if state.ranks[rank].aside))
    members = tuple(rank for rank in seat if not state.ranks[rank].aside)
    if not members:
        turn.drop_node(node, text, cause)
        verb = "is" if len(seat) == 1 else "are"
        turn.say(f"{name} {text} while {ranks_text(seat)} {verb} set aside")
        advance(turn)
        return
    hurt = tuple(
        rank for rank in members if state.ranks[rank].stage not in (Stage.ABSENT, Stage.ENDED)
    )
    ended = [rank for rank in members if state.ranks[rank].stage is Stage.ENDED]
    turn.set_ranks(ended, exited=True)
    if state.phase is Phase.AGENTS:
        turn.drop_node(node, text, cause)
        _replace_before_start(turn, name, text)
    elif state.phase is Phase.CLEARING:
        forget_processes(turn, hurt)
        turn.drop_node(node, text, cause)
        pending_seat_lost(turn, name, text)
    elif hurt:
        forget_processes(turn, hurt)
        lose(turn, [Loss(name, hurt, text, True)])
        turn.drop_node(node, text, cause)
    elif any(state.ranks[rank].stage is Stage.ABSENT for rank in members):
        turn.drop_node(node, text, cause)
        if state.phase is Phase.GATHERING:
            lose(turn, [Loss(name, tuple(members), text, True)])
        else:
            pending_seat_lost(turn, name, text)
    else:
        turn.drop_node(node, text, cause)
        turn.say(f"{name} {text} after {ranks_text(members)} had ended there")
    advance(turn)


def _replace_before_start(turn: Turn, name: str, cause: str) -> None:
    """No rank was ordered yet, so nothing is recovered: another node takes the place."""
    seat = turn.state.seats.index(name)
    if not turn.state.free:
        turn.finish(ExitCode.START_FAILED, f"{name} {cause}; no spare left")
        return
    taken = take_seats(turn)
    ranks = ranks_text(turn.state.ranks_of_seat(seat))
    turn.say(f"{name} {cause}; {taken[name]} takes {ranks}")
