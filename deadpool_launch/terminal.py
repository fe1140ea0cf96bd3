"""What commands print alike: tables of plain columns, and what is wrong in a file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence

import click
from rich.console import Console
from rich.table import Table

from deadpool_launch.dotted import Problem
from deadpool_launch.exits import ExitCode

#: Without a terminal; and the most on one, as longer lines are hard to read.
_WIDTH, _MOST = 80, 120


def console() -> Console:
    """Where to print: as wide as COLUMNS says or the terminal is, else 80."""
    width = None
    if os.environ.get("COLUMNS") is None:
        here = sys.stdout.isatty()
        width = min(_MOST, shutil.get_terminal_size().columns) if here else _WIDTH
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
        click.echo(str(problem), err=True)
    if problems:
        return ExitCode.USAGE
    click.echo(f"{path}: good")
    return ExitCode.OK
