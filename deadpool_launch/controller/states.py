"""What the controller knows: the phases of a job, and the state.

Only data lives here and in ``rank.py``, ``node.py``, ``incident.py`` and ``underway.py``, of which
the state consists. The moves between phases are in ``core.py`` and the modules it calls; the rules
that hold between any two events are in ``invariants.py``. Nothing here imports a clock: every time
is a value that came with an event.

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

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.incident import Incident
from deadpool_launch.controller.node import Node
from deadpool_launch.controller.rank import Rank, Stage, Trait
from deadpool_launch.controller.tables import NodeTable, RankTable
from deadpool_launch.controller.underway import Halt, Look, Paths, Stop, Wish
from deadpool_runtime.protocol import Address, Holder, Saved
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


#: The job is being repaired, and a failing script proves nothing about the script.
RECOVERING = frozenset({Phase.GATHERING, Phase.PARKING, Phase.INVENTORY, Phase.RESTORING})


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
