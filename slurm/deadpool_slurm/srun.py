"""Command lines for ``srun``, ``scancel`` and ``scontrol``. Pure: values in, argument lists out.

Every step names its nodes, shares them with all other steps (``--overlap``), survives the death of
a node (``--no-kill``), is not ended by one task's exit (``--kill-on-bad-exit=0``, ``--wait=0``,
whatever the site's defaults; the movers' step alone is) and gives up instead of waiting for ever
for resources (``--immediate``).
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
    task_epilog: Path | None = None,
    network: str | None = None,
    options: Sequence[str] = (),
    cpu_bind: str = "none",
    immediate_s: int = IMMEDIATE_S,
) -> list[str]:
    """One task on one node with every CPU the job has there; its output goes to ``log_path``.

    ``task_epilog``: a program that Slurm runs on the node when the task has ended, however it did.
    ``options``: what the site needs besides.
    """
    return [
        "srun",
        f"--jobid={job_id}",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node}",
        *_surviving(immediate_s),
        *_cpus(cpus, cpu_bind),
        *_network(network),
        *options,
        f"--job-name={name}",
        f"--output={_literal(log_path)}",
        *([f"--task-epilog={task_epilog}"] if task_epilog is not None else []),
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
    options: Sequence[str] = (),
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
        *options,
        f"--job-name={name}",
        *argv,
    ]


def mover_step(
    *,
    job_id: str,
    nodelist: str,
    node_count: int,
    cpus: int | None,
    name: str,
    log_path: Path,
    argv: Sequence[str],
    mpi: str,
    network: str | None = None,
    options: Sequence[str] = (),
    immediate_s: int = IMMEDIATE_S,
) -> list[str]:
    """One MPI process on each node; ``mpi`` is the kind of start that the site's MPI needs.

    Unlike other steps it ends as a whole when one of its tasks does: an MPI world with a hole is of
    no use, and the launcher starts another.
    """
    return [
        "srun",
        f"--jobid={job_id}",
        f"--nodes={node_count}",
        f"--ntasks={node_count}",
        "--ntasks-per-node=1",
        f"--nodelist={nodelist}",
        *_surviving(immediate_s, mpi=mpi, kill_on_bad_exit=1),
        *_cpus(cpus),
        *_network(network),
        *options,
        f"--job-name={name}",
        f"--output={_literal(log_path)}",
        *argv,
    ]


def cancel_step(step_id: str, signal: str | None = None) -> list[str]:
    """End the step ``JOB.STEP``, or send it a signal."""
    return ["scancel", *([f"--signal={signal}"] if signal else []), step_id]


def cancel_job(job_id: str) -> list[str]:
    """End the whole job."""
    return ["scancel", job_id]


def cancel_waiting(name: str, user_id: int) -> list[str]:
    """End the user's jobs of this name that are in the queue."""
    return ["scancel", f"--name={name}", f"--user={user_id}", "--state=PENDING"]


def comment_job(job_id: str, text: str) -> list[str]:
    """Put a comment on the job."""
    return ["scontrol", "update", f"JobId={job_id}", f"Comment={text}"]


def keep_nodes(job_id: str, nodelist: str) -> list[str]:
    """Give every other node of the job back to Slurm; the job never gets them again."""
    return ["scontrol", "update", f"JobId={job_id}", f"NodeList={nodelist}"]


def _surviving(immediate_s: int, mpi: str = "none", kill_on_bad_exit: int = 0) -> list[str]:
    return [
        "--overlap",
        "--no-kill",
        f"--kill-on-bad-exit={kill_on_bad_exit}",
        "--wait=0",
        f"--immediate={immediate_s}",
        "--input=none",
        "--export=ALL",
        f"--mpi={mpi}",
    ]


def _cpus(cpus: int | None, cpu_bind: str = "none") -> list[str]:
    # One task is given one CPU unless told otherwise; a binding plugin would then pin all ranks to
    # it.
    return [*([f"--cpus-per-task={cpus}"] if cpus else []), f"--cpu-bind={cpu_bind}"]


def _network(network: str | None) -> list[str]:
    return [f"--network={network}"] if network else []


def _literal(path: Path) -> str:
    # srun replaces %-patterns in file names.
    return str(path).replace("%", "%%")
