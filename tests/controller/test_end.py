"""The verdict, and what comes after it: nothing.

The stories are in ``scenarios/``; here are the corners beside them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from workbench import bench, recovering, render

from deadpool_launch.controller.events import Tick
from deadpool_launch.controller.invariants import InvariantBroken, validate
from deadpool_launch.controller.rank import Stage
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def test_nothing_is_answered_after_the_end() -> None:
    job = bench()
    job.train_to(3)
    job.stop(15)
    assert job.state.next_deadline() is None
    assert job.agent_lost("n1") == job.stop(2) == job.feed(Tick(99.0)) == []


def test_unknown_signal_is_named_by_its_number() -> None:
    job = bench()
    job.start()
    job.stop(10)
    assert job.finish is not None
    assert job.finish.reason == "stopped by a signal (10)"
    assert job.finish.exit_code == ExitCode.TERMINATED


def test_job_that_ends_before_the_first_new_step_continued_all_the_same() -> None:
    job = recovering()
    job.parked([3])
    job.inventory()
    job.rebuilt(job.everyone)
    job.restored(job.everyone)
    for rank in job.everyone:
        job.said(rank, protocol.ScriptEnded())
    assert render(job.trace)[-3:] == [
        "say: continued from step 20 in 0.1 s after the first sign (rung 1, local restart); "
        "0 completed steps run again",
        "incident 1 closed at 0.05: continued on rung 1, 0 replayed",
        "finish: completed (0): the script ended on every rank",
    ]


def test_broken_rule_is_reported_with_the_state() -> None:
    job = bench()
    job.train_to(3)
    rank = replace(job.state.ranks[0], stage=Stage.PARKED)
    with pytest.raises(InvariantBroken, match="rank 0: parked is possible while training"):
        validate(replace(job.state, ranks=job.state.ranks.with_changes({0: rank})))
