"""Command lines: a step names its nodes, outlives them, and cannot wait for ever."""

from __future__ import annotations

from pathlib import Path

from deadpool_slurm import srun

SURVIVING = {
    "--overlap",
    "--no-kill",
    "--kill-on-bad-exit=0",
    "--wait=0",
    "--input=none",
    "--export=ALL",
    "--mpi=none",
}


def agent(**changes: object) -> list[str]:
    wanted: dict[str, object] = {
        "job_id": "7",
        "node": "n2",
        "cpus": 64,
        "name": "deadpool-n2-1",
        "log_path": Path("/runs/7/logs/agent-n2.log"),
        "argv": ["python", "-m", "agent"],
    }
    return srun.agent_step(**{**wanted, **changes})  # type: ignore[arg-type]


def test_agent_step_names_its_node_and_outlives_others() -> None:
    argv = agent()
    assert argv[:6] == [
        "srun",
        "--jobid=7",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=n2",
        "--overlap",
    ]
    assert set(argv) >= SURVIVING
    assert any(word.startswith("--immediate=") for word in argv)
    assert argv[-3:] == ["python", "-m", "agent"]


def test_replacement_step_does_not_name_the_lost_node() -> None:
    assert "--nodelist=n4" in agent(node="n4", name="deadpool-n4-2")
    assert not any("n2" in word for word in agent(node="n4", name="x", log_path=Path("/l")))


def test_agent_step_sees_every_cpu_unbound() -> None:
    assert {"--cpus-per-task=64", "--cpu-bind=none"} <= set(agent())
    assert not any(word.startswith("--cpus-per-task") for word in agent(cpus=None))


def test_pattern_characters_in_a_path_are_literal() -> None:
    assert "--output=/r/100%%N.log" in agent(log_path=Path("/r/100%N.log"))


def test_network_is_passed_on() -> None:
    assert "--network=job_vni,single_node_vni" in agent(network="job_vni,single_node_vni")


def test_step_over_all_nodes_has_one_task_on_each() -> None:
    argv = srun.all_nodes_step(
        job_id="7", nodelist="n[1-4]", node_count=4, name="p", argv=["true"], immediate_s=5
    )
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1", "--nodelist=n[1-4]"} <= set(argv)
    assert set(argv) >= {*SURVIVING, "--immediate=5"}


def mover(**changes: object) -> list[str]:
    wanted: dict[str, object] = {
        "job_id": "7",
        "nodelist": "n[1-3]",
        "node_count": 3,
        "cpus": None,
        "name": "deadpool-movers-1",
        "log_path": Path("/runs/7/logs/movers.log"),
        "argv": ["python", "-m", "mover"],
        "mpi": "pmi2",
    }
    return srun.mover_step(**{**wanted, **changes})  # type: ignore[arg-type]


def test_movers_are_one_mpi_world_with_one_process_on_each_node() -> None:
    argv = mover()
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--nodelist=n[1-3]"} <= set(argv)
    assert "--mpi=pmi2" in argv
    assert "--mpi=none" not in argv
    assert argv[-3:] == ["python", "-m", "mover"]


def test_movers_share_their_nodes_and_end_together() -> None:
    argv = mover(mpi="cray_shasta")
    assert set(argv) >= SURVIVING - {"--kill-on-bad-exit=0", "--mpi=none"}
    assert {"--kill-on-bad-exit=1", "--mpi=cray_shasta"} <= set(argv)


def test_steps_are_cancelled_by_id() -> None:
    assert srun.cancel_step("7.3") == ["scancel", "7.3"]
    assert srun.cancel_step("7.3", "KILL") == ["scancel", "--signal=KILL", "7.3"]


def test_nodes_are_given_back_by_naming_those_to_keep() -> None:
    assert srun.keep_nodes("7", "n[1-2,4]") == [
        *("scontrol", "update", "JobId=7", "NodeList=n[1-2,4]")
    ]


def test_agent_step_has_slurm_clean_up_after_it() -> None:
    assert "--task-epilog=/run/clean" in agent(task_epilog=Path("/run/clean"))
    assert not any(word.startswith("--task-epilog") for word in agent())
