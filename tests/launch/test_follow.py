"""What a journal says about a job: tailing it, adding it up, comparing two of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from journals import record, swap, two_nodes_and_a_spare, view_of

from deadpool_launch.comparing import NOTHING, compare_finals
from deadpool_launch.controller.roles import NodeRole
from deadpool_launch.curves import loss_curve, steps_run_again
from deadpool_launch.follow import JournalTail
from deadpool_launch.journal import JOURNAL_NAME, Journal
from deadpool_launch.view import RunView
from deadpool_runtime.encoding import Digest, digest_of


def test_nodes_have_the_roles_of_the_plan_until_something_happens() -> None:
    view = view_of(two_nodes_and_a_spare())
    assert view.nodes == {"a": NodeRole.ACTIVE, "b": NodeRole.ACTIVE, "c": NodeRole.SPARE}


def test_a_swap_makes_the_dead_node_lost_and_the_spare_active() -> None:
    view = view_of(swap())
    assert view.nodes == {"a": NodeRole.ACTIVE, "b": NodeRole.LOST, "c": NodeRole.ACTIVE}
    assert (view.ranks[1].node, view.ranks[1].pid, view.ranks[1].processes) == ("c", 12, 2)
    assert (view.ranks[0].pid, view.ranks[0].processes) == (10, 1)


def test_the_step_of_the_job_is_the_one_that_every_rank_completed() -> None:
    records = swap()
    lost_at = next(i for i, record in enumerate(records) if record["kind"] == "fault")
    assert view_of(records[:lost_at]).step == 2
    assert view_of(records).step == 4
    assert view_of([]).step == 0


def test_an_incident_is_open_until_its_verdict() -> None:
    records = swap()
    opened = next(i for i, record in enumerate(records) if record["kind"] == "incident")
    incident = view_of(records[: opened + 1]).open_incident
    assert incident is not None
    assert incident.closed_at is None
    view = view_of(records)
    assert view.open_incident is None
    assert (view.incidents[1].verdict, view.incidents[1].closed_at) == ("continued", 8.3)


def test_the_curve_takes_the_second_run_of_a_step_that_was_run_again() -> None:
    view = view_of(swap())
    assert [(p.step, p.loss) for p in loss_curve(view)] == [(1, 3.0), (2, 2.0), (3, 1.5), (4, 0.5)]
    # Step 3, which rank 0 had completed, and step 4, which it had begun.
    assert steps_run_again(view, view.incidents[1]) == [3, 4]


def test_an_incident_without_verdict_has_no_replayed_steps() -> None:
    records = swap()
    opened = next(i for i, record in enumerate(records) if record["kind"] == "incident")
    view = view_of(records[: opened + 1])
    assert steps_run_again(view, view.incidents[1]) == []


def test_the_end_is_the_verdict() -> None:
    view = view_of(swap())
    assert view.end is not None
    assert (view.end.verdict, view.end.exit_code) == ("done", 0)


def test_records_of_a_kind_that_is_not_known_change_nothing() -> None:
    view = view_of([*swap(), record(10.0, "weather", temperature=20)])
    assert view.step == 4


def test_only_the_newest_lines_for_people_are_kept() -> None:
    view = view_of([record(float(n), "say", text=f"line {n}") for n in range(100)])
    assert view.says[-1] == (99.0, "line 99")
    assert len(view.says) < 100


# ---------------------------------------------------------------- tail


def test_the_tail_gives_each_record_once(tmp_path: Path) -> None:
    tail = JournalTail(tmp_path)
    assert tail.records() == []
    journal = Journal(tmp_path, lambda line: None)
    journal.say("one")
    assert [record["text"] for record in tail.records()] == ["one"]
    assert tail.records() == []
    journal.say("two")
    journal.say("três")
    assert [record["text"] for record in tail.records()] == ["two", "três"]
    journal.close()


@pytest.mark.parametrize("cut", range(1, 30, 4))
def test_a_line_that_is_still_being_written_waits(tmp_path: Path, cut: int) -> None:
    line = b'{"at":1.0,"kind":"say","text":"x"}\n'
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(line + line[:cut])
    tail = JournalTail(tmp_path)
    assert len(tail.records()) == 1
    with path.open("ab") as file:
        file.write(line[cut:])
    assert [record["text"] for record in tail.records()] == ["x"]


# ---------------------------------------------------------------- comparison


def _finals(*digests: dict[str, str]) -> RunView:
    return view_of(
        [record(1.0, "final", rank=rank, step=9, parts=parts) for rank, parts in enumerate(digests)]
    )


def test_equal_digests_on_every_rank_are_equal() -> None:
    one = _finals({"parameters": "aa", "rng": "r0"}, {"parameters": "aa", "rng": "r1"})
    rows = compare_finals(one, one)
    assert [(row.part, row.equal, row.equal_ranks) for row in rows] == [
        ("parameters", True, (0, 1)),
        ("rng", True, (0, 1)),
    ]


def test_one_differing_rank_makes_its_part_differ() -> None:
    reference = _finals({"parameters": "aa", "rng": "r0"}, {"parameters": "aa", "rng": "r1"})
    disturbed = _finals({"parameters": "aa", "rng": "r0"}, {"parameters": "aa", "rng": "rX"})
    rows = {row.part: row for row in compare_finals(reference, disturbed)}
    assert rows["parameters"].equal
    assert rows["rng"].other_ranks == (1,)


def test_what_only_one_run_reported_counts_as_different() -> None:
    reference = _finals({"parameters": "aa", "rng": "r0"}, {"parameters": "aa", "rng": "r1"})
    disturbed = _finals({"parameters": "aa"})
    rows = {row.part: row for row in compare_finals(reference, disturbed)}
    assert rows["parameters"].other_ranks == (1,)
    assert rows["rng"].other_ranks == (0, 1)


def test_without_any_final_state_there_is_nothing_to_compare() -> None:
    assert compare_finals(RunView(), RunView()) == []


def test_digests_of_nothing_are_the_runtimes() -> None:
    digests = [Digest().hexdigest(), digest_of([], "schedulers"), digest_of({}, "job.state")]
    assert sorted(NOTHING) == sorted(digests)


def test_a_part_that_no_rank_has_is_empty() -> None:
    nothing, something = digest_of({}, "job.state"), digest_of({"a": 1}, "job.state")
    none, some, one = (
        _finals({"user": first}, {"user": second})
        for first, second in (
            (nothing, nothing),
            (something, something),
            (nothing, something),
        )
    )
    assert [row.empty for row in compare_finals(none, none)] == [True]
    for reference, disturbed in ((some, some), (one, one), (none, one)):
        assert [row.empty for row in compare_finals(reference, disturbed)] == [False]
