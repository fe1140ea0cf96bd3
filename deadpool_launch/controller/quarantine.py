"""Which lost nodes may come back, and when. Pure.

A node that was given up for a cause that may pass is tried again some time later; one whose cause
lasts, or that was given up too often, stays out. A try that fails doubles the time to the next one.
"""

from __future__ import annotations

from typing import Any

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.node import AgentStage, Cause, Node
from deadpool_launch.controller.states import State
from deadpool_launch.controller.wording import plural, seconds

#: After so many tries that failed the time between two grows no more.
_MOST_DOUBLINGS = 6


def after_loss(node: Node, at: float, config: Config, cause: Cause) -> dict[str, Any]:
    """The fields of a node that is given up which say whether it comes back.

    A node that was being tried again and did not come up has failed a try; it is not one more
    fault.
    """
    if node.born > 1 and node.stage is not AgentStage.WARM:
        faults, tries = node.faults, node.tries + 1
    else:
        recent = (time for time in node.faults if time > at - config.quarantine_within_s)
        faults, tries = (*recent, at), 0
    back_at = None
    passing = cause is Cause.PASSING and len(faults) < config.quarantine_faults
    if config.readmit_after_s is not None and passing:
        back_at = at + config.readmit_after_s * 2 ** min(tries, _MOST_DOUBLINGS)
    return {"faults": faults, "tries": tries, "cause": cause, "back_at": back_at}


def next_try_text(node: Node, at: float) -> str:
    """The end of a sentence about a node that was just given up."""
    if node.back_at is None:
        return ""
    return f"; it is tried again in {seconds(round(node.back_at - at))}"


def stays_out_text(node: Node, config: Config) -> str:
    """Why a node that was just given up stays out, if that is for its many faults; else empty."""
    often = len(node.faults) >= max(2, config.quarantine_faults)
    if config.readmit_after_s is None or node.cause is not Cause.PASSING or not often:
        return ""
    within = seconds(config.quarantine_within_s)
    return f"{node.name} stays out: given up {plural(len(node.faults), 'time')} within {within}"


def left_out(state: State) -> tuple[str, ...]:
    """The nodes that the next job should do without: those whose fault lasts."""
    return tuple(
        node.name
        for node in state.nodes.values()
        if node.trouble is not None or (node.cause is Cause.SICK and node.stage is AgentStage.GONE)
    )
