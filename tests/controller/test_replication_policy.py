"""What the controller makes of the number of holders."""

from __future__ import annotations

from typing import Any

from workbench import Bench, bench, of_type, told

from deadpool_launch.controller.events import Say
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
