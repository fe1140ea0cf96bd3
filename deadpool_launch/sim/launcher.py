"""The launcher: the real controller, its deadlines, and a driver that acts in the simulation.

It keeps ``controller/driver.py``'s contract: events go in one by one in the order in which they
were noticed, actions are performed in order, a message goes to the node that has the rank after the
turn, what comes from a node that was dropped is no longer taken in, but may have been before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from deadpool_launch.controller import core
from deadpool_launch.controller import events as ev
from deadpool_launch.controller.states import State, initial_state
from deadpool_launch.sim.agents import MUCH_NBYTES
from deadpool_launch.sim.network import Wire
from deadpool_launch.sim.slurm import Slurm
from deadpool_runtime import protocol

if TYPE_CHECKING:
    from deadpool_launch.sim.cluster import Cluster

#: How often the launcher is held up before it takes an event in, and the longest that lasts.
HELD_UP_CHANCE = 0.01
HELD_UP_S = 0.1
#: The time that is left when the limit is near.
LIMIT_LEFT_S = 4.0


class Launcher:
    """One launcher. ``finish`` is its verdict, once there is one."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._queue = cluster.queue
        self.state: State = initial_state(cluster.config)
        self.finish: ev.Finish | None = None
        #: All that the controller asked for, in order.
        self.actions: list[ev.Action] = []
        self.events = 0
        #: Messages sent and received.
        self.messages = 0
        #: Bytes of the larger ones, and seconds that each decision took, by event; both are counted
        #: only where ``took`` was set.
        self.nbytes = 0
        self.took: list[tuple[str, float]] | None = None
        #: Called with each action when it has been performed.
        self.on_action: Callable[[ev.Action], None] | None = None
        self.slurm = Slurm(cluster)
        self._inbox: deque[ev.Event] = deque()
        self._held_up = False
        self._deadline: float | None = None

    # ------------------------------------------------------------ what is noticed

    def start(self) -> None:
        """The job begins."""
        self._feed(ev.JobStarted(self._queue.now))

    def stop(self, signal: int) -> None:
        """The user or Slurm asks for the end."""
        self._notice(ev.StopRequested(self._queue.now, signal))

    def drain(self, node: str) -> None:
        """An operator drains a node, or Slurm is seen to."""
        now = self._queue.now
        if self._cluster.dice.random() < 0.5:
            self._notice(ev.DrainRequested(now, node, "is drained (asked for, seen)", 1))
        else:
            self._notice(ev.NodeStateSeen(now, node, "MIXED+DRAIN", "cordoned", "fan"))
            if self._cluster.dice.random() < 0.3:
                self._queue.later(self._queue.delay(1.0), self._resumed, node)

    def _resumed(self, node: str) -> None:
        """Slurm has the node as before."""
        self._notice(ev.NodeStateSeen(self._queue.now, node, "MIXED", "ok", ""))

    def limit_near(self) -> None:
        """The job is to end before its time limit."""
        self._notice(ev.LimitNear(self._queue.now, "SIGUSR1", LIMIT_LEFT_S, False))

    def connected(self, node: str, wire: Wire) -> None:
        """An agent said hello."""
        self._notice(ev.AgentConnected(self._queue.now, node, f"{node}.host"))

    def warm(self, node: str) -> None:
        """Ranks can start on the node."""
        at = self._cluster.arenas.address(node)
        self._notice(ev.AgentWarm(self._queue.now, node, at, MUCH_NBYTES, "what is free"))

    def said(self, node: str, rank: int, born: int, body: protocol.FromRank) -> None:
        """A rank's message."""
        self._notice(ev.RankSaid(self._queue.now, node, rank, born, body))

    def exited(self, node: str, rank: int, born: int, code: int | None, signal: int | None) -> None:
        """A rank's process is gone."""
        self._notice(ev.RankExited(self._queue.now, node, rank, born, code, signal))

    def stopped(self, node: str, rank: int, born: int, for_s: float) -> None:
        """A rank's process is stopped."""
        self._notice(ev.RankStopped(self._queue.now, node, rank, born, for_s))

    def replicator_up(self, node: str) -> None:
        """The node has another replicator."""
        at = self._cluster.arenas.address(node)
        self._notice(ev.ReplicatorUp(self._queue.now, node, at, "ended with signal 9"))

    def inventory_taken(self, node: str, epoch: int, copies: tuple[protocol.Copy, ...]) -> None:
        """A node told its copies."""
        self._notice(ev.InventoryTaken(self._queue.now, node, epoch, copies))

    def standings_told(
        self,
        node: str,
        standings: tuple[protocol.Standing, ...],
        moved: tuple[tuple[int, int], ...],
        asked: int,
    ) -> None:
        """A node says what its ranks are doing."""
        self._notice(ev.StandingsTold(self._queue.now, node, standings, moved, asked))

    def paths_tried(self, node: str, number: int, unreached: tuple[str, ...]) -> None:
        """A node says which others it does not reach."""
        self._notice(ev.PathsTried(self._queue.now, node, number, unreached))

    def start_failed(self, node: str, reason: str) -> None:
        """srun could not start an agent."""
        self._notice(ev.AgentStartFailed(self._queue.now, node, reason))

    def lost(self, node: str, evidence: str, kind: str) -> None:
        """An agent's connection is gone."""
        self._cluster.network.wires[node].launcher_open = False
        self._notice(ev.AgentLost(self._queue.now, node, evidence, kind))

    def expect_silence(self, node: str, wire: Wire) -> None:
        """A node has just fallen silent. Its last heartbeat was a moment ago."""
        timeout_s = self._cluster.config.heartbeat_timeout_s
        since = self._queue.now
        wait_s = timeout_s * (1 - 0.2 * self._queue.dice.random())
        self._queue.later(wait_s, self._silent, node, wire, since)

    def _silent(self, node: str, wire: Wire, since: float) -> None:
        if not wire.launcher_open or not self._cluster.is_silent(node, since):
            return
        timeout_s = self._cluster.config.heartbeat_timeout_s
        self.lost(node, f"no heartbeat for {timeout_s:g} s", "inferred")

    # ------------------------------------------------------------ one event at a time

    def _notice(self, event: ev.Event) -> None:
        self.messages += 1
        if self.took is not None:
            self.nbytes += _nbytes(event)
        if self._held_up:
            self._inbox.append(event)
        elif self._cluster.dice.random() < HELD_UP_CHANCE:
            self._held_up = True
            self._inbox.append(event)
            self._queue.later(self._queue.delay(HELD_UP_S), self._go_on)
        else:
            self._feed(event)

    def _go_on(self) -> None:
        self._held_up = False
        while self._inbox and self.finish is None:
            self._feed(self._inbox.popleft())

    def deadline(self) -> float | None:
        """When the controller wants to be told the time; None while it cannot be told."""
        return None if self._held_up else self._deadline

    def tick(self) -> None:
        """Time has come to the deadline."""
        self._feed(ev.Tick(self._queue.now))

    def _feed(self, event: ev.Event) -> None:
        if self.finish is not None:
            return
        cluster = self._cluster
        before = self.state
        if self.took is None:
            self.state, actions = core.step(before, event)
            self._deadline = self.state.next_deadline()
        else:
            began = time.process_time()
            self.state, actions = core.step(before, event)
            self._deadline = self.state.next_deadline()
            self.took.append((_name(event), time.process_time() - began))
        self.events += 1
        self.actions += actions
        cluster.trace.turn(self._queue.now, event, actions)
        if cluster.scenario.checked:
            cluster.promises.decided(before, self.state, actions)
        for action in actions:
            self._perform(action)
            if self.on_action is not None:
                self.on_action(action)
        if self.state.phase is not before.phase:
            cluster.came_to(self.state.phase)

    # ------------------------------------------------------------ actions

    def _perform(self, action: ev.Action) -> None:
        cluster = self._cluster
        match action:
            case ev.StartAgent(node=node, born=born):
                self.slurm.start_agent(node, born)
            case ev.FenceNode(node=node):
                wire = cluster.network.wires.get(node)
                if wire is not None:
                    wire.drop()
                self.slurm.stop_agent(node)
            case ev.ReleaseNode(node=node):
                if (agent := self._reach(node)) is not None:
                    agent.down(cluster.agents[node].release)
                else:
                    self.slurm.call_off(node)
            case ev.StartRanks(node=node, epoch=epoch, ranks=ranks):
                if (agent := self._reach(node)) is not None:
                    agent.down(cluster.agents[node].start_ranks, epoch, ranks)
            case ev.KillRanks(node=node, ranks=ranks):
                if (agent := self._reach(node)) is not None:
                    agent.down(cluster.agents[node].kill_ranks, ranks)
            case ev.Tell(ranks=ranks, body=body):
                self._tell(ranks, body)
            case ev.TakeInventory(node=node, epoch=epoch):
                if (agent := self._reach(node)) is not None:
                    agent.down(cluster.agents[node].take_inventory, epoch)
            case ev.TakeStandings(node=node, number=number):
                if (agent := self._reach(node)) is not None:
                    agent.down(cluster.agents[node].take_standings, number)
            case ev.TakeStacks(node=node):
                self._reach(node)
            case ev.TryPaths(node=node, number=number, peers=peers, timeout_s=timeout_s):
                if (agent := self._reach(node)) is not None:
                    agent.down(cluster.agents[node].try_paths, number, tuple(peers), timeout_s)
            case ev.CommitCheckpoint(step=step, epoch=epoch):
                self._queue.later(self._queue.delay(), self._commit, step, epoch)
            case ev.Finish():
                self.finish = action
            case (
                ev.Answered()
                | ev.Say()
                | ev.IncidentOpened()
                | ev.IncidentMark()
                | ev.IncidentClosed()
            ):
                pass
            case _:
                assert_never(action)

    def _reach(self, node: str) -> Wire | None:
        """The connection to the node's agent, if there is one."""
        wire = self._cluster.network.wires.get(node)
        if wire is None or not wire.launcher_open:
            return None
        self.messages += 1
        return wire

    def _tell(self, ranks: tuple[int, ...], body: protocol.ToRank) -> None:
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.state.node_of(rank), []).append(rank)
        for node, members in by_node.items():
            wire = self._reach(node)
            if wire is not None:
                wire.down(self._cluster.agents[node].tell_ranks, tuple(members), body)
                if self.took is not None:
                    self.nbytes += len(protocol.frame(protocol.TellRanks(members, body)))

    def _commit(self, step: int, epoch: int) -> None:
        self._notice(self._cluster.disk.commit(self._queue.now, step, epoch))


def _name(event: ev.Event) -> str:
    if isinstance(event, ev.RankSaid):
        return type(event.body).__name__
    return type(event).__name__


def _nbytes(event: ev.Event) -> int:
    """What the message behind the event takes on the wire; 0 for those that never take much."""
    match event:
        case ev.RankSaid(rank=rank, born=born, body=body):
            return len(protocol.frame(protocol.RankSaid(rank, born, body)))
        case ev.InventoryTaken(epoch=epoch, copies=copies):
            return len(protocol.frame(protocol.Inventory(epoch, list(copies))))
        case _:
            return 0
