"""From options to a plan that can be started: find the nodes, check them, give them roles."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deadpool_launch import checkpoints
from deadpool_launch.backends.base import Allocation, Backend, Check
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.errors import UnsuitableError
from deadpool_launch.movers import LocalMovers, MoverStarter, mover_argv
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import LaunchPlan, make_plan, usable_nodes
from deadpool_launch.policy import spares
from deadpool_launch.slurm_movers import SlurmMovers


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything the driver needs before it starts the first agent."""

    allocation: Allocation
    plan: LaunchPlan
    #: All results of the preflight, for the log; those with ``ok`` false were ignored on request.
    checks: tuple[Check, ...]


def make_backend(options: LaunchOptions) -> SlurmBackend | LocalBackend:
    """The back end of the options' site."""
    if options.site == "local":
        return LocalBackend()
    return SlurmBackend(site=options.site_config)


def settle_spares(backend: SlurmBackend | LocalBackend, options: LaunchOptions) -> LaunchOptions:
    """The options with a number of spares where they name a share or a failure rate."""
    if isinstance(backend, LocalBackend):
        # As many nodes as are asked for: one without a word.
        asked = msgspec.structs.replace(options, nodes=options.nodes or 1)
        chosen = spares.choose(asked, total=None, hours_left=None)
    elif options.spare_fraction is None and options.node_mtbf_hours is None:
        chosen = None
    else:
        allocation = backend.discover(options)
        total = len(usable_nodes(allocation.nodes, allocation.batch_host, options))
        chosen = spares.choose(options, total=total, hours_left=backend.hours_left())
    if chosen is None:
        return options
    return msgspec.structs.replace(
        options, spares=chosen.count, remarks=(*options.remarks, chosen.remark)
    )


def make_mover_starter(
    backend: SlurmBackend | LocalBackend, job_id: str, options: LaunchOptions
) -> MoverStarter | None:
    """How the site starts the processes of the MPI library that was asked for; None without."""
    if options.mpi == "none":
        return None
    if isinstance(backend, LocalBackend):
        return LocalMovers(mpiexec_path(), backend.variables_of)
    return SlurmMovers(backend.client, job_id, backend.variables, options.mpi, options.site_config)


def mpiexec_path() -> str:
    """The ``mpiexec`` of this Python's environment, else that of ``PATH``."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"


def movers_argv(job_id: str, secret_path: Path, world_id: int) -> list[str]:
    """Command line of each of these processes."""
    return mover_argv(sys.executable, job_id, world_id, secret_path)


def carriers(options: LaunchOptions) -> str:
    """What replicas may go by besides TCP; empty for everything there is.

    Nodes on one machine would read each other's memory, and never use the MPI that was asked for.
    """
    return "mpi" if options.mpi == "mpiexec" else ""


def command_of(options: LaunchOptions, plan: LaunchPlan) -> checkpoints.Command:
    """What the launch runs, as its checkpoints know it."""
    return checkpoints.Command(options.script, options.script_args, plan.world_size)


def choose_folder(
    options: LaunchOptions, allocation: Allocation, command: checkpoints.Command
) -> checkpoints.Place:
    """Where the durable checkpoints of this launch go."""
    assert options.checkpoint_dir is not None
    return checkpoints.choose(
        Path(options.checkpoint_dir),
        allocation.job_id,
        options.checkpoint_name,
        command,
        allocation.restarts,
    )


def look(backend: Backend, options: LaunchOptions) -> Prepared:
    """The plan without any check and without starting anything."""
    allocation = backend.discover(options)
    return Prepared(allocation, make_plan(allocation.nodes, allocation.batch_host, options), ())


async def prepare(backend: Backend, options: LaunchOptions) -> Prepared:
    """Find, check and assign the nodes; a ``DeadpoolError`` says why the job cannot be started."""
    planned = look(backend, options)
    checks = await backend.preflight(options)
    allocation = planned.allocation
    plan = assign(allocation, options, checks)
    return Prepared(allocation, plan, tuple(checks))


def assign(allocation: Allocation, options: LaunchOptions, checks: Sequence[Check]) -> LaunchPlan:
    """The plan for the nodes that passed; raises for a failure that is not one node's alone."""
    counted = [check for check in checks if not (options.ignore_preflight and check.ok is False)]
    for check in counted:
        if check.ok is False and check.leave_out is None:
            raise UnsuitableError(_sentence(check))
    reasons = {check.leave_out: check for check in reversed(counted) if check.leave_out is not None}
    left_out = [node for node in allocation.nodes if node in reasons]
    try:
        return make_plan(allocation.nodes, allocation.batch_host, options, left_out)
    except UnsuitableError as error:
        if not left_out:
            raise
        raise UnsuitableError(f"{error} ({_sentence(reasons[left_out[0]])})") from error


def _sentence(check: Check) -> str:
    return f"{check.text}; {check.remedy}" if check.remedy else check.text
