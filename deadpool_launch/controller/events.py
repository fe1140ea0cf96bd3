"""What the controller is told (events, past tense) and what it asks for (actions, imperative).

Both are closed sets of frozen dataclasses; ``core.step`` matches on them exhaustively. ``at`` is
the launcher's clock in seconds (monotonic, injected). The driver in ``driver.py`` is the only one
that makes events and performs actions.
"""

from __future__ import annotations

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
    """The agent's parked process has torch imported; ranks can start there at once."""

    at: float
    node: str


@dataclass(frozen=True, slots=True)
class AgentStartFailed:
    """The agent did not come up (srun failed, deadline missed, parked process failed)."""

    at: float
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class AgentLost:
    """A connected agent is gone. ``evidence`` is a phrase; ``kind`` is ``seen`` or ``inferred``."""

    at: float
    node: str
    evidence: str
    kind: str


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A rank's message (``StepDone``'s ``own`` is already stored by the driver and emptied
    here).
    """

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
class StopRequested:
    """The user or Slurm asked for the end; ``signal`` is the number received by the launcher."""

    at: float
    signal: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has come to a deadline the state asked for (``State.next_deadline``)."""

    at: float


Event = (
    JobStarted
    | AgentConnected
    | AgentWarm
    | AgentStartFailed
    | AgentLost
    | RankSaid
    | RankExited
    | RankStopped
    | StopRequested
    | Tick
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class StartAgent:
    """Start an agent on this node; answered by ``AgentConnected`` + ``AgentWarm`` or
    ``AgentStartFailed``.
    """

    node: str


@dataclass(frozen=True, slots=True)
class FenceNode:
    """Make sure nothing on this node takes part any more: drop its agent's connection, end its
    step.
    """

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
    """Send ``body`` to these ranks. For a ``Plan`` the driver fills ``own`` per rank in
    ``body.sources``.
    """

    ranks: tuple[int, ...]
    body: protocol.ToRank


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
    """A phase of the open incident was reached (``detected``, ``parked``, ``spare ready``, …)."""

    number: int
    at: float
    phase: str
    detail: str


@dataclass(frozen=True, slots=True)
class IncidentClosed:
    """The incident's verdict: ``continued``, ``restarted`` or ``stopped``; ``replayed_steps``
    counts steps run twice.
    """

    number: int
    at: float
    verdict: str
    reason: str
    replayed_steps: int


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
    | StartRanks
    | KillRanks
    | Tell
    | Say
    | IncidentOpened
    | IncidentMark
    | IncidentClosed
    | Finish
)
