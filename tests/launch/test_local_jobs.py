"""Whole jobs on the local site: each fault, each way to end, scripts without DEADPOOL."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import local_run
import psutil
import pytest
from local_run import explain, final_state, records

STEPS = ["--", "--steps", "8"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = local_run.run(run_dir, "--nodes", 2, "--nproc-per-node", 2, *STEPS)
    assert done.returncode == 0, explain(done, run_dir)
    return final_state(run_dir)


@pytest.mark.parametrize(
    "fault",
    [
        *("power-off:1@4", "kill:3@4", "freeze:2@4"),
        pytest.param("vanish:0@4", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize(
    "spare_start", ["at-start", pytest.param("on-failure", marks=pytest.mark.matrix)]
)
def test_every_fault_leaves_the_undisturbed_state(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]], fault: str, spare_start: str
) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(
        run_dir,
        *("--nodes", 2, "--nproc-per-node", 2, "--spares", 1, "--spare-start", spare_start),
        *("--fault", fault, *STEPS),
    )
    assert done.returncode == 0, explain(done, run_dir)
    assert [record["fault"] for record in records(run_dir, "fault")] == [fault]
    closed = records(run_dir, "incident", phase="closed")
    assert [record["verdict"] for record in closed] == ["continued"]
    assert closed[0]["replayed_steps"] <= 1
    assert final_state(run_dir) == undisturbed, explain(done, run_dir)


PLAIN = """
import os, sys
import torch.distributed as dist
from pathlib import Path

dist.init_process_group("gloo")
rank, here = dist.get_rank(), Path(sys.argv[1])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
done = len(list(here.glob("checkpoint-*")))
for step in range(done, 6):
    dist.barrier()
    if rank == 1 and step == 3 and attempt == "0":
        os.kill(os.getpid(), 9)
    dist.barrier()
    if rank == 0:
        (here / f"checkpoint-{step}").touch()
    dist.barrier()
print(f"rank {rank} began at {done} in attempt {attempt}")
"""


def test_script_without_deadpool_restarts_from_its_own_checkpoints(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "plain.py"
    script.write_text(PLAIN)
    done = local_run.run(run_dir, "--nodes", 3, "--", tmp_path, script=script)
    assert done.returncode == 0, explain(done, run_dir)
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("rank-*.log"))
    assert logs.count("began at 3 in attempt 1") == 3
    assert len(list(tmp_path.glob("checkpoint-*"))) == 6


def test_import_error_on_every_rank_shows_the_users_traceback(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "broken.py"
    script.write_text("import this_module_is_missing\n")
    done = local_run.run(run_dir, "--nodes", 2, "--spares", 1, script=script)
    assert done.returncode == 20, explain(done, run_dir)
    assert "ModuleNotFoundError: No module named 'this_module_is_missing'" in done.stderr
    assert f'File "{script}", line 1, in <module>' in done.stderr
    assert "runpy" not in done.stderr
    assert not records(run_dir, "incident")


def test_script_that_is_no_python_starts_nothing(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "broken.py"
    script.write_text("x = 1\ny = (\n")
    done = local_run.run(run_dir, "--nodes", 1, script=script)
    assert done.returncode == 2
    assert done.stderr == (
        f"deadpool-launch: the script {script}, line 2: is not Python ('(' was never closed)\n"
    )
    assert not run_dir.exists()


def test_exit_code_of_the_script_is_a_failure_unless_zero(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    failed = local_run.run(tmp_path / "one", "--nodes", 2, "--", 3, script=script)
    assert failed.returncode == 20, explain(failed, tmp_path / "one")
    ended = local_run.run(tmp_path / "two", "--nodes", 2, "--", 0, script=script)
    assert ended.returncode == 0, explain(ended, tmp_path / "two")


def test_script_sees_its_arguments_name_and_folder(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    (tmp_path / "neighbour.py").write_text("VALUE = 17\n")
    script.write_text(
        "import os, sys, neighbour\n"
        "print('SEEN', __name__, sys.argv[1:], neighbour.VALUE, os.environ['RANK'],\n"
        "      os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'])\n"
    )
    run_dir = tmp_path / "run"
    options = ("--nodes", 2, "--nproc-per-node", 2, "--", "--lr", "3e-4")
    done = local_run.run(run_dir, *options, script=script)
    assert done.returncode == 0, explain(done, run_dir)
    seen = [(run_dir / "logs" / f"rank-{r:05d}.epoch-1.log").read_text() for r in range(4)]
    for rank, text in enumerate(seen):
        expected = f"SEEN __main__ ['--lr', '3e-4'] 17 {rank} 4 {rank % 2} {rank // 2}"
        assert expected in text


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_soon(tmp_path: Path, signum: int, code: int) -> None:
    run_dir = tmp_path / "run"
    options = ("--nodes", 2, "--spares", 1, "--", "--steps", 100000, "--step-s", 0.02)
    with local_run.started(run_dir, *options) as process:
        deadline = time.monotonic() + local_run.LONG_S
        while not records(run_dir, "step", step=2):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = local_run.family(process.pid)
        assert len(children) >= 8
        sent = time.monotonic()
        process.send_signal(signum)
        assert process.wait(local_run.LONG_S) == code
        assert time.monotonic() - sent < 25
        _gone, left = psutil.wait_procs(children, timeout=30)
        assert not left
    assert not (run_dir / "secret").exists()


def test_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("--nodes", 2, "--spares", 1, "--", "--steps", 100000, "--step-s", 0.02)
    with local_run.started(run_dir, *options) as process:
        deadline = time.monotonic() + local_run.LONG_S
        while not records(run_dir, "step", step=2):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = local_run.family(process.pid)
        process.kill()
        _gone, left = psutil.wait_procs(children, timeout=60)
        assert not left


def test_no_spare_left_is_a_verdict(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, "--nodes", 2, "--fault", "power-off:1@3", *STEPS)
    assert done.returncode == 30, explain(done, run_dir)
    assert "no spare" in done.stdout


def test_spare_that_holds_the_replicas_of_the_only_node_goes_on_alone(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = (
        "--nodes",
        1,
        "--spares",
        1,
        "--fault",
        "power-off:0@50",
        "--",
        "--steps",
        55,
        "--step-s",
        0.02,
    )
    with local_run.started(run_dir, *options, "--hold", "0:1:forward") as running:
        # Until it is warm the spare holds nothing; replicas go to it a few steps later.
        warm = {"name": "AgentWarm", "node": "local2"}
        local_run.wait("the spare is warm", lambda: records(run_dir, "event", **warm))
        (run_dir / "release-0-1").touch()
        assert running.wait(local_run.LONG_S) == 0
    closed = records(run_dir, "incident", phase="closed")
    assert [record["verdict"] for record in closed] == ["continued"]


def test_loss_of_every_copy_is_a_verdict_not_a_new_start(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("--nodes", 1, "--spares", 1, "--spare-start", "on-failure")
    done = local_run.run(run_dir, *options, "--fault", "power-off:0@3", *STEPS)
    assert done.returncode == 31, explain(done, run_dir)
    assert "no copy of any step is left" in done.stdout


def test_used_run_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    done = local_run.run(tmp_path, "--nodes", 1)
    assert done.returncode == 2
    assert "holds another run already" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
