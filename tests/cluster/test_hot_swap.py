"""A real job on real Slurm loses nodes and processes, goes on, and ends in the state of an
undisturbed run.

Three active nodes and one spare. ``ranks_a_node`` is two where that adds something, else one. Every
case asserts that the fault struck, that the numbers are the undisturbed run's, that at most one
completed step ran again, that survivors kept their processes and that the Slurm job stayed the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from mini_cluster import MiniCluster
from training_job import TrainingJob, submit

pytestmark = pytest.mark.cluster

#: Trains in the layout that its second argument names.
LAYOUT = Path(__file__).parents[1] / "runtime" / "scripts" / "layout.py"
STEPS = 10
#: The step in which faults strike.
FAULT_STEP = 5


def launch_options(ranks_a_node: int, spare_start: str, spares: int = 1) -> list[str]:
    return [
        f"--spares={spares}",
        f"--nproc-per-node={ranks_a_node}",
        f"--spare-start={spare_start}",
    ]


_references: dict[tuple[str, ...], dict[int, dict[str, str]]] = {}


def reference(
    slurm: MiniCluster, ranks_a_node: int, script_args: Sequence[str] = ()
) -> dict[int, dict[str, str]]:
    """Final state of an undisturbed run of the same size; run once per session."""
    key = (str(ranks_a_node), *script_args)
    if key not in _references:
        job = submit(
            slurm,
            launch=launch_options(ranks_a_node, "on-failure"),
            script_args=[f"--steps={STEPS}", *script_args],
        )
        end = job.wait_end()
        assert end["exit_code"] == 0, job.everything()
        assert not job.records("incident")
        state = job.final_state()
        assert len(state) == 3 * ranks_a_node
        _references[key] = state
    return _references[key]


def assert_went_on(
    job: TrainingJob,
    expected: dict[int, dict[str, str]],
    replaced: set[int],
    incidents: int = 1,
) -> None:
    """The job ended well, in the expected state, and only ``replaced`` ranks got new processes."""
    end = job.wait_end()
    assert end["exit_code"] == 0, job.everything()
    closed = job.incidents()
    assert [record["verdict"] for record in closed] == ["continued"] * incidents, job.everything()
    assert all(record["replayed_steps"] <= 1 for record in closed)
    assert job.final_state() == expected, job.everything()
    processes = job.process_ids()
    assert {rank for rank, ids in processes.items() if len(ids) > 1} == replaced
    jobs = {record["job_id"] for record in job.records("job")}
    assert jobs == {str(job.job_id)}


def strike_in_backward(
    slurm: MiniCluster, fault: str, rank: int, ranks_a_node: int, spare_start: str
) -> TrainingJob:
    job = submit(
        slurm,
        launch=launch_options(ranks_a_node, spare_start),
        script_args=[f"--steps={STEPS}", f"--hold={rank}:{FAULT_STEP}:backward"],
    )
    job.wait_held(rank, FAULT_STEP)
    job.strike(fault, rank)
    return job


def ranks_on_node_of(rank: int, ranks_a_node: int) -> set[int]:
    first = rank - rank % ranks_a_node
    return set(range(first, first + ranks_a_node))


both_spare_starts = pytest.mark.parametrize("spare_start", ["at-start", "on-failure"])
#: The second way adds little to what other cases show of it; it belongs to the whole matrix.
mostly_at_start = pytest.mark.parametrize(
    "spare_start", ["at-start", pytest.param("on-failure", marks=pytest.mark.matrix)]
)


@both_spare_starts
def test_power_off_in_the_middle_of_backward(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 2)
    job = strike_in_backward(slurm, "power-off", 3, 2, spare_start)
    assert_went_on(job, expected, ranks_on_node_of(3, 2))
    assert "takes ranks 2-3" in job.said()


@mostly_at_start
def test_power_off_of_the_node_of_rank_zero(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 1)
    job = strike_in_backward(slurm, "power-off", 0, 1, spare_start)
    assert_went_on(job, expected, {0})


@mostly_at_start
def test_node_vanishes_without_a_reset(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 1)
    job = strike_in_backward(slurm, "vanish", 1, 1, spare_start)
    assert_went_on(job, expected, {1})
    assert "no heartbeat for" in job.said()


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["fsdp", "zero", "ddp"])
def test_power_off_of_a_node_with_state_that_only_it_has(slurm: MiniCluster, layout: str) -> None:
    def run(*args: str) -> TrainingJob:
        out = slurm.base / f"out-{layout}-{len(args)}"
        out.mkdir(exist_ok=True)
        script_args = [str(out), layout, f"--steps={STEPS}", *args]
        launch = launch_options(1, "at-start")
        return submit(slurm, launch=launch, script=LAYOUT, script_args=script_args)

    undisturbed = run()
    assert undisturbed.wait_end()["exit_code"] == 0, undisturbed.everything()
    job = run(f"--hold=1:{FAULT_STEP}:backward")
    job.wait_held(1, FAULT_STEP)
    job.strike("power-off", 1)
    assert_went_on(job, undisturbed.final_state(), {1})
    assert job.records("incident", phase="redundancy restored"), job.everything()


@pytest.mark.matrix
def test_replicas_go_by_mpi_and_a_lost_node_costs_only_that(slurm: MiniCluster) -> None:
    """The movers are a job step of their own; the next world is of the nodes that are left."""
    expected = reference(slurm, 1)
    args = [f"--steps={STEPS}", "--step-s=0.5", f"--hold=1:{FAULT_STEP}:backward"]
    job = submit(slurm, launch=[*launch_options(1, "at-start"), "--mpi=pmi2"], script_args=args)
    job.wait("replicas go by MPI", lambda: "go by mpi, not tcp" in job.said())
    job.wait_held(1, FAULT_STEP)
    job.strike("power-off", 1)
    assert_went_on(job, expected, {1})
    # Line by line, as said: to the lost node by TCP at once, in the next world by MPI again.
    assert "go by tcp, not mpi any more" in job.said()
    assert job.said().rindex("go by mpi, not tcp") > job.said().index("go by tcp, not mpi")


@pytest.mark.matrix
def test_node_and_holder_are_lost_at_once_and_the_checkpoint_is_there(slurm: MiniCluster) -> None:
    """Only what one rank alone has is gone with both; all go back to what is on disk."""

    def run(*args: str, checkpoints: str) -> TrainingJob:
        out = slurm.base / f"out-{checkpoints}"
        out.mkdir(exist_ok=True)
        launch = [
            *launch_options(1, "at-start", spares=2),
            f"--checkpoint-dir={slurm.base / checkpoints}",
            "--checkpoint-every=2",
        ]
        script_args = [str(out), "fsdp", f"--steps={STEPS}", *args]
        return submit(slurm, nodes=5, launch=launch, script=LAYOUT, script_args=script_args)

    undisturbed = run(checkpoints="quiet")
    assert undisturbed.wait_end()["exit_code"] == 0, undisturbed.everything()
    job = run(f"--hold=1:{FAULT_STEP}:backward", checkpoints="kept")
    job.wait_held(1, FAULT_STEP)
    job.wait("a checkpoint", lambda: job.records("checkpoint"))
    # The holder of rank 1's replica is on the node of the next rank of its ring.
    job.strike("power-off", 1)
    job.cluster.power_off(job.node_of(2))
    end = job.wait_end()
    assert end["exit_code"] == 0, job.everything()
    assert job.records("incident", phase="durable checkpoint"), job.everything()
    assert job.final_state() == undisturbed.final_state(), job.everything()


@mostly_at_start
def test_kill_of_one_rank_is_repaired_on_its_own_node(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 2)
    job = strike_in_backward(slurm, "kill", 4, 2, spare_start)
    assert_went_on(job, expected, {4})
    assert len({node for node, _pid in job.process_ids()[4]}) == 1


@pytest.mark.matrix
@mostly_at_start
def test_frozen_rank_is_ended_and_replaced(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 1)
    job = strike_in_backward(slurm, "freeze", 2, 1, spare_start)
    assert_went_on(job, expected, {2})


@pytest.mark.matrix
def test_frozen_node_is_replaced_and_cannot_come_back(slurm: MiniCluster) -> None:
    expected = reference(slurm, 1)
    job = strike_in_backward(slurm, "freeze-node", 1, 1, "at-start")
    node = job.process_ids()[1][0][0]
    job.wait("the swap", lambda: job.incidents())
    slurm.thaw(node)
    assert_went_on(job, expected, {1})


@pytest.mark.matrix
def test_every_process_is_killed_at_once_and_the_arenas_are_there(slurm: MiniCluster) -> None:
    expected = reference(slurm, 1)
    holds = [f"--hold={rank}:{FAULT_STEP}:backward" for rank in range(3)]
    job = submit(
        slurm,
        launch=launch_options(1, "at-start"),
        script_args=[f"--steps={STEPS}", *holds],
    )
    for rank in range(3):
        job.wait_held(rank, FAULT_STEP)
    for rank in range(3):
        job.strike("kill", rank)
    assert_went_on(job, expected, {0, 1, 2})
    (closed,) = job.incidents()
    assert (closed["rung"], closed["replayed_steps"]) == (3, 0)


@pytest.mark.matrix
def test_node_that_reaches_the_launcher_but_not_its_peers_is_swapped(slurm: MiniCluster) -> None:
    """Its step hangs and is tried again, and then the groups cannot be connected."""
    expected = reference(slurm, 1, ["--side-group"])
    job = submit(
        slurm,
        launch=[*launch_options(1, "at-start"), "--collective-timeout=5"],
        script_args=[f"--steps={STEPS}", "--side-group", f"--hold=1:{FAULT_STEP}:backward"],
    )
    job.wait_held(1, FAULT_STEP)
    cut, peers = job.node_of(1), [job.node_of(0), job.node_of(2)]
    slurm.part(cut, peers)
    job.release(1, FAULT_STEP)
    assert_went_on(job, expected, {1})
    assert f"{cut} has no path to " in job.said(), job.everything()
    (closed,) = job.incidents()
    assert closed["rung"] == 2


@pytest.mark.matrix
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
@pytest.mark.parametrize("step", [1, 2, STEPS])
def test_power_off_at_every_place_of_a_step(slurm: MiniCluster, where: str, step: int) -> None:
    expected = reference(slurm, 1)
    job = submit(
        slurm,
        launch=launch_options(1, "at-start"),
        script_args=[f"--steps={STEPS}", f"--hold=1:{step}:{where}"],
    )
    job.wait_held(1, step)
    job.strike("power-off", 1)
    assert_went_on(job, expected, {1})


@pytest.mark.matrix
@pytest.mark.parametrize(
    "script_args",
    [["--ddp=bucket-view"], ["--ddp=unused"], ["--optimizer=sgd"], ["--side-group"]],
    ids=lambda value: value[0].removeprefix("--"),
)
def test_power_off_with_other_options(slurm: MiniCluster, script_args: list[str]) -> None:
    expected = reference(slurm, 1, script_args)
    job = submit(
        slurm,
        launch=launch_options(1, "at-start"),
        script_args=[f"--steps={STEPS}", f"--hold=2:{FAULT_STEP}:backward", *script_args],
    )
    job.wait_held(2, FAULT_STEP)
    job.strike("power-off", 2)
    assert_went_on(job, expected, {2})


@pytest.mark.matrix
@mostly_at_start
def test_two_power_offs_one_after_the_other(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 1)
    job = submit(
        slurm,
        nodes=5,
        launch=launch_options(1, spare_start, spares=2),
        script_args=[f"--steps={STEPS}", "--hold=0:3:backward", "--hold=2:7:backward"],
    )
    job.wait_held(0, 3)
    job.strike("power-off", 0)
    job.wait_held(2, 7)
    job.strike("power-off", 2)
    assert_went_on(job, expected, {0, 2}, incidents=2)


def struck_in_recovery(slurm: MiniCluster, spare_start: str) -> TrainingJob:
    """A job whose node of rank 1 is dead and whose replacement stands still while it builds."""
    job = submit(
        slurm,
        nodes=5,
        launch=launch_options(1, spare_start, spares=2),
        script_args=[f"--steps={STEPS}", "--hold=1:4:backward", "--hold-replacement=1"],
    )
    job.wait_held(1, 4)
    job.strike("power-off", 1)
    job.wait_held(1, 0)
    return job


@pytest.mark.matrix
@both_spare_starts
def test_second_power_off_during_recovery(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 1)
    job = struck_in_recovery(slurm, spare_start)
    slurm.power_off(job.node_of(2))
    job.release(1, 0)
    assert_went_on(job, expected, {1, 2})


@pytest.mark.matrix
@mostly_at_start
def test_power_off_of_the_spare_that_is_taking_over(slurm: MiniCluster, spare_start: str) -> None:
    expected = reference(slurm, 1)
    job = struck_in_recovery(slurm, spare_start)
    slurm.power_off(job.node_of(1))
    job.release(1, 0)
    assert_went_on(job, expected, {1})
    assert len(job.process_ids()[1]) == 3


@pytest.mark.matrix
@pytest.mark.parametrize("how", ["scontrol", pytest.param("time-out", marks=pytest.mark.matrix)])
def test_swap_after_slurm_has_marked_the_node_down(slurm: MiniCluster, how: str) -> None:
    slurm.set_slurmd_timeout(5)
    expected = reference(slurm, 1)
    job = submit(
        slurm,
        # Long enough that Slurm is first to notice, whatever else the machine does.
        launch=[
            *launch_options(1, "on-failure"),
            f"--heartbeat-timeout={20 if how == 'scontrol' else 90}",
        ],
        script_args=[f"--steps={STEPS}", f"--hold=1:{FAULT_STEP}:backward"],
    )
    job.wait_held(1, FAULT_STEP)
    node = job.strike("vanish", 1)
    if how == "scontrol":
        slurm.mark_down(node)
    slurm.wait_node_state(node, lambda state: "DOWN" in state, 120)
    assert not job.records("incident")
    assert_went_on(job, expected, {1})


@pytest.mark.matrix
def test_swap_before_slurm_has_noticed(slurm: MiniCluster) -> None:
    expected = reference(slurm, 1)
    job = strike_in_backward(slurm, "power-off", 1, 1, "on-failure")
    node = job.process_ids()[1][0][0]
    job.wait("the swap", lambda: job.incidents())
    assert "DOWN" not in slurm.node_state(node)
    assert_went_on(job, expected, {1})


@pytest.mark.matrix
def test_no_spare_left_ends_with_a_verdict(slurm: MiniCluster) -> None:
    job = submit(
        slurm,
        nodes=3,
        launch=["--spares=0"],
        script_args=[f"--steps={STEPS}", f"--hold=0:{FAULT_STEP}:backward"],
    )
    job.wait_held(0, FAULT_STEP)
    node = job.strike("power-off", 0)
    end = job.wait_end()
    assert end["exit_code"] == 30, job.everything()
    assert end["at"] - job.struck_at < 30
    assert f"{node} lost" in job.said()
    assert "no spare" in job.said()
