"""What the controller is told (events, past tense) and what it asks for (actions, imperative).

Both are closed sets of frozen dataclasses; ``core.step`` matches on them exhaustively. ``at`` is
the launcher's clock in seconds (monotonic, injected). The driver in ``driver.py`` is the only one
that makes events and performs actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_runtime import protocol

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class JobStarted:
    """The driver is ready to act; raised once."""

    at: float


@dataclass(frozen=True, slots=True)
class AgentConnected:
    """An agent proved the secret and said hello. ``host``: where its ranks' servers are reached."""

    at: float
    node: str
    host: str


@dataclass(frozen=True, slots=True)
class AgentWarm:
    """The agent's parked process has torch imported and its replicator listens; ranks can start
    there at once. See ``protocol.AgentReady``.
    """

    at: float
    node: str
    replicator: protocol.Address
    memory_nbytes: int
    memory_limit: str


@dataclass(frozen=True, slots=True)
class ReplicatorUp:
    """The node's replicator ended for ``reason``, and a new one listens."""

    at: float
    node: str
    replicator: protocol.Address
    reason: str


@dataclass(frozen=True, slots=True)
class InventoryTaken:
    """The agent fenced off the epochs before ``epoch`` and says which copies its node has."""

    at: float
    node: str
    epoch: int
    copies: tuple[protocol.Copy, ...]


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The durable checkpoint of ``step`` is complete. ``kept``: the steps of all that are now."""

    at: float
    step: int
    epoch: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """What the ranks wrote for ``step`` did not become a durable checkpoint."""

    at: float
    step: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class AgentStartFailed:
    """The agent did not come up (srun failed, deadline missed), or one that did cannot go on (its
    parked process or its replicator ends again and again).
    """

    at: float
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeReady:
    """Somebody vouches for a node that was given up, such as an admin who resumed it in Slurm.

    ``why`` continues a sentence that starts with the node's name.
    """

    at: float
    node: str
    why: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    """A connected agent is gone. ``evidence`` is a phrase; ``kind`` is ``seen`` or ``inferred``."""

    at: float
    node: str
    evidence: str
    kind: str


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A rank's message."""

    at: float
    node: str
    rank: int
    born: int
    body: protocol.FromRank


@dataclass(frozen=True, slots=True)
class RankExited:
    """A rank's process ended; exactly one of ``exit_code`` and ``signal`` is set."""

    at: float
    node: str
    rank: int
    born: int
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True, slots=True)
class RankStopped:
    """A rank's process is in the stopped state for ``for_s`` seconds (seen by its agent)."""

    at: float
    node: str
    rank: int
    born: int
    for_s: float


@dataclass(frozen=True, slots=True)
class StandingsTold:
    """Ranks of this node have been in one step for long; ``moved``: rank and birth of those that
    were told of and have gone on. ``asked``: the question that is answered, with every rank that is
    in a step; 0 if there was none. See ``protocol.Standings``.
    """

    at: float
    node: str
    standings: tuple[protocol.Standing, ...]
    moved: tuple[tuple[int, int], ...]
    asked: int


@dataclass(frozen=True, slots=True)
class PacesTold:
    """How fast ranks of this node go. See ``protocol.Pace``."""

    at: float
    node: str
    paces: tuple[protocol.Pace, ...]


@dataclass(frozen=True, slots=True)
class DeviceLines:
    """What this node's kernel or library has to say about its GPUs."""

    at: float
    node: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StackNotTaken:
    """The stacks of a rank's process could not be had."""

    at: float
    node: str
    rank: int
    born: int
    reason: str


@dataclass(frozen=True, slots=True)
class PathsTried:
    """The node's agent says which of the nodes that it was to call do not answer."""

    at: float
    node: str
    number: int
    unreached: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user or Slurm asked for the end; ``signal`` is the number received by the launcher."""

    at: float
    signal: int


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The ranks of this node are to move to another one. ``why`` continues a sentence that starts
    with the node's name. ``request``: answered by ``Answered`` with this number; 0 if nobody waits.
    """

    at: float
    node: str
    why: str
    request: int = 0


@dataclass(frozen=True, slots=True)
class NodeStateSeen:
    """Slurm has the node in another state than before. ``health``: see ``deadpool_slurm.parse``."""

    at: float
    node: str
    state: str
    health: str
    reason: str


