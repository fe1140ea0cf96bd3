"""The launcher ends while it should not: it is started again, and the ranks train on meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, launcher_of, records, wait

STEPS = 20
SIZE = ("--nodes", 2, "--nproc-per-node", 2, "--agent-start-timeout", 300)
ENDLESS = ["--", "--steps", 100000, "--step-s", 0.02]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = local_run.run(run_dir, *SIZE, "--", "--steps", STEPS)
    assert done.returncode == 0, explain(done, run_dir)
    return final_state(run_dir)


def said(run_dir: Path) -> str:
    return "\n".join(record["text"] for record in records(run_dir, "say"))


def processes(run_dir: Path) -> dict[int, list[int]]:
    """All process ids that each rank has had."""
    found: dict[int, list[int]] = {}
    for record in records(run_dir, "rank"):
        found.setdefault(record["rank"], []).append(record["pid"])
    return found


def finish(process: subprocess.Popen[str], run_dir: Path) -> str:
    """Wait for the end of a job that ends well; returns what was printed."""
    out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 0, out
    assert [record["exit_code"] for record in records(run_dir, "end")] == [0]
    assert not list(run_dir.glob("launcher.state*"))
    assert not (run_dir / "secret").exists()
    return out


def test_launcher_is_killed_in_training_and_no_rank_is_disturbed(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir = tmp_path / "run"
    script = ("--", "--steps", STEPS, "--step-s", 0.2)
    with local_run.started(run_dir, *SIZE, "--spares", 1, *script) as process:
        wait("steps", lambda: records(run_dir, "step", step=3))
        os.kill(launcher_of(run_dir), signal.SIGKILL)
        wait("the next launcher", lambda: records(run_dir, "launcher"))
        out = finish(process, run_dir)
    assert "the launcher ended (signal 9); started again from its journal in " in out
    assert "s, term 2; 3 agents are back, no rank was disturbed\n" in out
    assert not records(run_dir, "incident"), out
    assert all(len(pids) == 1 for pids in processes(run_dir).values())
    steps = [(record["rank"], record["step"]) for record in records(run_dir, "step")]
    assert len(steps) == len(set(steps)), "no step was run twice"
    assert final_state(run_dir) == undisturbed


@pytest.mark.matrix
@pytest.mark.parametrize("when", ["at once", "with the ranks parked"])
def test_launcher_is_killed_in_a_recovery_and_the_next_one_completes_it(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]], when: str
) -> None:
    """A replacement stands still while it builds its model, so that the recovery is under way."""
    run_dir = tmp_path / "run"
    script = ["--steps", STEPS, "--step-s", 0.1, "--hold", "3:5:forward"]
    script += ["--hold-replacement", 3] if when != "at once" else []
    with local_run.started(run_dir, *SIZE, "--spares", 1, "--", *script) as process:
        wait("rank 3 in step 5", (run_dir / "hold-3-5").exists)
        os.kill(processes(run_dir)[3][0], signal.SIGKILL)
        if when == "at once":
            wait("the incident", lambda: records(run_dir, "incident"))
        else:
            wait("the replacement", (run_dir / "hold-3-0").exists)
        os.kill(launcher_of(run_dir), signal.SIGKILL)
        wait("the next launcher", lambda: records(run_dir, "launcher"))
        (run_dir / "release-3-0").touch()
        out = finish(process, run_dir)
    closed = [record for record in records(run_dir, "incident") if "verdict" in record]
    assert [record["verdict"] for record in closed] == ["continued"], out
    pids = processes(run_dir)
    assert {rank: len(pids[rank]) for rank in range(4)} == {0: 1, 1: 1, 2: 1, 3: 2}
    assert final_state(run_dir) == undisturbed


@pytest.mark.matrix
def test_rank_and_node_that_are_lost_without_a_launcher_are_replaced_by_the_next(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir = tmp_path / "run"
    script = ("--", "--steps", STEPS, "--step-s", 0.2)
    with local_run.started(run_dir, *SIZE, "--spares", 1, *script) as process:
        wait("steps", lambda: records(run_dir, "step", step=3))
        node = records(run_dir, "rank", rank=2)[0]["node"]
        agent = local_run.agent_of(process.pid, node)
        launcher = launcher_of(run_dir)
        os.kill(launcher, signal.SIGSTOP)
        agent.kill()
        os.kill(processes(run_dir)[0][0], signal.SIGKILL)
        os.kill(launcher, signal.SIGKILL)
        out = finish(process, run_dir)
    assert f"2 agents are back, not that of {node}; rank 0 ended meanwhile" in out
    assert final_state(run_dir) == undisturbed
    pids = processes(run_dir)
    assert {rank: len(pids[rank]) for rank in range(4)} == {0: 2, 1: 1, 2: 2, 3: 2}


@pytest.mark.matrix
def test_launcher_that_ends_again_and_again_ends_the_job_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--nodes", 2, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=3))
        for count in range(4):
            wait("a launcher", lambda: said(run_dir).count("started again") == count)  # noqa: B023
            os.kill(launcher_of(run_dir), signal.SIGSEGV)
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 70, out
    assert "the launcher ended 4 times within 600 s, last by signal 11 (exit code 70)" in out
    assert [record["exit_code"] for record in records(run_dir, "end")] == [70]
    assert not records(run_dir, "incident")
    assert not any(local_run.alive(pid) for pids in processes(run_dir).values() for pid in pids)


#: In the first launcher: a defect that shows at the fifth step of rank 0.
DEFECT = """
import sys
if "deadpool_launch.cli" in sys.orig_argv:
    from deadpool_launch.driving.recorder import Recorder
    tell = Recorder.tell_progress
    def defective(self, state, rank, done):
        if (rank, done.step) == (0, 5):
            raise ZeroDivisionError("a defect")
        tell(self, state, rank, done)
    Recorder.tell_progress = defective
