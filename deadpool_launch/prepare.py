"""From options to a plan that can be started: find the nodes, check them, give them roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deadpool_launch.backends.base import Allocation, Backend, Check
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.errors import UnsuitableError
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import LaunchPlan, make_plan


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything the driver needs before it starts the first agent."""

    allocation: Allocation
    plan: LaunchPlan
    #: All results of the preflight, for the log; those with ``ok`` false were ignored on request.
    checks: tuple[Check, ...]


def make_backend(options: LaunchOptions) -> SlurmBackend | LocalBackend:
    """The back end of the options' site."""
    return SlurmBackend() if options.site == "slurm" else LocalBackend()


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
