"""The network: a connection of each agent to the launcher, and paths between the nodes.

A connection is TCP's: what is sent arrives in order and whole, later when the node is cut off for a
while, or the connection breaks. Either end may take it for broken while the other one does not know
it yet. Messages of different nodes overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from deadpool_launch.sim.clock import EventQueue
from deadpool_launch.sim.faults import Scope

#: The longest that a message takes, on a node that is not slow.
MESSAGE_S = 0.02
#: How long TCP may take to try again once a node is reached again, as a part of the time it was
#: not.
RETRY_PART = 0.3


class Peer(Protocol):
    """An agent, as its connection sees it."""

    node: str

    def disconnected(self) -> None:
        """The connection broke, as this end finds out."""


class Network:
    """Who reaches whom, and how fast."""

    def __init__(self, queue: EventQueue) -> None:
        self.queue = queue
        self.wires: dict[str, Wire] = {}
        #: What is far slower than usual.
        self.slow: dict[str, float] = {}
        #: Nodes that do not reach the launcher, and since when.
        self.far: dict[str, float] = {}
        #: Nodes that do not reach each other.
        self.apart: set[str] = set()
        self._held: list[tuple[str, str, Callable[..., None], tuple[Any, ...]]] = []

    def factor(self, node: str) -> float:
        """How many times as long everything takes on this node."""
        return self.slow.get(node, 1.0)

    def cut(self, node: str, scope: Scope) -> None:
        """From now on the node does not reach those of ``scope``."""
        if scope is not Scope.PEERS:
            self.far.setdefault(node, self.queue.now)
        if scope is not Scope.LAUNCHER:
            self.apart.add(node)

    def heal(self, node: str, scope: Scope) -> None:
        """It does again; what was sent meanwhile arrives when TCP tries again."""
        if scope is not Scope.PEERS and node in self.far:
            was_s = self.queue.now - self.far.pop(node)
            wire = self.wires.get(node)
            if wire is not None:
                self.queue.later(self.queue.delay(was_s * RETRY_PART), wire.release)
        if scope is not Scope.LAUNCHER and node in self.apart:
            self.apart.discard(node)
            held, self._held = self._held, []
            for one, other, what, args in held:
                self.between(one, other, self.queue.delay(), what, *args)

    def between(
        self, one: str, other: str, delay_s: float, what: Callable[..., None], *args: Any
    ) -> None:
        """Something goes from one node to another, or within a node."""
        slower = max(self.factor(one), self.factor(other))
        self.queue.later(delay_s * slower, self._across, one, other, what, args)

    def _across(
        self, one: str, other: str, what: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if one != other and (one in self.apart or other in self.apart):
            self._held.append((one, other, what, args))
            return
        what(*args)


class Wire:
    """The connection of one agent. ``up`` leads to the launcher, ``down`` to the agent."""

    def __init__(self, network: Network, agent: Peer) -> None:
        self._network = network
        self._queue = network.queue
        self._agent = agent
        self._node = agent.node
        #: Whether each end takes it for whole.
        self.launcher_open = True
        self.agent_open = True
        self._up_at = 0.0
        self._down_at = 0.0
        self._held: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []

    def up(self, what: Callable[..., None], *args: Any) -> None:
        """The agent sends; ``what`` is called at the launcher."""
        if self.agent_open:
            self._up_at = self._in_order(self._up_at)
            self._queue.at(self._up_at, self._arrive, True, what, args)

    def down(self, what: Callable[..., None], *args: Any) -> None:
        """The launcher sends; ``what`` is called at the agent."""
        if self.launcher_open:
            self._down_at = self._in_order(self._down_at)
            self._queue.at(self._down_at, self._arrive, False, what, args)

    def _in_order(self, last_at: float) -> float:
        delay_s = self._queue.delay(MESSAGE_S) * self._network.factor(self._node)
        return max(last_at, self._queue.now + delay_s)

    def _arrive(self, up: bool, what: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._node in self._network.far or self._held:
            self._held.append((up, what, args))
        elif up:
            if self.launcher_open:
                what(*args)
            else:
                self.reset()
        elif self.agent_open:
            what(*args)

    def release(self) -> None:
        """The node is reached again: let what was held go on its way."""
        if self._node in self._network.far:
            return
        held, self._held = self._held, []
        for up, what, args in held:
            self._arrive(up, what, args)
        if not self.launcher_open:
            self.reset()

    def drop(self) -> None:
        """The launcher cuts the connection; the agent learns of it when it is reached."""
        if self.launcher_open:
            self.launcher_open = False
            self._queue.later(self._queue.delay(MESSAGE_S), self.release)

    def reset(self) -> None:
        """The agent learns that the connection is broken."""
        if self.agent_open:
            self.agent_open = False
            self._agent.disconnected()

    def end(self) -> None:
        """The agent's end is closed, or gone with its node."""
        self.agent_open = False
