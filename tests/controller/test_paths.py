"""Who is cut off, from what every agent reaches; and what is done if that cannot be told."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from workbench import Bench, of_type, recovering, told

from deadpool_launch.controller.events import FenceNode, KillRanks, StartAgent, TryPaths
from deadpool_launch.controller.paths import WITNESSES, cut_off, others_of
from deadpool_launch.controller.rank import Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def all_try(names: str, broken: str) -> frozenset[str]:
    """Every node tries all others; ``broken``: pairs such as ``ab``: a does not reach b."""
    asked = {name: tuple(other for other in names if other != name) for name in names}
    pairs = set(broken.split())
    unreached = {a: tuple(b for b in asked[a] if a + b in pairs) for a in names}
    return cut_off(asked, unreached)


@pytest.mark.parametrize(
    ("names", "broken", "culprits"),
    [
        ("abc", "", ""),
        ("ab", "ab ba", ""),  # each blames the other
        ("abc", "ab cb", "b"),  # one way
        ("abc", "ba bc", "b"),  # the other way
        ("abc", "ab ba", ""),  # a single path is broken, and c reaches both
        ("abcde", "da db dc ea eb ec", "de"),  # two that reach each other
        ("abcd", "ac ad bc bd", ""),  # two halves
        ("abcde", "ab ba ad da", ""),  # a blames two of four: no majority
        ("abcde", "ab ac ad", "a"),
        ("abcdefg", "ab ac ad ae af ag cb cd ce cf cg", "ac"),
    ],
)
def test_nodes_are_cut_off_if_most_others_say_so(names: str, broken: str, culprits: str) -> None:
    assert all_try(names, broken) == frozenset(culprits)


def test_silence_is_no_complaint_but_the_others_count() -> None:
    asked = {"a": ("b", "c"), "b": ("c", "a"), "c": ("a", "b")}
    unreached: Mapping[str, tuple[str, ...]] = {"a": ("b",), "c": ("b",)}
    assert cut_off(asked, unreached) == {"b"}
    assert cut_off(asked, {}) == frozenset()


def test_with_many_nodes_each_tries_a_few_and_that_is_enough() -> None:
    names = [f"n{place:04}" for place in range(2000)]
    asked = {name: others_of(names, place) for place, name in enumerate(names)}
    assert {len(others) for others in asked.values()} == {WITNESSES}
    unreached = {
        name: tuple(o for o in others if {name, o} & {"n0007", "n1999"})
        for name, others in asked.items()
    }
    assert cut_off(asked, unreached) == {"n0007", "n1999"}


def restoring(**changes: object) -> Bench:
    """Rank 3 was lost, and the plan to go on is out."""
    job = recovering(**changes)
    job.parked([3])
    job.inventory()
    return job


def not_connected(job: Bench, rank: int = 0) -> list[object]:
    return list(job.said(rank, protocol.NotConnected(job.state.epoch, "Connect timeout")))


def again(job: Bench) -> None:
    job.parked(rank.rank for rank in job.state.ranks if rank.stage is Stage.UNWINDING)
    job.inventory()


def test_loss_that_explains_it_comes_before_any_answer_counts() -> None:
    job = restoring()
    not_connected(job)
    for node in ("n1", "n2", "n3"):
        assert job.tried(node) == []
    job.exited(1, signal=9)
    assert job.state.paths is None
    assert job.state.incident is not None
    assert job.state.incident.stalls == 0


def test_two_nodes_that_blame_each_other_cost_no_spare_and_wake_a_witness() -> None:
    job = restoring(spare_start="on-failure")
    not_connected(job)
    job.tried("n1", "n2")
    job.tried("n2", "n1")
    actions = job.tick()
    assert of_type(StartAgent, actions) == [StartAgent("n3")]
    assert not of_type(FenceNode, job.trace)
    job.warm("n3")
    again(job)
    not_connected(job)
    job.tried("n1", "n2")
    job.tried("n3", "n2")
    job.tried("n2", "n1", "n3")
    (fenced,) = of_type(FenceNode, job.trace)
    assert (fenced.node, job.state.phase) == ("n2", Phase.GATHERING)
    assert fenced.reason == (
        "has no path to n1, n3 (2 of the 2 nodes that it was tried with, inferred)"
    )


def test_nodes_that_blame_each_other_for_ever_lead_to_a_restart_and_to_the_end() -> None:
    job = restoring(spares=())
    for _ in range(2):
        not_connected(job)
        job.tick()
        if not of_type(KillRanks, job.trace):
            again(job)
    for rank in job.everyone:
        job.exited(rank, signal=9)
    job.ranks_up(job.everyone)
    job.parked(job.everyone)
    job.inventory()
    for _ in range(2):
        assert job.finish is None
        not_connected(job)
        job.tried("n1", "n2")
        job.tick()
        if job.finish is None:
            again(job)
    assert job.finish is not None
    assert job.finish.exit_code == ExitCode.RECOVERY_FAILED
    assert "n1, n2 do not all reach each other, and whose fault that is would be" in (
        job.finish.reason
    )


def test_node_that_is_cut_off_stays_while_no_spare_can_take_its_place() -> None:
    job = restoring(active=("n1", "n2", "n4"), spares=())
    not_connected(job)
    job.tried("n1", "n2")
    job.tried("n4", "n2")
    job.tried("n2", "n1", "n4")
    assert not of_type(FenceNode, job.trace)
    assert job.state.phase is Phase.PARKING


def test_word_of_an_older_plan_is_ignored() -> None:
    job = restoring()
    epoch = job.state.epoch
    not_connected(job)
    assert len(of_type(TryPaths, job.trace)) == 3
    job.exited(3, signal=9)
    assert job.said(0, protocol.NotConnected(epoch, "Connect timeout")) == []
    assert told(protocol.Revoke, job.tried("n1", "n2")) == []
