"""How many spares a policy comes to, and what batch host and order make of the plan."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.options import LaunchOptions, SpareBounds
from deadpool_launch.plan import make_plan
from deadpool_launch.policy.spares import choose, enough, needed, share_of
from deadpool_launch.prepare import settle_spares

NODES = ("n1", "n2", "n3", "n4", "n5")


def options(**changes: object) -> LaunchOptions:
    return LaunchOptions(script="/train.py", **changes)  # type: ignore[arg-type]


# ---------------------------------------------------------------- holders of replicas


def test_there_are_more_nodes_than_a_replica_has_holders() -> None:
    """Spares that start on failure hold nothing before."""
    both = options(replication_factor=4, spares=2)
    assert make_plan(NODES, None, both).active == ("n1", "n2", "n3")
    with pytest.raises(UsageError) as refused:
        make_plan(NODES, None, options(replication_factor=5, spares=2))
    assert str(refused.value) == (
        "replication.factor 5: replicas go to so many other nodes, and 3 active nodes and 2 spares "
        "make 4: allocate 6 nodes or more, or set at most 4"
    )
    with pytest.raises(UsageError, match=r"1 active node and 0 spares make 0: allocate 3 nodes"):
        make_plan(("n1",), None, options(replication_factor=2))
    late = options(replication_factor=3, spares=2, spare_start="on-failure")
    with pytest.raises(UsageError, match=r"3 active nodes and 0 spares make 2; spares that start "):
        make_plan(NODES, None, late)
    # One holder is asked for by nobody: a single node trains without.
    assert make_plan(("n1",), None, options()).active == ("n1",)


# ---------------------------------------------------------------- arithmetic


def test_probability_is_that_of_the_poisson_tables() -> None:
    assert enough(1.0, 0) == pytest.approx(0.36788, abs=1e-5)
    assert enough(2.0, 3) == pytest.approx(0.85712, abs=1e-5)
    assert enough(10.0, 15) == pytest.approx(0.95126, abs=1e-5)
    assert enough(0.0, 0) == 1.0
    assert enough(5000.0, 5000) == pytest.approx(0.5, abs=0.01)


def test_probability_is_that_of_simulated_losses() -> None:
    """Nodes that fail with exponential lifetimes, spares that fail as well, 5000 allocations."""
    dice, nodes, mtbf, hours, tries = random.Random(1), 40, 500.0, 24.0, 5000
    spares = needed(mtbf, hours, 0.95, active=None, total=nodes)
    assert spares is not None

    def losses() -> int:
        return sum(dice.expovariate(1 / mtbf) < hours for _ in range(nodes))

    lasted = sum(losses() <= spares for _ in range(tries)) / tries
    assert lasted >= 0.95
    assert lasted - enough(nodes * hours / mtbf, spares) == pytest.approx(0, abs=0.02)


@settings(deadline=None, max_examples=40)
@given(st.floats(200, 1e6), st.floats(0.1, 99), st.floats(0.5, 0.9999), st.integers(1, 300))
def test_number_is_the_smallest_that_suffices(
    mtbf: float, hours: float, probability: float, nodes: int
) -> None:
    for active, total in ((nodes, None), (None, nodes)):
        count = needed(mtbf, hours, probability, active=active, total=total)
        if count is None:
            continue
        for spares in (count, count - 1):
            mean = ((active or 0) + spares if active else nodes) * hours / mtbf
            assert (enough(mean, spares) >= probability) is (spares == count) or spares < 0


@given(st.integers(1, 500), st.floats(0.01, 0.9))
def test_share_is_rounded_up(nodes: int, fraction: float) -> None:
    of_all = share_of(fraction, active=None, total=nodes)
    assert of_all - 1 < fraction * nodes <= of_all + 1e-6
    beside = share_of(fraction, active=nodes, total=None)
    assert beside >= fraction * (nodes + beside) - 1e-6
    assert beside == math.ceil(fraction * nodes / (1 - fraction) - 1e-9)


# ---------------------------------------------------------------- from options to a number


def test_failure_rate_comes_to_a_number_and_says_why() -> None:
    wanted = options(node_mtbf_hours=20000.0, spare_probability=0.99)
    chosen = choose(wanted, total=66, hours_left=72.0)
    assert chosen is not None
    assert (chosen.count, chosen.remark) == (
        2,
        "spares.auto: 66 nodes with an MTBF of 20000 h lose at most 2 within 72 h with "
        "probability 0.9981: 2 are held",
    )


def test_hours_that_are_named_win_over_the_time_limit() -> None:
    wanted = options(node_mtbf_hours=1000.0, spare_hours=1.0)
    few = choose(wanted, total=50, hours_left=1000.0)
    assert few is not None
    assert few.count == 1


def test_without_hours_and_time_limit_a_person_is_asked_for_them() -> None:
    with pytest.raises(UsageError, match=r"name the hours in spares\.auto\.hours"):
        choose(options(node_mtbf_hours=1000.0), total=4, hours_left=None)


def test_nodes_that_cannot_last_are_refused() -> None:
    wanted = options(node_mtbf_hours=10.0, spare_hours=9.0)
    with pytest.raises(UnsuitableError, match=r"4 nodes with an MTBF of 10 h cannot last 9 h"):
        choose(wanted, total=4, hours_left=None)
    with pytest.raises(UnsuitableError, match=r"4 active nodes with an MTBF of 10 h cannot last"):
        choose(options(node_mtbf_hours=10.0, spare_hours=10.0, nodes=4), total=9, hours_left=None)


@pytest.mark.parametrize(
    ("least", "most", "held", "why"),
    [
        (None, 2, 2, "4 is above the site's limit of 2 (/etc/p.yaml): 2 are held"),
        (5, None, 5, "4 is below the site's limit of 5 (/etc/p.yaml): 5 are held"),
        (1, 9, 4, "spares.fraction 0.25: 4 are held"),
    ],
)
def test_sites_limit_bounds_what_is_computed(
    least: int | None, most: int | None, held: int, why: str
) -> None:
    bounds = SpareBounds(least=least, most=most, path="/etc/p.yaml")
    chosen = choose(options(spare_fraction=0.25, spare_bounds=bounds), total=16, hours_left=None)
    assert chosen is not None
    assert chosen.count == held
    assert chosen.remark.endswith(why)


def test_number_reaches_the_plan_with_its_reason() -> None:
    settled = settle_spares(LocalBackend(), options(nodes=3, spare_fraction=0.25))
    assert settled.spares == 1
    assert "note: spares.fraction 0.25: 1 is held" in make_plan(NODES, None, settled).describe()


# ---------------------------------------------------------------- roles


def test_batch_host_may_be_active_from_the_start() -> None:
    plan = make_plan(NODES, "n3", options(batch_host="active", spares=2))
    assert (plan.active, plan.spares) == (("n3", "n1", "n2"), ("n4", "n5"))
    assert "n3 runs ranks beside the launcher" in plan.describe()


def test_batch_host_may_be_kept_free_of_ranks() -> None:
    plan = make_plan(NODES, "n1", options(batch_host="never", spares=1))
    assert (plan.active, plan.spares, plan.unused) == (("n2", "n3", "n4"), ("n5",), ("n1",))
    assert "would hold them" not in plan.describe()
    with pytest.raises(UsageError, match=r"--nodes 4 and --spares 1 need 5 nodes.*has 4"):
        make_plan(NODES, "n1", options(batch_host="never", nodes=4, spares=1))
    with pytest.raises(UnsuitableError, match=r"no node but the batch host"):
        make_plan(("n1",), "n1", options(batch_host="never"))


def test_spares_may_be_used_from_the_end_of_the_list() -> None:
    plan = make_plan(NODES, "n1", options(spare_order="reversed", spares=3))
    assert (plan.active, plan.spares) == (("n2", "n3"), ("n5", "n4", "n1"))
    plan = make_plan(NODES, None, options(spare_order="reversed", nodes=2, spares=2))
    assert (plan.spares, plan.extras) == (("n5", "n4"), ("n3",))
