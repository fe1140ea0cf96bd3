"""Which slot a copy goes into: what may be gone back to is never overwritten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_runtime.replication.slotting import (
    MOST_SLOTS,
    SLOTS,
    SlotTable,
    newest_below,
    own_slots,
    slot_for,
)

COUNT = settings(max_examples=200, deadline=None)
#: How many steps are completed before all go back to one of those that are there.
RUNS = st.lists(st.tuples(st.integers(1, 25), st.integers(0, 4)), min_size=1, max_size=5)


@pytest.mark.parametrize(("interval", "slots"), [(1, 3), (2, 4), (3, 5), (4, 5), (1000, 5)])
def test_a_rank_has_a_slot_more_for_each_replicated_step_that_is_not_among_the_newest(
    interval: int, slots: int
) -> None:
    assert own_slots(interval) == slots <= MOST_SLOTS


@COUNT
@given(RUNS)
def test_with_replicas_of_every_step_the_slots_are_used_in_turn(
    runs: list[tuple[int, int]],
) -> None:
    table, step = SlotTable(1), 0
    assert table.take(0) == (0, None)
    for count, back in runs:
        for _ in range(count):
            step += 1
            assert table.take(step)[0] == step % SLOTS
            assert table.replicates(step)
        step = max(0, step - min(back, 2))
        there = {each % SLOTS: each for each in range(max(0, step - 2), step + 1)}
        table.go_back(step, [], there)


@COUNT
@given(st.integers(1, 9), RUNS)
def test_the_newest_steps_and_the_newest_with_replicas_stay(
    interval: int, runs: list[tuple[int, int]]
) -> None:
    table, there = SlotTable(interval), dict[int, int]()
    replicated: list[int] = []
    step = base = 0

    def take(step: int) -> None:
        slot, overwritten = table.take(step)
        assert 0 <= slot < own_slots(interval)
        before = there.get(slot)
        assert overwritten == (None if before == step else before)
        there[slot] = step
        assert table.find(step) == slot
        assert table.replicates(step) == ((step - base) % interval == 0)
        if table.replicates(step):
            replicated.append(step)

    take(0)
    for count, back in runs:
        for _ in range(count):
            older = {*newest_below(step + 1, replicated)} & set(there.values())
            step += 1
            take(step)
            kept = {each for each in (step, step - 1, step - 2) if each >= base}
            assert {*kept, *older} <= set(there.values())
        # All go back to one of the steps that are there; some copies may be gone.
        step = base = sorted(there.values())[-1 - min(back, len(there) - 1)]
        replicated = [*newest_below(step, replicated)]
        table.go_back(step, replicated, there)
        assert table.replicates(step)
        replicated.append(step)


def test_the_newest_with_replicas_is_counted_from_where_all_went_back_to() -> None:
    table = SlotTable(3)
    assert [table.newest_replicated(step) for step in range(8)] == [0, 0, 0, 3, 3, 3, 6, 6]
    table.go_back(7, [3, 6], {})
    assert [table.newest_replicated(step) for step in range(7, 12)] == [7, 7, 7, 10, 10]


def test_a_copy_goes_where_its_step_lies_already() -> None:
    assert slot_for(6, {0: 3, 1: 4, 2: 6}, {3, 4}, SLOTS) == 2


def test_a_slot_whose_turn_it_is_not_is_taken_if_that_one_is_to_be_kept() -> None:
    assert slot_for(9, {0: 6, 1: 3, 2: 0}, {6, 3}, SLOTS) == 2
    assert slot_for(9, {0: 6, 1: 3}, {6, 3}, SLOTS) == 2
