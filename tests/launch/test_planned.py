"""What is asked of a job while it runs: to give a node up, and to end before its time is over."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import local_run
import psutil
import pytest
from local_run import final_state, records, wait

STEPS = 14
SIZE = ("--nodes", 2, "--agent-start-timeout", 300)


def deadpool(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("deadpool")
    argv = [str(program), *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd=cwd)


def signalled(run_dir: Path, signum: int) -> None:
    """As Slurm does: the batch script's own process gets it, which is the supervisor's."""
    launcher = psutil.Process(int(records(run_dir, "job")[0]["pid"]))
    parent = launcher.parent()
    assert parent is not None
    parent.send_signal(signum)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert local_run.run(run_dir, *SIZE, "--", "--steps", STEPS).returncode == 0
    return final_state(run_dir)


def test_drained_node_hands_its_ranks_over_and_no_step_is_run_again(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir = tmp_path / "run"
    script = ("--", "--steps", STEPS, "--hold", "0:8:forward")
    with local_run.started(run_dir, *SIZE, "--spares", 1, *script) as process:
        wait("rank 0 in step 8", (run_dir / "hold-0-8").exists)
        unknown = deadpool("drain", "n7", "--job", run_dir)
        done = deadpool("drain", "local2", "--job", run_dir, "--reason", "fan  3")
        again = deadpool("drain", "local1", "--job", run_dir)
        (run_dir / "release-0-8").touch()
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 0, out
    assert (unknown.returncode, unknown.stdout) == (2, "")
    known = "local1, local2, local3"
    assert unknown.stderr == f"deadpool: n7 is no node of this job; those are {known}\n"
    moving = "rank 1 will move to a spare at the end of a step"
    assert (done.returncode, done.stdout) == (0, f"{moving}\n"), done.stderr + out
    assert (again.returncode, again.stdout) == (1, ""), again.stderr
    assert "no spare is left that could take rank 0 of local1" in again.stderr
    assert "local2 is drained (fan 3, seen); local3 takes rank 1, epoch 2" in out
    (closed,) = [record for record in records(run_dir, "incident") if "verdict" in record]
    assert (closed["verdict"], closed["replayed_steps"]) == ("continued", 0)
    assert records(run_dir, "event", name="AtBoundary", step=8, rank=0)
    steps = [(record["rank"], record["step"]) for record in records(run_dir, "step")]
    assert len(steps) == len(set(steps)), "no step was run twice"
    assert not records(run_dir, "event", name="AgentLost")
    assert {record["node"] for record in records(run_dir, "rank", rank=1)} == {"local2", "local3"}
    after = deadpool("drain", "local2", "--job", run_dir)
    assert after.returncode == 10
    assert "has ended: the script ended on every rank" in after.stderr
    assert final_state(run_dir) == undisturbed


def test_job_ends_at_a_boundary_with_a_checkpoint_and_the_next_launch_goes_on_from_it(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "checkpoints"
    saves = ("--checkpoint-dir", folder, "--checkpoint-every", 1000, "--checkpoint-name", "small")
    script = ("--", "--steps", STEPS, "--hold", "0:7:forward")
    with local_run.started(run_dir, *SIZE, *saves, *script) as process:
        wait("rank 0 in step 7", (run_dir / "hold-0-7").exists)
        signalled(run_dir, signal.SIGUSR1)
        wait("the launcher's word", lambda: records(run_dir, "event", name="Holding", rank=0))
        (run_dir / "release-0-7").touch()
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 75, out
    (end,) = records(run_dir, "end")
    newest = [max(r["step"] for r in records(run_dir, "step", rank=rank)) for rank in (0, 1)]
    assert newest[0] == newest[1]
    assert end["reason"] == (
        f"stopped before the time limit (SIGUSR1) after step {newest[0]}, "
        "whose checkpoint is complete"
    )
    (checkpoint,) = records(run_dir, "checkpoint")
    assert (checkpoint["step"], checkpoint["kept"]) == (newest[0], [newest[0]])
    assert not records(run_dir, "incident")
    later = tmp_path / "later"
    done = local_run.run(later, *SIZE, *saves, "--", "--steps", STEPS)
    assert done.returncode == 0, local_run.explain(done, later)
    where = folder / "small"
    assert f"goes on from the durable checkpoint of step {newest[0]} in {where}\n" in done.stdout
    steps = {record["step"] for record in records(later, "step")}
    assert steps == {0, *range(newest[0] + 1, STEPS + 1)}, "none is run again"
    (closed,) = [record for record in records(later, "incident") if "verdict" in record]
    assert closed["verdict"] == "begun"
    assert final_state(later) == undisturbed, local_run.explain(done, later)


@pytest.mark.parametrize(
    ("job", "code", "text"),
    [
        ("nowhere", 2, "--job nowhere: there is no such run directory"),
        ("folder", 2, "folder is no run directory: it has no journal.jsonl"),
        ("4711", 2, "--job 4711: there is no run directory of this job in deadpool-runs"),
        ("gone", 10, "the launcher of gone cannot be reached at 127.0.0.1:1 ("),
    ],
)
def test_drain_says_why_no_job_can_be_asked(tmp_path: Path, job: str, code: int, text: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "address").write_text("127.0.0.1:1\n")
    (tmp_path / "gone" / "secret").write_bytes(b"x" * 32)
    done = deadpool("drain", "n1", "--job", job, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"deadpool: {text}"), done.stderr
    assert done.stderr.count("\n") == 1
