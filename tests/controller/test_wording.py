"""Sentences for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_scenarios import unfold

from deadpool_launch.controller.incident import Loss
from deadpool_launch.controller.wording import (
    exit_text,
    fold,
    loss_text,
    nodes_text,
    plural,
    ranks_text,
    seconds,
    short_error,
    size,
    steps_text,
)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_unfolding_a_folded_set_gives_it_back(numbers: set[int]) -> None:
    assert unfold(fold(numbers)) == sorted(numbers)


def test_runs_become_ranges() -> None:
    assert fold([4, 0, 1]) == "0-1,4"
    assert fold([]) == ""


def test_one_rank_is_singular() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([4, 5, 6, 7]) == "ranks 4-7"


def test_many_nodes_are_a_number() -> None:
    assert nodes_text(["n1", "n2"]) == "n1, n2"
    assert nodes_text(f"n{i}" for i in range(300)) == "300 nodes"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 KiB"), (1536, "1.5 KiB"), (12 << 30, "12 GiB"), (1023 << 20, "1023 MiB")],
)
def test_size_is_in_the_unit_that_fits(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_steps_may_be_none() -> None:
    assert steps_text([]) == "no step"
    assert steps_text([4]) == "step 4"
    assert steps_text([4, 5]) == "steps 4-5"


def test_exit_names_signal_or_code() -> None:
    assert exit_text(None, 9) == "signal 9"
    assert exit_text(3, None) == "exit code 3"


def test_losses_say_who() -> None:
    assert loss_text(Loss("n2", (4, 5), "lost (silent, seen)", True)) == "n2 lost (silent, seen)"
    assert loss_text(Loss("n2", (4, 5), "died (x)", False)) == "ranks 4-5 on n2 died (x)"


def test_numbers_read_well() -> None:
    assert [seconds(30.0), seconds(0.05)] == ["30 s", "0.05 s"]
    assert [plural(0, "step"), plural(1, "step")] == ["0 steps", "1 step"]


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
            "Connection closed by peer [::ffff:127.0.0.1]:60599. This is typically caused by a "
            "remote worker crashing. Check the logs for more details. GLHF! 🏖️",
            "RuntimeError: Connection closed by peer 127.0.0.1:60599",
        ),
        ("[/a/b.cc:1] Timed out waiting 5.5 s", "Timed out waiting 5.5 s"),
        ("DistBackendError: [x.cpp:77] Read error.", "DistBackendError: Read error"),
        ("ValueError: bad value 0.5.\n  Then more.", "ValueError: bad value 0.5"),
        ("KeyError: 'a'", "KeyError: 'a'"),
        ("ValueError: [1, 2:3] is no shape", "ValueError: [1, 2:3] is no shape"),
        ("OSError: still waiting... Gave up", "OSError: still waiting... Gave up"),
        ("two\nlines", "two lines"),
        ("", ""),
    ],
)
def test_errors_become_short(error: str, short: str) -> None:
    assert short_error(error) == short


@given(st.text(), st.text())
def test_short_errors_are_one_line_of_limited_length(kind: str, text: str) -> None:
    short = short_error(f"{kind}: {text}" * 3)
    assert len(short) <= 120
    assert len(short.splitlines()) <= 1
