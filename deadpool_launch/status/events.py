"""``deadpool events``: a job's journal, line by line."""

from __future__ import annotations

import json
import os
import time

import click

from deadpool_launch.exits import ExitCode
from deadpool_launch.follow import JournalTail
from deadpool_launch.operators import find_run, require_journal, slurm_work_dir
from deadpool_launch.status.lines import line_of, wanted

_EVERY_S = 0.5


@click.command()
@click.argument("run", metavar="[RUN_DIR|JOBID]", required=False)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND",
    help="Only records of this kind, such as incident or step, or events of this name, such as "
    "AgentLost. Repeat it for several.  [default: all but step and PacesTold]",
)
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Only what is of this node.")
@click.option(
    "--rank",
    "ranks",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="RANK",
    help="Only what is of this rank.",
)
@click.option("--follow", is_flag=True, help="Go on with what comes, until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="The records themselves, one a line.")
def events(
    run: str | None,
    kinds: tuple[str, ...],
    nodes: tuple[str, ...],
    ranks: tuple[int, ...],
    follow: bool,
    as_json: bool,
) -> int:
    """Show what was noticed and decided in a job, line by line.

    Without RUN_DIR|JOBID: the job around this command, or the only one in deadpool-runs.
    """
    which = wanted(kinds, nodes, ranks)
    tail = JournalTail(require_journal(find_run(run, os.environ, slurm_work_dir, "")))
    ended = False
    while True:
        for records in tail.batches():
            ended = ended or any(record.get("kind") == "end" for record in records)
            for record in filter(which.has, records):
                click.echo(json.dumps(record) if as_json else line_of(record))
        if ended or not follow:
            return ExitCode.OK
        time.sleep(_EVERY_S)
