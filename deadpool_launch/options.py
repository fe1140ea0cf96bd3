"""The launcher's options as one frozen value, and the rules they must keep.

``cli.py`` makes it, everything else reads it. Pure: the environment and the clock are arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import msgspec

from deadpool_launch.errors import NotInAllocation, UsageError
from deadpool_launch.faults import Fault

Site = Literal["slurm", "local"]
SpareStart = Literal["at-start", "on-failure"]

NOT_IN_ALLOCATION = (
    "not inside a Slurm allocation: submit a script that runs this with sbatch, or use --site local"
)


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of ``deadpool-launch`` was asked to do. Paths are absolute."""

    #: The user's training script.
    script: str
    #: What the script finds in ``sys.argv[1:]``.
    script_args: tuple[str, ...] = ()
    #: Where nodes come from.
    site: Site = "local"
    #: Active nodes; ``None``: all of the allocation but the spares.
    nodes: int | None = None
    #: Nodes held back to replace lost ones. 0 by default: holding one costs a node.
    spares: int = 0
    #: Ranks on each active node.
    nproc_per_node: int = 1
    #: Number of ranks the user counts on; only checked.
    world_size: int | None = None
    #: ``at-start``: agents on spares wait from the start, so that a swap needs no new step.
    spare_start: SpareStart = "at-start"
    #: Folder for logs, journal and the job's secret; every node must see it.
    run_dir: str = "deadpool-runs/run"
    #: Seconds without a heartbeat after which a node counts as lost. Slurm itself takes minutes.
    heartbeat_timeout_s: float = 3.0
    #: Seconds an agent has to come up and connect; longer where Python starts slowly from a shared
    #: disk.
    agent_start_timeout_s: float = 60.0
    #: How often all ranks may be started again from the script's own checkpoints.
    max_restarts: int = 3
    #: The user vouches that the job was submitted with ``--no-kill``.
    assume_no_kill: bool = False
    #: Go on although a check failed.
    ignore_preflight: bool = False
    #: Write a digest of every rank's state after the last step.
    record_final_state: bool = False
    #: Faults to bring about (rehearsals only).
    faults: tuple[Fault, ...] = ()
    #: Show what would be started, start nothing.
    dry_run: bool = False

    def __post_init__(self) -> None:
        _check(self)


def choose_site(asked: str | None, environ: Mapping[str, str]) -> Site:
    """The site asked for; without one ``slurm`` inside an allocation, and an error outside."""
    if asked == "local":
        return "local"
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    raise NotInAllocation(NOT_IN_ALLOCATION)


def choose_nproc(asked: str, gpus_on_node: int | None) -> int:
    """``--nproc-per-node`` as a number: ``auto`` is one per GPU of the job, or one."""
    if asked == "auto":
        return gpus_on_node or 1
    if asked == "gpu":
        if not gpus_on_node:
            raise UsageError(
                "--nproc-per-node gpu: the job has no GPUs on this node; "
                "request them from Slurm (--gpus-per-node) or give a number"
            )
        return gpus_on_node
    if not asked.isdecimal() or int(asked) < 1:
        raise UsageError(f"--nproc-per-node {asked}: must be auto, gpu or a number of at least 1")
    return int(asked)


def default_run_dir(
    job_id: str | None, timestamp: str, used: Callable[[str], bool] = lambda _: False
) -> str:
    """``deadpool-runs/<job id>``, or ``deadpool-runs/local-<timestamp>`` outside a job.

    A number is added where that is ``used``: the job was requeued, or launches twice.
    """
    first = f"deadpool-runs/{job_id}" if job_id else f"deadpool-runs/local-{timestamp}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not used(name))


def _check(options: LaunchOptions) -> None:
    if options.site not in get_args(Site):
        raise UsageError(f"--site {options.site}: must be {' or '.join(get_args(Site))}")
    if options.spare_start not in get_args(SpareStart):
        raise UsageError(
            f"--spare-start {options.spare_start}: must be {' or '.join(get_args(SpareStart))}"
        )
    _at_least("--nodes", options.nodes, 1)
    _at_least("--spares", options.spares, 0)
    _at_least("--nproc-per-node", options.nproc_per_node, 1)
    _at_least("--world-size", options.world_size, 1)
    _at_least("--max-restarts", options.max_restarts, 0)
    if not 0.5 <= options.heartbeat_timeout_s <= 600:
        raise UsageError(
            f"--heartbeat-timeout {options.heartbeat_timeout_s:g}: must be from 0.5 to 600 s"
        )
    if not 1 <= options.agent_start_timeout_s <= 3600:
        raise UsageError(
            f"--agent-start-timeout {options.agent_start_timeout_s:g}: must be from 1 to 3600 s"
        )
    for fault in options.faults:
        if fault.node is not None and options.site != "local":
            raise UsageError(f"--fault {fault}: a node can be struck only with --site local")
        if (
            fault.rank is not None
            and options.world_size is not None
            and fault.rank >= options.world_size
        ):
            raise UsageError(f"--fault {fault}: ranks go from 0 to {options.world_size - 1}")


def _at_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"{flag} {value}: must be at least {least}")
