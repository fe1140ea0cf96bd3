"""The job that is asked about, and what became of one simulated run of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Job:
    """A training job: so many steps on so many nodes, and what the site does when they run out."""

    steps: int
    #: One step on all nodes, undisturbed and unprotected.
    step_s: float
    #: Nodes that train; seats ``0`` to ``nodes - 1``.
    nodes: int
    #: Nodes that wait; seats ``nodes`` to ``nodes + spares - 1``.
    spares: int
    #: How long a new allocation of the same size takes to come.
    queue_s: float
    #: With fewer nodes than this nothing that excludes nodes goes on.
    least_nodes: int = 1
    #: Nodes of a failure domain, outside of which replicas are kept; 1: every node is one.
    domain: int = 1

    @property
    def seats(self) -> int:
        """Nodes that the allocation holds."""
        return self.nodes + self.spares

    @property
    def undisturbed_s(self) -> float:
        """The training alone, without faults and without protection."""
        return self.steps * self.step_s


@dataclass(frozen=True, slots=True)
class Account:
    """Where the time of one run went. The parts add up to ``total_s``."""

    #: Steps that stayed, at the speed of all nodes.
    useful_s: float
    #: What protection adds to these steps.
    overhead_s: float
    #: Waiting for copies and checkpoints of these steps.
    saving_s: float
    #: What these steps took longer because nodes were missing.
    slow_s: float
    #: Work that was thrown away, the step under way included.
    lost_s: float
    #: From a fault to the first step that runs again.
    recovering_s: float
    #: Waiting for a new allocation.
    queued_s: float
    total_s: float
    #: Faults of nodes that were training.
    faults: int
    #: Recoveries: faults during one of them belong to it.
    incidents: int
    replayed_steps: int
    #: Spares that took a place, and spares that failed while they waited.
    spares_used: int
    spares_lost: int
    requeues: int
    #: Node-seconds of the allocations.
    held_node_s: float
    #: Node-seconds that were neither training that stayed nor needed for it.
    wasted_node_s: float
    finished: bool

    @property
    def recovery_s(self) -> float:
        """What faults cost but for the queue: recovering, and work that is done again."""
        return self.recovering_s + self.lost_s

    @property
    def goodput(self) -> float:
        """The share of the time that was training that stayed."""
        return self.useful_s / self.total_s if self.total_s else 1.0

    @property
    def spares_gone(self) -> int:
        """Spares that were used or lost."""
        return self.spares_used + self.spares_lost

    def as_dict(self) -> dict[str, float]:
        """Every number by its name."""
        names = [each.name for each in fields(self) if each.name != "finished"]
        extra = ("recovery_s", "goodput", "spares_gone")
        return {name: float(getattr(self, name)) for name in (*names, *extra)}
