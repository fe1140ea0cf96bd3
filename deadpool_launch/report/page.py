"""A report as one page of HTML that needs nothing else: no network, no scripts. Pure.

It shows what ``facts.document`` has. All text in it is escaped; nothing of a user's is put anywhere
but between tags or in quoted attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import tzinfo
from pathlib import PurePath
from typing import Any

from deadpool_launch.controller.wording import plural, ranks_text
from deadpool_launch.report.pictures import (
    Band,
    Curve,
    bar_svg,
    curve_svg,
    text_of,
    timeline_svg,
)
from deadpool_launch.report.style import STYLE
from deadpool_launch.report.words import moment_text, node_time_text, share_text, span_text

Facts = dict[str, Any]

_WIDE, _NARROW = 870, 338
#: Of incidents and nodes, and of losses that are named one by one.
_MOST_SHOWN, _MOST_LOSSES = 200, 60
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(facts: Facts, zone: tzinfo | None = None) -> str:
    """The whole page. ``zone``: of the times in it; None for this machine's."""
    title = text_of(f"Job {facts['job']['job_id']}" if facts["job"]["job_id"] else "Job")
    body = "\n".join(
        part
        for part in (
            _head(facts, zone),
            _tiles(facts),
            _goodput(facts["goodput"]),
            _steps(facts),
            _incidents(facts),
            _protection(facts, zone),
            _nodes(facts),
            _launchers(facts),
            _foot(facts),
        )
        if part
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


# ---------------------------------------------------------------- pieces


def _both(draw: Callable[[int], str]) -> str:
    """A picture for screens and one for telephones."""
    return f'<div class="wide">{draw(_WIDE)}</div><div class="narrow">{draw(_NARROW)}</div>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML already. A heading that begins with ``>`` is that of numbers."""
    ends = [' class="n"' if head.startswith(">") else "" for head in heads]
    top = "".join(
        f"<th{end}>{text_of(head.lstrip('>'))}</th>" for head, end in zip(heads, ends, strict=True)
    )
    lines = [
        "<tr>"
        + "".join(f"<td{end}>{cell}</td>" for cell, end in zip(row, ends, strict=True))
        + "</tr>"
        for row in rows
    ]
    shape = f' class="{kind}"' if kind else ""
    return f"<table{shape}><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _card(inner: str) -> str:
    return f'<div class="card">{inner}</div>'


def _tile(value: str, what: str, mood: str = "") -> str:
    number = f'<b class="{mood}">{text_of(value)}</b>'
    return f'<div class="tile">{number}<span>{text_of(what)}</span></div>'


def _mood(job: Facts) -> str:
    if not job["ended"]:
        return "bad" if job["state"] == "ended without a word" else "warn"
    return "good" if job["exit_code"] == 0 else "bad"


# ---------------------------------------------------------------- sections


def _head(facts: Facts, zone: tzinfo | None) -> str:
    job = facts["job"]
    script = PurePath(job["script"]).name
    name = f"Job {job['job_id']}" if job["job_id"] else "A job without a plan"
    code = "" if job["exit_code"] is None else f", exit code {job['exit_code']}"
    spares = [
        plural(job[key], word)
        for key, word in (("spares", "spare"), ("extras", "extra node"), ("unused", "unused node"))
        if job[key]
    ]
    size = f"{plural(job['world_size'], 'rank')} on {plural(job['active'], 'node')}"
    lines = [
        f"<h1>{text_of(name)}{f' · {text_of(script)}' if script else ''}</h1>",
        f'<p><span class="badge {_mood(job)}">{text_of(job["state"])}</span> '
        f'<span class="soft">{text_of(job["reason"])}{text_of(code)}</span></p>',
    ]
    if job["started_at"]:
        lines.append(
            f'<p class="soft">{text_of(", ".join([size, *spares]))} · '
            f"{text_of(moment_text(job['started_at'], zone))} until "
            f"{text_of(moment_text(job['newest_at'], zone))}</p>"
        )
    command = " ".join([job["script"], *job["script_args"]])
    if command:
        lines.append(f"<p><code>{text_of(command)}</code></p>")
    return "\n".join(lines)


def _tiles(facts: Facts) -> str:
    job, steps, goodput = facts["job"], facts["steps"], facts["goodput"]
    incidents = len(facts["incidents"])
    planned = sum(one["planned"] for one in facts["incidents"])
    of_them = f", {planned} of them planned" if planned else ""
    unprotected = facts["protection"]["unprotected_steps"]
    tiles = [
        _tile(share_text(goodput["share"]), "of all node time in steps that count"),
        _tile(span_text(job["duration_s"]), "from the first record to the last"),
        _tile(f"{steps['completed']:,}", "steps completed on every rank"),
    ]
    if steps["median_s"] is not None:
        tiles.append(_tile(span_text(steps["median_s"]), "a step (median)"))
    tiles += [
        _tile(f"{incidents}", f"incident{'' if incidents == 1 else 's'}{of_them}"),
        _tile(f"{steps['run_again']:,}", "completed steps run again"),
        _tile(f"{unprotected:,}", "steps without a replica of the one before", _warn(unprotected)),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _warn(count: int) -> str:
    return "warn" if count else ""


def _goodput(goodput: Facts) -> str:
    total_s = goodput["total_node_s"]
    if not total_s:
        return ""
    productive = ("productive", "steps that count", goodput["productive_node_s"], goodput["share"])
    by_size = sorted((one["node_s"] for one in goodput["losses"]), reverse=True)
    least = by_size[_MOST_LOSSES - 1] if len(by_size) >= _MOST_LOSSES else 0.0
    rest = [one for one in goodput["losses"] if one["node_s"] < least]
    losses = [
        (one["kind"], one["text"], one["node_s"], one["share"])
        for one in goodput["losses"]
        if one["node_s"] >= least
    ]
    if rest:
        node_s, share = (sum(one[key] for one in rest) for key in ("node_s", "share"))
        losses.append(("other", f"{len(rest)} smaller losses", node_s, share))
    parts = [productive, *losses]
    rows = [
        (
            f'<span class="key part {kind}"></span>{text_of(text)}',
            text_of(node_time_text(node_s, total_s)),
            text_of(share_text(share)),
        )
        for kind, text, node_s, share in parts
    ]
    total = ("<b>all of it</b>", f"<b>{node_time_text(total_s)}</b>", "100 %")
    shares = [(kind, share, f"{text}: {share_text(share)}") for kind, text, _, share in parts]
    picture = _both(lambda width: bar_svg(shares, width, "shares of the nodes' time"))
    return (
        "<h2>Where the time went</h2>"
        + _card(picture + _table(("", ">node time", ">share"), [*rows, total]))
        + f'<p class="soft">All seconds of {plural(goodput["nodes"], "node")}.</p>'
    )


def _bands_of(facts: Facts) -> list[Band]:
    bands = []
    for one in facts["incidents"]:
        start = one["since_start_s"]
        stop = facts["job"]["duration_s"] if one["took_s"] is None else start + one["took_s"]
        bands.append(
            Band(start, stop, str(one["number"]), f"incident {one['number']}: {one['reason']}")
        )
    return bands


def _plot(facts: Facts, curve: Curve, height: int, name: str) -> str:
    bands, until_s = _bands_of(facts), facts["job"]["duration_s"]
    return _both(lambda width: curve_svg(curve, bands, until_s, width, height, name))


def _steps(facts: Facts) -> str:
    series = facts["series"]
    if not series:
        return "<h2>Step time</h2>" + _card('<p class="soft">No step was completed.</p>')
    points = [(point[0], point[2], point[3], point[4]) for point in series]
    steps = facts["steps"]
    text = (
        f"{plural(steps['runs'], 'run')} of steps, on the slowest rank of each: median "
        f"{span_text(steps['median_s'])}, {span_text(steps['p95_s'])} or less for 95 % of them, "
        f"{span_text(steps['max_s'])} at most."
    )
    marked = " Incidents are marked with their numbers." if facts["incidents"] else ""
    return "<h2>Step time</h2>" + _card(
        _plot(facts, Curve(points, in_seconds=True), 220, "step time over the job's time")
        + f'<p class="soft">{text_of(text + marked)}</p>'
    )


def _incidents(facts: Facts) -> str:
    incidents = facts["incidents"]
    if not incidents:
        return "<h2>Incidents</h2>" + _card('<p class="soft">None.</p>')
    shown = incidents[-_MOST_SHOWN:]
    left_out = len(incidents) - len(shown)
    note = f'<p class="soft">The first {left_out} are not shown.</p>' if left_out else ""
    return f"<h2>Incidents</h2>{note}" + "".join(_card(_incident(one)) for one in shown)


def _incident(one: Facts) -> str:
    verdict = one["verdict"] or "not resolved"
    calm = one["verdict"] in ("continued", "shrunk", "regrown", "restarted")
    costs = [(word, one["node_s"][kind]) for word, kind in _COSTS if one["node_s"][kind]]
    facts = [
        ("at", f"{span_text(one['since_start_s'])} after the job's first record"),
        ("fault", one["fault"] or ""),
        ("noticed", "" if one["noticed_s"] is None else f"{span_text(one['noticed_s'])} after it"),
        (
            "ended the job" if verdict == "stopped" else "resolved",
            "" if one["took_s"] is None else f"in {span_text(one['took_s'])}",
        ),
        (
            "replicas",
            "" if one["bare_s"] is None else f"whole again after {span_text(one['bare_s'])}",
        ),
        ("cost", "; ".join(f"{node_time_text(node_s)} {word}" for word, node_s in costs)),
    ]
    lines = [
        f"<h3>{one['number']}. {text_of(one['reason'])} "
        f'<span class="badge {"good" if calm else "bad"}">{text_of(verdict)}</span></h3>',
        f'<p class="soft">{text_of("; ".join(f"{key} {what}" for key, what in facts if what))}</p>',
        _both(
            lambda width: timeline_svg(
                one["phases"], width, f"timeline of incident {one['number']}"
            )
        ),
    ]
    if one["outcome"]:
        lines.append(f"<p>{text_of(one['outcome'])}</p>")
    rows = [
        (
            text_of(phase["label"]),
            text_of(span_text(phase["since_s"])),
            text_of(span_text(phase["took_s"])),
            text_of(phase["detail"]),
        )
        for phase in one["phases"]
    ]
    table = _table(("phase", ">at", ">took", "what happened"), rows, "rows")
    lines.append(f"<details><summary>phases in words</summary>{table}</details>")
    return "".join(lines)


_COSTS = (("until it was noticed", "cut"), ("for the recovery", "recovery"), ("run again", "again"))


def _protection(facts: Facts, zone: tzinfo | None) -> str:
    protection, kept = facts["protection"], facts["checkpoints"]
    points = [
        (p[0], float(p[6]), float(p[6]), float(p[6])) for p in facts["series"] if p[6] is not None
    ]
    lines = []
    if points:
        curve = Curve(points, in_seconds=False, stairs=True)
        lines.append(_plot(facts, curve, 150, "steps that the oldest replica was behind"))
        lines.append(
            '<p class="soft">Steps that the oldest replica of any rank was behind when a step was '
            f"complete: median {protection['lag_steps_median']:g}, "
            f"{protection['lag_steps_max']} at most.</p>"
        )
    else:
        lines.append('<p class="soft">The journal does not tell of replicas.</p>')
    if protection["held_up_share"] is not None:
        lines.append(
            f"<p>Copies held steps up for {share_text(protection['held_up_share'])} of their time, "
            f"{span_text(protection['held_up_max_s'])} at most.</p>"
        )
    if protection["bare_s"]:
        lines.append(
            f"<p>After faults not every rank had a replica for {span_text(protection['bare_s'])} "
            "in all.</p>"
        )
    if kept["written"]:
        moment = moment_text(kept["newest_at"], zone)
        lines.append(
            f"<p>{plural(kept['written'], 'durable checkpoint')}, the newest of step "
            f"{kept['newest_step']} at {text_of(moment)} in "
            f"<code>{text_of(kept['directory'])}</code></p>"
        )
    for failed in kept["failed"]:
        lines.append(
            f'<p class="bad">No checkpoint of step {text_of(failed["step"])}: '
            f"{text_of(failed['reason'])}</p>"
        )
    return "<h2>Protection</h2>" + _card("".join(lines))


def _nodes(facts: Facts) -> str:
    nodes = facts["nodes"]
    if not nodes:
        return ""
    worth = [node for node in nodes if node["evidence"] or node["why"] or node["changes"]]
    rest = len(nodes) - len(worth)
    rows = [_node_row(node) for node in worth[:_MOST_SHOWN]]
    lines = []
    if rows:
        lines.append(_table(("node", "verdict", "evidence"), rows, "rows"))
    if len(worth) > _MOST_SHOWN:
        lines.append(f'<p class="soft">{len(worth) - _MOST_SHOWN} more are in the JSON file.</p>')
    if rest:
        quiet = plural(rest, "other node" if rows else "node")
        lines.append(f'<p class="soft">Of {quiet} there is nothing to be told.</p>')
    if facts["exclude"]:
        names = ",".join(facts["exclude"])
        lines.append(
            "<p>Leave out of the next job, as their fault lasts: "
            f"<code>--exclude={text_of(names)}</code></p>"
        )
    else:
        lines.append('<p class="soft">No node has to be left out of the next job.</p>')
    return "<h2>Nodes</h2>" + _card("".join(lines))


def _node_row(node: Facts) -> tuple[str, str, str]:
    ranks = f", {ranks_text(node['ranks'])}" if node["ranks"] and node["role"] == "active" else ""
    now = node["role"] + ranks
    was = node["planned_as"]
    steps, before = [was], was
    for change in node["changes"]:
        if change["role"] != before:
            before = change["role"]
            steps.append(f"{before} after {span_text(change['since_start_s'])}")
    mood = {"active": "good", "spare": "good", "lost": "bad", "worn": "bad"}.get(
        node["role"], "warn"
    )
    verdict = f'<span class="badge {mood}">{text_of(now)}</span>'
    if node["why"]:
        verdict += f" {text_of(node['why'])}"
    verdict += f'<br><span class="soft">{text_of(" → ".join(steps))}</span>'
    if node["lasting"]:
        verdict += '<br><span class="bad">its fault lasts</span>'
    evidence = "".join(
        f'<li>{text_of(one["text"])} <span class="soft">after '
        f"{text_of(span_text(one['since_start_s']))}</span></li>"
        for one in node["evidence"]
    )
    return f"<b>{text_of(node['node'])}</b>", verdict, f"<ul>{evidence}</ul>" if evidence else ""


def _launchers(facts: Facts) -> str:
    if not facts["launchers"]:
        return ""
    items = "".join(
        f"<li>after {text_of(span_text(one['since_start_s']))}: term {text_of(one['term'])}"
        f"{text_of(' on ' + one['node'] if one['node'] else '')}, as the one before ended "
        f"({text_of(one['ended'])})</li>"
        for one in facts["launchers"]
    )
    return "<h2>Launchers that took over</h2>" + _card(f"<ul>{items}</ul>")


def _foot(facts: Facts) -> str:
    bad = facts["malformed_records"]
    note = f" {plural(bad, 'record')} of it could not be read." if bad else ""
    version = facts["job"]["version"]
    made = f"DEADPOOL {version}" if version else "DEADPOOL"
    return f'<p class="soft">Made by {text_of(made)} from the journal of the job.{note}</p>'
