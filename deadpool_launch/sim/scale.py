"""How the controller's work grows with the cluster: time of a decision, messages of an incident.

One node of a job that trains loses power, and a spare takes its place. Sizes grow fourfold, so that
what is not linear shows in the ratio of two lines.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import IncidentClosed, IncidentOpened
from deadpool_launch.sim.cluster import Cluster
from deadpool_launch.sim.faults import Fault, FaultKind
from deadpool_launch.sim.promises import PromiseBroken
from deadpool_launch.sim.scenario import Scenario
from deadpool_launch.sim.values import LayoutKind

SIZES = (64, 256, 1024, 4096)
_SPARES = 2
_LAST_STEP = 3
#: When the node is lost: every rank has come to its first step, and some have completed one.
_STRIKE_S = 2.4


@dataclass(frozen=True)
class Growth:
    """One size. Times are of the controller alone, without the simulation around it."""

    nodes: int
    ranks: int
    events: int
    median_us: float
    most_ms: float
    #: What the event was that took longest.
    longest: str
    #: The kinds of events that took longest, with how long all of a kind took.
    slowest: str
    #: All decisions of the job, and of the incident.
    job_s: float
    incident_s: float
    #: Messages between the launcher and agents from the first sign to the first new step.
    incident_messages: int
    #: What they are together, in MiB.
    incident_mib: float


def measure(nodes: int, nproc_per_node: int, layout: LayoutKind = LayoutKind.HSDP) -> Growth:
    """Run one job of this size with the deadlines of a real one."""
    config = Config(
        active=tuple(f"n{i}" for i in range(nodes)),
        spares=tuple(f"s{i}" for i in range(_SPARES)),
        nproc_per_node=nproc_per_node,
    )
    fault = Fault(FaultKind.POWER, "n1", _STRIKE_S)
    scenario = Scenario(
        seed=nodes,
        config=config,
        faults=(fault,),
        layout=layout,
        last_step=_LAST_STEP,
        checked=False,
    )
    cluster = Cluster(scenario)
    launcher = cluster.launcher
    took = launcher.took = []
    marks: dict[str, tuple[int, int, int]] = {}

    def look(action: object) -> None:
        if isinstance(action, IncidentOpened):
            marks.setdefault("opened", (len(took), launcher.messages, launcher.nbytes))
        if isinstance(action, IncidentClosed):
            marks.setdefault("closed", (len(took), launcher.messages, launcher.nbytes))

    launcher.on_action = look
    cluster.run()
    if marks.keys() != {"opened", "closed"}:
        raise PromiseBroken(f"the loss of a node of {nodes} was not mended")
    (first, before, sent), (last, after, sent_after) = marks["opened"], marks["closed"]
    seconds = [taken_s for _, taken_s in took]
    by_kind: dict[str, float] = {}
    for kind, taken_s in took:
        by_kind[kind] = by_kind.get(kind, 0.0) + taken_s
    slowest = sorted(by_kind, key=lambda kind: -by_kind[kind])[:3]
    return Growth(
        nodes=nodes,
        ranks=config.world_size,
        events=len(took),
        median_us=statistics.median(seconds) * 1e6,
        most_ms=max(seconds) * 1e3,
        longest=max(took, key=lambda each: each[1])[0],
        slowest=", ".join(f"{kind} {by_kind[kind]:.2f} s" for kind in slowest),
        job_s=sum(seconds),
        incident_s=sum(seconds[first:last]),
        incident_messages=after - before,
        incident_mib=(sent_after - sent) / (1 << 20),
    )


HEADER = (
    f"{'nodes':>6} {'ranks':>6} {'events':>8} {'median':>9} {'most':>10} {'of':>15} {'all':>9} "
    f"{'incident':>9} {'messages':>9} {'MiB':>8}  most time goes to"
)


def row(growth: Growth) -> str:
    """One line of the table."""
    return (
        f"{growth.nodes:>6} {growth.ranks:>6} {growth.events:>8} {growth.median_us:>6.0f} us "
        f"{growth.most_ms:>7.1f} ms {growth.longest:>15} {growth.job_s:>7.2f} s "
        f"{growth.incident_s:>7.2f} s "
        f"{growth.incident_messages:>9} {growth.incident_mib:>8.1f}  {growth.slowest}"
    )
