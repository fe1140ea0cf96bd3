"""The reliability table, the judgement behind it and the soak's draw, without a cluster."""

from __future__ import annotations

import itertools
from typing import Any

import chaos_draw
import chaos_outcome
import chaos_table
import pytest
from chaos_case import Expect
from chaos_cases import CASES
from chaos_judge import deviations
from chaos_outcome import Outcome


def rank(number: int, node: str, at: float = 0.0) -> dict[str, Any]:
    return {"at": at, "kind": "rank", "rank": number, "node": node, "pid": 1, "epoch": 1}


def mark(phase: str, at: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"at": at, "kind": "incident", "number": 1, "phase": phase, "detail": "", **more}


def closed(verdict: str = "continued", replayed: int = 1) -> dict[str, Any]:
    return mark("closed", verdict=verdict, replayed_steps=replayed)


START = [rank(0, "n2"), rank(1, "n3"), mark("opened")]


@pytest.mark.parametrize(
    ("records", "rung"),
    [
        ([], 0),
        ([rank(1, "n3")], 1),
        ([rank(1, "n1")], 2),
        ([rank(0, "n2"), rank(1, "n3")], 3),
        ([rank(0, "n2"), rank(1, "n1")], 2),
        ([mark("durable checkpoint"), rank(1, "n1")], 5),
        ([rank(1, "n1"), mark("plan", rung=3)], 3),
    ],
)
def test_rung_follows_from_what_was_done(records: list[dict[str, Any]], rung: int) -> None:
    (found,) = chaos_outcome.incidents([*START, *records, closed()])
    assert (found.verdict, found.rung, found.replayed_steps) == ("continued", rung, 1)


def test_incident_without_an_end_is_open_and_a_stopped_one_is_the_last_rung() -> None:
    assert chaos_outcome.incidents(START)[0].verdict == "open"
    assert chaos_outcome.incidents([*START, closed("stopped")])[0].rung == 6


EXPECTED = {0: [(1, "a"), (2, "b")], 1: [(1, "c"), (2, "d")]}


@pytest.mark.parametrize(
    ("found", "whole", "difference"),
    [
        (EXPECTED, True, ""),
        ({0: [(1, "a"), (1, "a"), (2, "b")], 1: EXPECTED[1]}, True, ""),
        ({0: [(1, "x"), (1, "a"), (2, "b")], 1: EXPECTED[1]}, True, "rank 0 differs after step 1"),
        ({0: EXPECTED[0], 1: []}, True, "rank 1 completed no step"),
        ({0: EXPECTED[0], 1: []}, False, ""),
        ({0: EXPECTED[0], 1: [(1, "c")]}, True, "ranks end at different steps: {0: 2, 1: 1}"),
        ({0: EXPECTED[0], 1: [(1, "c")]}, False, ""),
        (
            {0: [(3, "a")], 1: EXPECTED[1]},
            True,
            "rank 0 completed step 3, which the undisturbed run has not",
        ),
    ],
)
def test_runs_are_compared_step_by_step(found: Any, whole: bool, difference: str) -> None:
    assert chaos_outcome.compare(EXPECTED, found, whole=whole) == difference


def test_line_that_is_not_whole_is_no_digest() -> None:
    assert chaos_outcome.read_digests({0: "1 a\n2 b"}) == {0: ((1, "a"),)}
    assert chaos_outcome.common_step({0: [(1, "a"), (2, "b")], 1: [(1, "c")]}) == 1


OUTCOME = Outcome(
    exit_code=0,
    reason="",
    incidents=(chaos_outcome.Incident("continued", 2, 1, 12.5),),
    slurm_state="COMPLETED",
    same_bits=True,
    difference="",
    steps=40,
    first_step_s=0.25,
    left=(),
)


def test_each_deviation_is_told() -> None:
    assert deviations(Expect(rungs=(2,)), OUTCOME) == []
    wrong = deviations(Expect(30, ("stopped",), (1,), 0), OUTCOME)
    assert wrong == [
        "exit code 0, not 30",
        "verdicts continued, not stopped",
        "rung 2, not 1",
        "1 completed steps were run again",
    ]


def test_table_has_a_row_for_each_case_and_names_what_is_wrong() -> None:
    case = {"fault": "node: power-off", "how": "a | b", "told": "", "deviations": []}
    good = {**case, "outcome": OUTCOME.as_json()}
    bad = {
        **case,
        "fault": "scancel",
        "outcome": {**OUTCOME.as_json(), "incidents": [], "same_bits": False, "exit_code": None},
        "deviations": ["exit code None, not 143"],
    }
    text = chaos_table.page({"nodes": 5, "cpus": 2, "timeouts": "3 s", "cases": [good, bad]})
    row = "| node: power-off | a / b | continued | 2 swap | 1 | 0.2 | yes | 0 |"
    assert row in text.splitlines()
    assert "| scancel | a / b | trained on | - | - | 0.2 | **no** | none |" in text.splitlines()
    assert text.endswith("- scancel: exit code None, not 143\n")


def test_cases_have_names_of_their_own_and_fit_the_cluster() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.nodes <= 5 for case in CASES)


def test_soak_draws_the_same_jobs_again_and_every_kind() -> None:
    drawn = list(itertools.islice(chaos_draw.jobs(1), 60))
    assert drawn == list(itertools.islice(chaos_draw.jobs(1), 60))
    assert drawn[7] == chaos_draw.job(1, 7)
    assert drawn != list(itertools.islice(chaos_draw.jobs(2), 60))
    kinds = {strike.kind for job in drawn for strike in job.strikes}
    assert kinds == {*chaos_draw.NODE_FAULTS, *chaos_draw.PROCESS_FAULTS}
    assert sum(job.faults for job in drawn[:30]) >= 300


def test_soak_draws_nothing_that_no_job_could_survive() -> None:
    for job in itertools.islice(chaos_draw.jobs(3), 200):
        kinds = [strike.kind for strike in job.strikes]
        seconds = [strike.second for strike in job.strikes if strike.second is not None]
        kinds += [second.kind for second in seconds]
        lost = sum(kind in chaos_draw.NODE_FAULTS for kind in kinds)
        assert lost <= chaos_draw.SPARES
        assert kinds.count("launcher") <= chaos_draw.LAUNCHERS
        if job.layout == "zero":
            assert not any(s.kind in chaos_draw.SECOND_NODE_FAULTS for s in seconds)
        for strike in job.strikes:
            assert strike.second is None or strike.second.rank != strike.rank
