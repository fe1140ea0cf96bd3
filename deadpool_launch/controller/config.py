"""What the controller is told once: the nodes, how ranks lie on them, and every deadline.

Values come from the command line and the site file; this module neither reads nor guesses them. All
times are seconds on the launcher's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

#: When agents of spare nodes are started.
SPARE_STARTS = ("at-start", "on-failure")


@dataclass(frozen=True, slots=True)
class Config:
    """The fixed part of a job, as the controller sees it."""

    #: Nodes that hold ranks from the start; node ``i`` holds ``[i * nproc_per_node, ...)``.
    active: tuple[str, ...]
    #: Nodes kept in reserve, in the order in which they are used.
    spares: tuple[str, ...]
    nproc_per_node: int
    #: ``at-start``: a spare's agent waits warm. ``on-failure``: it is started when needed.
    spare_start: str = "at-start"
    #: The driver calls an agent lost after this silence; here only ``verdict_s`` depends on it.
    heartbeat_timeout_s: float = 3.0
    #: From ``StartAgent`` until ``AgentWarm``.
    agent_start_s: float = 60.0
    #: From ``StartRanks`` until ``RankUp``.
    rank_start_s: float = 120.0
    #: From ``Revoke`` until ``Parked``. A survivor parks when its body comes to the next
    #: collective or to its end, which may be the end of a validation or of a checkpoint; only one
    #: that is truly stuck is worth killing, since its copy of the state goes with it.
    park_s: float = 1800.0
    #: From a replacement's ``Begin`` until its ``Parked``.
    build_s: float = 300.0
    #: From ``Plan`` until ``Restored``.
    restore_s: float = 120.0
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
    #: How many epochs one incident may use.
    max_attempts: int = 8

    def __post_init__(self) -> None:
        if self.verdict_s is None:
            object.__setattr__(self, "verdict_s", self.heartbeat_timeout_s + 1.0)
        names = self.active + self.spares
        if not self.active:
            raise ValueError("a job needs at least one active node")
        if len(set(names)) != len(names):
            raise ValueError(f"a node is named twice: {', '.join(names)}")
        if self.nproc_per_node < 1:
            raise ValueError(f"nproc_per_node is {self.nproc_per_node}, must be at least 1")
        if self.spare_start not in SPARE_STARTS:
            raise ValueError(
                f"spare_start is {self.spare_start!r}, must be one of {', '.join(SPARE_STARTS)}"
            )

    @property
    def world_size(self) -> int:
        """Number of logical ranks; it never changes."""
        return len(self.active) * self.nproc_per_node

    @property
    def verdict_wait_s(self) -> float:
        """``verdict_s`` with its default filled in."""
        assert self.verdict_s is not None
        return self.verdict_s
