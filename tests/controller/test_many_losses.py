"""Every fourth node goes at one instant: one incident, and one epoch for each gather window."""

from __future__ import annotations

import pytest
from workbench import Bench

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import (
    Action,
    IncidentClosed,
    IncidentOpened,
    StartRanks,
    Tell,
)
from deadpool_runtime import protocol

LOST = ("n0", "n4", "n8", "n12")


def job() -> Bench:
    nodes = tuple(f"n{i}" for i in range(16))
    spares = tuple(f"s{i}" for i in range(5))
    bench = Bench(Config(active=nodes, spares=spares, nproc_per_node=1))
    bench.train_to(5)
    bench.now += 10
    return bench


def told(actions: list[Action], kind: type) -> list[Tell]:
    return [a for a in actions if isinstance(a, Tell) and isinstance(a.body, kind)]


@pytest.mark.parametrize("apart_s", [0.0, 0.01])
def test_losses_within_the_window_share_an_epoch(apart_s: float) -> None:
    bench = job()
    actions: list[Action] = []
    for node in LOST:
        actions += bench.agent_lost(node)
        bench.now += apart_s
    actions += bench.tick()
    assert len([a for a in actions if isinstance(a, IncidentOpened)]) == 1
    assert bench.state.epoch == 2
    # Nobody is told twice, and only those that live are told.
    revoked = [rank for tell in told(actions, protocol.Revoke) for rank in tell.ranks]
    assert len(revoked) == len(set(revoked))
    assert {1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15} <= set(revoked)
    started = [a for a in actions if isinstance(a, StartRanks)]
    assert sorted(rank for start in started for rank in start.ranks) == [0, 4, 8, 12]
    assert {start.epoch for start in started} == {2}
    assert {start.node for start in started} == {"s0", "s1", "s2", "s3"}


def test_a_loss_behind_the_window_takes_another_epoch_of_the_same_incident() -> None:
    bench = job()
    actions: list[Action] = []
    for node in LOST[:3]:
        actions += bench.agent_lost(node)
    actions += bench.tick()
    bench.now += 1
    actions += bench.agent_lost(LOST[3])
    actions += bench.tick()
    assert len([a for a in actions if isinstance(a, IncidentOpened)]) == 1
    assert not [a for a in actions if isinstance(a, IncidentClosed)]
    assert bench.state.epoch == 3
