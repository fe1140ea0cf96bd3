"""Times, shares and names as people read them. Pure."""

from __future__ import annotations

from datetime import datetime, tzinfo
from math import floor, isfinite, log10

#: Names of an incident's phases where the journal's word is the launcher's own.
_PHASES = {
    "opened": "detected",
    "detected": "attributed",
    "revoked": "new epoch",
    "parked": "survivors parked",
    "spare ready": "spare admitted",
    "inventory": "copies found",
    "redundancy restored": "redundancy back",
}
#: From so many on they are told in hours: of less than ten most parts would be 0.00.
_MOST_NODE_S = 36_000
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def phase_label(phase: str, verdict: str | None = None) -> str:
    """``spare admitted``; of the last phase the verdict."""
    return verdict if verdict and phase == "closed" else _PHASES.get(phase, phase)


def span_text(seconds: float) -> str:
    """``0.42 s``, ``12.3 s``, ``2 min 5 s``, ``3 h 20 min``."""
    if not isfinite(seconds):
        return "?"
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 0.0995:
        return (
            f"{sign}{seconds * 1000:.{3 if seconds >= 1e-3 else 2}g} ms"
            if seconds >= 5e-5
            else "0 s"
        )
    if seconds < 59.95:
        return f"{sign}{seconds:.2f} s" if seconds < 9.995 else f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    smaller = {"d": ("h", 3600), "h": ("min", 60), "min": ("s", 1)}
    for unit, length in _UNITS:
        if whole >= length:
            name, part = smaller[unit]
            rest = whole % length // part
            return f"{sign}{whole // length} {unit}" + (f" {rest} {name}" if rest else "")
    return f"{sign}{whole} s"


def share_text(share: float) -> str:
    """``97.3 %``; what is little is not nothing, and what is not all is not all."""
    percent = 100 * share
    if 0 < percent < 0.05:
        return "< 0.1 %"
    if 99.95 <= percent < 100:
        return "> 99.9 %"
    return f"{percent:.1f} %" if percent < 100 else "100 %"


def node_time_text(node_s: float, of_s: float | None = None) -> str:
    """Seconds of nodes: ``12.3 node-s``, ``1.25 node-h``; in the unit that ``of_s`` would have, so
    that parts of it can be compared by the eye.
    """
    if (node_s if of_s is None else of_s) < _MOST_NODE_S:
        return f"{node_s:,.1f} node-s"
    return f"{node_s / 3600:,.2f} node-h"


def moment_text(at: float, zone: tzinfo | None) -> str:
    """``2026-12-01 09:12:04 +0000``; ``zone``: None for this machine's."""
    try:
        moment = datetime.fromtimestamp(at, zone)
    except (OverflowError, OSError, ValueError):
        return "?"
    return f"{moment if zone else moment.astimezone():%Y-%m-%d %H:%M:%S %z}"


def ticks(least: float, most: float, about: int) -> list[float]:
    """Round numbers from ``least`` to ``most``, about so many."""
    if not most > least:
        return [least]
    rough = (most - least) / max(1, about)
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = -floor(-(least / step) + 1e-9)
    return [n * step for n in range(first, floor(most / step + 1e-9) + 1)]


def time_unit(span_s: float) -> tuple[str, float]:
    """The unit for an axis of time, and its seconds."""
    for unit, length in _UNITS:
        if span_s >= 2 * length:
            return unit, length
    return "s", 1.0
