"""A journal line by line, and which lines are shown."""

from __future__ import annotations

from typing import Any

import pytest
from journals import record, recorded, step, swap

from deadpool_launch.errors import UsageError
from deadpool_launch.status.lines import KINDS, line_of, wanted


def _texts(**asked: Any) -> list[str]:
    which = wanted(asked.get("kinds", ()), asked.get("nodes", ()), asked.get("ranks", ()))
    return [line_of(each).partition("  ")[2] for each in swap() if which.has(each)]


def test_steps_are_shown_only_if_asked_for() -> None:
    assert not [text for text in _texts() if "completed step" in text]
    assert len(_texts(kinds=["step"])) == 9


def test_kinds_nodes_and_ranks_narrow_it_down_together() -> None:
    assert _texts(kinds=["incident"]) == [
        "incident 1: detected: b lost",
        "incident 1: state restored: step 2",
        "incident 1: continued:",
    ]
    assert _texts(kinds=["agentlost"]) == ["AgentLost b"]
    assert _texts(kinds=["rank"], nodes=["c"]) == ["rank 1 on c: process 12, epoch 2"]
    assert len(_texts(kinds=["step", "rank"], ranks=[1])) == 6


def test_record_of_another_shape_is_not_among_those_asked_for() -> None:
    odd = {"at": 1.0, "kind": ["step"], "name": {}, "node": ["c"], "rank": [1]}
    assert wanted((), (), ()).has(odd)
    assert not any(
        which.has(odd)
        for which in (wanted(["step"], (), ()), wanted((), ["c"], ()), wanted((), (), [1]))
    )


def test_what_is_no_kind_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(UsageError, match="did you mean AgentLost"):
        wanted(["AgntLost"], (), ())
    with pytest.raises(UsageError, match="kinds are job, launcher"):
        wanted(["xyzzy"], (), ())


@pytest.mark.parametrize("name", ["swap", "kill"])
def test_every_record_of_a_real_job_is_one_line_and_of_a_known_kind(name: str) -> None:
    for each in recorded(name):
        assert each["kind"] in KINDS
        line = line_of(each)
        assert "\n" not in line
        assert "??" not in line
        assert wanted([each.get("name") or each["kind"]], (), ()).has(each)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"at": "yesterday", "kind": "step"},
        {"at": 1e300, "kind": ["x"]},
        record(1.0, "incident"),
        record(1.0, "event", name="New", deep={"x": [1, 2]}),
        step(1.0, 0, 1, 1.0) | {"loss": "nan"},
    ],
)
def test_odd_records_are_lines_too(odd: dict[str, Any]) -> None:
    assert line_of(odd)
