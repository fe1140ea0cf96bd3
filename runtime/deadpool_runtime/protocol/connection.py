"""The connection between the launcher and an agent: how it begins, and how nothing is lost on it.

``ToLauncher`` is all that a launcher may hear, operators included; ``FromLauncher`` is all that an
agent may hear of whom it takes for its launcher.
"""

from __future__ import annotations

import msgspec

from deadpool_runtime.protocol.base import Message
from deadpool_runtime.protocol.from_agent import FromAgent
from deadpool_runtime.protocol.operators import Request
from deadpool_runtime.protocol.succession import (
    Claim,
    Granted,
    LauncherAt,
    LogKept,
    LogPart,
    NoLauncher,
    Ping,
    Pong,
    Successors,
)
from deadpool_runtime.protocol.to_agent import JobSpec, ToAgent


class AgentHello(Message, frozen=True):
    """First message of an agent on each of its connections. ``host``: the address at which its
    ranks' servers can be reached.

    ``term``: the highest one that it has seen; 0 if it has not been welcomed yet. ``heard``: number
    of the newest order that it has received. ``ranks``: rank and birth of every process of a rank
    that lives there. ``seen``: how far the launcher's log was, by term and part, when something
    was decided that the agent was told. ``born``: the how manieth agent of its node it is.
    """

    node: str
    host: str
    pid: int
    version: str
    protocol: int
    term: int = 0
    heard: int = 0
    ranks: list[tuple[int, int]] = msgspec.field(default_factory=list)
    seen: tuple[int, int] = (0, 0)
    born: int = 1


class Welcome(Message, frozen=True):
    """Answer to ``AgentHello``; nothing else goes to the agent before it.

    ``term``: the launcher's incarnation; an agent refuses a lower one than it has seen. ``heard``:
    number of the agent's newest ``Report`` that is in the launcher's log; the later ones are sent
    again. ``spec``: None for an agent that has it already.
    """

    term: int
    heard: int
    spec: JobSpec | None


class Refused(Message, frozen=True):
    """Answer to ``AgentHello``: this agent takes no part in the job; it ends its ranks."""

    reason: str


class Order(Message, frozen=True):
    """A message to the agent. Numbers go up by one, over all terms: one that was not received
    before a launcher ended is sent again by the next, and none is obeyed twice. ``index``: the
    newest part of the log when it was decided upon.
    """

    term: int
    number: int
    body: ToAgent
    index: int = 0


class Report(Message, frozen=True):
    """A message of the agent. Numbers go up, over all terms; one that no launcher has in its log
    is sent again to the next.
    """

    number: int
    body: FromAgent


class Heard(Message, frozen=True):
    """The agent's reports up to ``number`` are in the launcher's log and need not be kept.
    ``index``: the newest part of the log then.
    """

    number: int
    index: int = 0


class Heartbeat(Message, frozen=True):
    """The agent's event loop runs, and it has received the orders up to number ``heard``."""

    sequence: int
    heard: int


FromLauncher = (
    Welcome
    | Refused
    | Order
    | Heard
    | Ping
    | LogPart
    | Successors
    | Claim
    | LauncherAt
    | NoLauncher
)
ToLauncher = AgentHello | Heartbeat | Report | Pong | LogKept | Granted | Request
