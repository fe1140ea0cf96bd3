"""What the command lines of ``deadpool simulate`` and ``deadpool plan`` take, and files they read.

Every error is a sentence that names the option or the file and says what would be right.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from deadpool_launch.errors import UsageError
from deadpool_launch.policy.files import content_of
from deadpool_launch.policy.kinds import A_DURATION, read_duration, show_duration
from deadpool_launch.whatif.faults import Faults, Renewal, Trace, listed
from deadpool_launch.whatif.report import hours, share
from deadpool_launch.whatif.strategies import GIVEN, MEANING, MEASURED, Strategy

#: Unexpected interruptions, days and nodes of eight GPUs of the Llama 3 405B training.
_LLAMA = 419, 54, 16_384 // 8
NODE_MTBF_S = _LLAMA[2] * _LLAMA[1] * 86400 / _LLAMA[0]
NODE_MTBF_SOURCE = (
    "Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs, at 8 a node "
    "(Grattafiori et al. 2024)"
)
TRANSIENT = 0.24
TRANSIENT_SOURCE = (
    "Crusoe at GTC 2025: of 205 faults of an H200 cluster 19.5 % were of a GPU and 4.9 % of "
    "InfiniBand that recovered"
)
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_TRACE_LINE = re.compile(
    r"\s*([\w.:-]{1,30}(?: \w{1,3})?)\s*,\s*([0-9]{1,9})\s*,\s*(transient|permanent)\s*"
)
_NUMBER = re.compile(r"(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*([KMGBT]?)(i?B)?", re.IGNORECASE)


#: Of whatever is counted, and of bytes.
_MOST, _MOST_SIZE = 10**15, 1 << 60
#: Of nodes, of ranks on one, and of runs: more would not fit into memory, or never end.
MOST_NODES, MOST_RANKS, MOST_SEEDS = 200_000, 1024, 100_000
#: A training job takes no longer; where it seems to, a unit is wrong.
_LONGEST_S = 100 * 365.25 * 86400
#: Of a file that is read whole.
_MOST_NBYTES = 64 << 20

F = TypeVar("F")

#: What ``click.option`` gives.
Decorator = Callable[[F], F]


def time_option(name: str, text: str) -> Decorator[Any]:
    """An option that takes a duration above zero; seconds, or None."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        found = None if value is None else read_duration(value)
        if value is not None and (found is None or not 0 < found < math.inf):
            raise UsageError(f"{name} {value}: must be {A_DURATION}, above zero")
        return found

    return click.option(name, metavar="TIME", callback=read, help=text)


def count_option(name: str, least: int, text: str, most: int = _MOST) -> Decorator[Any]:
    """An option that takes a whole number from ``least`` to ``most``, as ``7B`` or ``1e5`` too."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        found = None if value is None else _scaled(value, _DECIMAL)
        if value is not None and (found is None or found % 1 != 0 or found < least):
            raise UsageError(
                f"{name} {value}: must be a whole number of at least {least}, such as "
                f"{max(least, 128)}, 1e5 or 7B"
            )
        if found is not None and found > most:
            raise UsageError(f"{name} {value}: must be at most {most:,}")
        return None if found is None else int(found)

    return click.option(name, metavar="N", callback=read, help=text)


def file_option(name: str, to: str, metavar: str, text: str) -> Decorator[Any]:
    """An option that takes a path."""
    return click.option(name, to, metavar=metavar, type=click.Path(path_type=Path), help=text)


def size_option(name: str, text: str) -> Decorator[Any]:
    """An option that takes bytes, with a binary suffix."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
        found = None if value is None else _scaled(value, _BINARY)
        if value is not None and (found is None or not 1 <= found <= _MOST_SIZE):
            raise UsageError(f"{name} {value}: must be a size such as 512G or 1.5T")
        return None if found is None else int(found)

    return click.option(name, metavar="SIZE", callback=read, help=text)


