"""``deadpool policy check`` and ``deadpool policy show``."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import click
import msgspec

from deadpool_launch import terminal
from deadpool_launch.exits import ExitCode
from deadpool_launch.policy import files
from deadpool_launch.policy.merge import Setting, Settled, settle

_WIDTH = 80


@click.group(
    name="policy",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": _WIDTH},
)
def policy() -> None:
    """Look at policy.yaml; docs/policy.md lists its keys."""


@policy.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> int:
    """Say everything that is wrong in FILE; exit code 2 if anything is."""
    return terminal.tell_problems(str(file), files.check(file))


@policy.command()
@click.option(
    "--policy",
    "named",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The user's file.  [default: ~/.config/deadpool/policy.yaml]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, by key.")
def show(named: Path | None, as_json: bool) -> int:
    """Show every key's value and where it came from."""
    settled = settle(
        files.site_file(os.environ), files.user_file(os.environ, named), {}, on_slurm=True
    )
    if as_json:
        click.echo(json.dumps(_as_json(settled), indent=2))
        return ExitCode.OK
    _print(settled)
    return ExitCode.OK


def _as_json(settled: Settled) -> dict[str, Any]:
    return {
        name: {
            "value": msgspec.to_builtins(setting.value),
            "text": setting.key.show(setting.value),
            "level": "limit" if setting.limited else setting.level,
            "origin": setting.origin,
            "default": setting.key.show(setting.key.default),
            "doc": setting.key.doc,
            "flag": setting.key.flag,
        }
        for name, setting in settled.settings.items()
    }


def _print(settled: Settled) -> None:
    console, table = terminal.console(), terminal.columns("key", "value", "from", whole=["key"])
    for setting in settled.settings.values():
        style = "" if setting.level != "default" or setting.limited else "dim"
        table.add_row(*_row(setting), style=style)
    console.print(table)
    console.print()
    for setting in settled.settings.values():
        text = f"{setting.key.name}: {setting.key.doc}"
        lines = textwrap.wrap(text, console.width, subsequent_indent="    ", break_on_hyphens=False)
        console.print("\n".join(lines), markup=False)
    for remark in settled.remarks:
        console.print(remark, markup=False)


def _row(setting: Setting) -> tuple[str, str, str]:
    from rich.markup import escape

    return setting.key.name, escape(setting.key.show(setting.value)), escape(setting.origin)
