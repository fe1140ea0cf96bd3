"""What the controller knows: the phases of a job, the stages of a rank's process, and the state.

Only data lives here. The moves between phases are in ``core.py`` and the modules it calls; the
rules that hold between any two events are in ``invariants.py``. Nothing here imports a clock: every
time is a value that came with an event.

Phases::

    NEW -> AGENTS -> LAUNCHING -> TRAINING -> ENDED          (ENDED is reached from everywhere)
                         |  ^        |  ^
                 a loss  |  |        |  | Resume
                         v  |        v  |
        CLEARING <----- GATHERING <--+  RESTORING
           |  all exits     |  ^           ^
           +-> LAUNCHING    |  | a loss    | Plan
                            +--+-> PARKING-+
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from deadpool_launch.controller.config import Config


class Phase(StrEnum):
    """What the whole job is doing."""

    #: Nothing was asked for yet.
    NEW = "new"
    #: Agents of the active nodes come up.
    AGENTS = "agents"
    #: Rank processes come up; no script of this attempt has begun.
    LAUNCHING = "launching"
    #: The script runs on every rank.
    TRAINING = "training"
    #: A fault was seen and revoked; its siblings are collected before anything is decided.
    GATHERING = "gathering"
    #: Survivors unwind, replacements come up and build; then the step is agreed on.
    PARKING = "parking"
    #: The plan is out: groups are rebuilt and state is restored.
    RESTORING = "restoring"
    #: Every rank starts anew, and the old processes have to be gone first.
    CLEARING = "clearing"
    #: ``Finish`` was given; nothing is answered any more.
    ENDED = "ended"


class Stage(StrEnum):
    """What the process behind one rank is doing."""

    #: There is no process, and none was ordered.
    ABSENT = "absent"
    #: Ordered from the agent, not yet up.
    STARTING = "starting"
    #: Up, and waits for ``Begin``.
    UP = "up"
    #: The script runs but has not come to its first step: it cannot be unwound.
    SCRIPT = "script"
    #: The script is in its steps and can be unwound.
    ATTACHED = "attached"
    #: Told to park in the current epoch, has not said that it did.
    UNWINDING = "unwinding"
    #: Parked in the current epoch.
    PARKED = "parked"
    #: Has the plan of the current epoch.
    RESTORING = "restoring"
    #: Kill was ordered, the exit is awaited.
    DYING = "dying"
    #: The script failed; whether that is its own fault is not yet known.
    FAILED = "failed"
    #: The script came to its end.
    ENDED = "ended"


#: A process is there and was not condemned.
LIVE = frozenset(
    {
        Stage.STARTING,
        Stage.UP,
        Stage.SCRIPT,
        Stage.ATTACHED,
        Stage.UNWINDING,
        Stage.PARKED,
        Stage.RESTORING,
    }
)
#: The process was told ``Begin`` and must hear of every new epoch.
BEGUN = frozenset({Stage.SCRIPT, Stage.ATTACHED, Stage.UNWINDING, Stage.PARKED, Stage.RESTORING})
#: The job is being repaired, and a failing script proves nothing about the script.
RECOVERING = frozenset({Phase.GATHERING, Phase.PARKING, Phase.RESTORING})


class AgentStage(StrEnum):
    """What a node's agent is doing."""

    OFF = "off"
    STARTING = "starting"
    CONNECTED = "connected"
    WARM = "warm"
    #: Failed to start, or lost; the node is not used again.
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the allocation."""

    name: str
    stage: AgentStage = AgentStage.OFF
    #: Where servers of its ranks are reached; empty until its agent connected.
    host: str = ""
    #: Set while the agent is coming up.
    deadline: float | None = None
    #: Why it is gone; continues a sentence that starts with its name.
    gone: str = ""


@dataclass(frozen=True, slots=True)
class Rank:
    """One logical rank and the process that stands behind it now.

    The first group of fields belongs to the rank and outlives its processes; the second belongs to
    the process and is fresh for each one.
    """

    rank: int
    #: Newest step completed in the history that counts; -1 before the first. Set back by a plan.
    completed: int = -1
    #: Newest steps (at most three, ascending) whose own part the driver keeps.
    own: tuple[int, ...] = ()
    #: Digests reported for steps 0 and 1; empty until then.
    digests: tuple[str, str] = ("", "")
    #: Step during which a process of this rank died by itself last; None if none did.
    died_in: int | None = None

    stage: Stage = Stage.ABSENT
    #: Epoch in which the process was started; with ``rank`` it names the process.
    born: int = 0
    #: When patience with this stage ends.
    deadline: float | None = None
    store_port: int = 0
    #: The process joins a job that already trains, and has not yet resumed with it.
    replacement: bool = False
    #: The process holds the whole state of some step.
    holds: bool = False
    #: Steps whose state the process held when it parked.
    slots: tuple[int, ...] = ()
    rebuilt: bool = False
    #: Digest of the restored state; None until ``Restored``.
    restored: str | None = None
    steps_ended: bool = False
    #: Step whose body raised; None if none did.
    raised: int | None = None
    #: ``RaiseIt`` was answered.
    raise_told: bool = False
    #: When the process first showed that something is wrong in it.
    sign_at: float = 0.0
    error: str = ""
    traceback: str = ""
    #: The process of a ``FAILED`` rank is gone.
    exited: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks that went away together, and why."""

    node: str
    ranks: tuple[int, ...]
    #: Continues the sentence "n2 ..." or "rank 3 on n2 ...".
    cause: str
    whole_node: bool


