"""``deadpool classify``: the first root error of a log, and what it is."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import click

from deadpool_launch.classify.model import Kind
from deadpool_launch.classify.rules import default_rules, load_rules
from deadpool_launch.classify.scan import Finding, find_root
from deadpool_launch.controller.wording import ranks_text
from deadpool_launch.errors import UsageError
from deadpool_launch.exits import ExitCode

#: No rule knows a line of the log.
NOTHING_FOUND = 1
#: What the launcher does with a fault of each kind.
ACTIONS: Mapping[Kind, str] = {
    Kind.TRANSIENT: "the rank is started again on its node, unless it comes at the same step again",
    Kind.PERMANENT: "the node is not used any more and a spare takes its ranks",
    Kind.USER: (
        f"the job ends with exit code {ExitCode.SCRIPT_FAILED.value} and the script's traceback; "
        "no spare is used"
    ),
    Kind.JOB: f"the job ends with exit code {ExitCode.JOB_FAULT.value}; no spare is used",
    Kind.ECHO: "nothing for this alone: the cause is another rank's or node's; look at their logs",
}
#: Longer lines are cut, in bytes: a file without line ends must not come into memory whole.
_MAX_LINE_NBYTES = 64 << 10
#: Characters shown of the line.
_SHOWN = 400


@click.command()
@click.argument("log", metavar="LOG")
@click.option(
    "--rules",
    "own",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rules (YAML) that are tried before the packaged ones.",
)
@click.option(
    "--time-left",
    type=float,
    metavar="SECONDS",
    help="What was left of the time limit at the log's end.  [default: by the clock inside the "
    "job; else unknown, and nothing is put down to the time limit]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def classify(log: str, own: Path | None, time_left: float | None, as_json: bool) -> int:
    """Find the first root error in LOG and say which kind of fault it is.

    LOG is a rank's log, Slurm's output or the kernel's messages; - reads standard input. Exit code
    1 if no rule knows a line of it.
    """
    if time_left is not None and math.isnan(time_left):
        raise UsageError(f"--time-left {time_left}: must be a number of seconds, such as 30")
    mine = load_rules(own) if own is not None else ()
    if time_left is None:
        time_left = clocked_time_left(os.environ, time.time())
    with _open(log) as stream:
        try:
            found = find_root(numbered(stream), (*mine, *default_rules()), time_left, mine)
        except OSError as error:
            raise UsageError(f"{log}: cannot be read ({error.strerror})") from error
    if found is None:
        if as_json:
            click.echo(json.dumps({"log": log, "kind": None}))
        click.echo(f"deadpool classify: {log}: no rule knows an error in it", err=True)
        return NOTHING_FOUND
    click.echo(json.dumps(_as_json(log, found)) if as_json else describe(log, found))
    return ExitCode.OK


def clocked_time_left(environ: Mapping[str, str], now: float) -> float | None:
    """Seconds until the job's time limit, if this runs inside a job that tells its end."""
    try:
        return float(environ["SLURM_JOB_END_TIME"]) - now
    except (KeyError, ValueError):
        return None


def numbered(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers; of one that is too long only the beginning."""
    number = 0
    while raw := stream.readline(_MAX_LINE_NBYTES):
        number += 1
        yield number, raw
        while not raw.endswith(b"\n") and (raw := stream.readline(_MAX_LINE_NBYTES)):
            pass


def describe(log: str, found: Finding) -> str:
    """For people: the verdict, the line, and what the launcher does."""
    who = f", {ranks_text(sorted(found.ranks))}" if found.ranks else ""
    of = f" of {found.all_ranks}" if len(found.ranks) > 1 else ""
    text = found.text if len(found.text) <= _SHOWN else f"{found.text[:_SHOWN]}…"
    return (
        f"{found.verdict.kind}: {found.verdict.text}\n"
        f"  {log}, line {found.number}{who}{of}: {text}\n"
        f"  {ACTIONS[found.verdict.kind]}"
    )


def _as_json(log: str, found: Finding) -> dict[str, Any]:
    return {
        "log": log,
        "kind": found.verdict.kind,
        "rule": found.verdict.rule,
        "reason": found.verdict.reason,
        "line": found.number,
        "text": found.text,
        "ranks": sorted(found.ranks),
        "all_ranks": found.all_ranks,
        "xids": sorted(found.xids),
        "action": ACTIONS[found.verdict.kind],
    }


def _open(log: str) -> BinaryIO:
    if log == "-":
        try:
            return sys.stdin.buffer
        except AttributeError:
            raise UsageError("-: standard input is closed; name a file") from None
    try:
        return open(log, "rb")  # closed by the caller's with
    except IsADirectoryError:
        raise UsageError(f"{log}: is a directory; name one of the files in it") from None
    except OSError as error:
        raise UsageError(f"{log}: cannot be read ({error.strerror})") from error
