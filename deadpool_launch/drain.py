"""``deadpool drain``: take a node out of a running job."""

from __future__ import annotations

import os

import click

from deadpool_launch.exits import ExitCode
from deadpool_launch.operators import ask, find_run, slurm_work_dir
from deadpool_runtime import protocol

#: The job says no.
DENIED = 1


@click.command()
@click.argument("node", metavar="NODE")
@click.option(
    "--job",
    metavar="RUN_DIR|JOBID",
    help="Which job.  [default: the one around this command, or the only one in deadpool-runs]",
)
@click.option("--reason", default="", metavar="TEXT", help="Why, for the job's log.")
def drain(node: str, job: str | None, reason: str) -> int:
    """Move the ranks of NODE to a spare at the end of a step; nothing is run again.

    The node is not used by the job any more. A spare is drained at once. Exit code 1 if the job
    cannot do without the node, 10 if its launcher cannot be asked.
    """
    run_dir = find_run(job, os.environ, slurm_work_dir)
    answer = ask(run_dir, protocol.DrainNode(node, " ".join(reason.split())))
    match answer:
        case protocol.Denied(text=text, mistaken=mistaken):
            click.echo(f"deadpool: {text}", err=True)
            return ExitCode.USAGE if mistaken else DENIED
        case protocol.Done(text=text):
            click.echo(text)
            return ExitCode.OK
        case _:
            raise AssertionError(f"an answer to another question: {answer}")
