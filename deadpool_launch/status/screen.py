"""``status.facts`` on a terminal, 80 columns or more. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deadpool_launch.controller.wording import fold, plural
from deadpool_launch.report.words import share_text, span_text
from deadpool_launch.status.facts import SILENT

Facts = dict[str, Any]

#: Lines of a screen that are no rows of nodes.
OTHER_LINES = 19
_SAID = 4
_ROLE_STYLES = {"active": "green", "spare": "blue", "lost": "bold red", "worn": "red"}
_QUIET_ROLES = ("active", "spare")


def screen(facts: Facts, run_dir: str, most_nodes: int) -> RenderableType:
    """One screen, with rows for at most so many nodes."""
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    for label, text in (
        ("job", _job(facts)),
        ("state", _state(facts)),
        ("step", _step(facts)),
        ("copies", _copies(facts["protection"])),
        ("checkpoint", _checkpoint(facts)),
        ("incidents", _incidents(facts)),
        ("run", Text(run_dir)),
    ):
        if text is not None:
            head.add_row(label, text)
    parts: list[RenderableType] = [head]
    if facts["nodes"]:
        parts += [Text(), _nodes(facts["nodes"], most_nodes)]
    if facts["said"]:
        parts += [Text(), *_said(facts["said"][-_SAID:])]
    return Group(*parts)


def _job(facts: Facts) -> Text:
    name = facts["job_id"] or "has no plan yet"
    roles = Counter(node["role"] for node in facts["nodes"])
    parts = [name, PurePath(facts["script"]).name]
    if facts["world_size"]:
        ranks = plural(facts["world_size"], "rank")
        if 0 < facts["ranks_taking_part"] < facts["world_size"]:
            ranks = f"{facts['ranks_taking_part']} of {ranks}"
        parts.append(f"{ranks} on {plural(roles['active'], 'node')}")
        parts.append(plural(facts["spares"], "spare"))
    return Text(", ".join(part for part in parts if part))


def _state(facts: Facts) -> Text:
    state = facts["state"]
    text = Text()
    if facts["exit_code"] is not None:
        text.append(state, style="green" if facts["exit_code"] == 0 else "bold red")
        text.append(f" (exit code {facts['exit_code']}) after {span_text(facts['elapsed_s'])}")
        text.append(f": {facts['reason']}" if facts["reason"] else "")
        return text
    text.append(state, style={"training": "green", SILENT: "bold red"}.get(state, "yellow"))
    if state != SILENT:
        text.append(f", {span_text(facts['elapsed_s'])} since its start")
    text.append(f"; last word {span_text(facts['newest_s'])} ago, epoch {facts['epoch']}")
    text.append(f", launcher's term {facts['term']}" if facts["term"] > 1 else "")
    return text


def _step(facts: Facts) -> Text | None:
    if facts["step_s"] is None:
        return None
    loss = "" if facts["loss"] is None else f", loss {facts['loss']:.4f}"
    return Text(f"{facts['step']}, {span_text(facts['step_s'])} a step{loss}")


def _copies(protection: Facts) -> Text:
    state, lag = protection["state"], protection["lag_steps"]
    text = Text()
    if state == "bare":
        text.append("not every rank has a replica again", style="bold yellow")
    elif state == "none":
        text.append("no rank has a replica", style="yellow")
    elif lag is not None:
        text.append("every rank has a replica")
    else:
        text.append("not told of")
    if lag is not None:
        text.append(f", {plural(lag, 'step')} behind")
    count = protection["unprotected_steps"]
    text.append("; ")
    text.append(f"{plural(count, 'step')} without", style="yellow" if count else "")
    if protection["held_up_share"] is not None:
        text.append(f"; hold up {share_text(protection['held_up_share'])} of a step")
    return text


def _checkpoint(facts: Facts) -> Text | None:
    checkpoint = facts["checkpoint"]
    if checkpoint is None:
        return None
    age = _age(checkpoint["age_s"], facts)
    return Text(f"step {checkpoint['step']}, {age}, in {checkpoint['directory']}")


def _age(age_s: float, facts: Facts) -> str:
    return f"{span_text(age_s)} {'ago' if facts['exit_code'] is None else 'before the end'}"


def _incidents(facts: Facts) -> Text:
    last = facts["last_incident"]
    if last is None:
        return Text("none")
    text = Text(f"{facts['incidents']}, the last {_age(last['age_s'], facts)}: ")
    text.append(last["reason"])
    if last["verdict"] is None:
        text.append(f"; {last['phase']}", style="bold yellow")
        return text
    text.append("; ")
    good = last["verdict"] != "stopped"
    text.append(f"{last['verdict']} in {span_text(last['took_s'])}", style="" if good else "red")
    if good:
        text.append(f", {plural(last['replayed_steps'] or 0, 'completed step')} run again")
    return text


def _nodes(nodes: Sequence[Facts], most: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("node", "role", "ranks", "step", "s/step", ""):
        # The note alone gives way where the terminal is too narrow.
        table.add_column(
            heading,
            justify="right" if heading in ("step", "s/step") else "left",
            no_wrap=bool(heading),
            overflow="ellipsis",
        )
    rows = sorted(nodes, key=lambda node: (not node["ranks"], node["ranks"]))
    if len(rows) > most:
        rows.sort(key=lambda node: node["role"] in _QUIET_ROLES)
    for node in rows[:most]:
        note = node["why"]
        if not node["ready"] and node["step"] is None and node["role"] in _QUIET_ROLES:
            note = "its agent is not up"
        table.add_row(
            Text(node["node"]),
            Text(node["role"], style=_ROLE_STYLES.get(node["role"], "yellow")),
            fold(node["ranks"]),
            "" if node["step"] is None else str(node["step"]),
            "" if node["step_s"] is None else f"{node['step_s']:.3f}",
            Text(note, no_wrap=True, overflow="ellipsis"),
        )
    if len(rows) > most:
        table.add_row("…", f"{len(rows) - most} more", style="dim")
    return table


def _said(lines: Sequence[Facts]) -> list[Text]:
    shown = []
    for line in lines:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(time.strftime("%H:%M:%S  ", time.localtime(line["at"])), style="dim")
        text.append(line["text"])
        shown.append(text)
    return shown
