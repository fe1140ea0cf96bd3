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
                            +--+-> PARKING-+-> INVENTORY
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from deadpool_launch.classify.model import Kind, Verdict
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.tables import NodeTable, RankTable
from deadpool_runtime.protocol import Address, Copy, Holder, Pace, Saved, SegmentDigest, Standing
from deadpool_runtime.replication.naming import Ranks


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
    #: Survivors unwind, replacements come up and build.
    PARKING = "parking"
    #: Every rank is parked; the nodes say which copies they have, then the step is agreed on.
    INVENTORY = "inventory"
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
RECOVERING = frozenset({Phase.GATHERING, Phase.PARKING, Phase.INVENTORY, Phase.RESTORING})


class Trait:
    """What the table of ranks sums up: bits of ``Rank.traits``."""

    #: The bit of each stage, and those of all stages together.
    STAGE: Mapping[Stage, int] = {stage: 1 << place for place, stage in enumerate(Stage)}
    ANY_STAGE = (1 << len(Stage)) - 1
    #: Survivors of a loss, those who take the places of the lost; which of each have not parked.
    SURVIVOR = 1 << 20
    SURVIVOR_NOT_PARKED = 1 << 21
    NEWCOMER = 1 << 22
    NEWCOMER_NOT_PARKED = 1 << 23
    REBUILT = 1 << 24
    RESTORED = 1 << 25
    #: An exception of it is not explained yet.
    SIGN = 1 << 26
    #: It lives, and no exception has left its step.
    LIVE_NOT_RAISED = 1 << 30
    #: It takes no part: what every rank must have is not asked of it.
    ASIDE = 1 << 33
    OVERDUE = 1 << 27
    #: It has not said which step it is in, not come to the boundary that all wait at.
    NOT_HELD = 1 << 31
    NOT_THERE = 1 << 32
    #: It has not reported its digests after step 0, after step 1.
    NO_DIGESTS = (1 << 28, 1 << 29)


def stage_traits(*stages: Stage) -> int:
    """The bits of these stages."""
    traits = 0
    for stage in stages:
        traits |= Trait.STAGE[stage]
    return traits


class AgentStage(StrEnum):
    """What a node's agent is doing."""

    OFF = "off"
    STARTING = "starting"
    CONNECTED = "connected"
    WARM = "warm"
    #: Failed to start, or lost; the node is not used again.
    GONE = "gone"


