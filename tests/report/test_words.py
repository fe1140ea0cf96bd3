"""Times and shares as people read them."""

from __future__ import annotations

from datetime import UTC

import pytest

from deadpool_launch.report.words import (
    moment_text,
    node_time_text,
    phase_label,
    share_text,
    span_text,
    ticks,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.00042, "0.42 ms"),
        (0.0351, "35.1 ms"),
        (0.42, "0.42 s"),
        (9.994, "9.99 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (12000, "3 h 20 min"),
        (100000, "1 d 3 h"),
        (-1.5, "-1.50 s"),
        (float("nan"), "?"),
    ],
)
def test_spans_have_the_units_that_fit(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_what_is_little_is_not_nothing_and_what_is_not_all_is_not_all() -> None:
    shares = (0, 0.0001, 0.1234, 0.9999, 1)
    assert [*map(share_text, shares)] == ["0.0 %", "< 0.1 %", "12.3 %", "> 99.9 %", "100 %"]


def test_node_time_has_two_units() -> None:
    assert node_time_text(12.34) == "12.3 node-s"
    assert node_time_text(1234.5) == "1,234.5 node-s"
    assert node_time_text(12.34, of_s=36_000.0) == "0.00 node-h"
    assert node_time_text(7200 * 1000) == "2,000.00 node-h"


def test_moments_outside_of_the_calendar_are_no_error() -> None:
    assert moment_text(0, UTC) == "1970-01-01 00:00:00 +0000"
    assert moment_text(1e300, UTC) == "?"


@pytest.mark.parametrize(("least", "most"), [(0, 1), (-0.3, 4.7), (0, 1e-9), (0, 12345), (5, 5)])
def test_ticks_are_within_the_axis_and_not_many(least: float, most: float) -> None:
    found = ticks(least, most, 5)
    assert 1 <= len(found) <= 12
    assert all(least - 1e-9 <= tick <= most + 1e-9 for tick in found)


def test_the_last_phase_is_called_by_the_verdict() -> None:
    assert phase_label("spare ready") == "spare admitted"
    assert phase_label("closed", "continued") == "continued"
    assert phase_label("something new") == "something new"
