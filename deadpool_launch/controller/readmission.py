"""Nodes that were given up come back as spares.

A fresh agent is started, which the old one's connection and orders are nothing to (``born``). The
node is the last of the spares from then on; its agent runs the admission checks before it says that
it is ready, and if it does not come up the node is given up again.
"""

from __future__ import annotations

from deadpool_launch.controller.events import NodeStateSeen
from deadpool_launch.controller.node import AgentStage, Cause, Node
from deadpool_launch.controller.recovery import advance
from deadpool_launch.controller.shrinking import is_left_empty
from deadpool_launch.controller.states import State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import nodes_text

#: The gather window is over by then.
_NO_PLACE_S = 1.0


def on_node_ready(turn: Turn, name: str, why: str) -> None:
    """Somebody vouches for a node: it is tried again at once, whatever it was given up for.

    ``why`` continues a sentence that starts with the node's name.
    """
    node = turn.state.nodes.get(name)
    if node is None or turn.over:
        return
    turn.set(unfit=tuple(unfit for unfit in turn.state.unfit if unfit != name))
    if node.stage is AgentStage.GONE:
        turn.set_node(name, faults=(), tries=0, back_at=turn.at)
        turn.say(f"{name} {why}: it becomes a spare if it comes up")
        try_again(turn, say=False)
    elif name in (*turn.state.worn, *turn.state.drained) and name not in turn.state.seats:
        _no_longer_set_aside(turn, name)
        turn.set_node(name, cause=Cause.PASSING, trouble=None)
        turn.set(
            free=(*turn.state.free, name),
            node_restarts={**turn.state.node_restarts, name: ()},
        )
        turn.say(f"{name} {why}: it is a spare again")
    advance(turn)


def on_node_resumed(turn: Turn, event: NodeStateSeen, before: Node | None) -> None:
    """Slurm says how a node is, which was ``before``. One that it had as unhealthy and has no more
    is vouched for if an admin had drained it; else it is only tried sooner.
    """
    if before is None or event.health != "ok" or not before.slurm:
        return
    if event.node in turn.state.drained or "DRAIN" in before.slurm:
        on_node_ready(turn, event.node, f"is well again (Slurm has it as {event.state}, inferred)")
    elif before.back_at is not None:
        turn.set_node(event.node, back_at=turn.at)
        try_again(turn)


def try_again(turn: Turn, *, say: bool = True) -> None:
    """Try the nodes whose time has come. A job whose last step is over needs no more spares, and a
    node whose place was not given to another one yet has to wait for that.
    """
    due = [
        node.name
        for node in turn.state.nodes.values()
        if node.back_at is not None and node.back_at <= turn.at
    ]
    first = []
    for name in due:
        if turn.state.steps_over:
            turn.set_node(name, back_at=None)
        elif _place_is_waited_for(turn.state, name):
            turn.set_node(name, back_at=turn.at + _NO_PLACE_S)
        else:
            first += [name] if turn.state.nodes[name].tries == 0 else []
            _readmit(turn, name)
    if first and say:
        turn.say(f"trying {nodes_text(first)} again: a spare if it comes up")


def _place_is_waited_for(state: State, name: str) -> bool:
    """Whether it holds the place of ranks that are about to get another node.

    That of ranks which are set aside it holds for good, and takes up again.
    """
    return name in state.seats and not is_left_empty(state, state.seats.index(name))


def _no_longer_set_aside(turn: Turn, name: str) -> None:
    drained = {node: step for node, step in turn.state.drained.items() if node != name}
    worn = tuple(worn for worn in turn.state.worn if worn != name)
    turn.set(drained=drained, worn=worn)


def _readmit(turn: Turn, name: str) -> None:
    state = turn.state
    turn.set(
        lost=tuple(lost for lost in state.lost if lost != name),
        free=state.free if name in state.seats else (*state.free, name),
    )
    _no_longer_set_aside(turn, name)
    turn.set_node(name, stage=AgentStage.OFF, gone="", host="", back_at=None, trouble=None)
    turn.start_agent(name)
