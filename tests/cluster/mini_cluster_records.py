"""What Slurm's commands say about jobs, as typed records. Text in, records out; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ClusterShell.NodeSet import NodeSet

#: States in which a job has ended and will not change any more.
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True)
class QueuedJob:
    """One line of squeue: a job that waits, runs or is completing."""

    job_id: int
    name: str
    state: str
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class JobRecord:
    """Everything `scontrol show job` tells about a job, the parts that tests ask for by name."""

    job_id: int
    name: str
    state: str
    nodes: tuple[str, ...]
    batch_host: str
    reason: str
    exit_code: int
    exit_signal: int
    fields: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED


def fields_of(line: str) -> dict[str, str]:
    """`A=1 B=two words C=3` as a mapping; the form of `scontrol --oneliner show`."""
    pairs = re.split(r"(?:^|\s)(?=[A-Za-z][A-Za-z/:_]*=)", line.strip())
    return dict(pair.strip().split("=", 1) for pair in pairs if "=" in pair)


def nodes_of(text: str) -> tuple[str, ...]:
    """`n[1-3,5]` as names; Slurm writes `(null)` for no nodes."""
    return () if text in ("", "(null)") else tuple(NodeSet(text))


def job_record(line: str) -> JobRecord:
    """Read one line of `scontrol --oneliner show job`."""
    fields = fields_of(line)
    code, _, number = fields["ExitCode"].partition(":")
    return JobRecord(
        job_id=int(fields["JobId"]),
        name=fields["JobName"],
        state=fields["JobState"],
        nodes=nodes_of(fields.get("NodeList", "")),
        batch_host=fields.get("BatchHost", ""),
        reason=fields["Reason"],
        exit_code=int(code),
        exit_signal=int(number or 0),
        fields=fields,
    )


#: The squeue format that `queued_jobs` reads.
QUEUE_FORMAT = "%i|%j|%T|%N|%r"


def queued_jobs(text: str) -> list[QueuedJob]:
    jobs = []
    for line in text.splitlines():
        number, name, state, nodes, reason = line.split("|")
        jobs.append(QueuedJob(int(number), name, state, nodes_of(nodes), reason))
    return jobs
