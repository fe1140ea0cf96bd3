"""Random faults in the fake cluster: whatever happens, the job ends with a verdict that is true."""

from __future__ import annotations

import os
import random

import pytest
from fake_cluster import FAULT_KINDS, LAST_STEP, FakeCluster, Fault, quick_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workbench import of_type, render

from deadpool_launch.controller.events import (
    IncidentClosed,
    IncidentOpened,
    StartRanks,
    TakeStacks,
)
from deadpool_launch.controller.states import Phase
from deadpool_launch.exits import ExitCode

#: Raise it for a longer search: ``DEADPOOL_SEEDS=5000``.
SEEDS = int(os.environ.get("DEADPOOL_SEEDS", "60"))
COUNT = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def faults_of(*kinds: str, most: int = 5) -> st.SearchStrategy[list[Fault]]:
    fault = st.builds(
        Fault,
        at=st.floats(0.0, 9.0, allow_nan=False),
        kind=st.sampled_from(kinds),
        target=st.integers(0, 11),
    )
    return st.lists(fault, max_size=most)


@st.composite
def clusters(draw: st.DrawFn, *kinds: str, attaches: bool = True) -> FakeCluster:
    config = quick_config(
        nodes=draw(st.integers(1, 3)),
        spares=draw(st.integers(0, 3)),
        nproc_per_node=draw(st.integers(1, 3)),
        spare_start=draw(st.sampled_from(["at-start", "on-failure"])),
        gather_s=draw(st.sampled_from([0.0, 0.05])),
        checkpoint_dir=draw(st.sampled_from(["", "/checkpoints"])),
    )
    every = draw(st.integers(1, 3)) if config.checkpoint_dir else 0
    seed, faults = draw(st.integers(0, 2**16)), draw(faults_of(*kinds))
    return FakeCluster(config, seed, faults, attaches, every)


def check_end(cluster: FakeCluster) -> ExitCode:
    """Run the job and check all that must be true of its trace, whatever happened."""
    finish = cluster.run()
    state = cluster.bench.state
    assert state.phase is Phase.ENDED
    opened = [a.number for a in of_type(IncidentOpened, cluster.bench.trace)]
    closed = [a.number for a in of_type(IncidentClosed, cluster.bench.trace)]
    assert opened == closed == list(range(1, len(opened) + 1))
    born = [(rank, a.epoch) for a in of_type(StartRanks, cluster.bench.trace) for rank in a.ranks]
    assert len(born) == len(set(born)), "a process has a name of its own"
    assert finish.reason
    if finish.exit_code == ExitCode.OK and cluster.attaches:
        for process in cluster.processes.values():
            assert process.state.step == LAST_STEP
    return ExitCode(finish.exit_code)


@COUNT
@given(clusters(*FAULT_KINDS))
def test_every_job_ends_with_a_verdict(cluster: FakeCluster) -> None:
    check_end(cluster)


@COUNT
@given(clusters(*FAULT_KINDS, attaches=False))
def test_every_job_of_a_script_without_the_runtime_ends(cluster: FakeCluster) -> None:
    check_end(cluster)


@COUNT
@given(clusters("kill", "power", "freeze"))
def test_machine_faults_are_never_blamed_on_the_script(cluster: FakeCluster) -> None:
    assert check_end(cluster) is not ExitCode.SCRIPT_FAILED


@COUNT
@given(clusters("raise", "fail"))
def test_no_spare_is_used_for_a_script_error(cluster: FakeCluster) -> None:
    code = check_end(cluster)
    used = [a for a in of_type(StartRanks, cluster.bench.trace) if a.node.startswith("s")]
    assert not used
    assert code in (ExitCode.OK, ExitCode.SCRIPT_FAILED)


@pytest.mark.parametrize("attaches", [True, False])
def test_many_seeds_end_with_a_verdict(attaches: bool) -> None:
    """Hypothesis looks for small cases; this one looks for crowded ones."""
    for seed in range(SEEDS):
        dice = random.Random(seed)
        config = quick_config(
            nodes=dice.randint(1, 4),
            spares=dice.randint(0, 3),
            nproc_per_node=dice.randint(1, 3),
            spare_start=dice.choice(["at-start", "on-failure"]),
            gather_s=dice.choice([0.0, 0.05]),
            checkpoint_dir="/checkpoints" if seed % 2 else "",
        )
        faults = [
            Fault(dice.uniform(0.0, 6.0), dice.choice(FAULT_KINDS), dice.randrange(12))
            for _ in range(dice.randint(1, 6))
        ]
        check_end(FakeCluster(config, seed, faults, attaches, 1 + seed % 3 if seed % 2 else 0))


