"""An incident as a table: the rows are right, and the table fits the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deadpool_launch.display import print_table
from deadpool_launch.report.words import phase_label
from deadpool_launch.timeline import TimelineRow, bar, headline, render, timeline
from deadpool_launch.view import IncidentView, RunView

_PHASES = [
    (0.0, "opened", "node2 lost: its connection was closed"),
    (0.2, "parked", "ranks 0, 2 parked at step 19"),
    (0.3, "spare ready", "node4 takes rank 1"),
    (1.8, "replacement up", "rank 1 built its model and waits for the plan of epoch 2"),
    (1.9, "restored", "step 19 on every rank"),
]


def _incident(*, closed: bool = True, fault: bool = False) -> IncidentView:
    view = RunView()
    if fault:
        view.apply({"at": 98.0, "kind": "fault", "fault": "vanish:1@20", "node": "node2"})
    for since_s, phase, detail in _PHASES:
        view.apply(
            {
                "at": 100.0 + since_s,
                "kind": "incident",
                "number": 1,
                "phase": phase,
                "detail": detail,
            }
        )
    if closed:
        view.apply(
            {
                "at": 102.0,
                "kind": "incident",
                "number": 1,
                "phase": "closed",
                "verdict": "continued",
                "detail": "step 20 is complete",
                "replayed_steps": 1,
            }
        )
    return view.incidents[1]


def test_phases_are_counted_from_the_first_sign() -> None:
    rows = timeline(_incident())
    assert [row.phase for row in rows] == [phase for _, phase, _ in _PHASES] + ["closed"]
    assert [round(row.since_s, 3) for row in rows] == [0.0, 0.2, 0.3, 1.8, 1.9, 2.0]
    assert [round(row.took_s, 3) for row in rows] == [0.0, 0.2, 0.1, 1.5, 0.1, 0.1]


def test_the_headline_names_cause_verdict_time_and_replayed_steps() -> None:
    assert headline(_incident()) == (
        "Incident 1: node2 lost: its connection was closed; "
        "continued 2.00 s after the first sign, 1 completed step run again"
    )
    assert headline(_incident(closed=False)).endswith("; not resolved")


def test_what_the_headline_says_is_not_said_again() -> None:
    view = RunView()
    for at, phase, detail in (
        (1.0, "opened", "rank 1 on n2 died"),
        (1.0, "detected", "rank 1 on n2 died"),
        (1.2, "detected", "n3 lost"),
    ):
        fields = {"number": 1, "phase": phase, "detail": detail}
        view.apply({"at": at, "kind": "incident", **fields})
    view.apply(
        {
            "at": 1.5,
            "kind": "incident",
            "number": 1,
            "phase": "closed",
            "verdict": "stopped",
            "detail": "n3 lost, no spare left: submit again",
            "replayed_steps": 0,
        }
    )
    details = [(row.phase, row.detail) for row in timeline(view.incidents[1])]
    assert details == [
        ("opened", ""),
        ("detected", ""),
        ("detected", "n3 lost"),
        ("closed", "the job ended"),
    ]
    assert headline(view.incidents[1]) == (
        "Incident 1: rank 1 on n2 died; stopped 0.50 s after the first sign"
    )


def test_a_rehearsed_fault_comes_before_its_first_sign() -> None:
    incident = _incident(fault=True)
    rows = timeline(incident)
    assert [(row.phase, row.since_s, row.took_s) for row in rows[:2]] == [
        ("fault", -2.0, 0.0),
        ("opened", 0.0, 2.0),
    ]
    assert "2.00 s after the first sign and 4.00 s after the fault" in headline(incident)
    assert bar(rows[1], rows[0].since_s, rows[-1].since_s, 20) == (0, 10)


def test_a_second_incident_does_not_take_the_first_ones_fault() -> None:
    view = RunView()
    view.apply({"at": 1.0, "kind": "fault", "fault": "kill:1@20"})
    view.apply({"at": 2.0, "kind": "incident", "number": 1, "phase": "opened"})
    view.apply({"at": 5.0, "kind": "incident", "number": 2, "phase": "opened"})
    assert view.incidents[1].fault_at == 1.0
    assert view.incidents[2].fault_at == 5.0


def test_replicas_that_are_whole_again_after_the_verdict_have_a_row_but_do_not_move_it() -> None:
    incident = _incident()
    incident.records.append(
        {"at": 104.0, "kind": "incident", "number": 1, "phase": "redundancy restored"}
    )
    assert incident.closed_at == 102.0
    assert "continued 2.00 s after the first sign" in headline(incident)
    last = timeline(incident)[-1]
    assert (last.phase, last.since_s, last.took_s) == ("redundancy restored", 4.0, 2.0)


def test_bars_follow_one_another_and_stay_inside() -> None:
    rows = timeline(_incident())
    bars = [bar(row, 0.0, rows[-1].since_s, 20) for row in rows]
    assert all(begin >= 0 and length >= 1 and begin + length <= 20 for begin, length in bars)
    assert bars[3] == (3, 15)
    assert bars[-1] == (19, 1)


def test_an_incident_of_no_length_has_a_bar() -> None:
    assert bar(TimelineRow("opened", "", 0.0, 0.0), 0.0, 0.0, 20) == (0, 1)


def test_a_long_text_takes_two_lines_and_the_end_is_told_once() -> None:
    incident = _incident(closed=False)
    incident.records[2]["detail"] = "rank 1 waits " * 20
    incident.records.append(
        {
            "at": 102.0,
            "phase": "closed",
            "verdict": "continued",
            "detail": "continued from step 4 in "
            "0.4 s after the first sign; 0 completed steps run again",
        }
    )
    assert timeline(incident)[-1].detail == "continued from step 4"
    out = io.StringIO()
    print_table(render(incident, 80), Console(width=80, file=out))
    lines = out.getvalue().splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    first = next(index for index, line in enumerate(lines) if line.startswith("spare admitted"))
    assert lines[first + 1].endswith("…")
    assert lines[first + 2].startswith("replacement up")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(render(_incident(fault=True), width))
    lines = capture.get().splitlines()
    assert max(len(line) for line in lines) <= width
    for _, phase, _ in _PHASES:
        assert sum(line.startswith(phase_label(phase)) for line in lines) == 1
    shown = " ".join("".join(lines).split())
    assert "A bar is the time spent to reach its row." in shown
    assert "…" not in shown
    assert any("node4 takes rank 1" in line for line in lines)
    assert ("took s" in "".join(lines)) == (width == 120)
