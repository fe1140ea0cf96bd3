"""An incident as a table of phases: what happened when, counted from the first sign. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deadpool_launch.follow import IncidentView

#: From this terminal width on there is room for a longer bar and for each phase's own time.
_WIDE = 110
_NARROW_BAR = 18
_WIDE_BAR = 34
_SECONDS_WIDTH = 6
_GAP = 2


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One phase: ``since_s`` seconds after the first sign, ``took_s`` after the phase before it."""

    phase: str
    detail: str
    since_s: float
    took_s: float


def timeline(incident: IncidentView) -> list[TimelineRow]:
    """The incident's phases in the order in which they were reached."""
    rows = []
    before = incident.opened_at
    for record in incident.records:
        at = float(record["at"])
        rows.append(
            TimelineRow(
                phase=str(record.get("phase", "")),
                detail=str(record.get("detail") or record.get("reason") or ""),
                since_s=at - incident.opened_at,
                took_s=max(0.0, at - before),
            )
        )
        before = at
    return rows


def headline(incident: IncidentView) -> str:
    """The incident in one sentence."""
    rows = timeline(incident)
    cause = rows[0].detail or rows[0].phase
    text = f"Incident {incident.number}: {cause}"
    if incident.verdict is None:
        return f"{text}; not resolved"
    text += f"; {incident.verdict} after {rows[-1].since_s:.2f} s"
    if incident.replayed_steps is not None:
        plural = "" if incident.replayed_steps == 1 else "s"
        text += f", {incident.replayed_steps} completed step{plural} run again"
    return text


def bar(row: TimelineRow, total_s: float, width: int) -> tuple[int, int]:
    """Where the row's bar begins and how long it is (at least 1), in characters."""
    if total_s <= 0:
        return 0, 1
    begin = round((row.since_s - row.took_s) / total_s * width)
    end = round(row.since_s / total_s * width)
    begin = min(begin, width - 1)
    return begin, max(1, end - begin)


def render(incident: IncidentView, width: int) -> RenderableType:
    """The incident's phases for a terminal ``width`` characters wide."""
    rows = timeline(incident)
    total_s = rows[-1].since_s
    wide = width >= _WIDE
    bar_width = _WIDE_BAR if wide else _NARROW_BAR
    slowest = max(rows, key=lambda row: row.took_s)
    phase_width = max(len("phase"), *(len(row.phase) for row in rows))
    widths = [phase_width, *[_SECONDS_WIDTH] * (1 + wide), bar_width]
    detail_width = max(10, width - sum(widths) - len(widths) * _GAP)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("phase", width=phase_width)
    table.add_column("at s", justify="right", width=_SECONDS_WIDTH)
    if wide:
        table.add_column("took s", justify="right", width=_SECONDS_WIDTH)
    table.add_column("", width=bar_width)
    table.add_column("what happened", width=detail_width, overflow="ellipsis", no_wrap=True)
    for row in rows:
        begin, length = bar(row, total_s, bar_width)
        style = "red" if row is slowest and row.took_s > 0 else "cyan"
        drawn = Text(" " * begin) + Text("█" * length if row.took_s > 0 else "▏", style=style)
        seconds = [f"{row.since_s:.2f}", f"{row.took_s:.2f}"]
        table.add_row(row.phase, *seconds[: 1 + wide], drawn, row.detail)
    return Group(Text(headline(incident), style="bold"), table)
