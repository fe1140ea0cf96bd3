"""An incident as a table of phases: what happened when, counted from the first sign. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deadpool_launch.report.words import phase_label
from deadpool_launch.view import IncidentView

#: From this terminal width on there is room for a longer bar and for each phase's own time.
_WIDE = 110
_NARROW_BAR = 10
_WIDE_BAR = 34
_SECONDS_WIDTH = 6
_GAP = 2
_CAPTION = "A bar is the time spent to reach its row."
#: Lines that a phase's text may take; ``deadpool.log`` has all of it.
_MOST_LINES = 2
#: Phases whose text may be what the headline says already.
_FIRST_SIGNS = ("opened", "detected")


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One phase: ``since_s`` seconds after the first sign, ``took_s`` after the phase before it."""

    phase: str
    detail: str
    since_s: float
    took_s: float


def timeline(incident: IncidentView) -> list[TimelineRow]:
    """The incident's phases in the order in which they were reached.

    A rehearsed fault comes first, before the first sign of it. What the headline says is not said
    again.
    """
    rows = []
    first_sign = incident.records[0].get("detail", "")
    before = incident.fault_at
    if incident.fault is not None:
        since_s = incident.fault_at - incident.opened_at
        rows.append(TimelineRow("fault", str(incident.fault["fault"]), since_s, 0.0))
    for record in incident.records:
        at = float(record["at"])
        phase, detail = str(record.get("phase", "")), str(record.get("detail", ""))
        if phase in _FIRST_SIGNS and detail == first_sign:
            detail = ""
        if record.get("verdict") == "stopped":
            detail = "the job ended"
        elif record.get("verdict"):
            # How long it took and what was run again is in the headline.
            detail = detail.partition(" in ")[0]
        rows.append(
            TimelineRow(
                phase=phase,
                detail=detail,
                since_s=at - incident.opened_at,
                took_s=max(0.0, at - before),
            )
        )
        before = at
    return rows


def headline(incident: IncidentView) -> str:
    """The incident in one sentence."""
    text = f"Incident {incident.number}: {incident.records[0].get('detail', '')}"
    if incident.closed_at is None:
        return f"{text}; not resolved"
    text += (
        f"; {incident.verdict} {incident.closed_at - incident.opened_at:.2f} s after the first sign"
    )
    if incident.fault is not None:
        text += f" and {incident.closed_at - incident.fault_at:.2f} s after the fault"
    if incident.replayed_steps is not None and incident.verdict != "stopped":
        plural = "" if incident.replayed_steps == 1 else "s"
        text += f", {incident.replayed_steps} completed step{plural} run again"
    return text


def bar(row: TimelineRow, from_s: float, until_s: float, width: int) -> tuple[int, int]:
    """Where the row's bar begins and how long it is (at least 1), in characters.

    The whole ``width`` stands for the time from ``from_s`` until ``until_s``.
    """
    if until_s <= from_s:
        return 0, 1
    per_s = width / (until_s - from_s)
    begin = round((row.since_s - row.took_s - from_s) * per_s)
    end = round((row.since_s - from_s) * per_s)
    begin = min(begin, width - 1)
    return begin, max(1, end - begin)


def _shortened(text: str, width: int) -> str:
    """As much of the text as fits into the lines that it may take."""
    lines = textwrap.wrap(text, width)
    if len(lines) <= _MOST_LINES:
        return text
    last = lines[_MOST_LINES - 1]
    return " ".join([*lines[: _MOST_LINES - 1], f"{last[: width - 1].rstrip()}…"])


def render(incident: IncidentView, width: int) -> RenderableType:
    """The incident's phases for a terminal ``width`` characters wide."""
    rows = timeline(incident)
    wide = width >= _WIDE
    bar_width = _WIDE_BAR if wide else _NARROW_BAR
    slowest = max(rows, key=lambda row: row.took_s)
    labels = [phase_label(row.phase, incident.verdict) for row in rows]
    phase_width = max(len("phase"), *map(len, labels))
    widths = [phase_width, *[_SECONDS_WIDTH] * (1 + wide), bar_width]
    detail_width = max(10, width - sum(widths) - len(widths) * _GAP)
    table = Table(
        box=None,
        padding=(0, _GAP, 0, 0),
        pad_edge=False,
        header_style="bold",
        caption=_CAPTION,
        caption_justify="left",
    )
    table.add_column("phase", width=phase_width)
    table.add_column("at s", justify="right", width=_SECONDS_WIDTH)
    if wide:
        table.add_column("took s", justify="right", width=_SECONDS_WIDTH)
    table.add_column("", width=bar_width)
    table.add_column("what happened", width=detail_width)
    for row, label in zip(rows, labels, strict=True):
        begin, length = bar(row, rows[0].since_s, rows[-1].since_s, bar_width)
        style = "red" if row is slowest and row.took_s > 0 else "cyan"
        drawn = Text(" " * begin) + Text("█" * length if row.took_s > 0 else "▏", style=style)
        seconds = [f"{row.since_s:.2f}", f"{row.took_s:.2f}"]
        table.add_row(label, *seconds[: 1 + wide], drawn, _shortened(row.detail, detail_width))
    return Group(Text(headline(incident), style="bold"), table)
