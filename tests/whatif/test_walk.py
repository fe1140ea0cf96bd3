"""A simulated run against closed forms, against sums by hand, and against itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_launch.whatif.estimate import estimate, mean
from deadpool_launch.whatif.faults import Fault, Renewal
from deadpool_launch.whatif.job import Account, Job
from deadpool_launch.whatif.replication import replay
from deadpool_launch.whatif.strategies import ALL, DEADPOOL, FIXED, YOUNG_DALY
from deadpool_launch.whatif.walk import Rules, walk

HOUR = 3600.0
#: A checkpoint of 5 s after every 10 steps of 1 s, a restart of 60 s; nothing in memory.
RESTART = Rules(0.0, None, 0.0, 10, 5.0, 60.0, 60.0, 60.0)
#: A copy after every step, 40 s for a swap, 20 s for a process, 300 s from the checkpoint.
SWAP = Rules(0.0, 1, 0.0, 10, 0.0, 20.0, 40.0, 300.0)
JOB = Job(steps=100, step_s=1.0, nodes=4, spares=1, queue_s=1000.0, least_nodes=2)


def run(rules: Rules, *faults: Fault, job: Job = JOB, limit_s: float = 1e9) -> Account:
    return walk(job, rules, iter(faults), limit_s)


def lost(at: float, *seats: int) -> Fault:
    return Fault(at, seats, permanent=True)


def hiccup(at: float, seat: int = 0) -> Fault:
    return Fault(at, (seat,), permanent=False)


def parts(account: Account) -> float:
    return math.fsum(
        (
            *(account.useful_s, account.overhead_s, account.saving_s, account.slow_s),
            *(account.lost_s, account.recovering_s, account.queued_s),
        )
    )


# ---------------------------------------------------------------- without faults, and one fault


def test_without_faults_a_job_takes_its_steps_what_is_added_to_them_and_its_checkpoints() -> None:
    account = run(replace(RESTART, overhead=0.02))
    assert account.total_s == pytest.approx(100 * 1.02 + 10 * 5)
    assert (account.useful_s, account.saving_s) == (100, 50)
    assert account.overhead_s == pytest.approx(2.0)
    assert account.goodput == pytest.approx(100 / 152)


def test_a_restart_loses_all_since_the_last_checkpoint() -> None:
    # 35 s: 20 steps and two checkpoints take 30 s, 5 more steps are done again.
    account = run(RESTART, lost(35.0, 2))
    assert (account.lost_s, account.replayed_steps, account.recovering_s) == (5.0, 5, 60.0)
    assert account.total_s == 100 + 50 + 5 + 60
    assert (account.spares_used, account.faults, account.incidents) == (1, 1, 1)


def test_a_checkpoint_that_is_not_whole_is_none() -> None:
    # 27 s: the checkpoint after step 20 would be whole at 30 s.
    account = run(RESTART, lost(27.0, 2))
    assert account.lost_s == 27 - 15


def test_a_swap_loses_the_step_under_way() -> None:
    account = run(SWAP, lost(35.75, 2))
    assert account.lost_s == pytest.approx(0.75)
    assert (account.replayed_steps, account.recovering_s) == (0, 40)


def test_a_process_that_ends_takes_no_spare() -> None:
    account = run(SWAP, hiccup(10.5))
    assert (account.recovering_s, account.spares_used) == (20, 0)


# ---------------------------------------------------------------- spares, and what is left without


def test_a_spare_that_failed_while_it_waited_is_not_there() -> None:
    account = run(SWAP, lost(5.0, 4), lost(10.5, 2))
    assert (account.spares_lost, account.spares_used, account.requeues) == (1, 0, 1)


def test_without_a_spare_a_new_allocation_is_waited_for() -> None:
    account = run(SWAP, lost(10.5, 2), lost(70.25, 1))
    # 10 steps, 40.5 s, 19.75 s of which 19 steps: at step 29 the second fault goes back to 20.
    assert account.requeues == 1
    assert (account.queued_s, account.recovering_s) == (1000, 40 + 300)
    assert account.replayed_steps == 9
    assert account.total_s == pytest.approx(100 + 0.5 + 9.75 + 340 + 1000)


def test_faults_of_others_nodes_while_waiting_are_none_of_the_jobs() -> None:
    faults = [lost(10.5, 2), lost(70.25, 1)]
    assert run(SWAP, *faults, lost(500.0, 0)) == run(SWAP, *faults)


def test_elastic_goes_on_slower_with_the_nodes_that_are_left() -> None:
    elastic = replace(SWAP, exclude_s=30.0)
    account = run(elastic, lost(10.0, 3), job=replace(JOB, spares=0))
    # 10 steps, 30 s, then 90 steps at three quarters of the speed.
    assert account.total_s == pytest.approx(10 + 30 + 90 / 0.75)
    assert account.slow_s == pytest.approx(30)
    again = run(elastic, lost(10.0, 3), lost(50.0, 3), job=replace(JOB, spares=0))
    assert again == account


def test_elastic_with_too_few_nodes_waits_for_an_allocation() -> None:
    elastic = replace(SWAP, exclude_s=30.0)
    job = replace(JOB, spares=0, least_nodes=3)
    account = run(elastic, lost(10.0, 3), lost(50.0, 2), job=job)
    assert (account.requeues, account.queued_s) == (1, 1000)


# ---------------------------------------------------------------- copies, and who holds them


def test_a_rank_and_its_holder_lost_together_go_back_to_the_checkpoint() -> None:
    job = replace(JOB, spares=4)
    apart = run(SWAP, lost(35.5, 0, 2), job=job)
    assert (apart.replayed_steps, apart.recovering_s) == (0, 40)
    together = run(SWAP, lost(35.5, 1, 2), job=job)
    assert (together.replayed_steps, together.recovering_s) == (5, 300)


def test_the_holder_is_lost_during_the_recovery() -> None:
    account = run(SWAP, lost(35.5, 1), lost(50.0, 2), job=replace(JOB, spares=4))
    assert account.incidents == 1
    assert account.replayed_steps == 5
    assert account.recovering_s == pytest.approx(14.5 + 300)


def test_replicas_outside_of_the_failure_domain_survive_it() -> None:
    job = replace(JOB, spares=4)
    assert run(SWAP, lost(35.5, 0, 1), job=job).replayed_steps == 5
    assert run(SWAP, lost(35.5, 0, 1), job=replace(job, domain=2)).replayed_steps == 0


def test_the_only_node_has_its_replica_on_a_spare() -> None:
    job = replace(JOB, nodes=1, least_nodes=1)
    assert run(SWAP, lost(35.5, 0), job=job).replayed_steps == 0


def test_a_fault_during_a_recovery_begins_it_again() -> None:
    account = run(SWAP, lost(10.0, 0), hiccup(30.0, 3))
    assert account.recovering_s == 20 + 40
    assert (account.incidents, account.faults) == (1, 2)


def test_a_job_that_never_comes_through_is_given_up() -> None:
    endless = (lost(30.0 * number, 0) for number in range(1, 10_000))
    account = walk(replace(JOB, spares=10_000), RESTART, endless, limit_s=10_000.0)
    assert not account.finished
    assert parts(account) == pytest.approx(account.total_s)


def test_with_two_holders_it_takes_both_to_go_back_to_the_checkpoint() -> None:
    job, two = replace(JOB, nodes=5, spares=4), replace(SWAP, holders=2)
    assert run(two, lost(35.5, 1, 2), job=job).replayed_steps == 0
    assert run(two, lost(35.5, 1, 3), job=job).replayed_steps == 0
    account = run(two, lost(35.5, 1, 2, 3), job=job)
    assert (account.replayed_steps, account.recovering_s) == (5, 300)
    # One after the other during a recovery is at once too.
    later = run(two, lost(35.5, 1), lost(40.0, 2), lost(45.0, 3), job=job)
    assert (later.replayed_steps, later.recovering_s) == (5, 9.5 + 300)


def test_with_an_interval_a_lost_node_goes_back_to_the_newest_step_with_replicas() -> None:
    third = replace(SWAP, replicate_every=3)
    account = run(third, lost(35.5, 2))
    assert (account.replayed_steps, account.lost_s, account.recovering_s) == (2, 2.5, 40)
    assert run(third, hiccup(35.5)).replayed_steps == 0
    # 35 is replicated once all went on from it, and then 38: the second goes back from 40 to 38.
    again = run(third, hiccup(35.5), lost(61.0, 2))
    assert (again.faults, again.replayed_steps) == (2, 2)


def test_a_node_lost_while_a_process_comes_back_costs_steps_without_replicas() -> None:
    account = run(replace(SWAP, replicate_every=3), hiccup(35.5), lost(40.0, 2))
    assert (account.incidents, account.replayed_steps) == (1, 2)


def test_a_replica_that_is_under_way_is_none() -> None:
    for every, whole in ((1, 35), (5, 35)):
        slow = replace(SWAP, replicate_every=every, replicate_s=0.75)
        assert run(slow, lost(35.8, 2)).replayed_steps == 35 - whole
        assert run(slow, lost(35.7, 2)).replayed_steps == 35 - whole + every
        assert run(slow, hiccup(35.7)).replayed_steps == 0


# ---------------------------------------------------------------- closed forms


def total_s(job: Job, rules: Rules, faults: Renewal, seeds: Iterable[int]) -> list[float]:
    return [
        walk(job, rules, faults.stream(seed, job.nodes, job.spares), math.inf).total_s
        for seed in seeds
    ]


def test_expected_time_is_that_of_exponential_faults() -> None:
    """A stretch of ``t`` between checkpoints and restarts of ``r`` that faults strike as well takes
    ``exp(r / m) (exp(t / m) - 1) m`` in the mean, with a fault of the job every ``m`` (Daly 2006).
    """
    job = replace(JOB, steps=2000, nodes=5)
    m = 200.0
    found = mean(total_s(job, RESTART, Renewal(m * job.nodes, transient=1.0), range(400)))
    expected = 200 * math.exp(60 / m) * (math.exp(15 / m) - 1) * m
    assert found.value == pytest.approx(expected, abs=1.5 * found.half)
    assert found.half < 0.02 * expected


def test_lost_work_is_half_an_interval_and_half_a_step() -> None:
    job, faults = replace(JOB, steps=20_000, nodes=10), Renewal(10 * 2000.0, transient=1.0)
    for rules, expected in ((RESTART, 15 / 2), (SWAP, 0.5)):
        runs = [walk(job, rules, faults.stream(seed, 10, 0), math.inf) for seed in range(100)]
        each = sum(run.lost_s for run in runs) / sum(run.incidents for run in runs)
        assert each == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(("interval", "whole_s"), [(1, 0.4), (4, 0.4)])
def test_steps_run_again_are_those_that_a_plan_expects(interval: int, whole_s: float) -> None:
    job, faults = replace(JOB, steps=10_000, nodes=100, spares=1000), Renewal(100 * 1000.0)
    rules = replace(SWAP, replicate_every=interval, replicate_s=whole_s)
    runs = [walk(job, rules, faults.stream(seed, 100, 1000), math.inf) for seed in range(50)]
    each = sum(run.replayed_steps for run in runs) / sum(run.incidents for run in runs)
    again = replay(interval, whole_s, job.step_s)
    assert each == pytest.approx(again.mean, rel=0.1, abs=0.05)
    assert again.mean <= again.most == interval


def test_young_and_daly_name_the_best_interval() -> None:
    job = Job(steps=20_000, step_s=5.0, nodes=64, spares=0, queue_s=HOUR)
    faults = Renewal(64 * 2 * HOUR, transient=1.0)
    best = YOUNG_DALY.save_every_s(job, faults)
    assert best == pytest.approx(math.sqrt(2 * 10 * 2 * HOUR))
    found = {
        factor: estimate(job, faults, FIXED.changed("save-every", factor * best), range(60))
        for factor in (0.3, 1.0, 3.0)
    }
    assert found[1.0].mean("total_s").high < found[0.3].mean("total_s").low
    assert found[1.0].mean("total_s").high < found[3.0].mean("total_s").low
    by_itself = estimate(job, faults, YOUNG_DALY, range(60))
    assert by_itself.accounts == found[1.0].accounts


# ---------------------------------------------------------------- properties

some_rules = st.builds(
    Rules,
    overhead=st.floats(0, 0.5),
    copy_every=st.sampled_from([None, 1, 1, 3]),
    copy_s=st.floats(0, 2),
    save_every=st.integers(1, 40),
    save_s=st.floats(0, 10),
    transient_s=st.floats(0, 100),
    permanent_s=st.floats(0, 100),
    reload_s=st.floats(0, 100),
    exclude_s=st.sampled_from([None, 30.0]),
    replicate_every=st.sampled_from([1, 1, 4]),
    replicate_s=st.floats(0, 5),
    holders=st.sampled_from([1, 1, 2]),
)
some_faults = st.builds(
    Renewal,
    mtbf_s=st.floats(300, 1e5),
    shape=st.sampled_from([0.7, 1.0, 2.0]),
    transient=st.floats(0, 1),
    group=st.sampled_from([1, 2]),
    group_mtbf_s=st.just(5000.0),
)
some_jobs = st.builds(
    Job,
    steps=st.integers(1, 300),
    step_s=st.floats(0.1, 5),
    nodes=st.integers(1, 6),
    spares=st.integers(0, 3),
    queue_s=st.floats(0, 500),
    least_nodes=st.integers(1, 6),
    domain=st.integers(1, 3),
)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(some_jobs, some_rules, some_faults, st.integers(0, 1000))
def test_accounts_add_up(job: Job, rules: Rules, faults: Renewal, seed: int) -> None:
    account = walk(job, rules, faults.stream(seed, job.nodes, job.spares), 30 * job.undisturbed_s)
    assert parts(account) == pytest.approx(account.total_s, abs=1e-6)
    assert min(account.as_dict().values()) >= -1e-6
    assert account.held_node_s == pytest.approx(job.seats * (account.total_s - account.queued_s))
    assert account.wasted_node_s >= -1e-6
    assert account.spares_gone <= job.spares * (account.requeues + 1)
    if account.finished:
        assert account.useful_s == pytest.approx(job.undisturbed_s)
    again = walk(job, rules, faults.stream(seed, job.nodes, job.spares), 30 * job.undisturbed_s)
    assert again == account


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    st.sampled_from(ALL),
    st.integers(2, 20),
    st.integers(0, 4),
    st.floats(20, 300),
    st.sampled_from([0.0, 0.3]),
)
def test_one_more_spare_is_never_worse_in_the_mean(
    strategy: object, nodes: int, spares: int, mtbf_h: float, transient: float
) -> None:
    faults = Renewal(mtbf_h * HOUR, transient=transient)
    job = Job(2000, 20.0, nodes, spares, queue_s=2 * HOUR, least_nodes=max(1, nodes // 2))
    more = replace(job, spares=spares + 1)
    few, many = (estimate(each, faults, strategy, range(40)) for each in (job, more))  # type: ignore[arg-type]
    gained = mean(
        [
            one.total_s - other.total_s
            for one, other in zip(few.accounts, many.accounts, strict=True)
        ]
    )
    assert gained.high >= -1e-6
    assert gained.value >= -0.02 * job.undisturbed_s


def test_an_incident_costs_deadpool_less_than_a_restart_does() -> None:
    job = Job(20_000, 10.0, 64, 30, queue_s=HOUR)
    faults = Renewal(1000 * HOUR)
    swap, restart = (estimate(job, faults, each, range(20)) for each in (DEADPOOL, FIXED))
    assert swap.mean("recovery_s").high < 0.1 * restart.mean("recovery_s").low
