"""The options of ``deadpool-launch`` that say how a job is submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from deadpool_launch.submit.request import Wanted

_F = TypeVar("_F", bound=Callable[..., Any])

#: Names of the parameters, in the order of ``--help``.
PARAMETERS = (
    *("time", "partition", "qos", "account", "job_name", "sbatch_args", "chain"),
    *("print_script",),
)

_OPTIONS = (
    click.option("-t", "--time", metavar="TIME", help="Time limit, as sbatch takes it."),
    click.option("-p", "--partition", metavar="NAME", help="Partition."),
    click.option("-q", "--qos", metavar="NAME", help="Quality of service."),
    click.option("-A", "--account", metavar="NAME", help="Account that is charged."),
    click.option(
        "-J", "--job-name", metavar="NAME", help="Name of the job.  [default: that of SCRIPT]"
    ),
    click.option(
        "--sbatch-arg",
        "sbatch_args",
        multiple=True,
        metavar="OPTION",
        help="Further option of sbatch, such as --mail-type=END; may be given several times.",
    ),
    click.option(
        "--chain",
        type=int,
        metavar="N",
        help="Submit N jobs that follow each other; each goes on from the last durable checkpoint.",
    ),
    click.option("--print-script", is_flag=True, help="Show the batch script; submit nothing."),
)


def submission_options(function: _F) -> _F:
    """Decorates a command's function with all of them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def wanted(given: Mapping[str, Any]) -> Wanted:
    """The command line's values."""
    return Wanted(
        time=given["time"],
        partition=given["partition"],
        qos=given["qos"],
        account=given["account"],
        job_name=given["job_name"],
        sbatch_args=tuple(given["sbatch_args"]),
        chain=given["chain"],
    )
