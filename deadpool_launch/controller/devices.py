"""What a node's agent says about its GPUs: evidence of what the node's next fault is.

Rules (``deadpool_launch.classify``) say what a line means. A fault of the hardware is remembered:
what a process of the node shows from then on is the node's fault (``causes.py``), and if the
policy says so the node's ranks move to a spare at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from deadpool_launch.classify.lines import XID
from deadpool_launch.classify.model import Kind, Observation, Verdict, classify
from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.drains import wish
from deadpool_launch.controller.node import AgentStage, Cause
from deadpool_launch.controller.rank import Trait
from deadpool_launch.controller.shrinking import is_left_empty
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Wish
from deadpool_launch.controller.wording import short_error


def on_device_lines(turn: Turn, name: str, lines: Sequence[str]) -> None:
    """The agent of a node has seen these."""
    node = turn.state.nodes[name]
    if node.stage is AgentStage.GONE or turn.state.config.device == "ignore":
        return
    for line in lines:
        verdict = _verdict(turn.state, line)
        told = f" ({verdict.text})" if verdict is not None else ""
        turn.say(f"{name}: {short_error(line)}{told}")
        if verdict is not None and verdict.kind is Kind.PERMANENT and node.trouble is None:
            trouble = Verdict(Kind.PERMANENT, verdict.rule, f"{verdict.reason}: {line}")
            turn.set_node(name, trouble=trouble)
            node = turn.state.nodes[name]
            _act(turn, name, f"({short_error(line)}, seen; {verdict.text})")


def _verdict(state: State, line: str) -> Verdict | None:
    xids = frozenset(int(found) for found in XID.findall(line))
    return classify(Observation(error=line, xids=xids), state.config.rules)


def _act(turn: Turn, name: str, evidence: str) -> None:
    """Do without the node where that costs nothing, where it is being mended, or by policy."""
    state = turn.state
    if name not in state.seats or is_left_empty(state, state.seats.index(name)):
        on_node_gone(turn, name, f"is given up {evidence}", Cause.SICK)
        return
    ranks = tuple(state.ranks_of_seat(state.seats.index(name)))
    fresh = [rank for rank in ranks if state.ranks[rank].traits & Trait.NEWCOMER]
    if state.incident is not None and fresh and state.phase is not Phase.TRAINING:
        # A process has died of it, and another one comes up on the same GPU.
        on_node_gone(turn, name, f"is given up {evidence}", Cause.SICK)
        return
    if state.config.device != "swap":
        return
    wish(turn, Wish(name, f"is given up {evidence}"), 0)
