"""Where a job's time went: the parts add up to the total, and each is called by its name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import Records, record, recorded, step, swap, two_nodes_and_a_spare, view_of

from deadpool_launch.report.account import Account, account


def _adds_up(whole: Account) -> bool:
    return whole.productive_us + sum(whole.losses.values()) == whole.total_us


def _losses(whole: Account) -> dict[str, float]:
    return {cell.text: round(whole.node_s(us), 3) for cell, us in whole.losses.items()}


def test_every_second_of_a_swap_has_its_name() -> None:
    whole = account(view_of(swap()))
    # Three nodes for 8.5 s; four steps of 0.1 s on two nodes count.
    assert whole.node_s(whole.total_us) == pytest.approx(25.5)
    assert whole.node_s(whole.productive_us) == pytest.approx(0.8)
    assert _losses(whole) == {
        # The first step begins at 3.9.
        "start, until the first step": 5.8,
        # On a: 1.8 before the fault, 1.5 after it; 0.9 on b; 1.5 on c.
        "between steps: data, evaluation, the script's own checkpoints": 5.7,
        "behind the last step": 1.0,
        "c: waited as a spare": 5.4,
        "b: lost or given up": 3.3,
        "incident 1: the step cut short, until it was noticed": 1.5,
        "incident 1: recovery": 1.9,
        "incident 1: completed steps that were run again": 0.1,
    }
    assert _adds_up(whole)


def test_time_that_copies_held_a_step_up_is_no_productive_time() -> None:
    records = [*two_nodes_and_a_spare(), step(5.0, 0, 1, 1.0) | {"blocked_s": 0.04}]
    whole = account(view_of(records))
    assert whole.node_s(whole.productive_us) == pytest.approx(0.06)
    assert _losses(whole)["steps held up by copies of the state"] == 0.04
    assert _adds_up(whole)


def test_more_time_in_copies_than_in_the_step_is_all_of_the_step() -> None:
    records = [*two_nodes_and_a_spare(), step(5.0, 0, 1, 1.0) | {"blocked_s": 7.0}]
    whole = account(view_of(records))
    assert whole.productive_us == 0
    assert _adds_up(whole)


def test_planned_move_cuts_no_step_short() -> None:
    records = swap()
    opened = next(each for each in records if each.get("phase") == "opened")
    opened["planned"] = True
    texts = _losses(account(view_of(records)))
    assert not [text for text in texts if "cut short" in text]


def test_nodes_that_the_job_did_not_want_are_lost_time_too() -> None:
    records = two_nodes_and_a_spare()
    records[0]["unused"] = ["x"]
    whole = account(view_of([*records, record(4.0, "say", text="")]))
    assert _losses(whole)["x: not used: more nodes than the job wanted"] == 3.0
    assert _adds_up(whole)


def test_script_without_the_runtime_is_not_called_unproductive_by_another_name() -> None:
    whole = account(view_of([*two_nodes_and_a_spare(), record(11.0, "say", text="")]))
    assert _losses(whole) == {
        "the script tells nothing of its steps": 20.0,
        "c: waited as a spare": 10.0,
    }


def test_journal_without_a_plan_has_an_empty_account() -> None:
    whole = account(view_of([record(1.0, "say", text="compiling")]))
    assert (whole.total_us, whole.productive_us, whole.losses) == (0, 0, {})
    assert whole.goodput == 0.0


@pytest.mark.parametrize("name", ["swap", "kill"])
def test_recorded_jobs_add_up_wherever_their_journal_ends(name: str) -> None:
    records = recorded(name)
    for end in range(len(records) + 1):
        assert _adds_up(account(view_of(records[:end]))), f"{end} records"


_TIMES = st.floats(0, 100, allow_nan=False).map(lambda at: round(at, 6))
_NODES = st.sampled_from(["a", "b", "c", "d"])
_RECORDS = st.one_of(
    st.builds(
        lambda at, rank, number, epoch, took, held: record(
            at,
            "step",
            rank=rank,
            step=number,
            epoch=epoch,
            duration_s=took,
            blocked_s=held,
            loss=None,
        ),
        *(_TIMES, st.integers(0, 3), st.integers(0, 5), st.integers(1, 4)),
        *(st.floats(0, 20), st.floats(0, 20)),
    ),
    st.builds(
        lambda at, node, role: record(at, "node", node=node, role=role, why="", lasting=False),
        *(_TIMES, _NODES, st.sampled_from(["active", "spare", "lost", "drained", "aside"])),
    ),
    st.builds(
        lambda at, rank, node: record(at, "rank", rank=rank, node=node, pid=1, epoch=1),
        *(_TIMES, st.integers(0, 3), _NODES),
    ),
    st.builds(
        lambda at, number, phase, planned: record(
            at,
            "incident",
            number=number,
            phase=phase,
            detail="",
            planned=planned,
            **({"verdict": "continued"} if phase == "closed" else {}),
        ),
        *(_TIMES, st.integers(1, 3)),
        st.sampled_from(["opened", "revoked", "state restored", "closed"]),
        st.booleans(),
    ),
)


@given(
    st.lists(_RECORDS, max_size=40),
    st.integers(1, 2),
    st.lists(_NODES, max_size=2, unique=True),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_parts_add_up_to_the_total_whatever_the_journal_says(
    records: Records, places: int, unused: list[str], in_order: bool
) -> None:
    if in_order:
        records = sorted(records, key=_at)
    plan = record(0.0, "job", active=["a", "b"], spares=["c"], unused=unused, nproc_per_node=places)
    whole = account(view_of([plan, *records]))
    assert _adds_up(whole)
    assert whole.productive_us >= 0
    assert all(us > 0 for us in whole.losses.values())


def _at(record: dict[str, Any]) -> float:
    return float(record["at"])
