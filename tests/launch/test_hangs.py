"""Whole jobs in which a rank hangs: noticed, named, mended in place, with the undisturbed state."""

from __future__ import annotations

from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, records

JOB = ("--nodes", 2, "--collective-timeout", 4, "--agent-start-timeout", 180)
STEPS = ("--", "--steps", 7, "--side-group")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = local_run.run(run_dir, *JOB, *STEPS)
    assert done.returncode == 0, explain(done, run_dir)
    assert not records(run_dir, "incident")
    return final_state(run_dir)


def processes(run_dir: Path, rank: int) -> int:
    return len(records(run_dir, "rank", rank=rank))


def stack(run_dir: Path, rank: int) -> str:
    return (run_dir / "logs" / f"rank-{rank:05d}.epoch-1.stack").read_text()


def test_rank_that_holds_the_lock_is_named_killed_and_restarted(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *JOB, *STEPS, "--hang", "1:4:lock")
    assert done.returncode == 0, explain(done, run_dir)
    assert "rank 1 on local2 did not come to " in done.stdout
    assert "its stack is in logs/rank-00001.epoch-1.stack; step 4 is tried again" in done.stdout
    assert "rank 1 on local2 did not park within 3 s (seen); restarted on local2" in done.stdout
    assert "train_small.py" in stack(run_dir, 1)
    assert (processes(run_dir, 0), processes(run_dir, 1)) == (1, 2)
    (closed,) = records(run_dir, "incident", phase="closed")
    assert closed["verdict"] == "continued"
    assert final_state(run_dir) == undisturbed, explain(done, run_dir)


@pytest.mark.matrix
def test_collective_that_one_rank_leaves_out_is_mended_without_a_new_process(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *JOB, *STEPS, "--hang", "1:4:skip")
    assert done.returncode == 0, explain(done, run_dir)
    named = "rank 1 on local2 did not come to all_reduce no. 4 of group 1 that rank 0 has waited in"
    assert named in done.stdout
    assert (processes(run_dir, 0), processes(run_dir, 1)) == (1, 1)
    (closed,) = records(run_dir, "incident", phase="closed")
    assert closed["verdict"] == "continued"
    assert closed["replayed_steps"] <= 1
    assert final_state(run_dir) == undisturbed, explain(done, run_dir)


@pytest.mark.matrix
def test_rank_that_sleeps_in_its_step_is_restarted(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]]
) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *JOB, *STEPS, "--hold", "1:4:backward")
    assert done.returncode == 0, explain(done, run_dir)
    assert "rank 1 on local2 did not come to " in done.stdout
    assert "in hold" in stack(run_dir, 1)
    assert (processes(run_dir, 0), processes(run_dir, 1)) == (1, 2)
    assert final_state(run_dir) == undisturbed, explain(done, run_dir)


@pytest.mark.matrix
def test_lone_rank_that_sleeps_is_noticed_by_its_step_clock(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ("--nodes", 1, "--collective-timeout", 4, *STEPS, "--hold", "0:4:forward")
    done = local_run.run(run_dir, *options)
    assert done.returncode == 0, explain(done, run_dir)
    assert "rank 0 on local1 did not end step 4 within 4 s, outside of any coll" in done.stdout
    assert processes(run_dir, 0) == 2


@pytest.mark.matrix
@pytest.mark.parametrize(("how", "code"), [("cut", 0), ("cut-always", 20)])
def test_connections_that_break_between_living_ranks_are_mended_once(
    tmp_path: Path, undisturbed: dict[int, dict[str, str]], how: str, code: int
) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *JOB, *STEPS, "--hang", f"1:4:{how}")
    assert done.returncode == code, explain(done, run_dir)
    assert "and every rank lives; the step is tried again" in done.stdout
    assert (processes(run_dir, 0), processes(run_dir, 1)) == (1, 1)
    if code == 0:
        assert final_state(run_dir) == undisturbed, explain(done, run_dir)


@pytest.mark.matrix
def test_step_that_hangs_in_new_processes_too_ends_the_job(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *JOB, *STEPS, "--hang", "1:4:skip-always")
    assert done.returncode == 32, explain(done, run_dir)
    (end,) = records(run_dir, "end")
    assert end["reason"].startswith("rank 1 on local2 did not come to all_reduce no. 1 of group 1")
    assert "its stack is in logs/rank-00001.epoch-3.stack; step 4 hung before" in end["reason"]
    assert "train_small.py" in stack(run_dir, 1)
    assert (processes(run_dir, 0), processes(run_dir, 1)) == (2, 2)
