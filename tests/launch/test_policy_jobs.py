"""Policies on whole jobs on the local site: admission checks and restarts on a node."""

from __future__ import annotations

import json
from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, records, wait, warm

STEPS = ["--", "--steps", "8"]


def policy_file(folder: Path, **values: object) -> Path:
    """A policy with these keys; JSON is YAML too."""
    path = folder / "policy.yaml"
    path.write_text(json.dumps({name.replace("__", "."): value for name, value in values.items()}))
    return path


def swap_by_budget(folder: Path, nodes: int) -> Path:
    """The last active node's process is killed, which may not be started again there, and the
    first spare is refused.

    The check fails when it is run for the second time on that spare. Returns the run directory.
    """
    count = f"{folder}/$DEADPOOL_NODE"
    again = f'echo x >> {count}; test "$DEADPOOL_NODE $(wc -l < {count})" != "local{nodes + 1} 2"'
    path = policy_file(
        folder,
        node__local_restarts=0,
        spares__count=2,
        # The check is to be what keeps a spare out, however busy the machine is.
        agent_start_timeout="10m",
        admission=[{"command": f"{again} || {{ echo worn out; false; }}", "timeout": "60s"}],
    )
    run_dir = folder / "run"
    options = ("--nodes", nodes, "--policy", path, "--fault", f"kill:{nodes - 1}@4", *STEPS)
    with local_run.started(run_dir, *options, "--hold", "0:1:forward") as process:
        # A spare that is not warm yet would not be the first.
        wait("every node is warm", lambda: len(warm(run_dir)) == nodes + 2)
        (run_dir / "release-0-1").touch()
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 0, out
    return run_dir


def test_spare_that_fails_its_admission_check_is_passed_over(tmp_path: Path) -> None:
    run_dir = swap_by_budget(tmp_path, 1)
    said = "\n".join(record["text"] for record in records(run_dir, "say"))
    assert "local1 is given up (rank 0 on local1 died (signal 9, seen); its budget of 0 " in said
    assert "local2 takes rank 0, epoch 2" in said
    assert "local2 cannot serve any longer (fails the admission check 'echo" in said
    assert "exit code 1: worn out, seen); local3 takes rank 0, epoch 3" in said
    # The node with ranks from the start was checked by the preflight alone.
    runs = {path.name: path.read_text().count("x") for path in tmp_path.glob("local*")}
    assert runs == {"local1": 1, "local2": 2, "local3": 2}
    (settings,) = [r["settings"] for r in records(run_dir, "event", name="Policy")]
    assert [line.split(":")[0] for line in settings] == [
        "spares.count",
        "admission",
        "agent_start_timeout",
        "node.local_restarts",
    ]


@pytest.mark.matrix
def test_state_that_comes_from_a_node_that_was_given_up_is_the_undisturbed_one(
    tmp_path: Path,
) -> None:
    disturbed = swap_by_budget(tmp_path, 2)
    run_dir = tmp_path / "quiet"
    done = local_run.run(run_dir, "--nodes", 2, *STEPS)
    assert done.returncode == 0, explain(done, run_dir)
    assert final_state(disturbed) == final_state(run_dir)


def test_too_few_nodes_that_pass_end_the_launch_before_it_starts(tmp_path: Path) -> None:
    path = policy_file(
        tmp_path,
        admission=[
            {"command": "echo one; test $DEADPOOL_NODE != local2 || sleep 600", "timeout": "500ms"}
        ],
    )
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, "--nodes", 2, "--policy", path, *STEPS)
    assert done.returncode == 10, explain(done, run_dir)
    assert "2 active nodes needed, but only 1 of 2 can be used: local2 failed the " in done.stderr
    assert "local2 fails the admission check 'echo one; " in done.stderr
    assert "no end within 0.5 s" in done.stderr
    assert (run_dir / "logs" / "admission-local2.log").read_text() == "one\n"
