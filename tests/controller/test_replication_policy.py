"""What the controller makes of the number of holders and of an interval between replicas."""

from __future__ import annotations

from typing import Any

import pytest
from workbench import MUCH_NBYTES, Bench, bench, of_type, render, told

from deadpool_launch.controller.events import Finish, Say
from deadpool_launch.exits import ExitCode
from deadpool_launch.whatif import sizes
from deadpool_runtime import protocol


def three_nodes(**changes: Any) -> Bench:
    return bench(active=("n1", "n2", "n3"), spares=("n4", "n5"), nproc_per_node=1, **changes)


def test_every_rank_is_told_of_all_its_holders() -> None:
    job = three_nodes(replication_factor=2)
    actions = job.train_to(0)
    holders = [body.holder for _, body in told(protocol.Protect, actions)]
    assert [[each.node for each in (first, *first.more)] for first in holders] == [
        ["n2", "n3"],
        ["n3", "n1"],
        ["n1", "n2"],
    ]
    assert all(each.segments for first in holders for each in (first, *first.more))
    assert [first.deputy for first in holders] == [None] * 3


def test_a_node_and_its_first_holder_are_lost_at_once_and_the_second_has_all() -> None:
    job = three_nodes(replication_factor=2)
    job.train_to(20)
    for node in ("n2", "n3"):
        job.agent_lost(node)
        job.arenas.pop(node)
    job.tick()
    actions = job.parked([0]) + job.ranks_up([1, 2]) + job.parked([1, 2]) + job.inventory()
    plans = told(protocol.Plan, actions)
    assert {body.step for _, body in plans} == {20}
    pieces = {rank: body.pieces for (rank,), body in plans}
    assert [(piece.rank, piece.source.host) for piece in pieces[1] + pieces[2] if piece.base] == [
        (1, "n1.host"),
        (2, "n1.host"),
    ]


def test_fewer_holders_than_asked_for_are_told_of() -> None:
    job = three_nodes(replication_factor=4)
    job.train_to(3)
    assert not [say for say in of_type(Say, job.trace) if "replication.factor" in say.text]
    actions = job.agent_lost("n5")
    assert [say.text for say in of_type(Say, actions) if "replication.factor" in say.text] == [
        "so few nodes are up that each rank's replica goes to 3 of them instead of 4 "
        "(replication.factor)"
    ]


def trained_with_interval(interval: int) -> Bench:
    """n2 of three nodes is lost in step 21, rank 1 is about to be replaced; the arenas hold what
    they would: the newest steps, and the newest with replicas.
    """
    job = three_nodes(replication_interval=interval)
    job.train_to(20)
    replicated = [step for step in range(20, 0, -1) if step % interval == 0][:3]
    job.arenas = {}
    for rank in job.everyone:
        segments, holder = job.segments(rank), job.state.holders[rank]
        assert holder is not None
        missing = [name for name in segments if name not in holder.segments]
        for step in sorted({20, 19, 18, *replicated[:2]}):
            own = protocol.Copy(rank, step, 1, False, segments, [])
            job.arenas.setdefault(job.state.node_of(rank), {})[rank, False, step] = own
        for step in replicated:
            replica = protocol.Copy(rank, step, 1, True, holder.segments, missing)
            job.arenas.setdefault(holder.node, {})[rank, True, step] = replica
    return job


def test_a_lost_node_goes_back_to_the_newest_step_with_replicas() -> None:
    job = trained_with_interval(7)
    job.agent_lost("n2")
    job.arenas.pop("n2")
    job.tick()
    actions = job.parked([0, 2]) + job.ranks_up([1]) + job.parked([1]) + job.inventory()
    plans = [body for _, body in told(protocol.Plan, actions)]
    assert [(body.step, body.keep) for body in plans] == [(14, [7])] * 3
    assert any("step 20 is not on rank 1" in line for line in render(actions))


def test_a_process_that_dies_goes_back_to_the_newest_step_of_all() -> None:
    """What has replicas must be kept until the replicas of that step are whole."""
    job = trained_with_interval(7)
    job.exited(1, signal=9)
    job.tick()
    actions = job.parked([0, 2]) + job.ranks_up([1]) + job.parked([1]) + job.inventory()
    plans = [body for _, body in told(protocol.Plan, actions)]
    assert [(body.step, body.keep) for body in plans] == [(20, [7, 14])] * 3


def test_with_a_replica_for_every_step_nothing_is_named_that_must_be_kept() -> None:
    job = trained_with_interval(1)
    job.exited(1, signal=9)
    job.tick()
    actions = job.parked([0, 2]) + job.ranks_up([1]) + job.parked([1]) + job.inventory()
    assert [body.keep for _, body in told(protocol.Plan, actions)] == [[]] * 3


def test_an_interval_takes_memory_for_more_copies() -> None:
    """The same job has enough without: see scenarios/too_little_memory.txt."""

    def started(**changes: Any) -> list[Finish]:
        job = bench(spares=(), **changes)
        actions = job.start()
        for node, nbytes in (("n1", MUCH_NBYTES), ("n2", 23_000_000)):
            actions += job.connected(node) + job.warm(node, nbytes)
        actions += job.ranks_up(job.everyone)
        actions += job.attached(job.everyone)
        return of_type(Finish, actions)

    assert started() == []
    for interval, copies, needed in ((2, 4, "25.6 MiB"), (3, 5, "30.1 MiB"), (50, 5, "30.1 MiB")):
        (end,) = started(replication_interval=interval)
        assert end.exit_code == ExitCode.LITTLE_MEMORY
        assert (
            f"{needed} needed (2 ranks x {copies} copies of 2.26 MiB and 3 replicas of ranks 0-1"
            in end.reason
        )


@pytest.mark.parametrize(("factor", "interval"), [(1, 1), (1, 2), (2, 1), (3, 7)])
def test_a_start_asks_for_the_memory_that_a_plan_names(
    factor: int, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of the workbench has 1 MiB in common with all, 1 MiB alone and an own part."""
    nodes = ("n1", "n2", "n3", "n4")
    changes = {"replication_factor": factor, "replication_interval": interval}
    job = bench(active=nodes, spares=(), nproc_per_node=1, **changes)
    job.train_to(0)
    monkeypatch.setattr(sizes, "OWN_NBYTES", 1000)
    layout = sizes.Layout(len(nodes), 0, 1, "zero1", factor=factor, interval=interval)
    model = sizes.Model(1 << 19, "bf16", "adamw", "fp32")
    assert job.state.need_nbytes == sizes.sizes(model, layout).need.nbytes