"""


@pytest.mark.matrix
def test_defect_of_the_launcher_costs_a_launcher_and_not_the_job(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    (tmp_path / "sitecustomize.py").write_text(DEFECT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with local_run.started(run_dir, *SIZE, "--", "--steps", STEPS, "--step-s", 0.1) as process:
        out = finish(process, run_dir)
    assert "ZeroDivisionError: a defect" in out
    assert "the launcher ended (exit code 70); started again from its journal" in out
    assert all(len(pids) == 1 for pids in processes(run_dir).values())
    assert final_state(run_dir) == undisturbed


@pytest.mark.matrix
def test_stop_is_obeyed_after_another_launcher_took_over(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--nodes", 2, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=3))
        os.kill(launcher_of(run_dir), signal.SIGKILL)
        wait("another launcher", lambda: "started again" in said(run_dir))
        process.send_signal(signal.SIGTERM)
        assert process.wait(local_run.LONG_S) == 143
    assert not any(local_run.alive(pid) for pids in processes(run_dir).values() for pid in pids)


@pytest.mark.matrix
def test_supervisor_is_killed_and_everything_ends_in_order(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--nodes", 2, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=3))
        process.kill()
        end = wait("the verdict", lambda: records(run_dir, "end"))
        assert end[0]["exit_code"] == 143


# ---------------------------------------------------------------- the supervisor alone


def supervised(code: str) -> subprocess.Popen[str]:
    """A supervisor whose child runs this Python code."""
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-c"),
            "import sys; from deadpool_launch.supervisor import supervise; "
            f"sys.exit(supervise(['-c', {code!r}]))",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(20)", 20),
        ("import sys; sys.exit(70)", 70),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_launcher_that_has_no_job_yet_is_not_started_again(code: str, expected: int) -> None:
    with supervised(code) as process:
        assert process.wait(local_run.LONG_S) == expected


def test_signals_go_to_the_launcher_and_its_exit_code_comes_back() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with supervised(code) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(local_run.LONG_S) == 143


@pytest.mark.parametrize("state_is_left", [False, True])
def test_launcher_that_ends_behind_the_end_of_the_job_costs_nothing(
    tmp_path: Path, state_is_left: bool
) -> None:
    """Slurm kills the batch script of a job that it requeues, as it was asked to."""
    code = (
        "import os, signal, socket; from pathlib import Path\n"
        "from deadpool_launch import supervisor; from deadpool_launch.succession import result\n"
        "supervisor.attach()\n"
        f"run_dir = Path({str(tmp_path)!r})\n"
        "supervisor.keep(str(run_dir), socket.create_server(('127.0.0.1', 0)))\n"
        "result.record(run_dir, result.Result('stopped in time', 75, 'the limit', 'n1', 1))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    if state_is_left:
        (tmp_path / "launcher.state").write_bytes(b"not to be read")
    with supervised(code) as process:
        out, err = process.communicate(timeout=local_run.LONG_S)
    assert (process.returncode, out, err) == (75, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_supervisor_imports_little() -> None:
    """What it does not import cannot end it."""
    code = (
        "import sys; before = set(sys.modules); import deadpool_launch.supervisor; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert loaded <= sys.stdlib_module_names | {"deadpool_launch"}
    assert not loaded & {"asyncio", "subprocess", "logging", "threading"}
