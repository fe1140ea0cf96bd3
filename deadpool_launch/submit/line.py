"""The launcher's command line for inside the allocation, from the one that was given. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from deadpool_launch.policy.kinds import show_duration


def launch_line(
    program: Sequence[str],
    parameters: Sequence[click.Parameter],
    given: Mapping[str, Any],
    instead: Mapping[str, str],
    left_out: Sequence[str],
) -> list[str]:
    """``program`` with every option that was given, the script and its arguments.

    ``given``: the values of the parameters that stood on the command line. ``instead``: options
    that are set whatever was given. ``left_out``: names of parameters that are for elsewhere.
    """
    line = [*program, *(f"{flag}={value}" for flag, value in instead.items())]
    for parameter in parameters:
        name = parameter.name or ""
        if not isinstance(parameter, click.Option) or name not in given or name in left_out:
            continue
        flag = max(parameter.opts, key=len)
        if flag in instead:
            continue
        if parameter.is_flag:
            line.append(flag)
            continue
        values = given[name] if parameter.multiple else [given[name]]
        line += [f"{flag}={_text(value)}" for value in values]
    line.append(str(given["script"]))
    extra = given.get("extra") or ()
    return [*line, "--", *extra] if extra else line


def _text(value: Any) -> str:
    if isinstance(value, float):
        return show_duration(value)
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value.absolute()) if isinstance(value, Path) else str(value)