def test_what_is_lost_from_memory_comes_back_from_disk() -> None:
    """Half of the nodes go away at once, again and again, and some checkpoints are damaged."""
    read = ended_well = 0
    for seed in range(SEEDS):
        dice = random.Random(seed)
        config = quick_config(4, 6, 1, "at-start", checkpoint_dir="/checkpoints")
        faults = []
        for _ in range(dice.randint(1, 3)):
            at, first = dice.uniform(2.5, 7.0), dice.randrange(4)
            faults += [Fault(at, "power", first), Fault(at + 0.01, "power", (first + 1) % 4)]
        faults += [Fault(dice.uniform(2.0, 7.0), "disk", 0) for _ in range(dice.randint(0, 2))]
        cluster = FakeCluster(config, seed, faults, True, dice.randint(1, 3))
        code = check_end(cluster)
        assert code in (ExitCode.OK, ExitCode.STATE_LOST, ExitCode.NO_SPARE)
        read += cluster.disk.reads > 0
        ended_well += cluster.disk.reads > 0 and code is ExitCode.OK
    assert read >= SEEDS // 4, "the seeds are no test of it"
    assert ended_well >= SEEDS // 8


def test_faults_in_quick_succession_never_mix_two_histories() -> None:
    """A step is undone, and lost again before it is run anew: old copies lie beside new ones."""
    for seed in range(SEEDS):
        dice = random.Random(seed)
        config = quick_config(3, 2, 1, "at-start", gather_s=0.0)
        first = dice.uniform(2.0, 3.5)
        faults = [Fault(first, "kill", dice.randrange(3))]
        faults += [
            Fault(first + dice.uniform(0.2, 3.0), dice.choice(["kill", "power"]), dice.randrange(3))
            for _ in range(3)
        ]
        check_end(FakeCluster(config, seed, faults, True))


@pytest.mark.parametrize("seed", range(30))
def test_one_lost_node_never_ends_the_job_while_a_spare_is_left(seed: int) -> None:
    config = quick_config(nodes=3, spares=1, nproc_per_node=2, spare_start="at-start")
    cluster = FakeCluster(config, seed, [Fault(2.5 + 0.01 * seed, "power", seed % 3)], True)
    assert check_end(cluster) is ExitCode.OK
    assert len(cluster.happened) == 1
    # Every rank had completed the step before the interrupted one; of that the replica may lack.
    assert [step >= completed - 1 for step, completed in cluster.plans] == [True]
    assert [a.verdict for a in of_type(IncidentClosed, cluster.bench.trace)] == ["continued"]


@pytest.mark.parametrize("kind", ["hang", "lock"])
def test_one_rank_that_hangs_costs_a_process_only_if_it_is_stuck(kind: str) -> None:
    struck = 0
    for seed in range(20):
        config = quick_config(nodes=3, spares=1, nproc_per_node=2, spare_start="at-start")
        fault = Fault(2.5 + 0.05 * seed, kind, seed % 6)
        cluster = FakeCluster(config, seed, [fault], True)
        assert check_end(cluster) is ExitCode.OK
        started = [a.ranks for a in of_type(StartRanks, cluster.bench.trace)][3:]
        if not of_type(TakeStacks, cluster.bench.trace):
            continue  # the rank was between two collectives when it was struck, and went on
        struck += 1
        assert started == ([(seed % 6,)] if kind == "lock" else [])
    assert struck >= 5, "the seeds are no test of it"


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace() -> list[str]:
        config = quick_config(nodes=3, spares=2, nproc_per_node=2, spare_start="on-failure")
        faults = [Fault(2.5, "power", 1), Fault(3.0, "kill", 4), Fault(4.0, "freeze", 0)]
        cluster = FakeCluster(config, 7, faults, True)
        cluster.run()
        assert cluster.happened == faults
        return render(cluster.bench.trace)

    assert trace() == trace()


def test_stop_request_ends_a_running_job() -> None:
    config = quick_config(nodes=2, spares=0, nproc_per_node=1, spare_start="at-start")
    cluster = FakeCluster(config, 1, [], True)
    cluster.stop(2.0, 15)
    assert check_end(cluster) is ExitCode.TERMINATED
