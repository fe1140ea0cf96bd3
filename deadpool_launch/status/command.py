"""``deadpool status``: how a job stands, once or again and again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from deadpool_launch.display import print_table
from deadpool_launch.exits import ExitCode
from deadpool_launch.follow import JournalTail
from deadpool_launch.operators import (
    find_run,
    require_journal,
    slurm_work_dir,
    standing_of,
)
from deadpool_launch.status.facts import status as status_of
from deadpool_launch.status.screen import OTHER_LINES, screen
from deadpool_launch.view import RunView

#: Without a terminal: of a screen, and its rows of nodes.
_WIDTH, _NODES = 80, 64
_EVERY_S = 2.0


@click.command()
@click.argument("run", metavar="[RUN_DIR|JOBID]", required=False)
@click.option("--watch", is_flag=True, help="Show it again every 2 s until the job ends.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line.")
def status(run: str | None, watch: bool, as_json: bool) -> int:
    """Show how a job stands: nodes, ranks, step, copies, the last incident.

    Without an argument: the job around this command, or the only one in deadpool-runs. Works for a
    job that has ended too.
    """
    run_dir = require_journal(find_run(run, os.environ, slurm_work_dir, ""))
    follower = _Follower(run_dir)
    if as_json:
        while True:
            click.echo(json.dumps(follower.look(), allow_nan=False))
            if follower.ended or not watch:
                return ExitCode.OK
            time.sleep(_EVERY_S)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    if not watch or not console.is_terminal:
        print_table(screen(follower.look(), str(run_dir), _rows(console)), console)
        while watch and not follower.ended:
            time.sleep(_EVERY_S)
            click.echo()
            print_table(screen(follower.look(), str(run_dir), _rows(console)), console)
        return ExitCode.OK
    with Live(console=console, auto_refresh=False) as live:
        while True:
            shown = screen(follower.look(), str(run_dir), _rows(console))
            live.update(shown, refresh=True)
            if follower.ended:
                return ExitCode.OK
            time.sleep(_EVERY_S)


def _rows(console: Console) -> int:
    return max(3, console.size.height - OTHER_LINES) if console.is_terminal else _NODES


class _Follower:
    """What is known of the job so far."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tail = JournalTail(run_dir)
        self._view = RunView(keep_steps=False)

    @property
    def ended(self) -> bool:
        return self._view.end is not None

    def look(self) -> dict[str, Any]:
        """Read what is new, and ask the launcher."""
        for records in self._tail.batches():
            self._view.apply_all(records)
        standing = None if self.ended else standing_of(self._run_dir)
        return status_of(self._view, standing, time.time())
