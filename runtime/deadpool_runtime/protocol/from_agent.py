"""What an agent reports: of itself, of its node, and of the ranks there."""

from __future__ import annotations

import msgspec

from deadpool_runtime.protocol.base import Address, Message
from deadpool_runtime.protocol.from_rank import FromRank


class AgentReady(Message, frozen=True):
    """Ranks can start at once: the parked process has torch imported, the replicator listens.

    ``memory_nbytes``: how much more host memory copies may take on this node, the smaller of what
    is free in /dev/shm and what the job's memory limit leaves; ``memory_limit``: which of the two
    that is, in words.
    """

    warm_s: float
    replicator: Address
    memory_nbytes: int
    memory_limit: str


class ReplicatorUp(Message, frozen=True):
    """The replicator ended and a new one listens elsewhere; the copies are as they were."""

    replicator: Address
    reason: str


class Copy(msgspec.Struct, frozen=True):
    """A sealed copy of the state of ``rank`` after ``step``, made in ``epoch``.

    ``replica``: kept for another node's rank. ``segments``: the names of those it has.
    ``missing``: of those that belong to the state but are not in this copy.
    """

    rank: int
    step: int
    epoch: int
    replica: bool
    segments: list[tuple[int, ...]]
    missing: list[tuple[int, ...]]


class Inventory(Message, frozen=True):
    """Answer to ``TakeInventory``: every sealed copy on this node."""

    epoch: int
    copies: list[Copy]


class RankSaid(Message, frozen=True):
    """A rank's message. ``born``: the epoch in which the rank's process was started."""

    rank: int
    born: int
    body: FromRank


class RankExited(Message, frozen=True):
    """A rank's process is gone. Exactly one of ``exit_code`` and ``signal`` is set."""

    rank: int
    born: int
    exit_code: int | None
    signal: int | None


class RankStopped(Message, frozen=True):
    """A rank's process has been in the stopped state (SIGSTOP, tracing) for ``for_s`` seconds."""

    rank: int
    born: int
    for_s: float


class GroupStanding(msgspec.Struct, frozen=True):
    """What a rank does in one of its process groups, in which its peers count as it does.

    ``entered``: collectives begun in this epoch. ``waits``: ``number`` is under way, and has been
    for ``wait_s``; else it is the newest, and complete. ``peer_op``: the operation by which a
    single message is waited for, for ``peer_s``; empty if none is.
    """

    name: str
    entered: int
    number: int
    waits: bool
    op: str
    wait_s: float
    peer_op: str = ""
    peer_s: float = 0.0


class Standing(msgspec.Struct, frozen=True):
    """What a rank is doing: it has been in ``step`` for ``step_s``."""

    rank: int
    born: int
    epoch: int
    step: int
    step_s: float
    groups: list[GroupStanding]


class Standings(Message, frozen=True):
    """Ranks of this node that have been in one step for a large part of the deadline, unless they
    were told of and nothing changed; with ``asked``, the answer to that question: every rank that
    is in a step. ``moved``: rank and birth of those that were told of and have gone on.
    """

    standings: list[Standing]
    moved: list[tuple[int, int]]
    asked: int = 0


class Pace(msgspec.Struct, frozen=True):
    """How fast a rank goes: the medians of its ``steps`` newest steps, in seconds. ``own_s``:
    without the time in which it waited for others in collectives or was held up by the runtime;
    ``low_s``: the quarter of them that took the least took no longer than this.
    """

    rank: int
    born: int
    epoch: int
    steps: int
    own_s: float
    low_s: float
    step_s: float


class Paces(Message, frozen=True):
    """How fast the ranks of this node go, now and then, each by its steps since it was last told
    of.
    """

    paces: list[Pace]


class DeviceLines(Message, frozen=True):
    """What the kernel's log or the GPUs' library says of the GPUs of this node; only news."""

    lines: list[str]


class StackNotTaken(Message, frozen=True):
    """The stacks of this rank's process could not be had."""

    rank: int
    born: int
    reason: str


class PathsTried(Message, frozen=True):
    """Answer to ``TryPaths``: the nodes that could not be reached."""

    number: int
    unreached: list[str]


class AgentFailed(Message, frozen=True):
    """The agent cannot serve (the parked process did not come up, run directory not writable …)."""

    reason: str


class AgentLeaving(Message, frozen=True):
    """Answer to ``StopAgent``: nothing of the job is left on this node."""

    leftovers: list[str]


class StepsUntold(Message, frozen=True):
    """So many reports of completed steps were given up, each for a later one of the same rank:
    the agent had no launcher to tell them to, and no more room.
    """

    count: int


FromAgent = (
    AgentReady
    | ReplicatorUp
    | Inventory
    | RankSaid
    | RankExited
    | RankStopped
    | StepsUntold
    | Standings
    | Paces
    | DeviceLines
    | StackNotTaken
    | PathsTried
    | AgentFailed
    | AgentLeaving
)
