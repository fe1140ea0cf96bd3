"""What is made of the words of ranks while nothing is wrong.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

import pytest
from workbench import Bench, bench, of_type, step_done, told

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import RankSaid, Say
from deadpool_launch.controller.invariants import validate
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def test_nobody_trains_before_every_rank_has_attached() -> None:
    job = bench()
    job.begun()
    assert job.attached([0, 1, 3]) == []
    told_now = told(protocol.Protect, job.attached([2]))
    assert [ranks for ranks, _ in told_now] == [(0,), (1,), (2,), (3,)]
    assert [body.holder.node for _, body in told_now] == ["n2", "n2", "n1", "n1"]
    assert [body.holder.segments for _, body in told_now] == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_rank_that_ended_without_a_step_is_not_waited_for() -> None:
    job = bench()
    job.begun()
    job.attached([0, 1, 2])
    actions = job.said(3, protocol.ScriptEnded())
    assert [ranks for ranks, _ in told(protocol.Protect, actions)] == [(0,), (1,), (2,)]


def test_steps_without_a_confirmed_replica_are_counted_once_and_told_ever_less_often() -> None:
    job = bench()
    job.train_to(20)
    for number in range(1, 6):
        for rank in (1, 2):
            job.said(rank, step_done(1, 20 + number, number))
    assert job.state.unprotected == 5
    assert [said.text for said in of_type(Say, job.trace)] == [
        "rank 1 went through step 21 without a confirmed replica of the step before",
        "rank 1 went through step 22 without a confirmed replica of the step before "
        "(2 such steps so far)",
        "rank 1 went through step 24 without a confirmed replica of the step before "
        "(4 such steps so far)",
    ]
    job.stop(15)
    assert of_type(Say, job.trace)[-1] == Say(
        "5 steps began without a confirmed replica of the step before"
    )


def test_new_process_counts_its_unprotected_steps_from_zero() -> None:
    job = bench()
    job.train_to(20)
    job.said(3, step_done(1, 21, 7))
    job.exited(3, signal=9)
    job.tick()
    job.repaired([3])
    assert job.state.ranks[3].unprotected == 0
    job.said(3, step_done(2, 21, 0))
    job.said(3, step_done(2, 22, 1))
    assert job.state.unprotected == 2


def test_step_report_leaves_other_ranks_alone() -> None:
    job = bench()
    job.train_to(3)
    before = job.state
    job.steps_done([1], 4)
    assert [a is b for a, b in zip(before.ranks, job.state.ranks, strict=True)] == [
        True,
        False,
        True,
        True,
    ]
    assert before.ranks[1].completed == 3


def test_digest_of_a_later_step_is_not_compared() -> None:
    job = bench()
    job.train_to(2)
    job.snapshotted(range(3), 2, "a")
    job.snapshotted([3], 2, "b")
    assert job.finish is None


def test_states_that_differ_at_the_start_end_the_job() -> None:
    job = bench()
    job.train_to(0)
    assert job.snapshotted([0, 1, 2], 0, "a") == []
    job.snapshotted([3], 0, "b")
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.SCRIPT_FAILED
    assert job.finish.reason.startswith(
        "the state after step 0 differs between ranks 0-2 and rank 3 in the tensors that "
        "ranks 0-3 have in common;"
    )


def test_only_the_ranks_of_a_segment_are_compared() -> None:
    job = bench()
    job.train_to(0)
    for rank, digest in enumerate("abab"):
        pair = (rank % 2, rank % 2 + 2)
        segments = [protocol.SegmentDigest(pair, digest), protocol.SegmentDigest((rank,), "own")]
        assert job.said(rank, protocol.Snapshotted(1, 0, segments)) == []
    for rank, digest in enumerate("abcb"):
        pair = (rank % 2, rank % 2 + 2)
        job.said(rank, protocol.Snapshotted(1, 1, [protocol.SegmentDigest(pair, digest)]))
    assert job.finish is not None
    assert "between rank 0 and rank 2 in the tensors that ranks 0,2 have" in job.finish.reason


def test_ranks_that_disagree_about_what_they_have_in_common_end_the_job() -> None:
    job = bench(active=("n1",))
    job.train_to(0)
    both = [protocol.SegmentDigest((0, 1), "a")]
    alone = [protocol.SegmentDigest((1,), "a")]
    assert job.said(0, protocol.Snapshotted(1, 0, both)) == []
    job.said(1, protocol.Snapshotted(1, 0, alone))
    assert job.finish is not None
    assert "between rank 0 and rank 1 in the tensors that ranks 0-1 have" in job.finish.reason


def test_messages_for_the_driver_are_no_decisions() -> None:
    job = bench()
    job.train_to(0)
    said: list[protocol.FromRank] = [
        protocol.Note("hello"),
        protocol.FaultPoint(3),
        protocol.FinalState(3, {}),
    ]
    assert [job.said(0, body) for body in said] == [[], [], []]


@pytest.mark.parametrize(
    "body",
    [
        protocol.RankUp(1, 1),
        protocol.Attached("ddp", [], 0),
        protocol.Parked(1, 0.0),
        protocol.GroupsRebuilt(1, 1),
        protocol.Restored(1, 20, []),
        protocol.RestoreFailed(1, 20, "x"),
        protocol.Protected(0, 20),
        protocol.Snapshotted(0, 0, []),
        step_done(0, 21),
        protocol.StepRaised(0, 21, "old"),
        protocol.StepsEnded(0, 21),
    ],
)
def test_words_that_do_not_fit_the_moment_are_ignored(body: protocol.FromRank) -> None:
    job = bench()
    job.train_to(20)
    before = job.state
    assert job.said(0, body) == []
    assert job.state == before


def test_tick_before_any_deadline_changes_nothing() -> None:
    job = bench()
    job.train_to(20)
    before = job.state
    assert job.tick_now() == []
    assert job.state is before


def test_thousand_ranks_come_up_and_train() -> None:
    nodes = tuple(f"n{i:03}" for i in range(250))
    job = Bench(Config(active=nodes, spares=("s",), nproc_per_node=4), check=False)
    job.train_to(0)
    validate(job.state)
    for rank in (0, 500, 999):
        body = step_done(1, 1)
        event = RankSaid(job.now, job.state.node_of(rank), rank, 1, body)
        assert job.feed(event) == []
