"""Means, intervals and ratios."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deadpool_launch.whatif.estimate import mean, ratio, student
from deadpool_launch.whatif.faults import Renewal
from deadpool_launch.whatif.job import Job
from deadpool_launch.whatif.strategies import DEADPOOL
from deadpool_launch.whatif.walk import walk


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (99, 1.9842)],
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=0.002)


def test_an_interval_is_of_the_mean_and_a_single_value_has_none() -> None:
    found = mean([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.half == pytest.approx(4.3027 / 3**0.5, rel=1e-3)
    assert (mean([7.0]).low, mean([7.0]).high) == (7, 7)


def test_a_ratio_of_what_goes_together_is_sure() -> None:
    job = Job(1000, 1.0, 2, 1, 10.0)
    faults = Renewal(2000.0)
    accounts = [
        walk(job, DEADPOOL.rules(job, faults), faults.stream(seed, 2, 1), 1e6) for seed in range(20)
    ]
    doubled = [replace(each, lost_s=2 * each.lost_s) for each in accounts]
    found = ratio(doubled, accounts, lambda account: account.lost_s)
    assert found.value == pytest.approx(2)
    assert found.half == pytest.approx(0, abs=1e-9)
    alone = [replace(each, lost_s=1.0) for each in accounts]
    of_mean = mean([each.lost_s for each in accounts])
    found = ratio(accounts, alone, lambda account: account.lost_s)
    assert (found.value, found.half) == pytest.approx((of_mean.value, of_mean.half))
    unsure = ratio(accounts, list(reversed(accounts)), lambda account: account.lost_s)
    assert unsure.value == pytest.approx(1)
    assert unsure.half > 0.01