@dataclass(frozen=True, slots=True)
class LimitNear:
    """The job must be over in ``left_s``. ``ending``: its processes are being terminated."""

    at: float
    why: str
    left_s: float
    ending: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has come to a deadline the state asked for (``State.next_deadline``)."""

    at: float


Event = (
    JobStarted
    | AgentConnected
    | AgentWarm
    | ReplicatorUp
    | InventoryTaken
    | CheckpointCommitted
    | CheckpointFailed
    | AgentStartFailed
    | AgentLost
    | NodeReady
    | RankSaid
    | RankExited
    | RankStopped
    | StandingsTold
    | PacesTold
    | DeviceLines
    | StackNotTaken
    | PathsTried
    | StopRequested
    | DrainRequested
    | NodeStateSeen
    | LimitNear
    | Tick
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start an agent on this node; answered by ``AgentConnected`` + ``AgentWarm`` or
    ``AgentStartFailed``. ``born``: the how manieth it is there; with a second one the node comes
    back, and it makes the admission checks first.
    """

    node: str
    born: int = 1


@dataclass(frozen=True, slots=True)
class FenceNode:
    """Make sure nothing on this node takes part any more: drop its agent's connection, end its
    step.
    """

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseNode:
    """Let the agent of this node end in good order: the node takes no part any more."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start these global ranks on this node."""

    node: str
    epoch: int
    node_index: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KillRanks:
    """SIGKILL these ranks' processes on this node; ``RankExited`` follows."""

    node: str
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``body`` to these ranks."""

    ranks: tuple[int, ...]
    body: protocol.ToRank


@dataclass(frozen=True, slots=True)
class TakeInventory:
    """Ask the node's agent for its copies; answered by ``InventoryTaken``."""

    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeStandings:
    """Ask the node's agent what its ranks are doing; answered by ``StandingsTold``."""

    node: str
    number: int


@dataclass(frozen=True, slots=True)
class TakeStacks:
    """Have the stacks of these ranks' threads written to their logs, before anything that is asked
    for later happens on this node; ``StackNotTaken`` follows where that fails.
    """

    node: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TryPaths:
    """Have the node's agent call the replicators of these nodes; answered by ``PathsTried``.

    ``timeout_s``: after which one that does not answer counts as not reached.
    """

    node: str
    number: int
    peers: Mapping[str, protocol.Address]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """All ranks have written their parts of the durable checkpoint of ``step``, from copies made in
    ``epoch``; answered by ``CheckpointCommitted`` or ``CheckpointFailed``.
    """

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Answered:
    """Tell whoever asked. ``mistaken``: see ``protocol.Denied``."""

    request: int
    done: bool
    text: str
    mistaken: bool = False


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the user (the driver puts the time before it)."""

    text: str


@dataclass(frozen=True, slots=True)
class IncidentOpened:
    """For the journal and the timeline: the first sign of a fault."""

    number: int
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class IncidentMark:
    """A phase of an incident was reached (``detected``, ``parked``, ``spare ready``, …).

    Only ``redundancy restored`` may come after the incident's verdict.
    """

    number: int
    at: float
    phase: str
    detail: str


@dataclass(frozen=True, slots=True)
class IncidentClosed:
    """The incident's verdict: ``continued``, ``restarted`` or ``stopped``; ``replayed_steps``
    counts steps that every rank had completed and that were run again. ``rung``: the highest that
    was taken, see ``ladder.Rung``.
    """

    number: int
    at: float
    verdict: str
    reason: str
    replayed_steps: int
    rung: int


@dataclass(frozen=True, slots=True)
class Finish:
    """End the job: stop every agent, then leave with ``exit_code``. ``detail``: a traceback to
    show, if any.
    """

    verdict: str
    exit_code: int
    reason: str
    detail: str


Action = (
    StartAgent
    | FenceNode
    | ReleaseNode
    | StartRanks
    | KillRanks
    | Tell
    | TakeInventory
    | TakeStandings
    | TakeStacks
    | TryPaths
    | CommitCheckpoint
    | Answered
    | Say
    | IncidentOpened
    | IncidentMark
    | IncidentClosed
    | Finish
)