class Cause(StrEnum):
    """What a node is given up for."""

    #: It may pass: the node is tried again.
    PASSING = "passing"
    #: The job has no use for it as it is: it comes back only if somebody vouches for it.
    UNFIT = "unfit"
    #: The same, and the next job should do without it.
    SICK = "sick"


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
    #: How many agents were ordered there so far; the newest is known by this number.
    born: int = 0
    #: When it was given up, as far as that still counts, and what that was for the last time.
    faults: tuple[float, ...] = ()
    cause: Cause = Cause.PASSING
    #: A fault of its hardware that was seen; None if none was.
    trouble: Verdict | None = None
    #: When it is tried again, and how many tries have failed since it was given up; see
    #: ``quarantine.py``.
    back_at: float | None = None
    tries: int = 0
    #: Its state in Slurm's words, while that is not a healthy one.
    slurm: str = ""
    #: Where its replicator listens; None until its agent is warm.
    replicator: Address | None = None
    #: Host memory that copies may take there, and what sets the limit, in words.
    memory_nbytes: int = 0
    memory_limit: str = ""
    #: Set from the question which copies it has until the answer.
    inventory_by: float | None = None
    #: The answer of the current epoch.
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class Rank:
    """One logical rank and the process that stands behind it now.

    The first group of fields belongs to the rank and outlives its processes; the second belongs to
    the process and is fresh for each one.
    """

    rank: int
    #: Newest step completed in the history that counts; -1 before the first. Set back by a plan.
    completed: int = -1
    #: Size of each segment of its state, and of the own part; None until it attached.
    segments: Mapping[Ranks, int] | None = None
    own_nbytes: int = 0
    #: Host memory that writing its part of a durable checkpoint takes.
    save_nbytes: int = 0
    #: Digests of its segments after steps 0 and 1; None until they are reported.
    digests: tuple[tuple[SegmentDigest, ...] | None, tuple[SegmentDigest, ...] | None] = (
        None,
        None,
    )
    #: The ranks that have one whole model together with it, and why the job needs them all; the
    #: latter is empty if it does not.
    replica: Ranks = ()
    fixed: str = ""
    #: Its optimizers share out their state over the ranks that take part.
    shares: bool = False
    #: Its script came to the first step with a state that steps were made in.
    brings_state: bool = False
    #: It takes no part: there is no node for its replica. Its process, if any, is ``DYING``.
    aside: bool = False
    #: Up to this step the copy of a peer stands for its own: it was aside then, or still is.
    adopts: int = -1
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
    #: The process has the job's state: it completed a step or restored one.
    holds: bool = False
    rebuilt: bool = False
    #: Digests of the restored segments; None until ``Restored``.
    restored: tuple[SegmentDigest, ...] | None = None
    #: Epoch in which a replica of it was first confirmed last; 0 before.
    protected: int = 0
    #: How many steps of the process went on without a confirmed replica of the step before.
    unprotected: int = 0
    steps_ended: bool = False
    #: Step whose body raised; None if none did.
    raised: int | None = None
    #: ``RaiseIt`` was answered.
    raise_told: bool = False
    #: When the process first showed that something is wrong in it.
    sign_at: float = 0.0
    error: str = ""
    traceback: str = ""
    #: What a rule called that when it was shown; None if no rule knew it.
    fault: Kind | None = None
    #: The process of a ``FAILED`` rank is gone.
    exited: bool = False
    #: When its step will have lasted for too long; None unless it is late.
    overdue_at: float | None = None
    #: How fast it goes, and whether that has not been looked at yet.
    pace: Pace | None = None
    pace_is_new: bool = False
    #: For how many windows in a row it has been slow, or no longer slow, and their steps.
    windows: int = 0
    windows_steps: int = 0
    #: People were told that it is slow, and not that it no longer is.
    slow: bool = False
    #: How long it was given to park.
    patience_s: float = 0.0
    #: The newest step it had begun when it was held back; None while that is not known.
    held: int | None = None
    #: It waits at the boundary that the halt is about.
    there: bool = False

    @property
    def goes_on(self) -> bool:
        """It has steps left to run, and takes part."""
        return not (self.steps_ended or self.aside or self.stage is Stage.ENDED)

    @property
    def traits(self) -> int:
        """What the table of all ranks sums up; see ``Trait``."""
        stage = self.stage
        if self.aside:
            return Trait.ASIDE | (Trait.STAGE[stage] if stage is Stage.DYING else 0)
        traits = Trait.STAGE[stage]
        if self.replacement or stage not in LIVE:
            traits |= Trait.NEWCOMER
            if stage is not Stage.PARKED:
                traits |= Trait.NEWCOMER_NOT_PARKED
        else:
            traits |= Trait.SURVIVOR
            if stage is not Stage.PARKED:
                traits |= Trait.SURVIVOR_NOT_PARKED
        if self.rebuilt:
            traits |= Trait.REBUILT
        if self.restored is not None:
            traits |= Trait.RESTORED
        if self.raised is not None or stage is Stage.FAILED:
            traits |= Trait.SIGN
        if self.raised is None and stage in LIVE:
            traits |= Trait.LIVE_NOT_RAISED
        if self.overdue_at is not None:
            traits |= Trait.OVERDUE
        if self.held is None:
            traits |= Trait.NOT_HELD
        if not (self.there or self.steps_ended):
            traits |= Trait.NOT_THERE
        for digests, trait in zip(self.digests, Trait.NO_DIGESTS, strict=True):
            if digests is None:
                traits |= trait
        return traits


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks that went away together, and why."""

    node: str
    ranks: tuple[int, ...]
    #: Continues the sentence "n2 ..." or "rank 3 on n2 ...".
    cause: str
    whole_node: bool


@dataclass(frozen=True, slots=True)
class Look:
    """The question what every rank is doing, and what was answered so far."""

    number: int
    #: After this the answers that are there must do.
    by: float
    #: Nodes that have not answered.
    waiting: frozenset[str]
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """A node that is to be left by its ranks. ``why`` continues a sentence that starts with its
    name; ``slurms``: Slurm asked for it, and may think better of it; ``replicated``: not before
    every rank has a replica.
    """

    node: str
    why: str
    slurms: bool = False
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """All ranks are brought to the end of the same step, where they wait."""

    number: int
    #: After this it is done without those that have not come.
    by: float
    #: To end the job there, rather than to move ranks.
    stop: bool
    #: The step; None until every rank has said which it is in.
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is to be ended at a boundary, before its time limit."""

    why: str
    by: float
    #: Its processes are being terminated already.
    ending: bool
    #: The checkpoint of the last step could not be written.
    unsaved: bool = False


