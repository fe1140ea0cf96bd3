"""A journal's records as lines for people, and which of them somebody wants to see. Pure."""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from deadpool_launch.controller import events
from deadpool_launch.errors import UsageError
from deadpool_launch.report.words import phase_label, span_text
from deadpool_runtime import protocol

Record = dict[str, Any]

#: See ``journal.py``.
KINDS = (
    *("job", "launcher", "say", "rank", "step", "node", "incident", "checkpoint", "fault"),
    *("final", "event", "end"),
)
#: Names of ``event`` records.
NAMES: tuple[str, ...] = (
    *(kind.__name__ for kind in typing.get_args(events.Event)),
    *(kind.__name__ for kind in typing.get_args(protocol.FromRank)),
    *("Check", "Movers", "NativePartReady", "Policy"),
)
#: So many of them that they are shown only if they are asked for.
_MANY = ("step", "PacesTold")
#: Longer values are cut.
_LONGEST = 100
_NOT_SHOWN = ("at", "kind", "name", "node", "rank")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records are shown; empty: all but those of which there are many."""

    kinds: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()

    def has(self, record: Record) -> bool:
        """Whether this one is wanted."""
        names = {record.get("kind"), record.get("name")} - {None}
        if self.kinds and not names & self.kinds:
            return False
        if not self.kinds and names & set(_MANY):
            return False
        if self.nodes and record.get("node") not in self.nodes:
            return False
        return not self.ranks or record.get("rank") in self.ranks


def check_kind(given: str) -> str:
    """The kind or name that is meant; upper and lower case are the same."""
    known: dict[str, str] = {name.lower(): name for name in (*KINDS, *NAMES)}
    if given.lower() in known:
        return known[given.lower()]
    close = get_close_matches(given.lower(), known, n=1)
    meant = f"did you mean {known[close[0]]}?" if close else f"kinds are {', '.join(KINDS)}"
    raise UsageError(f"--kind {given}: is no kind of record, and no event; {meant}")


def line_of(record: Record) -> str:
    """One line: the time, what happened, where, and what is known of it."""
    kind = str(record.get("kind", "?"))
    write = _WRITERS.get(kind, _event)
    try:
        text = write(record)
    except (KeyError, TypeError, ValueError):
        text = json.dumps(record, default=str)
    return f"{_clock(record.get('at'))}  {' '.join(text.split())}"


def _clock(at: Any) -> str:
    try:
        whole = time.strftime("%m-%d %H:%M:%S", time.localtime(at))
        return f"{whole}.{int(at % 1 * 1000):03d}"
    except (TypeError, ValueError, OverflowError, OSError):
        return "??-?? ??:??:??.???"


def _job(record: Record) -> str:
    spares = ", ".join(record["spares"]) or "none"
    active = ", ".join(record["active"])
    return f"job {record['job_id']}: {record['world_size']} ranks on {active}; spares: {spares}"


def _launcher(record: Record) -> str:
    where = f" on {record['node']}" if record.get("node") else ""
    return f"launcher of term {record['term']}{where}: the one before ended ({record['ended']})"


def _rank(record: Record) -> str:
    return (
        f"rank {record['rank']} on {record['node']}: process {record['pid']}, "
        f"epoch {record['epoch']}"
    )


def _step(record: Record) -> str:
    loss = "" if record.get("loss") is None else f", loss {record['loss']:.6g}"
    held_up = span_text(record.get("blocked_s") or 0.0)
    text = (
        f"rank {record['rank']} completed step {record['step']} in "
        f"{span_text(record['duration_s'])} (held up {held_up}){loss}"
    )
    if record.get("confirmed", -1) >= 0:
        text += f", replica of step {record['confirmed']}"
    return text


def _node(record: Record) -> str:
    why = f": {record['why']}" if record.get("why") else ""
    lasting = "; its fault lasts" if record.get("lasting") else ""
    return f"{record['node']} is {record['role']}{why}{lasting}"


def _incident(record: Record) -> str:
    verdict = record.get("verdict")
    label = phase_label(str(record["phase"]), None if verdict is None else str(verdict))
    detail = str(record.get("detail", ""))
    text = detail if detail.startswith(label) else f"{label}: {detail}"
    return f"incident {record['number']}: {text}"


def _checkpoint(record: Record) -> str:
    if "failed" in record:
        return f"no durable checkpoint of step {record['step']}: {record['failed']}"
    return f"durable checkpoint of step {record['step']} in {record['directory']}"


def _fault(record: Record) -> str:
    return f"rehearsed fault {record['fault']} at rank {record['rank']} on {record['node']}"


def _final(record: Record) -> str:
    return f"rank {record['rank']} told the digests of its state after step {record['step']}"


def _end(record: Record) -> str:
    return f"end: {record['verdict']}: {record['reason']} (exit code {record['exit_code']})"


def _event(record: Record) -> str:
    where = ""
    if "rank" in record:
        where += f" rank {record['rank']}"
    if "node" in record:
        where += f" on {record['node']}" if where else f" {record['node']}"
    fields = [f"{name}={_short(value)}" for name, value in record.items() if name not in _NOT_SHOWN]
    name = record.get("name") or record.get("kind", "?")
    return f"{name}{where}{': ' if fields else ''}{' '.join(fields)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


_WRITERS: Mapping[str, Callable[[Record], str]] = {
    "job": _job,
    "launcher": _launcher,
    "say": lambda record: str(record["text"]),
    "rank": _rank,
    "step": _step,
    "node": _node,
    "incident": _incident,
    "checkpoint": _checkpoint,
    "fault": _fault,
    "final": _final,
    "end": _end,
}


def wanted(kinds: Collection[str], nodes: Collection[str], ranks: Collection[int]) -> Wanted:
    """What these words of a command line ask for. Raises ``UsageError``."""
    return Wanted(frozenset(map(check_kind, kinds)), frozenset(nodes), frozenset(ranks))
