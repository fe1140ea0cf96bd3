"""Drawn and recorded faults: as often as they should be, and the same for all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, takewhile

import pytest

from deadpool_launch.whatif.faults import Fault, Faults, Renewal, listed


def until(faults: Faults, end: float, *, seed: int = 0, nodes: int = 10) -> list[Fault]:
    stream: Iterator[Fault] = faults.stream(seed, nodes, 0)
    return list(takewhile(lambda fault: fault.at < end, stream))


def test_a_seed_gives_the_same_faults_and_another_gives_others() -> None:
    faults = Renewal(100.0, shape=0.7, transient=0.3)
    assert until(faults, 1000) == until(faults, 1000)
    assert until(faults, 1000) != until(faults, 1000, seed=1)


def test_one_more_spare_changes_no_fault_of_the_others() -> None:
    faults = Renewal(100.0, transient=0.3)
    few = [fault for fault in islice(faults.stream(3, 4, 1), 200)]
    many = [fault for fault in islice(faults.stream(3, 4, 2), 400) if fault.seats != (5,)]
    assert few == many[:200]


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 2.0])
def test_the_mean_time_between_faults_holds_from_the_begin(shape: float) -> None:
    faults = Renewal(1000.0, shape=shape)
    for end in (100.0, 1000.0):
        counts = [len(until(faults, end, seed=seed)) for seed in range(300)]
        assert sum(counts) / 300 == pytest.approx(faults.rate(10) * end, rel=0.12)


def test_faults_come_in_bursts_below_shape_1_and_evenly_above() -> None:
    def spread(shape: float) -> float:
        counts = [
            len(until(Renewal(100.0, shape=shape), 2000.0, seed=seed, nodes=1))
            for seed in range(300)
        ]
        middle = sum(counts) / 300
        return sum((count - middle) ** 2 for count in counts) / 300 / middle

    assert spread(0.5) > 2
    assert spread(1.0) == pytest.approx(1.0, abs=0.2)
    assert spread(3.0) < 0.5


def test_the_share_of_transient_faults_is_as_given() -> None:
    drawn = list(islice(Renewal(100.0, transient=0.25).stream(0, 10, 0), 4000))
    assert sum(not fault.permanent for fault in drawn) / 4000 == pytest.approx(0.25, abs=0.03)


def test_groups_fail_as_a_whole_and_spares_with_them() -> None:
    faults = Renewal(1e12, group=4, group_mtbf_s=100.0)
    drawn = list(islice(faults.stream(0, 6, 3), 300))
    assert {fault.seats for fault in drawn} == {(0, 1, 2, 3), (4, 5, 6, 7), (8,)}
    assert faults.rate(6) == pytest.approx(2 / 100)
    assert faults.losses(6) == pytest.approx(6 / 100)


def test_a_record_repeats_and_begins_at_its_begin_for_seed_0() -> None:
    trace = listed([(20.0, 1, True), (10.0, 0, False), (20.0, 2, True)], length_s=30.0)
    first = list(islice(trace.stream(0, 4, 0), 4))
    assert first == [
        Fault(10.0, (0,), False),
        Fault(20.0, (1, 2), True),
        Fault(40.0, (0,), False),
        Fault(50.0, (1, 2), True),
    ]
    other = next(trace.stream(1, 4, 0))
    assert other.at not in (10.0, 20.0)
    assert trace.rate(4) == pytest.approx(2 / 30)
    assert trace.losses(2) == pytest.approx(1 / 30)


def test_a_record_of_other_nodes_is_a_job_without_faults() -> None:
    assert list(listed([(1.0, 7, True)]).stream(0, 4, 2)) == []