def share_option(name: str, text: str) -> Decorator[Any]:
    """An option that takes a number from 0 up to but not including 1."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        if value is None:
            return None
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not 0 <= found < 1:
            raise UsageError(f"{name} {value}: must be a number from 0 and below 1, such as 0.25")
        return found

    return click.option(name, metavar="SHARE", callback=read, help=text)


def _scaled(text: str, suffixes: Mapping[str, int]) -> float | None:
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2].upper() not in suffixes:
        return None
    return float(found[1]) * suffixes[found[2].upper()]


# ---------------------------------------------------------------- the failure process


def drawn_faults(options: Mapping[str, Any]) -> Renewal:
    """The failure process that the options name; published figures for those that were not given.

    ``options``: ``node_mtbf`` and ``transient``; ``weibull``, ``group`` and ``group_mtbf`` if the
    command has them.
    """
    shape, group = options.get("weibull"), options.get("group")
    group_mtbf_s = options.get("group_mtbf")
    if (group is None) != (group_mtbf_s is None):
        raise UsageError("--group and --group-mtbf: give both or neither")
    if shape is not None and not 0.1 <= shape <= 10:
        raise UsageError(f"--weibull {shape:g}: must be a shape from 0.1 to 10, such as 0.7")
    return Renewal(
        mtbf_s=options["node_mtbf"] or NODE_MTBF_S,
        shape=shape or 1.0,
        transient=TRANSIENT if options["transient"] is None else options["transient"],
        group=group or 1,
        group_mtbf_s=group_mtbf_s or math.inf,
    )


def check_lengths(
    nodes: int, step_s: float, length_s: float, faults: Faults, named: str = "--node-mtbf"
) -> None:
    """Raise a ``UsageError`` for a job of which no simulation would see the end. ``named``: what
    says how often there are faults.
    """
    if length_s > _LONGEST_S:
        raise UsageError(
            f"{show_duration(step_s)} a step (--step-time): the job takes {_years(length_s)} years "
            f"without any fault, and {_years(_LONGEST_S)} at most can be simulated; is the unit "
            "right?"
        )
    rate = faults.rate(nodes)
    if rate * step_s > 1:
        raise UsageError(
            f"{named}: some of {nodes} nodes fails every {1 / rate:.3g} s, and a step takes "
            f"{show_duration(step_s)}, so none would be completed; is a unit missing, as in 50000h?"
        )


def _years(seconds: float) -> str:
    return f"{seconds / (365.25 * 86400):.3g}"


def faults_text(faults: Renewal, options: Mapping[str, Any]) -> list[str]:
    """What is taken for the faults, and where that is from."""
    kind = "exponential" if faults.shape == 1 else f"Weibull, shape {faults.shape:g}"
    texts = [
        f"node MTBF {hours(faults.mtbf_s)} ({kind}): "
        f"{NODE_MTBF_SOURCE if options['node_mtbf'] is None else GIVEN}",
        f"transient faults {share(faults.transient)}: "
        f"{TRANSIENT_SOURCE if options['transient'] is None else GIVEN}",
    ]
    if faults.group > 1:
        texts.append(
            f"groups of {faults.group} nodes fail together every {hours(faults.group_mtbf_s)}: "
            f"{GIVEN}"
        )
    return texts


def read_trace(path: Path, seats: int) -> Trace:
    """The record of faults in a file; see ``parse_trace``."""
    try:
        text = _text_of(path)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{path}: cannot be read as lines of text ({_because(error)})") from None
    return parse_trace(text, seats, str(path))


def _text_of(path: Path) -> str:
    """Raises ``OSError`` and ``UnicodeError``."""
    content = content_of(path, _MOST_NBYTES, str(path), "the right file")
    # Spreadsheets put a mark at the beginning.
    return content.decode("utf-8-sig")


def parse_trace(text: str, seats: int, name: str) -> Trace:
    """A record of faults: lines of a time since its begin, a node's number and what it was."""
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _TRACE_LINE.fullmatch(line)
        at = read_duration(found[1]) if found else None
        if found is None or at is None:
            raise UsageError(
                f"{name}, line {number}: must be TIME,NODE,KIND with a node's number from 0 and "
                "the kind transient or permanent, such as 3.5h,17,permanent"
            )
        if int(found[2]) >= seats:
            raise UsageError(
                f"{name}, line {number}: there is no node {found[2]}; the job has {seats} nodes, "
                "spares included, counted from 0"
            )
        rows.append((at, int(found[2]), found[3] == "permanent"))
    if not rows or max(at for at, _, _ in rows) <= 0:
        raise UsageError(f"{name}: has no fault later than its begin; name at least one")
    return listed(rows)


def read_first_step(path: Path) -> dict[str, float]:
    """Seconds to the first step after each fault in ``MEASURED``, as ``bench/first_step.py`` wrote
    them.
    """
    try:
        results = json.loads(_text_of(path))["results"]
        found = {case: results[case]["median"]["first step"] for case in MEASURED.values()}
    except (OSError, UnicodeError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path}: is not what bench/first_step.py writes ({_because(error)})"
        ) from None
    for case, seconds in found.items():
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise UsageError(
                f"{path}: {case} has the median {seconds!r}; must be seconds to the first step, "
                "from 0 on"
            )
    return {case: float(seconds) for case, seconds in found.items()}


def _because(error: Exception) -> str:
    match error:
        case OSError(strerror=str(why)):
            return why
        case KeyError():
            return f"{error} is not in it"
        case UnicodeError():
            return "not UTF-8 text"
        case json.JSONDecodeError(lineno=line, msg=why):
            return f"line {line} is not JSON: {why}"
        case _:
            return "it has another form"


# ---------------------------------------------------------------- the user's figures


def with_changes(strategies: list[Strategy], changes: tuple[str, ...]) -> list[Strategy]:
    """The strategies with the figures that ``--set NAME.FIGURE=VALUE`` gives."""
    by_name = {each.name: each for each in strategies}
    for text in changes:
        found = re.fullmatch(r"([\w-]+)\.([\w-]+)=(.+)", text)
        if found is None or found[2] not in MEANING:
            raise UsageError(
                f"--set {text}: must be STRATEGY.FIGURE=VALUE; figures are {', '.join(MEANING)}"
            )
        name, key, value = found.groups()
        if name not in by_name:
            raise UsageError(f"--set {text}: {name} is not simulated; {', '.join(by_name)} are")
        by_name[name] = by_name[name].changed(key, _figure(text, key, value))
    return list(by_name.values())


def _figure(text: str, key: str, value: str) -> float:
    unit, meaning = MEANING[key]
    if unit == "s":
        found, wanted, least = read_duration(value), A_DURATION, 0.0
    else:
        try:
            found = float(value)
        except ValueError:
            found = None
        wanted, least = ("a share such as 0.02", 0.0) if unit == "share" else ("a number", 1.0)
    if key == "save-every":
        least = 1e-3
    if found is None or not least <= found < math.inf:
        raise UsageError(f"--set {text}: {key} ({meaning}) must be {wanted}, at least {least:g}")
    return found
