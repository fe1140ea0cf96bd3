"""Slurm: starts an agent with ``srun``, which takes a while or fails, and ends one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deadpool_launch.sim.agents import Agent

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster

#: The longest that ``srun`` takes, to start a program or to say that it cannot.
SRUN_S = 0.2
#: The longest that Slurm takes to end a step on a node that it reaches.
CANCEL_S = 0.5


class Slurm:
    """What the launcher has of Slurm. A node that is DOWN is seen to be in half of the cases."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._queue = cluster.queue
        #: Nodes on which srun cannot start anything.
        self.bad: set[str] = set()
        #: Which agent of each node is wanted.
        self._wanted: dict[str, int] = {}

    def start_agent(self, node: str, born: int) -> None:
        """``srun`` for one node."""
        self._wanted[node] = born
        slower = self._cluster.network.factor(node)
        self._queue.later(self._queue.delay(SRUN_S) * slower, self._started, node, born)

    def _started(self, node: str, born: int) -> None:
        cluster = self._cluster
        if self._wanted.get(node) != born:
            return
        if node in cluster.arenas.dead or node in self.bad or node in cluster.network.far:
            if self._queue.dice.random() < 0.5:
                self._queue.later(self._queue.delay(), self._failed, node, born)
            return
        if born > 1:
            # Its own arena and replicator: what processes of an older agent write is elsewhere.
            cluster.arenas.lose(node)
            cluster.arenas.move_replicator(node)
            cluster.fenced[node] = cluster.launcher.state.epoch
        agent = cluster.agents[node] = Agent(cluster, node)
        agent.start()

    def _failed(self, node: str, born: int) -> None:
        if self._wanted.get(node) == born:
            self._cluster.launcher.start_failed(node, "srun: error: task 0 not launched")

    def call_off(self, node: str) -> None:
        """An agent that has not come up yet is not to."""
        self._wanted.pop(node, None)

    def stop_agent(self, node: str) -> None:
        """End the node's step, once Slurm reaches it."""
        self._wanted.pop(node, None)
        agent = self._cluster.agents.get(node)
        if agent is not None:
            self._queue.later(self._queue.delay(CANCEL_S), self._stop, agent)

    def _stop(self, agent: Agent) -> None:
        if agent.node not in self._cluster.network.far:
            agent.end(seen=False)
