"""Which node does what, and what is said when it cannot be done."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.faults import FaultKind, parse_fault
from deadpool_launch.options import LaunchOptions, choose_nproc, choose_site, default_run_dir
from deadpool_launch.plan import agent_argv, make_plan

NODES = ("n1", "n2", "n3", "n4")


def options(**changes: object) -> LaunchOptions:
    return LaunchOptions(script="/train.py", **changes)  # type: ignore[arg-type]


def test_batch_host_is_the_last_spare_to_be_used() -> None:
    plan = make_plan(NODES, "n1", options(spares=2))
    assert plan.active == ("n2", "n3")
    assert plan.spares == ("n4", "n1")


def test_batch_host_is_active_only_where_every_node_is() -> None:
    plan = make_plan(NODES, "n1", options())
    assert plan.active == ("n2", "n3", "n4", "n1")
    assert "n1 runs ranks beside the launcher" in plan.describe()


def test_batch_host_is_left_over_rather_than_active() -> None:
    plan = make_plan(NODES, "n1", options(nodes=3))
    assert plan.active == ("n2", "n3", "n4")
    assert (plan.extras, plan.unused) == (("n1",), ())
    plan = make_plan(NODES, "n1", options(nodes=3, extra_nodes="unused"))
    assert (plan.extras, plan.unused) == ((), ("n1",))


def test_nodes_that_are_left_over_come_behind_the_spares() -> None:
    plan = make_plan(NODES, None, options(nodes=2, spares=1))
    assert (plan.spares, plan.extras, plan.unused) == (("n3",), ("n4",), ())
    assert "used only when no spare is left (n4); --spares 2 would hold it" in plan.describe()


def test_batch_host_is_the_last_of_the_nodes_that_are_left_over() -> None:
    plan = make_plan(NODES, "n1", options(nodes=2, spares=1))
    assert (plan.active, plan.spares, plan.extras) == (("n2", "n3"), ("n4",), ("n1",))


def test_batch_host_is_a_spare_before_it_is_unused() -> None:
    plan = make_plan(NODES, "n1", options(nodes=2, spares=1, extra_nodes="unused"))
    assert (plan.active, plan.spares, plan.unused) == (("n2", "n3"), ("n1",), ("n4",))


def test_launcher_outside_the_nodes_leaves_their_order_alone() -> None:
    plan = make_plan(NODES, None, options(spares=1))
    assert (plan.active, plan.spares) == (("n1", "n2", "n3"), ("n4",))


def test_ranks_of_a_node_are_consecutive() -> None:
    plan = make_plan(NODES, "n1", options(spares=1, nproc_per_node=4))
    assert plan.world_size == 12
    assert plan.ranks_of(1) == (4, 5, 6, 7)


def test_holding_no_spare_is_said() -> None:
    assert "no spare is held" in make_plan(NODES, "n1", options()).describe()
    assert "no spare is held" not in make_plan(NODES, "n1", options(spares=1)).describe()


def test_node_that_failed_its_checks_costs_a_spare() -> None:
    plan = make_plan(NODES, "n1", options(spares=2), left_out=["n3"])
    assert plan.active == ("n2", "n4")
    assert plan.spares == ("n1",)
    assert "only 1 of 2 spares can be used" in plan.describe()


def test_too_few_good_nodes_name_the_bad_ones() -> None:
    with pytest.raises(UnsuitableError, match=r"3 active nodes needed.*2 of 4.*n2, n3 failed"):
        make_plan(NODES, "n1", options(spares=1), left_out=["n2", "n3"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"spares": 4}, r"--spares 4: the allocation has 4 nodes, so at most 3 spares"),
        ({"nodes": 4, "spares": 1}, r"--nodes 4 and --spares 1 need 5 nodes.*has 4.*--nodes=5"),
        ({"world_size": 7}, r"--world-size 7: 4 active nodes with --nproc-per-node 1 make 4"),
        ({"faults": (parse_fault("kill:4@2"),)}, r"--fault kill:4@2: ranks go from 0 to 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_in_one_sentence(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        make_plan(NODES, "n1", options(**changes))
    assert "\n" not in str(caught.value)


def test_one_node_cannot_hold_a_spare() -> None:
    with pytest.raises(UsageError, match=r"has 1 node, so at most 0 spares"):
        make_plan(("n1",), "n1", options(spares=1))


def test_allocation_without_nodes_is_refused() -> None:
    with pytest.raises(UnsuitableError):
        make_plan((), None, options())


@given(
    total=st.integers(1, 12),
    batch=st.integers(0, 12),
    nodes=st.none() | st.integers(1, 12),
    spares=st.integers(0, 12),
    bad=st.sets(st.integers(0, 11)),
    extra_nodes=st.sampled_from(("spares", "unused")),
)
def test_every_plan_gives_each_good_node_one_role(
    total: int, batch: int, nodes: int | None, spares: int, bad: set[int], extra_nodes: str
) -> None:
    names = [f"n{number}" for number in range(total)]
    batch_host = names[batch] if batch < total else None
    left_out = [name for number, name in enumerate(names) if number in bad]
    wanted = options(nodes=nodes, spares=spares, extra_nodes=extra_nodes)
    try:
        plan = make_plan(names, batch_host, wanted, left_out)
    except (UsageError, UnsuitableError):
        enough = (nodes if nodes is not None else max(total - spares, 1)) + spares <= total
        active_count = nodes if nodes is not None else total - spares
        assert not enough or total - len(left_out) < active_count
        return
    roles = [*plan.active, *plan.spares, *plan.extras, *plan.unused]
    assert not plan.extras or not plan.unused
    assert sorted(roles) == sorted(set(names) - set(left_out))
    assert len(plan.active) == (nodes if nodes is not None else total - spares)
    assert len(plan.spares) <= spares
    if batch_host in plan.active:
        assert not plan.spares
        assert not plan.extras
        assert not plan.unused
    if batch_host in plan.spares:
        assert plan.spares[-1] == batch_host
    if batch_host in plan.extras:
        assert plan.extras[-1] == batch_host
    if batch_host in plan.unused:
        assert not plan.spares


def test_agent_command_line_carries_no_secret() -> None:
    assert agent_argv("python", "n2", "10.0.0.1:4000", "/runs/7", 3) == [
        *("python", "-m", "deadpool_launch.agent", "--node", "n2"),
        *("--connect", "10.0.0.1:4000", "--run-dir", "/runs/7", "--epoch", "3"),
    ]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"spares": -1}, "--spares -1"),
        ({"nodes": 0}, "--nodes 0"),
        ({"site": "local", "nodes": 999999}, "--nodes 999999"),
        ({"site": "local", "spares": 999999}, "--spares 999999"),
        ({"world_size": 0}, "--world-size 0"),
        ({"nproc_per_node": 0}, "--nproc-per-node 0"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"heartbeat_timeout_s": 0.1}, "--heartbeat-timeout 0.1"),
        ({"collective_timeout_s": 3.0}, "--collective-timeout 3 s"),
        ({"collective_timeout_s": 90000.0}, "--collective-timeout 90000"),
        ({"agent_start_timeout_s": 0}, "--agent-start-timeout 0"),
        ({"site": "cloud"}, "--site cloud"),
        ({"spare_start": "never"}, "--spare-start never"),
        ({"site": "slurm", "faults": (parse_fault("vanish:n2@3"),)}, "--fault vanish:n2@3"),
        ({"world_size": 2, "faults": (parse_fault("kill:2@3"),)}, "--fault kill:2@3"),
    ],
)
def test_wrong_option_is_named(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: "):
        options(**changes)


def test_fault_names_what_it_strikes() -> None:
    strike = parse_fault("power-off:local2@5")
    assert (strike.kind, strike.node, strike.rank, strike.step) == (
        FaultKind.POWER_OFF,
        "local2",
        None,
        5,
    )
    strike = parse_fault("freeze:3@7")
    assert (strike.node, strike.rank, str(strike)) == (None, 3, "freeze:3@7")


@pytest.mark.parametrize(
    "text", ["", "kill", "kill:1", "kill:one@3", "explode:1@3", "kill:1@-3", "kill:1@3 "]
)
def test_malformed_fault_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--fault "):
        parse_fault(text)


def test_nodes_of_slurm_take_an_allocation() -> None:
    assert choose_site("slurm", {"SLURM_JOB_ID": "7"}) == "slurm"
    assert choose_site("local", {"SLURM_JOB_ID": "7"}) == "local"
    with pytest.raises(UnsuitableError, match=r"^not inside a Slurm allocation: submit "):
        choose_site("slurm", {})


def test_number_of_ranks_on_a_node() -> None:
    assert choose_nproc("auto", None) == 1
    assert choose_nproc("auto", 4) == 4
    assert choose_nproc("gpu", 4) == 4
    assert choose_nproc("3", 4) == 3
    for asked, gpus in (("gpu", None), ("0", 4), ("many", 4), ("-1", 4)):
        with pytest.raises(UsageError, match=f"^--nproc-per-node {asked}: "):
            choose_nproc(asked, gpus)


def test_run_directory_is_named_after_the_job() -> None:
    assert default_run_dir("17", "x") == "deadpool-runs/17"
    assert default_run_dir(None, "x") == "deadpool-runs/local-x"
    used = {"deadpool-runs/17", "deadpool-runs/17-2"}
    assert default_run_dir("17", "x", used.__contains__) == "deadpool-runs/17-3"
