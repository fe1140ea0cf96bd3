"""The agreed step and the sources, against models that are too dumb to be wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deadpool_launch.controller.agreement import agree_on_step, choose_sources

STEPS = st.lists(st.integers(0, 6), max_size=4, unique=True).map(sorted)
TABLES = st.dictionaries(st.integers(0, 5), STEPS, min_size=1)


def dumb_agreement(
    slots: dict[int, list[int]], own: dict[int, list[int]], refused: set[int]
) -> int | None:
    """Try every step from the newest down, and ask every rank."""
    for step in range(6, -1, -1):
        if step in refused:
            continue
        donors = 0
        missing = 0
        for rank in slots:
            if step in slots[rank]:
                donors += 1
            elif step not in own.get(rank, []):
                missing += 1
        if donors and not missing:
            return step
    return None


@given(TABLES, st.dictionaries(st.integers(0, 5), STEPS), st.sets(st.integers(0, 6), max_size=3))
def test_agreement_is_the_dumb_model(
    slots: dict[int, list[int]], own: dict[int, list[int]], refused: set[int]
) -> None:
    agreement = agree_on_step(slots, own, refused)
    assert agreement.step == dumb_agreement(slots, own, refused)
    assert agreement.reason


def test_newest_common_step_is_chosen() -> None:
    assert agree_on_step({0: [19, 20, 21], 1: [18, 19, 20]}, {}).step == 20


def test_new_process_needs_its_own_part() -> None:
    assert agree_on_step({0: [19, 20], 1: []}, {1: [18, 19]}).step == 19


def test_new_process_without_own_part_blocks_every_step() -> None:
    agreement = agree_on_step({0: [19, 20], 1: [20], 2: []}, {})
    assert agreement.step is None
    assert agreement.reason == (
        "no step is whole on every rank: rank 0 with steps 19-20, rank 1 with step 20, "
        "rank 2 with the own part of no step"
    )


def test_own_parts_alone_make_no_state() -> None:
    agreement = agree_on_step({0: [], 1: []}, {0: [3], 1: [3]})
    assert agreement.step is None
    assert agreement.reason == "no rank of ranks 0-1 holds a step"


def test_refused_step_is_named() -> None:
    agreement = agree_on_step({0: [20], 1: [20]}, {}, {20})
    assert agreement.reason.endswith("; step 20 refused")


def test_rank_restored_a_moment_ago_can_go_back_further_with_a_donor() -> None:
    slots = {0: [18, 19, 20], 1: [20]}
    assert agree_on_step(slots, {1: [18, 19, 20]}, {20}).step == 19


@given(
    st.sets(st.integers(0, 20), max_size=12),
    st.dictionaries(st.integers(30, 45), st.sampled_from(["n1", "n2", "n3"]), min_size=1),
)
def test_sources_are_spread_evenly(needing: set[int], donors: dict[int, str]) -> None:
    sources = choose_sources(sorted(needing), donors)
    assert sources.keys() == needing
    assert set(sources.values()) <= donors.keys()
    used = [list(sources.values()).count(donor) for donor in donors]
    assert max(used) - min(used) <= 1
    nodes = {donors[donor] for donor in sources.values()}
    assert len(nodes) == min(len(needing), len(set(donors.values())))


def test_sources_do_not_depend_on_the_order_of_donors() -> None:
    donors = {1: "n1", 2: "n2", 3: "n1"}
    backwards = dict(reversed(donors.items()))
    assert choose_sources([7, 8], donors) == choose_sources([8, 7], backwards) == {7: 1, 8: 2}
