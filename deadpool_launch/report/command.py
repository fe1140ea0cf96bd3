"""``deadpool report``: a page and a JSON file about a job, from its run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from deadpool_launch.errors import UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import read
from deadpool_launch.operators import (
    find_run,
    is_alive,
    require_journal,
    slurm_work_dir,
)
from deadpool_launch.report.facts import document
from deadpool_launch.report.page import page
from deadpool_launch.view import RunView

PAGE_NAME, FACTS_NAME = "report.html", "report.json"


@click.command()
@click.argument("run", metavar="[RUN_DIR|JOBID]", required=False)
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    help="Write both files there.  [default: the run directory]",
    type=click.Path(path_type=Path),
)
@click.option("--json", "as_json", is_flag=True, help="Print the JSON; write no file.")
def report(run: str | None, folder: Path | None, as_json: bool) -> int:
    """Write report.html and report.json: what a job did, and what it lost where.

    The page needs nothing else and can be sent around. Works while the job runs, and after it was
    killed: it goes as far as the journal.
    """
    run_dir = require_journal(find_run(run, os.environ, slurm_work_dir, ""))
    view = RunView()
    view.apply_all(read(run_dir))
    facts = document(view, None if view.end is not None else is_alive(run_dir))
    text = json.dumps(facts, indent=1, allow_nan=False)
    if as_json:
        click.echo(text)
        return ExitCode.OK
    where = run_dir if folder is None else folder
    for name, content in ((FACTS_NAME, text), (PAGE_NAME, page(facts))):
        _write(where / name, content)
    click.echo(str(where / PAGE_NAME))
    return ExitCode.OK


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}); name another folder with --to DIR"
        ) from error