@dataclass(frozen=True, slots=True)
class Incident:
    """Everything from the first sign of a fault until the verdict."""

    number: int
    opened_at: float
    #: The first sign, as a sentence.
    reason: str
    #: Epochs used so far.
    attempts: int = 0
    #: Losses of the current epoch, in order of arrival.
    losses: tuple[Loss, ...] = ()
    #: Phases already marked in the current epoch.
    marked: frozenset[str] = frozenset()
    #: The step that all ranks go back to; None until a plan is out.
    step: int | None = None
    #: Steps whose restored state differed between ranks.
    refused: frozenset[int] = frozenset()
    #: Newest step that any rank is known to have completed before a plan set it back.
    newest: int = -1
    #: ``Resume`` was told in the current epoch.
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """All that the controller remembers. Mappings in it are never changed, only replaced."""

    config: Config
    nodes: Mapping[str, Node]
    #: Node that holds the ranks of each logical node index.
    seats: tuple[str, ...]
    #: Spares not used yet, in order of use.
    free: tuple[str, ...]
    ranks: tuple[Rank, ...]
    phase: Phase = Phase.NEW
    epoch: int = 1
    #: How often the script was started anew on all ranks.
    attempt: int = 0
    #: How often all processes were brought up again; ``max_restarts`` limits it.
    restarts: int = 0
    #: Nodes lost so far, in order.
    lost: tuple[str, ...] = ()
    #: The script of this attempt was begun.
    begun: bool = False
    #: Newest step completed by any rank, ever; from 1 on there is work that must not be lost.
    newest: int = -1
    #: A rank of this job came to its first step, so the script uses the runtime.
    attached: bool = False
    #: When people are told that exceptions wait for a loss that explains them.
    notice_at: float | None = None
    #: ``AllEnded`` was told: the ranks have left their steps and can no longer be unwound.
    steps_over: bool = False
    #: End of the gather window; set in ``GATHERING`` only.
    gather_until: float | None = None
    incident: Incident | None = None
    #: Incidents opened so far.
    incidents: int = 0

    def next_deadline(self) -> float | None:
        """When the driver must send ``Tick`` at the latest; None if nothing is waited for."""
        if self.phase is Phase.ENDED:
            return None
        times = [rank.deadline for rank in self.ranks if rank.deadline is not None]
        times += [node.deadline for node in self.nodes.values() if node.deadline is not None]
        times += [at for at in (self.gather_until, self.notice_at) if at is not None]
        return min(times, default=None)

    def node_of(self, rank: int) -> str:
        """The node whose place in the job this rank belongs to."""
        return self.seats[rank // self.config.nproc_per_node]

    def ranks_of_seat(self, seat: int) -> range:
        """The ranks of one logical node index."""
        nproc = self.config.nproc_per_node
        return range(seat * nproc, (seat + 1) * nproc)


def initial_state(config: Config) -> State:
    """The state before ``JobStarted``."""
    return State(
        config=config,
        nodes={name: Node(name) for name in config.active + config.spares},
        seats=config.active,
        free=config.spares,
        ranks=tuple(Rank(rank) for rank in range(config.world_size)),
    )
