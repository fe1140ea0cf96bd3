"""Whole jobs of which no process is left: all restart from the copies on their nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import local_run
import pytest
from local_run import explain, final_state, records, wait

LAYOUT = Path(__file__).parents[1] / "runtime" / "scripts" / "layout.py"
#: The step in which the faults strike.
STRUCK = 4
JOB = ("--nodes", 2, "--agent-start-timeout", 180)
HANGS = (*JOB, "--collective-timeout", 4)


def final_of(run_dir: Path, *options: object, script: Path = local_run.SCRIPT) -> dict[int, object]:
    done = local_run.run(run_dir, *options, script=script)
    assert done.returncode == 0, explain(done, run_dir)
    return dict(final_state(run_dir))


def assert_restarted(
    run_dir: Path, expected: Mapping[int, object], said: str, *, replayed: int = 0
) -> None:
    """All ranks have new processes; ``replayed``: the completed steps that may be run again."""
    (closed,) = records(run_dir, "incident", phase="closed")
    assert (closed["verdict"], closed["rung"]) == ("continued", 3)
    assert closed["replayed_steps"] <= replayed
    assert {len(records(run_dir, "rank", rank=rank)) for rank in expected} == {2}
    assert dict(final_state(run_dir)) == expected, said


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("fsdp", signal.SIGKILL),
        pytest.param("ddp", signal.SIGKILL, marks=pytest.mark.matrix),
        pytest.param("zero", signal.SIGKILL, marks=pytest.mark.matrix),
        # Stands for a process that nothing can wake: only SIGKILL helps.
        pytest.param("fsdp", signal.SIGSTOP, marks=pytest.mark.matrix),
    ],
)
def test_death_of_every_process_at_once_costs_the_step(
    tmp_path: Path, layout: str, how: signal.Signals
) -> None:
    job = ("--nodes", 3, "--agent-start-timeout", 180)
    out = [tmp_path / name for name in ("out", "undisturbed-out")]
    for each in out:
        each.mkdir()
    expected = final_of(
        tmp_path / "undisturbed", *job, "--", out[1], layout, "--steps", 7, script=LAYOUT
    )
    run_dir = tmp_path / "run"
    holds = [word for rank in range(3) for word in ("--hold", f"{rank}:{STRUCK}:backward")]
    options = (*job, "--", out[0], layout, "--steps", 7, *holds)
    with local_run.started(run_dir, *options, script=LAYOUT) as launcher:
        held = [run_dir / f"hold-{rank}-{STRUCK}" for rank in range(3)]
        wait("every rank is in the step", lambda: all(path.exists() for path in held))
        for record in records(run_dir, "rank"):
            os.kill(record["pid"], how)
        said, _ = launcher.communicate(timeout=local_run.LONG_S)
    assert launcher.returncode == 0, said
    assert_restarted(run_dir, expected, said)


@pytest.mark.matrix
@pytest.mark.parametrize(("who", "rung"), [("1", 1), ("all", 3)])
def test_hang_with_the_lock_held_ends_the_processes_that_hold_it(
    tmp_path: Path, who: str, rung: int
) -> None:
    steps = ("--", "--steps", 7, "--side-group")
    expected = final_of(tmp_path / "undisturbed", *HANGS, *steps)
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *HANGS, *steps, "--hang", f"{who}:{STRUCK}:lock")
    assert done.returncode == 0, explain(done, run_dir)
    if who == "all":
        assert "did not end step 4 within 4 s, outside of any collective" in done.stdout
        # The lock may be taken before the copy of the step before is whole.
        assert_restarted(run_dir, expected, done.stdout, replayed=1)
    (closed,) = records(run_dir, "incident", phase="closed")
    assert closed["rung"] == rung
    assert dict(final_state(run_dir)) == expected


@pytest.mark.matrix
def test_step_that_hangs_again_in_place_is_tried_in_new_processes(tmp_path: Path) -> None:
    steps = ("--", "--steps", 7, "--side-group")
    expected = final_of(tmp_path / "undisturbed", *HANGS, *steps)
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *HANGS, *steps, "--hang", f"1:{STRUCK}:skip-twice")
    assert done.returncode == 0, explain(done, run_dir)
    assert "all ranks restart from the copies on their nodes (rung 3, warm restart)" in done.stdout
    assert_restarted(run_dir, expected, done.stdout)
