"""MPI's processes on the nodes that serve, which move replicas: one world of them at a time."""

from __future__ import annotations

from typing import Any

from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.movers import MoverStep
from deadpool_launch.statelog import StateLog

#: In place of a node's name in what is kept: the newest world of movers.
_MOVERS = ""


class MoverWorld:
    """``step``: what starts them; None for a job without."""

    def __init__(self, step: MoverStep | None, log: StateLog) -> None:
        self._step = step
        self._log = log
        self._nodes: tuple[str, ...] = ()
        #: ``NodeTable.stages`` when those were found.
        self._stages: object = None
        #: What finds the newest world again, as what finds agents again is kept.
        self.saved: dict[str, dict[str, Any]] = {}
        if step is not None:
            step.on_world = self._note

    def take_over(self, saved: dict[str, dict[str, Any]]) -> None:
        """Take the world that another launcher began out of what it kept."""
        world = saved.pop(_MOVERS, None)
        self.saved = {} if world is None else {_MOVERS: world}
        if self._step is not None and world is not None:
            self._step.take_over(world["world"])

    def keep(self, state: State) -> None:
        """Have them on the nodes that serve, once all that are needed at first do."""
        if self._step is None or state.phase in (Phase.NEW, Phase.AGENTS, Phase.ENDED):
            return
        if state.nodes.stages is self._stages:
            return
        self._stages = state.nodes.stages
        nodes = tuple(name for name, node in state.nodes.items() if node.stage is AgentStage.WARM)
        if nodes != self._nodes:
            self._nodes = nodes
            self._step.restart(state.epoch, nodes)

    def stop(self) -> None:
        """Have them end."""
        if self._step is not None:
            self._step.stop()

    async def close(self) -> None:
        """Wait for their end."""
        if self._step is not None:
            await self._step.close()

    def _note(self, world_id: int) -> None:
        self.saved = {_MOVERS: {"world": world_id}}
        self._log.started(_MOVERS, self.saved[_MOVERS])
