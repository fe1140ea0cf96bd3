"""Pictures of a report as SVG: an incident's timeline, curves over the job's time. Pure.

Colours are classes, which the page defines for light and dark. Each picture is drawn for a width in
CSS pixels, so that its letters are as large on a telephone as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from deadpool_launch.report.words import span_text, ticks, time_unit

#: From this width on a label stands beside its bar, not above it.
_ROOM_BESIDE = 560
_LABEL_WIDTH, _TIME_WIDTH = 132, 66
_ROW, _ROW_NARROW = 24, 38
_BAR = 12
_AXIS = 26
_LETTER = 6.6
#: Of the time that a plot shows: so much of it lies before its first point.
_MARGIN = 0.02


def text_of(value: object) -> str:
    """Any text for a page: escaped, without what no page may have in it."""
    kept = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )
    return escape(kept)


@dataclass(frozen=True, slots=True)
class Band:
    """A time that is marked in a plot: from, until, what is written above it."""

    start_s: float
    stop_s: float
    label: str
    title: str


def timeline_svg(phases: Sequence[dict[str, Any]], width: int, name: str) -> str:
    """The phases of an incident, one row each; a bar is the time spent to reach it."""
    beside = width >= _ROOM_BESIDE
    row_height = _ROW if beside else _ROW_NARROW
    left = _LABEL_WIDTH if beside else 4
    right = width - (_TIME_WIDTH if beside else 6)
    height = row_height * len(phases) + _AXIS
    begin, end = float(phases[0]["since_s"]), float(phases[-1]["since_s"])
    scale = (right - left) / (end - begin) if end > begin else 0.0

    def x(since_s: float) -> float:
        return left + (since_s - begin) * scale

    slowest = max(phases, key=lambda phase: phase["took_s"])
    bottom = height - _AXIS + 2
    parts = [_open(width, height, name, "timeline")]
    for tick in ticks(begin, end, 6 if beside else 3):
        parts.append(_line(x(tick), 0, x(tick), bottom, "grid"))
        anchor = "end" if x(tick) > width - 24 else "middle" if x(tick) > 24 else "start"
        label = span_text(tick) if tick else "0"
        parts.append(_text(x(tick), height - 8, label, "axis", anchor))
    for index, phase in enumerate(phases):
        top = index * row_height
        middle = top + (row_height / 2 if beside else row_height - _BAR / 2 - 4)
        stop, start = x(phase["since_s"]), x(phase["since_s"] - phase["took_s"])
        kind = "fault" if phase["phase"] == "fault" else "slow" if phase is slowest else "bar"
        title = f"{phase['label']}: {phase['detail']}" if phase["detail"] else phase["label"]
        parts.append(f"<g><title>{text_of(title)}</title>")
        time = span_text(phase["since_s"])
        if beside:
            parts.append(_text(left - 8, middle + 4, phase["label"], "label", "end"))
            parts.append(_text(right + 6, middle + 4, time, "axis", "start"))
        else:
            parts.append(_text(left, top + 14, phase["label"], "label", "start"))
            parts.append(_text(width - 4, top + 14, time, "axis", "end"))
        long = max(2.0, stop - start)
        parts.append(
            f'<rect x="{min(start, right - 2):.1f}" y="{middle - _BAR / 2:.1f}" '
            f'width="{long:.1f}" height="{_BAR}" rx="2" class="{kind}"/></g>'
        )
    parts.append("</svg>")
    return "".join(parts)


@dataclass(frozen=True, slots=True)
class Curve:
    """What is drawn: for each time the least, the middle and the greatest value."""

    points: Sequence[tuple[float, float, float, float]]
    #: Of the values; seconds are written as spans.
    in_seconds: bool
    #: Whether it keeps its value until the next point.
    stairs: bool = False


def curve_svg(
    curve: Curve, bands: Sequence[Band], until_s: float, width: int, height: int, name: str
) -> str:
    """A curve over the job's time from its first point on, with the incidents in it."""
    points = curve.points
    begin_s = max(0.0, points[0][0] - _MARGIN * (until_s - points[0][0])) if points else 0.0
    top_value = _top(points)
    labels = ticks(0.0, top_value, 4)
    left = 12 + _LETTER * max(len(_value_text(label, curve)) for label in labels)
    right, top, bottom = width - 10.0, 20.0, height - 24.0
    span = until_s - begin_s if until_s > begin_s else 1.0

    def x(at_s: float) -> float:
        return left + min(1.0, max(0.0, (at_s - begin_s) / span)) * (right - left)

    def y(value: float) -> float:
        return bottom - min(value, top_value) / top_value * (bottom - top)

    parts = [_open(width, height, name, "curve")]
    for label in labels:
        parts.append(_line(left, y(label), right, y(label), "grid"))
        parts.append(_text(left - 6, y(label) + 4, _value_text(label, curve), "axis", "end"))
    unit, length = time_unit(until_s)
    for tick in ticks(begin_s / length, (begin_s + span) / length, max(2, width // 110)):
        anchor = "end" if x(tick * length) > right - 16 else "middle"
        moment = f"{round(tick, 9):g} {unit}"
        parts.append(_text(x(tick * length), height - 6, moment, "axis", anchor))
    parts += _bands(bands, x, top, bottom)
    for run in _between(points, [band.start_s for band in bands]):
        parts += _run(run, curve, x, y)
    for at_s, _, middle, most in points:
        if most > top_value:
            kind = "over" if middle <= top_value else "over all"
            parts.append(
                f'<path d="M{x(at_s) - 3:.1f} {top + 1:.1f}h6l-3 -6z" class="{kind}">'
                f"<title>{text_of(_value_text(most, curve))}</title></path>"
            )
    parts.append("</svg>")
    return "".join(parts)


def _top(points: Sequence[tuple[float, float, float, float]]) -> float:
    """The upper end: a few outliers are cut off, or nothing else could be seen."""
    if not points:
        return 1.0
    most = sorted(point[3] for point in points)
    usual = most[int(0.97 * (len(most) - 1))]
    limit = most[-1] if most[-1] <= 2.5 * usual else 1.3 * usual
    return limit * 1.08 or 1.0


def _between(
    points: Sequence[tuple[float, float, float, float]], cuts: Iterable[float]
) -> list[list[tuple[float, float, float, float]]]:
    """The points cut into runs that no incident is in."""
    runs: list[list[tuple[float, float, float, float]]] = [[]]
    left = sorted(cuts)
    for point in points:
        crossed = False
        while left and point[0] > left[0]:
            left.pop(0)
            crossed = True
        if crossed and runs[-1]:
            runs.append([])
        runs[-1].append(point)
    return [run for run in runs if run]


def _run(run: list[tuple[float, float, float, float]], curve: Curve, x: Any, y: Any) -> list[str]:
    if len(run) == 1:
        at_s, _, middle, _ = run[0]
        return [f'<circle cx="{x(at_s):.1f}" cy="{y(middle):.1f}" r="1.8" class="dot"/>']
    upper = " ".join(f"{x(p[0]):.1f},{y(p[3]):.1f}" for p in run)
    lower = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in reversed(run))
    path = [f"M{x(run[0][0]):.1f} {y(run[0][2]):.1f}"]
    for point in run[1:]:
        if curve.stairs:
            path.append(f"H{x(point[0]):.1f}V{y(point[2]):.1f}")
        else:
            path.append(f"L{x(point[0]):.1f} {y(point[2]):.1f}")
    shade = f'<polygon points="{upper} {lower}" class="shade"/>' if not curve.stairs else ""
    return [shade, f'<path d="{"".join(path)}" class="line"/>']


def _bands(bands: Sequence[Band], x: Any, top: float, bottom: float) -> list[str]:
    parts = []
    label_until = -1.0
    for band in bands:
        start, stop = x(band.start_s), x(band.stop_s)
        parts.append(
            f'<rect x="{start:.1f}" y="{top:.1f}" width="{max(1.5, stop - start):.1f}" '
            f'height="{bottom - top:.1f}" class="band"><title>{text_of(band.title)}</title></rect>'
        )
        middle = (start + stop) / 2
        if middle - 8 > label_until:
            parts.append(_text(middle, top - 7, band.label, "bandlabel", "middle"))
            label_until = middle + 8
    return parts


def bar_svg(shares: Sequence[tuple[str, float, str]], width: int, name: str) -> str:
    """One bar of parts: class, share, title."""
    parts = [_open(width, 28, name, "shares")]
    at = 0.0
    for kind, share, title in shares:
        long = share * width
        if long > 0:
            parts.append(
                f'<rect x="{at:.2f}" y="0" width="{long:.2f}" height="28" class="part {kind}">'
                f"<title>{text_of(title)}</title></rect>"
            )
        at += long
    parts.append("</svg>")
    return "".join(parts)


def _value_text(value: float, curve: Curve) -> str:
    if not curve.in_seconds:
        return f"{value:g}"
    return span_text(value) if value else "0"


def _open(width: int, height: float, name: str, kind: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" role="img" '
        f'class="{kind}" aria-label="{text_of(name)}">'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{kind}"/>'


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
        f"{text_of(text)}</text>"
    )
