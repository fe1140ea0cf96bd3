"""The table of ``deadpool preflight``, for 80 columns and for more, and the same for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from deadpool_launch import terminal
from deadpool_launch.backends.base import Check
from deadpool_launch.preflight.rules import Result, result_of

#: From this width on what to do has a column of its own.
_WIDE = 100
#: Rows of one check with one result; a large job may have the same on every node.
_MOST_ALIKE = 3
_STYLES: dict[Result, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def draw(checks: Sequence[Check], width: int) -> Table:
    """The rows in their order."""
    wide = width >= _WIDE
    last = ("what it means", "what to do") if wide else ("what it means, and what to do",)
    table = terminal.columns("check", "result", *last, whole=("check", "result"))
    if wide:
        table.columns[2].ratio, table.columns[3].ratio = 3, 2
    alike = Counter((check.name, result_of(check)) for check in checks)
    shown: Counter[tuple[str, Result]] = Counter()
    for check in checks:
        key = check.name, result_of(check)
        shown[key] += 1
        if shown[key] > _MOST_ALIKE:
            continue
        left = alike[key] - _MOST_ALIKE
        more = f" (and {left} more such, --json has them)" if left > 0 else ""
        text = check.text + (more if shown[key] == _MOST_ALIKE else "")
        cells = [Text(text)]
        if wide:
            cells.append(Text(check.remedy))
        elif check.remedy:
            cells[0].append(f"\n→ {check.remedy}", style="italic")
        table.add_row(check.name, Text(key[1], style=_STYLES.get(key[1], "cyan")), *cells)
    return table


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """The rows for programs."""
    return [
        {
            "check": check.name,
            "result": result_of(check),
            "text": check.text,
            "remedy": check.remedy,
            "leave_out": check.leave_out,
        }
        for check in checks
    ]