@dataclass(frozen=True, slots=True)
class Paths:
    """The question which nodes reach each other, and what was answered so far."""

    number: int
    #: Not decided before, unless it is clear who is cut off: a loss may explain it.
    by: float
    #: Why it was asked, as a sentence.
    reason: str
    #: No rank has failed to connect yet: it only takes long.
    early: bool
    #: Whom each node tries to reach, and whom it did not reach; no entry before it has answered.
    asked: Mapping[str, tuple[str, ...]]
    unreached: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Incident:
    """Everything from the first sign of a fault until the verdict."""

    number: int
    opened_at: float
    #: The first sign, as a sentence.
    reason: str
    #: Epochs used so far on the rung that was climbed to last.
    attempts: int = 0
    #: The highest rung that it took, and the one that it climbed to because others did not help;
    #: see ``ladder.py``.
    rung: int = 0
    climbed: int = 0
    #: How often a plan came to nothing on that rung though nobody was lost.
    stalls: int = 0
    #: No process may go on: all are to be ended before the next plan.
    anew: bool = False
    #: Losses of the current epoch, in order of arrival.
    losses: tuple[Loss, ...] = ()
    #: Phases already marked in the current epoch.
    marked: frozenset[str] = frozenset()
    #: Ranks that it sets aside, and ranks that it takes back in.
    shed: Ranks = ()
    regained: Ranks = ()
    #: The step that all ranks go back to; None until a plan is out.
    step: int | None = None
    #: Steps that are not tried again: restored states differed, or restoring failed twice.
    refused: frozenset[int] = frozenset()
    #: Steps that could not be restored, once for each time.
    failed: tuple[int, ...] = ()
    #: By rank, the nodes that the present plan has it fetch from; nodes without ranks that somebody
    #: could not fetch from, which others are preferred to.
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    doubted: frozenset[str] = frozenset()
    #: Newest step that every rank is known to have completed before a plan set it back.
    newest: int = -1
    #: ``Resume`` was told in the current epoch.
    resumed: bool = False
    #: Seconds until every rank had a replica again; None until then.
    bare_s: float | None = None
    #: Step of the durable checkpoint that the ranks were sent back to; None if they were not.
    checkpoint: int | None = None
    #: The plan of the current epoch is to read that checkpoint.
    reading: bool = False
    #: Steps of the durable checkpoints that turned out to be of no use.
    unusable: tuple[int, ...] = ()
    #: It is no fault: the ranks of a node are moved.
    planned: bool = False
    #: Nor is anything moved: training begins with a checkpoint of an earlier launch.
    begins: bool = False
    #: When the current epoch was opened some rank had no replica yet: there may be copies of its
    #: state on one node only.
    bare: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """All that the controller remembers. Mappings in it are never changed, only replaced."""

    config: Config
    nodes: NodeTable
    #: Node that holds the ranks of each logical node index.
    seats: tuple[str, ...]
    #: Spares not used yet, in order of use; with those that were given up and come back.
    free: tuple[str, ...]
    ranks: RankTable
    phase: Phase = Phase.NEW
    epoch: int = 1
    #: How often the script was started anew on all ranks.
    attempt: int = 0
    #: How often all processes were brought up again; ``max_restarts`` limits it.
    restarts: int = 0
    #: Nodes that are lost, in order.
    lost: tuple[str, ...] = ()
    #: The script of this attempt was begun.
    begun: bool = False
    #: Newest step completed by any rank, ever; from 1 on there is work that must not be lost.
    newest: int = -1
    #: The step that training began after: that of an earlier launch's checkpoint, or 0.
    begun_at: int = 0
    #: A rank of this job came to its first step, so the script uses the runtime.
    attached: bool = False
    #: Epoch and step of every resume, in order: which copies count.
    history: tuple[tuple[int, int], ...] = ()
    #: The ranks that took no part in an epoch, where there were any.
    aside_in: Mapping[int, Ranks] = field(default_factory=dict)
    #: What ranks have written of durable checkpoints that are not complete, by epoch and step of
    #: the copies and by rank.
    saved: Mapping[tuple[int, int], Mapping[int, Saved]] = field(default_factory=dict)
    #: Epoch and step of checkpoints that all ranks have written and that are being committed, with
    #: the bytes and seconds it took to write them.
    committing: Mapping[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    #: The durable checkpoints that can be gone back to: the epoch of each step, 0 for one of an
    #: earlier launcher.
    checkpoints: Mapping[int, int] = field(default_factory=dict)
    #: When people were last told of a checkpoint, and how many could not be committed so far.
    checkpoint_told_at: float | None = None
    checkpoints_failed: int = 0
    #: ``Protect`` was told: the ranks of this attempt train.
    protecting: bool = False
    #: Where the replica of each rank goes; None if there is no other node.
    holders: Mapping[int, Holder | None] = field(default_factory=dict)
    #: The nodes and replicators among which the holders were chosen.
    electors: tuple[tuple[str, Address], ...] = ()
    #: The most memory that copies take on any node; 0 until it is known.
    need_nbytes: int = 0
    #: Since when some rank has no confirmed replica because of an incident.
    bare_since: float | None = None
    #: Steps that some rank began without a confirmed replica of the step before; the newest such.
    unprotected: int = 0
    unprotected_step: int = -1
    #: When people are told that exceptions wait for a loss that explains them.
    notice_at: float | None = None
    #: ``AllEnded`` was told: the ranks have left their steps and can no longer be unwound.
    steps_over: bool = False
    #: End of the gather window; set in ``GATHERING`` only.
    gather_until: float | None = None
    incident: Incident | None = None
    #: Incidents opened so far.
    incidents: int = 0
    #: When it is looked at how fast the ranks go; None if nothing new is known of that.
    paces_at: float | None = None
    #: Asked because a step is overdue; None if no answer is waited for.
    look: Look | None = None
    #: Questions asked so far.
    looks: int = 0
    #: Asked because ranks could not connect; None if no answer is waited for.
    paths: Paths | None = None
    #: How often that was asked so far.
    trials: int = 0
    #: When it is asked although no rank has failed to connect; None once all are connected.
    connect_by: float | None = None
    #: Step that hung last, and step that was tried again last because connections broke.
    hung_step: int | None = None
    retried_step: int | None = None
    #: When those that count for the job's budget were opened, and when processes of each node began
    #: those that count for the node's.
    incidents_at: tuple[float, ...] = ()
    node_restarts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    #: Nodes that used up their budget: they take no ranks any more, but have copies to fetch.
    worn: tuple[str, ...] = ()
    #: Nodes with which ranks that were aside could not be taken back in: not tried again for that.
    unfit: tuple[str, ...] = ()
    #: Nodes that are to be drained, in order, and the one whose ranks leave when all are parked.
    wishes: tuple[Wish, ...] = ()
    leaving: str = ""
    #: Nodes that were drained. Until some rank has completed that step, there are copies to fetch.
    drained: Mapping[str, int] = field(default_factory=dict)
    #: The boundary that the ranks are brought to, and how often they were.
    halt: Halt | None = None
    halts: int = 0
    #: The job is to end before its time limit.
    stop: Stop | None = None

    def next_deadline(self) -> float | None:
        """When the driver must send ``Tick`` at the latest; None if nothing is waited for."""
        if self.phase is Phase.ENDED:
            return None
        tables = self.ranks.deadline(), self.nodes.deadline()
        times = [at for at in tables if at is not None]
        look_by = self.look.by if self.look is not None else self.next_overdue()
        paths_by = self.paths.by if self.paths is not None else None
        halt_by = self.halt.by if self.halt is not None else None
        stop_by = self.stop.by if self.stop is not None else None
        waits = self.gather_until, self.notice_at, look_by, paths_by, halt_by, stop_by
        times += [at for at in (*waits, self.paces_at, self.connect_by) if at is not None]
        return min(times, default=None)

    def next_overdue(self) -> float | None:
        """When a step is overdue; None if none is late, or if the job is being mended anyway."""
        if self.phase is not Phase.TRAINING or self.steps_over:
            return None
        if not self.ranks.some(Trait.OVERDUE):
            return None
        times = [
            rank.overdue_at
            for rank in self.ranks
            if rank.overdue_at is not None and rank.stage is Stage.ATTACHED and not rank.steps_ended
        ]
        return min(times, default=None)

    def present(self) -> Sequence[Rank]:
        """The ranks that take part: all of them, but for those that are set aside."""
        if not self.ranks.some(Trait.ASIDE):
            return self.ranks
        return [rank for rank in self.ranks if not rank.aside]

    def aside(self) -> Ranks:
        """The ranks that take no part."""
        return tuple(rank.rank for rank in self.ranks.having(Trait.ASIDE))

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
        nodes=NodeTable({name: Node(name) for name in config.nodes}),
        seats=config.active,
        free=config.spares + config.extras,
        ranks=RankTable(Rank(rank) for rank in range(config.world_size)),
        checkpoints=dict.fromkeys(config.checkpoints, 0),
    )
