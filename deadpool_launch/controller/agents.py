"""Events of agents: a node becomes usable, or stops being so."""

from __future__ import annotations

from deadpool_launch.controller.losses import forget_processes, lose
from deadpool_launch.controller.recovery import advance
from deadpool_launch.controller.rungs import pending_seat_lost, take_seats
from deadpool_launch.controller.states import AgentStage, Loss, Phase, Stage
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import ranks_text
from deadpool_launch.exits import ExitCode


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


def on_agent_warm(turn: Turn, name: str) -> None:
    """Ranks can start at once on this node."""
    if turn.state.nodes[name].stage in (AgentStage.STARTING, AgentStage.CONNECTED):
        turn.set_node(name, stage=AgentStage.WARM, deadline=None)
        advance(turn)


def on_node_gone(turn: Turn, name: str, cause: str) -> None:
    """The node's agent failed to start, was lost or is condemned: the node is not used again.

    ``cause`` continues a sentence that starts with the node's name.
    """
    state = turn.state
    node = state.nodes[name]
    if node.stage is AgentStage.GONE or turn.over:
        return
    if name not in state.seats:
        turn.drop_node(node, cause)
        turn.say(f"spare {name} {cause} while waiting")
        return
    members = state.ranks_of_seat(state.seats.index(name))
    hurt = tuple(
        rank for rank in members if state.ranks[rank].stage not in (Stage.ABSENT, Stage.ENDED)
    )
    ended = [rank for rank in members if state.ranks[rank].stage is Stage.ENDED]
    turn.set_ranks(ended, exited=True)
    if state.phase is Phase.AGENTS:
        turn.drop_node(node, cause)
        _replace_before_start(turn, name, cause)
    elif state.phase is Phase.CLEARING:
        forget_processes(turn, hurt)
        turn.drop_node(node, cause)
        pending_seat_lost(turn, name, cause)
    elif hurt:
        forget_processes(turn, hurt)
        lose(turn, [Loss(name, hurt, cause, True)])
        turn.drop_node(node, cause)
    elif any(state.ranks[rank].stage is Stage.ABSENT for rank in members):
        turn.drop_node(node, cause)
        if state.phase is Phase.GATHERING:
            lose(turn, [Loss(name, tuple(members), cause, True)])
        else:
            pending_seat_lost(turn, name, cause)
    else:
        turn.drop_node(node, cause)
        turn.say(f"{name} {cause} after {ranks_text(members)} had ended there")
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
