"""The tables of ranks and nodes say the same as plain ones, whatever was changed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deadpool_launch.controller.node import AgentStage, Node
from deadpool_launch.controller.rank import Rank, Stage, Trait, stage_traits
from deadpool_launch.controller.tables import NodeTable, RankTable, changed


@pytest.mark.parametrize("size", [1, 7, 128, 129, 400])
def test_a_changed_table_of_ranks_is_like_a_tuple(size: int) -> None:
    dice = random.Random(size)
    plain = [Rank(rank) for rank in range(size)]
    table = RankTable(plain)
    for _ in range(60):
        stage = dice.choice(list(Stage))
        changes = {
            rank: replace(
                plain[rank],
                stage=stage,
                deadline=dice.choice([None, dice.random()]),
                rebuilt=dice.random() < 0.9,
                completed=dice.choice([3, 4, 4, 4]),
                protected=dice.choice([1, 2, 2, 2]),
                steps_ended=dice.random() < 0.3,
                aside=dice.random() < 0.1,
            )
            for rank in dice.sample(range(size), min(size, dice.choice([1, 1, 3, 200])))
        }
        before, was = table, list(plain)
        for rank, entry in changes.items():
            plain[rank] = entry
        table = table.with_changes(changes)
        assert list(before) == was
        assert list(table) == plain
        assert (len(table), table[-1], table[size // 2]) == (size, plain[-1], plain[size // 2])
        times = [rank.deadline for rank in plain if rank.deadline is not None]
        assert table.deadline() == min(times, default=None)
        # Of one that is set aside it only counts whether it is being ended.
        seen = [rank for rank in plain if not rank.aside or rank.stage is Stage.DYING]
        of_stage = [rank for rank in seen if rank.stage in (stage, Stage.PARKED)]
        assert table.having(stage_traits(stage, Stage.PARKED)) == of_stage
        assert table.some(stage_traits(stage)) == any(rank.stage is stage for rank in seen)
        present = [rank for rank in plain if not rank.aside]
        assert table.every(Trait.REBUILT) == all(rank.rebuilt for rank in present)
        assert table.all_past(3) == all(r.completed > 3 for r in plain if r.goes_on)
        assert table.all_protected(2) == all(rank.protected == 2 for rank in present)
    assert table == RankTable(plain)
    with pytest.raises(IndexError, match=f"there is no rank {size} among {size}"):
        table[size]


def test_the_first_deadline_of_the_nodes_is_kept() -> None:
    dice = random.Random(1)
    table = NodeTable({name: Node(name) for name in "abcde"})
    for _ in range(300):
        name = dice.choice("abcde")
        times = [None, 1.0, 1.0, 2.0, 3.0]
        before = dict(table)
        stage = dice.choice([AgentStage.WARM, AgentStage.GONE])
        node = changed(
            table[name],
            deadline=dice.choice(times),
            inventory_by=dice.choice(times),
            stage=stage if dice.random() < 0.2 else table[name].stage,
        )
        after = table.with_nodes([node])
        assert (dict(table), after[name]) == (before, node)
        assert (after.stages is table.stages) == (node.stage is table[name].stage)
        table = after
        assert table.answers == sum(n.inventory_by is not None for n in table.values())
        known = [
            at for n in table.values() for at in (n.deadline, n.inventory_by) if at is not None
        ]
        assert table.deadline() == min(known, default=None)


def test_a_field_that_is_none_is_refused() -> None:
    with pytest.raises(KeyError, match="stagee"):
        changed(Rank(0), stagee=Stage.UP)
