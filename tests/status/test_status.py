"""How a job stands, by its journal and its launcher's word: the document and the screen."""

from __future__ import annotations

import json
from typing import Any

import pytest
from journals import Records, record, recorded, step, swap, two_nodes_and_a_spare, view_of
from rich.console import Console

from deadpool_launch.status.facts import SILENT, status
from deadpool_launch.status.screen import screen
from deadpool_runtime.protocol import JobStanding

NOW = 20.0


def _standing(**fields: Any) -> JobStanding:
    given: dict[str, Any] = {
        "phase": "training",
        "term": 1,
        "epoch": 1,
        "step": 2,
        "nodes": {"a": "active", "b": "active", "c": "spare"},
        "ranks": 2,
        "bare": False,
        "incident": None,
    }
    return JobStanding(**given | fields)


def _lines(facts: dict[str, Any], most_nodes: int = 64, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(screen(facts, "/somewhere/deadpool-runs/7", most_nodes))
    return capture.get().splitlines()


def _trained() -> Records:
    return [
        *two_nodes_and_a_spare(),
        *(
            step(3.0 + number, rank, number, 1.0) | {"confirmed": number - 1 - rank}
            for number in (1, 2, 3)
            for rank in (0, 1)
        ),
    ]


def test_running_job_is_in_its_launchers_words() -> None:
    facts = status(view_of(_trained()), _standing(), NOW)
    assert (facts["state"], facts["launcher_answers"]) == ("training", True)
    assert (facts["step"], facts["elapsed_s"], facts["newest_s"]) == (3, 19.0, 14.0)
    assert facts["protection"]["lag_steps"] == 2
    text = "\n".join(_lines(facts))
    assert "training, 19.0 s since its start; last word 14.0 s ago, epoch 1" in text
    assert "every rank has a replica, 2 steps behind; 0 steps without" in text
    assert "2 ranks on 2 nodes, 1 spare" in text


def test_launcher_that_does_not_answer_is_said_to() -> None:
    facts = status(view_of(_trained()), None, NOW)
    assert (facts["state"], facts["launcher_answers"]) == (SILENT, False)
    assert any("its launcher does not answer; last word 14.0 s ago" in x for x in _lines(facts))


def test_job_that_ended_has_its_verdict_and_no_age() -> None:
    facts = status(view_of(swap()), None, NOW)
    assert (facts["state"], facts["exit_code"], facts["launcher_answers"]) == ("done", 0, None)
    text = "\n".join(_lines(facts))
    assert "done (exit code 0) after 8.50 s: all ranks ended" in text
    words = " ".join(text.split())
    assert "1, the last 3.20 s before the end: b lost; continued in 2.00 s, 1 completed" in words


def test_incident_that_is_open_shows_its_phase() -> None:
    records = swap()
    opened = next(i for i, each in enumerate(records) if each["kind"] == "incident")
    facts = status(view_of(records[: opened + 1]), _standing(phase="parking", bare=True), NOW)
    assert facts["state"] == "recovering"
    text = "\n".join(_lines(facts))
    assert "b lost; opened" in text
    assert "not every rank has a replica again" in text


def test_without_the_launcher_the_journal_says_whether_replicas_are_whole() -> None:
    records = [*_trained(), record(7.0, "incident", number=1, phase="opened", detail="x")]
    assert status(view_of(records), None, NOW)["protection"]["state"] == "bare"
    records.append(record(7.5, "incident", number=1, phase="redundancy restored", detail="x"))
    assert status(view_of(records), None, NOW)["protection"]["state"] == "whole"


def test_ranks_that_were_left_without_a_node_hold_up_no_figure() -> None:
    records = [
        *_trained(),
        record(7.0, "event", name="AgentLost", node="b", evidence="gone", evidence_kind="seen"),
        record(7.0, "incident", number=1, phase="opened", detail="b lost"),
    ]
    assert status(view_of(records), None, NOW)["step"] == 3
    records += [
        record(8.0, "incident", number=1, phase="closed", verdict="shrunk", detail="x"),
        step(9.0, 0, 4, 1.0) | {"confirmed": 4},
    ]
    facts = status(view_of(records), None, NOW)
    assert (facts["step"], facts["protection"]["lag_steps"]) == (4, 0)
    records.append(record(9.5, "rank", rank=1, node="c", pid=9, epoch=3))
    assert status(view_of(records), None, NOW)["step"] == 3


def test_ranks_that_take_no_part_are_counted() -> None:
    nodes = {"a": "active", "b": "aside", "c": "lost"}
    facts = status(view_of(_trained()), _standing(ranks=1, nodes=nodes), NOW)
    text = "\n".join(_lines(facts))
    assert "1 of 2 ranks on 1 node, 0 spares" in text
    assert "aside" in text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["swap", "kill"])
def test_screen_fits_wherever_the_journal_ends(name: str, width: int) -> None:
    records = recorded(name)
    for end in range(0, len(records) + 1, 5):
        facts = status(view_of(records[:end]), None, records[-1]["at"] + 1)
        json.dumps(facts, allow_nan=False)
        assert max(len(line) for line in _lines(facts, width=width)) <= width


@pytest.mark.parametrize("width", [80, 120])
def test_long_reason_beside_a_node_takes_no_room_from_the_columns(width: int) -> None:
    reason = "its agent ended with exit code 1: " + "srun: error: no such step " * 8
    records = [*_trained(), record(7.0, "event", name="AgentStartFailed", node="b", reason=reason)]
    lines = _lines(status(view_of(records), None, NOW), width=width)
    assert max(len(line) for line in lines) <= width
    assert "node  role    ranks  step  s/step" in [line.rstrip() for line in lines]
    (row,) = [line for line in lines if line.startswith("b ")]
    assert "lost" in row
    assert "its agent ended with" in row


def test_drained_node_stays_one_when_its_agent_leaves_it() -> None:
    drained = record(7.0, "node", node="b", role="drained", why="was drained", lasting=False)
    leaves = record(8.0, "event", name="AgentStartFailed", node="b", reason="its agent ended")
    nodes = status(view_of([*_trained(), drained, leaves]), None, NOW)["nodes"]
    (row,) = [node for node in nodes if node["node"] == "b"]
    assert (row["role"], row["why"]) == ("drained", "was drained")


def test_of_many_nodes_those_that_are_not_well_come_first() -> None:
    records = two_nodes_and_a_spare()
    records[0]["active"] = [f"n{number}" for number in range(100)]
    records.append(record(3.0, "node", node="n77", role="lost", why="fell silent", lasting=False))
    lines = _lines(status(view_of(records), None, NOW), most_nodes=5)
    at = next(i for i, line in enumerate(lines) if line.startswith("node "))
    assert lines[at + 1].split()[:2] == ["n77", "lost"]
    assert "98 more" in lines[at + 6]


def test_step_that_several_ranks_began_unprotected_is_counted_once() -> None:
    records = [
        *two_nodes_and_a_spare(),
        *(step(4.0, rank, 2, 1.0) | {"unprotected": 1} for rank in (0, 1)),
        *(step(5.0, rank, 3, 1.0) | {"unprotected": 1 + rank} for rank in (0, 1)),
    ]
    assert status(view_of(records), None, NOW)["protection"]["unprotected_steps"] == 2


def test_text_of_users_is_no_markup() -> None:
    records = two_nodes_and_a_spare()
    records[0]["script"] = "/x/[bold]train.py"
    records.append(record(3.0, "say", text="[red]no[/] such thing"))
    text = "\n".join(_lines(status(view_of(records), None, NOW)))
    assert "[bold]train.py" in text
    assert "[red]no[/] such thing" in text
