"""What commands print alike: tables of plain columns, 80 wide unless COLUMNS says otherwise, and
what is wrong in a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence

import click
from rich.console import Console
from rich.table import Table

from deadpool_launch.dotted import Problem
from deadpool_launch.entry import printable
from deadpool_launch.exits import ExitCode

_WIDTH, _LEAST_WIDTH = 80, 40


def console() -> Console:
    """Where to print."""
    given = os.environ.get("COLUMNS", "")
    # In less a table has no room for its words.
    width = max(_LEAST_WIDTH, int(given)) if re.fullmatch("[0-9]{1,4}", given) else _WIDTH
    return Console(width=width, highlight=False, soft_wrap=False)


def columns(*headings: str, whole: Collection[str] = ()) -> Table:
    """An empty table. ``whole``: headings of columns whose words are never broken."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in whole)
    return table


def tell_problems(path: str, problems: Sequence[Problem]) -> ExitCode:
    """Say everything that is wrong in a file, or that nothing is; returns the exit code."""
    for problem in problems:
        click.echo(printable(str(problem)), err=True)
    if problems:
        return ExitCode.USAGE
    click.echo(f"{path}: good")
    return ExitCode.OK
