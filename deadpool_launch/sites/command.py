"""``deadpool sites``: which clusters are known, and what their files come to."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.markup import escape

from deadpool_launch import terminal
from deadpool_launch.errors import UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.policy.files import text_of
from deadpool_launch.sites import files
from deadpool_launch.sites.cluster import cluster_name
from deadpool_launch.sites.merge import Settled
from deadpool_launch.sites.reading import read_site


@click.command(
    name="sites", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80}
)
@click.argument("name", required=False)
@click.option("-p", "--partition", metavar="NAME", help="Show what holds in this partition.")
@click.option("-q", "--qos", metavar="NAME", help="Show what holds with this QOS.")
@click.option(
    "--check",
    "checked",
    metavar="FILE",
    help="Say everything that is wrong in FILE instead; exit code 2 if anything is.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, by key.")
def sites(
    name: str | None,
    partition: str | None,
    qos: str | None,
    checked: str | None,
    as_json: bool,
) -> int:
    """List the clusters that are known, or show every value of the one called NAME.

    The file template.yaml, among those that come with DEADPOOL, explains every key.
    """
    if checked is not None:
        if name or partition or qos or as_json:
            raise UsageError(f"--check {checked}: shows no site; leave out what is beside it")
        return terminal.tell_problems(
            checked, read_site(text_of(Path(checked), what="site file"), checked)[1]
        )
    if name is None:
        if partition or qos or as_json:
            flag = "--partition" if partition else "--qos" if qos else "--json"
            raise UsageError(f"{flag}: name the site to show")
        _list()
        return ExitCode.OK
    settled = files.load(name, os.environ, partition=partition, qos=qos, named_by="NAME")
    if as_json:
        click.echo(json.dumps(_as_json(settled), indent=2))
    else:
        _show(settled)
    return ExitCode.OK


def _list() -> None:
    here = files.choose(None, os.environ, cluster_name).site.name
    table = terminal.columns("", "site", "what it is", "nodes from", whole=["", "site"])
    for name in files.names(os.environ):
        site = files.load(name, os.environ).site
        kind = "Slurm" if site.kind == "slurm" else "this machine"
        table.add_row("*" if name == here else "", name, escape(site.about), kind)
    console = terminal.console()
    console.print(table)
    console.print(
        "\n* is taken without --site. Files NAME.yaml are read from, the last one winning:\n"
        + "\n".join(f"  {folder}" for folder in files.folders(os.environ)),
        markup=False,
    )


def _show(settled: Settled) -> None:
    console, table = terminal.console(), terminal.columns("key", "value", "from", whole=["key"])
    folders = {str(folder): f"[{number}]" for number, folder in enumerate(_folders(settled), 1)}
    for name, setting in settled.settings.items():
        style = "yellow" if setting.how else "" if setting.path else "dim"
        origin = setting.origin
        for folder, mark in folders.items():
            origin = origin.replace(f"{folder}/", mark)
        table.add_row(name, escape(setting.text), escape(origin), style=style)
    console.print(table)
    console.print()
    for folder, mark in folders.items():
        console.print(f"{mark} {folder}", markup=False)
    unknown = [name for name, setting in settled.settings.items() if setting.how]
    if unknown:
        text = (
            f"Not known: {', '.join(unknown)}. The value says how to find it out; put it into "
            f"{files.folders(os.environ)[-1]}/{settled.site.name}.yaml."
        )
        console.print("\n".join(textwrap.wrap(text, console.width)), markup=False)


def _folders(settled: Settled) -> list[Path]:
    """Where the values came from, each folder once."""
    paths = (Path(setting.path).parent for setting in settled.settings.values() if setting.path)
    return list(dict.fromkeys(paths))


def _as_json(settled: Settled) -> dict[str, Any]:
    return {
        name: {
            "value": msgspec.to_builtins(setting.value),
            "text": setting.text,
            "unknown": setting.how,
            "origin": setting.origin,
            "doc": setting.key.doc,
        }
        for name, setting in settled.settings.items()
    }
