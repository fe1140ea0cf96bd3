"""The agent of one node: starts and kills ranks, passes messages on, reports what happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deadpool_launch.sim.network import Wire
from deadpool_launch.sim.ranks import Process
from deadpool_runtime import protocol

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster

#: A process that is stopped for longer is reported.
FROZEN_AFTER_S = 0.3
#: Of what a step may take, the part after which a rank is told of.
LATE = 0.5
#: Host memory of a node that copies may take.
MUCH_NBYTES = 1 << 40


class Agent:
    """One agent; a node that comes back has another one."""

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.cluster = cluster
        self.node = node
        self.alive = True
        self.processes: dict[int, Process] = {}
        #: The step of each late process that the launcher was told of.
        self._told: dict[tuple[int, int], int] = {}
        self._queue = cluster.queue
        self._launcher = cluster.launcher
        self._wire = Wire(cluster.network, self)
        cluster.network.wires[node] = self._wire

    # ------------------------------------------------------------ to the launcher

    def start(self) -> None:
        """The agent's program begins."""
        self._wire.up(self._launcher.connected, self.node, self._wire)
        slower = self.cluster.network.factor(self.node)
        self._queue.later(self._queue.delay(1.0) * slower, self._warm)

    def _warm(self) -> None:
        if self.alive:
            self._wire.up(self._launcher.warm, self.node)

    def pass_on(self, process: Process, body: protocol.FromRank) -> None:
        """A rank says something."""
        if self.alive:
            self._wire.up(self._launcher.said, self.node, process.rank, process.born, body)

    def report_exit(self, process: Process, code: int | None, signal: int | None) -> None:
        """A rank's process is gone."""
        if self.alive:
            self._wire.up(
                self._launcher.exited, self.node, process.rank, process.born, code, signal
            )

    def watch_frozen(self, process: Process) -> None:
        """A rank's process was stopped."""
        self._queue.later(FROZEN_AFTER_S, self._report_frozen, process)

    def _report_frozen(self, process: Process) -> None:
        if self.alive and process.frozen and self.processes.get(process.rank) is process:
            self._wire.up(
                self._launcher.stopped, self.node, process.rank, process.born, FROZEN_AFTER_S
            )

    def new_replicator(self) -> None:
        """The replicator ended, and another one listens."""
        if not self.alive:
            return
        self._wire.up(self._launcher.replicator_up, self.node)
        for process in self.processes.values():
            process.when(0.05, self.cluster.copying.again, process)

    def look(self) -> None:
        """Tell of the ranks that are late in a step, once, and of those that have gone on."""
        if not self.alive:
            return
        late_s = self.cluster.config.collective_timeout_s * LATE
        standings = [s for s in self._standings() if s.step_s >= late_s]
        late = {(s.rank, s.born): s.step for s in standings}
        moved = tuple(key for key in self._told if key not in late)
        fresh = tuple(s for s in standings if self._told.get((s.rank, s.born)) != s.step)
        self._told = late
        if fresh or moved:
            self._wire.up(self._launcher.standings_told, self.node, fresh, moved, 0)
        if late:
            self._queue.later(late_s / 2, self.look)

    def _standings(self) -> list[protocol.Standing]:
        found = [process.standing() for process in self.processes.values()]
        return [each for each in found if each is not None]

    # ------------------------------------------------------------ from the launcher

    def start_ranks(self, epoch: int, ranks: tuple[int, ...]) -> None:
        """Fork a process for each rank."""
        for rank in ranks:
            process = self.processes[rank] = Process(self, rank, epoch)
            self.cluster.came_up(process)
            process.start()

    def kill_ranks(self, ranks: tuple[int, ...]) -> None:
        """SIGKILL."""
        for rank in ranks:
            process = self.processes.get(rank)
            if process is not None and not process.unkillable:
                process.exit(signal=9)

    def tell_ranks(self, ranks: tuple[int, ...], body: protocol.ToRank) -> None:
        """Pass a message on."""
        for rank in ranks:
            process = self.processes.get(rank)
            if process is not None:
                process.take(body)

    def take_inventory(self, epoch: int) -> None:
        """Fence off older epochs, then say which copies there are."""
        if self.node in self.cluster.mute:
            return
        self.cluster.fenced[self.node] = epoch
        copies = self.cluster.arenas.copies(self.node)
        self._wire.up(self._launcher.inventory_taken, self.node, epoch, copies)

    def take_standings(self, number: int) -> None:
        """Say what every rank is doing."""
        told = tuple(self._standings())
        self._wire.up(self._launcher.standings_told, self.node, told, (), number)

    def try_paths(self, number: int, peers: tuple[str, ...], timeout_s: float) -> None:
        """Call other nodes; those that cannot be reached take the whole time."""
        reaches = self.cluster.reaches
        unreached = tuple(peer for peer in peers if not reaches(self.node, peer))
        wait_s = timeout_s if unreached else self._queue.delay(0.05)
        self._queue.later(wait_s, self._tell_paths, number, unreached)

    def _tell_paths(self, number: int, unreached: tuple[str, ...]) -> None:
        if self.alive:
            self._wire.up(self._launcher.paths_tried, self.node, number, unreached)

    # ------------------------------------------------------------ the end

    def release(self) -> None:
        """The launcher lets it go."""
        self.end(seen=False)

    def disconnected(self) -> None:
        """The connection broke: an agent without a launcher ends, and its ranks with it."""
        self.end(seen=False)

    def end(self, *, seen: bool) -> None:
        """The agent is gone and so are its ranks and copies. ``seen``: its connection closes."""
        if not self.alive:
            return
        self.alive = False
        if seen:
            self._wire.up(self._launcher.lost, self.node, "agent connection closed", "seen")
        self._wire.end()
        gone = [process for process in self.processes.values() if process.vanish()]
        epochs = {process.epoch for process in gone if not process.ended}
        if self.cluster.agents[self.node] is self:
            self.cluster.arenas.lose(self.node)
        for epoch in sorted(epochs):
            self.cluster.training.peer_lost(epoch)

    def watch_silence(self) -> None:
        """The node has fallen silent; the launcher notices that in a while."""
        self._launcher.expect_silence(self.node, self._wire)
