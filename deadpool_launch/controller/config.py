"""What the controller is told once: the nodes, how ranks lie on them, and every deadline.

Values come from the command line and the site file; this module neither reads nor guesses them. All
times are seconds on the launcher's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deadpool_launch.classify.model import Rule

#: When agents of spare nodes are started.
SPARE_STARTS = ("at-start", "on-failure")
#: What may be done about a slow rank, and about a GPU with a fault.
REACTIONS = ("ignore", "report", "swap")
#: What is done about a node that Slurm drains.
ON_DRAIN = ("swap", "ignore")


@dataclass(frozen=True, slots=True)
class Config:
    """The fixed part of a job, as the controller sees it."""

    #: Nodes that hold ranks from the start; node ``i`` holds ``[i * nproc_per_node, ...)``.
    active: tuple[str, ...]
    #: Nodes kept in reserve, in the order in which they are used.
    spares: tuple[str, ...]
    nproc_per_node: int
    #: Nodes that nothing was planned for: spares behind the others, whose agents are started when
    #: needed.
    extras: tuple[str, ...] = ()
    #: ``at-start``: a spare's agent waits warm. ``on-failure``: it is started when needed.
    spare_start: str = "at-start"
    #: The driver calls an agent lost after this silence; here only ``verdict_s`` depends on it.
    heartbeat_timeout_s: float = 3.0
    #: The longest that a step may take, with all that its body does: one that takes longer hangs.
    #: The other limits of hangs follow from it.
    collective_timeout_s: float = 600.0
    #: From ``TakeStandings`` until every node's answer.
    look_s: float = 5.0
    #: From ``StartAgent`` until ``AgentWarm``.
    agent_start_s: float = 60.0
    #: From ``StartRanks`` until ``RankUp``.
    rank_start_s: float = 120.0
    #: From ``Revoke`` until ``Parked``. A survivor parks when its body comes to the next
    #: collective or to its end, which may be the end of a validation or of a checkpoint; only one
    #: that is truly stuck is worth killing, as that takes time. See ``unwind_s``.
    park_s: float = 1800.0
    #: From ``TakeInventory`` until ``Inventory``; a replicator may have to be killed and restarted
    #: within it.
    inventory_s: float = 20.0
    #: From a replacement's ``Begin`` until its ``Parked``.
    build_s: float = 300.0
    #: From ``Plan`` until ``Restored``.
    restore_s: float = 120.0
    #: The same where the state comes from a durable checkpoint: all ranks read it from one disk.
    load_s: float = 1800.0
    #: From ``KillRanks`` until ``RankExited``; a process that outlives SIGKILL condemns its node.
    kill_s: float = 10.0
    #: Signs that follow the first one this closely share its epoch: one root cause, one placement.
    gather_s: float = 0.05
    #: How long a rank's exception waits for the loss of a peer that would explain it. Longer than
    #: the heartbeat timeout, else a silent node's death would be blamed on the script.
    verdict_s: float | None = None
    #: How long it waits before people are told of that. When every rank fails for the same reason,
    #: the others follow the first one closely, and there is nothing to wait for.
    notice_s: float = 1.0
    #: How often all ranks may be started anew.
    max_restarts: int = 3
    #: How many epochs one incident may use before it climbs to the next rung, and so many again on
    #: that. Those that follow a failed restore are not counted: a step is tried twice at most.
    max_attempts: int = 8
    #: How many incidents that a node's processes began within the window are mended on the node;
    #: after the next one a spare takes its ranks. None: all.
    node_restarts: int | None = None
    node_restarts_within_s: float = 3600.0
    #: Go on without the data-parallel replicas that lost members when no spare is left for them.
    shrink: bool = False
    #: How many incidents within the window the job survives. None: any number.
    max_incidents: int | None = None
    incidents_within_s: float = 3600.0
    #: A node that was given up is tried again after this time. None: never.
    readmit_after_s: float | None = None
    #: One that was given up so many times within the window stays out.
    quarantine_faults: int = 2
    quarantine_within_s: float = 86400.0
    #: The most time that the admission checks take; the agent of a node that comes back makes them
    #: before it is ready.
    admission_s: float = 0.0
    #: What is done about a rank that is slower than its peers: see ``stragglers.py``.
    straggler: str = "report"
    #: It is slow if a step takes it so many times as long as its peers, for so many windows of this
    #: length in a row.
    straggler_factor: float = 1.5
    straggler_windows: int = 6
    straggler_window_s: float = 5.0
    #: What is done when a GPU of an active node shows a fault of the hardware.
    device: str = "report"
    #: What tells kinds of faults apart, see ``deadpool_launch.classify``; without them every
    #: exception that no loss explains is the script's own.
    rules: tuple[Rule, ...] = ()
    #: What is done when Slurm drains a node that has ranks: ``swap`` or ``ignore``.
    on_drain: str = "swap"
    #: How many holders each rank's replica has, and after how many steps each is made.
    replication_factor: int = 1
    replication_interval: int = 1
    #: Failure domain of nodes that go away together with others; others are one of their own.
    domains: Mapping[str, str] = field(default_factory=dict)
    #: Where the ranks write durable checkpoints; empty if they write none.
    checkpoint_dir: str = ""
    #: How many of them are kept.
    checkpoint_keep: int = 2
    #: Steps of those that an earlier launcher of this very job left there.
    checkpoints: tuple[int, ...] = ()
    #: Training begins with the newest of them.
    resume: bool = False

    def __post_init__(self) -> None:
        if self.verdict_s is None:
            object.__setattr__(self, "verdict_s", self.heartbeat_timeout_s + 1.0)
        if self.collective_timeout_s <= self.heartbeat_timeout_s:
            raise ValueError(
                f"collective_timeout_s is {self.collective_timeout_s:g}, must be longer than "
                f"heartbeat_timeout_s, {self.heartbeat_timeout_s:g}"
            )
        names = self.nodes
        if not self.active:
            raise ValueError("a job needs at least one active node")
        if len(set(names)) != len(names):
            raise ValueError(f"a node is named twice: {', '.join(names)}")
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node is {self.nproc_per_node}, must be at least 1")
        for name, value in (("straggler", self.straggler), ("device", self.device)):
            if value not in REACTIONS:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(REACTIONS)}")
        if self.spare_start not in SPARE_STARTS:
            raise ValueError(
                f"spare_start is {self.spare_start!r}, must be one of {', '.join(SPARE_STARTS)}"
            )

        if self.on_drain not in ON_DRAIN:
            raise ValueError(f"on_drain is {self.on_drain!r}, must be one of {', '.join(ON_DRAIN)}")

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that the job may use."""
        return self.active + self.spares + self.extras

    @property
    def world_size(self) -> int:
        """Number of logical ranks; it never changes."""
        return len(self.active) * self.nproc_per_node

    @property
    def hang_park_s(self) -> float:
        """From ``Revoke`` until ``Parked`` for a rank that others have waited for to no avail."""
        return min(30.0, max(3.0, self.collective_timeout_s / 10))

    @property
    def unwind_s(self) -> float:
        """From ``Revoke`` until ``Parked`` for a rank that was in a step. No step is longer than
        the collective time-out, so who has not parked by then hangs.
        """
        return min(self.park_s, self.collective_timeout_s + self.hang_park_s)

    @property
    def verdict_wait_s(self) -> float:
        """``verdict_s`` with its default filled in."""
        assert self.verdict_s is not None
        return self.verdict_s
