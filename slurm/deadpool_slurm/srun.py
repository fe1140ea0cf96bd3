"""Command lines for ``srun``, ``scancel`` and ``scontrol``. Pure: values in, argument lists out.

Every step names its nodes, shares them with all other steps (``--overlap``), survives the death of
a node (``--no-kill``), is not ended by one task's exit (``--kill-on-bad-exit=0``, ``--wait=0``,
whatever the site's defaults) and gives up instead of waiting for ever for resources
(``--immediate``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

#: ``srun`` gives up if a step's resources are not there within this many seconds.
IMMEDIATE_S = 30


def agent_step(
    *,
    job_id: str,
    node: str,
    cpus: int | None,
    name: str,
    log_path: Path,
    argv: Sequence[str],
    network: str | None = None,
    immediate_s: int = IMMEDIATE_S,
) -> list[str]:
    """One task on one node with every CPU the job has there; its output goes to ``log_path``."""
    return [
        "srun",
        f"--jobid={job_id}",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        *_surviving(immediate_s),
        *_cpus(cpus),
        *_network(network),
        f"--job-name={name}",
        f"--output={_literal(log_path)}",
        *argv,
    ]


def all_nodes_step(
    *,
    job_id: str,
    nodelist: str,
    node_count: int,
    name: str,
    argv: Sequence[str],
    network: str | None = None,
    immediate_s: int = IMMEDIATE_S,
) -> list[str]:
    """One task on each node; what the tasks print comes out on ``srun``'s standard output."""
    return [
        "srun",
        f"--jobid={job_id}",
        f"--nodes={node_count}",
        f"--ntasks={node_count}",
        "--ntasks-per-node=1",
        f"--nodelist={nodelist}",
        *_surviving(immediate_s),
        *_network(network),
        f"--job-name={name}",
        *argv,
    ]


def cancel_step(step_id: str, signal: str | None = None) -> list[str]:
    """End the step ``JOB.STEP``, or send it a signal."""
    return ["scancel", *([f"--signal={signal}"] if signal else []), step_id]


def keep_nodes(job_id: str, nodelist: str) -> list[str]:
    """Give every other node of the job back to Slurm; the job never gets them again."""
    return ["scontrol", "update", f"JobId={job_id}", f"NodeList={nodelist}"]


def _surviving(immediate_s: int) -> list[str]:
    return [
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        f"--immediate={immediate_s}",
        "--input=none",
        "--export=ALL",
        "--mpi=none",
    ]


def _cpus(cpus: int | None) -> list[str]:
    # One task is given one CPU unless told otherwise; a binding plugin would then pin all ranks to
    # it.
    return [*([f"--cpus-per-task={cpus}"] if cpus else []), "--cpu-bind=none"]


def _network(network: str | None) -> list[str]:
    return [f"--network={network}"] if network else []


def _literal(path: Path) -> str:
    # srun replaces %-patterns in file names.
    return str(path).replace("%", "%%")
