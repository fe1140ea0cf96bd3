"""Which ranks count as slower than their peers, and who their peers are."""

from __future__ import annotations

import pytest
from workbench import bench

from deadpool_launch.controller.stragglers import peers_of, slower
from deadpool_runtime import protocol


@pytest.mark.parametrize(
    ("own_ms", "peers_ms", "slow"),
    [
        (310, [200, 205, 198], True),
        (290, [200, 205, 198], False),  # not half as long again
        (310, [200], True),
        (30, [15, 14, 16], False),  # too little to speak of
        (310, [200, 120, 330, 280, 100], False),  # they differ as much among themselves
        (310, [200, 195, 205, 202, 198], True),
        (310, [200, 200, 200, 900, 200], True),  # another slow one does not hide it
    ],
)
def test_slow_is_what_stands_out(own_ms: int, peers_ms: list[int], slow: bool) -> None:
    assert slower(own_ms / 1000, [each / 1000 for each in peers_ms], 1.5) is slow


def test_ranks_are_compared_with_those_that_do_the_same() -> None:
    """Two stages of a pipeline with two replicas each, of which the second stage has more to do."""
    job = bench(active=("n1", "n2"), straggler_windows=1)
    job.begun()
    stages = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    for rank, ranks in stages.items():
        sizes = [protocol.SegmentSize(ranks, 1 << 20), protocol.SegmentSize((rank,), 1 << 10)]
        job.said(rank, protocol.Attached("ddp", sizes, 1000))
    job.steps_done(job.everyone, 0)
    job.paces("n1", [0.2, 0.5])
    job.paces("n2", [0.2, 0.5])
    groups = sorted([rank.rank for rank in group] for group in peers_of(job.state))
    assert groups == [[0, 2], [1, 3]]
    assert job.tick() == []


def test_ranks_of_a_job_that_has_no_replicas_are_compared_by_the_size_of_their_state() -> None:
    job = bench(active=("n1", "n2"))
    job.begun()
    for rank in job.everyone:
        size = protocol.SegmentSize((rank,), 1 << (10 if rank == 3 else 20))
        job.said(rank, protocol.Attached("fsdp", [size], 1000))
    job.steps_done(job.everyone, 0)
    job.paces("n1", [0.2, 0.2])
    job.paces("n2", [0.2, 0.2])
    groups = sorted([rank.rank for rank in group] for group in peers_of(job.state))
    assert groups == [[0, 1, 2], [3]]
