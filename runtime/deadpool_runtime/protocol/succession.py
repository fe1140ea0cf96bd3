"""Who leads the job, and who does after that: its log on other nodes, and the next launcher.

``Claim``, ``LauncherAt`` and ``NoLauncher`` come from an agent that keeps the launcher's log, as
answers to ``AgentHello``.
"""

from __future__ import annotations

from deadpool_runtime.protocol.base import Address, Message


class Ping(Message, frozen=True):
    """Answer with ``Pong``: the launcher asks whether it still leads the job."""

    number: int
    index: int


class Pong(Message, frozen=True):
    """Answer to ``Ping``: the agent obeys this launcher."""

    number: int


class LogPart(Message, frozen=True):
    """A part of the launcher's log, for a node that keeps a copy; answered by ``LogKept``.

    ``fresh``: it takes the place of all before. ``slot``: the node's number among all nodes of the
    job. ``voters``: the nodes whose agents decide who leads, from this part on; None if they are
    the same. ``host``: the launcher's own node; empty if it is none of the job's.
    """

    index: int
    fresh: bool
    data: bytes
    slot: int
    voters: list[str] | None = None
    host: str = ""


class LogKept(Message, frozen=True):
    """This node has the parts of the log up to ``index``. ``address``: where agents find it if
    they lose their launcher.
    """

    index: int
    address: Address


class Successors(Message, frozen=True):
    """Where to ask for a launcher when this one has been silent for ``silent_s``, in this order."""

    addresses: list[Address]
    silent_s: float


class Claim(Message, frozen=True):
    """Obey no launcher below ``term`` any more, if this copy of the log, which goes to ``mark``,
    has everything that this agent was told; answered by ``Granted``.
    """

    term: int
    mark: tuple[int, int]


class Granted(Message, frozen=True):
    """Answer to ``Claim``."""

    term: int


class LauncherAt(Message, frozen=True):
    """The launcher is there now."""

    address: Address


class NoLauncher(Message, frozen=True):
    """There is no launcher to be had here; ``reason`` for people."""

    reason: str
