"""Which spare takes a lost node's place: a pure function over the nodes' agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deadpool_launch.controller.node import AgentStage, Node


def choose_spare(free: Sequence[str], nodes: Mapping[str, Node]) -> str | None:
    """The first spare in order of use, but one whose agent is warm before one that has to come up.

    Starting an agent may take the whole of ``agent_start_s`` or fail, while a warm one answers at
    once; the order of use is a preference, the time without training is a loss.
    """
    usable = [name for name in free if nodes[name].stage is not AgentStage.GONE]
    warm = [name for name in usable if nodes[name].stage is AgentStage.WARM]
    return next(iter(warm + usable), None)
