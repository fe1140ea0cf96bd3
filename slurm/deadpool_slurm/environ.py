"""Slurm's environment variables: what a job's process can learn from them, and which must not reach
``srun``.

Pure: the environment is an argument. ``srun`` reads many of the variables that Slurm itself puts
into a batch script (``SLURM_NNODES`` is its ``-N``), and they go stale when a node leaves the job;
a step that is to run on one named node must not see them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: What a nested ``srun`` may keep of Slurm's variables; all others act as options of it or are
#: stale.
KEPT_FOR_SRUN = frozenset(
    {"SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTER_NAME", "SLURM_NETWORK", "SLURM_JOB_END_TIME"}
)
#: Prefixes of further variables that a step must not inherit.
_SRUN_INPUTS = ("SRUN_", "SBATCH_", "SALLOC_", "SLURMD_")
#: Step ids from here on are Slurm's own (batch script, extern, interactive), not those of an
#: ``srun``.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_CPUS_ON_NODES = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
#: More nodes are not Slurm's, which has 64,000 at most.
_MOST_NODES = 1 << 17
#: Digits of the largest number that Slurm sets.
_MOST_DIGITS = 20


def for_srun(environ: Mapping[str, str], job_id: str | None = None) -> dict[str, str]:
    """The environment for a nested ``srun``: without the variables that act as its options."""
    clean = {
        name: value
        for name, value in environ.items()
        if name in KEPT_FOR_SRUN or not name.startswith(("SLURM_", *_SRUN_INPUTS))
    }
    if job_id is not None:
        clean["SLURM_JOB_ID"] = job_id
    return clean


def shared_network(environ: Mapping[str, str]) -> dict[str, str]:
    """What a step's process must change to reach the job's other steps over Slingshot.

    Slurm gives a step a virtual network of its own and, where that was asked for, the job's behind
    it; libfabric takes the first. Steps on one node each have only the job's in common.
    """
    own, comma, shared = environ.get("SLINGSHOT_VNIS", "").rpartition(",")
    return {"SLINGSHOT_VNIS": shared} if comma and own and shared else {}


@dataclass(frozen=True, slots=True)
class JobEnviron:
    """What the environment of a process inside an allocation says about its job."""

    job_id: str
    #: Nodes as Slurm writes them (``n[1-4]``); stale once a node has left the job.
    nodelist: str
    #: The node this process runs on; ``None`` outside the job's nodes (``salloc`` on a login node).
    node: str | None
    #: CPUs of the job on each node, in the order of ``nodelist``; empty if unknown.
    cpus_per_node: tuple[int, ...]
    #: GPUs of the job on this node; ``None`` if the job has none.
    gpus_on_node: int | None
    #: When the job's time is over, in seconds since 1970, where Slurm says so (23.02 and later).
    end_time: float | None
    #: Where the job was put; ``None`` if Slurm does not say.
    partition: str | None
    qos: str | None
    #: The process belongs to a step that a user's ``srun`` made, not to the batch script.
    in_srun_step: bool
    #: ``SBATCH_NO_KILL=set`` (or ``SALLOC_NO_KILL=set``; Slurm takes no other value for yes): the
    #: job was submitted with ``--no-kill`` if the variable was set at that time.
    no_kill_variable: bool
    #: How often the job was begun again: requeued, by itself or somebody else.
    restarts: int


def read_job(environ: Mapping[str, str]) -> JobEnviron | None:
    """The facts about the job this process is in, or ``None`` outside any job."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        return None
    return JobEnviron(
        job_id=job_id,
        nodelist=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or "",
        node=environ.get("SLURMD_NODENAME") or None,
        cpus_per_node=expand_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
        gpus_on_node=_number(environ.get("SLURM_GPUS_ON_NODE")),
        end_time=_number(environ.get("SLURM_JOB_END_TIME")),
        partition=environ.get("SLURM_JOB_PARTITION") or None,
        qos=environ.get("SLURM_JOB_QOS") or None,
        in_srun_step=_in_srun_step(environ),
        no_kill_variable=any(
            environ.get(name, "").lower() == "set" for name in ("SBATCH_NO_KILL", "SALLOC_NO_KILL")
        ),
        restarts=_number(environ.get("SLURM_RESTART_COUNT")) or 0,
    )


def expand_cpus(text: str) -> tuple[int, ...]:
    """``"4(x2),8"`` as ``(4, 4, 8)``; empty if the text has another form."""
    cpus: list[int] = []
    for part in filter(None, text.split(",")):
        match = _CPUS_ON_NODES.fullmatch(part.strip())
        if match is None or len(cpus) + int(match[2] or 1) > _MOST_NODES:
            return ()
        cpus += [int(match[1])] * int(match[2] or 1)
    return tuple(cpus)


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ:
        return False
    step = _number(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID"))
    return step is not None and step < _FIRST_SPECIAL_STEP


def _number(text: str | None) -> int | None:
    readable = text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text or "") if readable else None
