"""Rehearsals from end to end: real launchers, real processes, a real loss of a node."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deadpool_launch.faults import parse_fault, striking_ranks
from deadpool_launch.follow import JournalTail
from deadpool_launch.rehearsal_run import Outcome
from deadpool_launch.rehearse import Rehearsal, _why_missed
from deadpool_launch.view import RankView, RunView, StepView

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
_REHEARSE = [sys.executable, "-m", "deadpool_launch.main_cli", "rehearse"]
_SMALL = ["--steps", "12", "--layers", "1", "--dim", "32", "--batch", "2"]
_TIMEOUT_S = 200


def _rehearse(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_REHEARSE, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )


def _kept(done: subprocess.CompletedProcess[str], tmp_path: Path) -> Path:
    """The folder that a failed rehearsal says it has kept; moved away, so that no trace is left."""
    match = re.search(r"^Run directories \(logs, journals\): (.+)$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    kept = tmp_path / "moved"
    shutil.move(match[1], kept)
    return kept


def _view(run_dir: Path) -> RunView:
    view = RunView()
    view.apply_all(JournalTail(run_dir).records())
    return view


def test_a_lost_node_is_replaced_and_the_final_state_has_the_same_bits(tmp_path: Path) -> None:
    keep, picture = tmp_path / "kept", tmp_path / "loss.png"
    done = _rehearse(
        *(EXAMPLE, "--nodes", "2", "--spares", "1", "--fault", "power-off:1@5"),
        *("--keep", keep, "--plot", picture, "--", *_SMALL),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME BITS" in done.stdout
    assert f"Run directories (logs, journals): {keep}" in done.stdout
    assert re.search(r"^ extras +none *$", done.stdout, re.MULTILINE)
    assert "Incident 1" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    view = _view(keep / "disturbed")
    assert [record["fault"] for record in view.faults] == ["power-off:1@5"]
    assert view.step == 12
    assert view.ranks[0].processes == 1
    assert view.ranks[1].processes == 2
    assert not _view(keep / "undisturbed").incidents


def test_a_run_that_ends_in_another_state_is_noticed(tmp_path: Path) -> None:
    script = tmp_path / "other_seed.py"
    # The two runs' directories have names of different lengths.
    script.write_text(
        "import os, runpy, sys\n"
        "sys.argv += ['--seed', str(len(os.environ['DEADPOOL_RUN_DIR']))]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    done = _rehearse(script, "--nodes", "2", "--fault", "kill:1@3", "--", *_SMALL)
    assert done.returncode == 40, done.stdout + done.stderr
    assert "DIFFERENT" in done.stdout
    assert re.search(r"parameters +differs on ranks 0-1 of 2", done.stdout)
    assert "state that attach was not given" in done.stdout
    assert _view(_kept(done, tmp_path) / "disturbed").step == 12


def test_a_fault_that_is_never_reached_is_no_rehearsal(tmp_path: Path) -> None:
    done = _rehearse(
        *(EXAMPLE, "--nodes", "1", "--spares", "0", "--no-reference"),
        *("--fault", "kill:0@500", "--", *_SMALL),
    )
    assert done.returncode == 41, done.stdout + done.stderr
    assert "NOT REHEARSED: kill:0@500" in done.stdout
    assert done.stdout.count("deadpool-rehearsal-") == 1
    assert _view(_kept(done, tmp_path) / "disturbed").step == 12


def test_a_fault_that_was_due_on_a_replaced_process_says_so(tmp_path: Path) -> None:
    faults = (parse_fault("kill:1@5"), parse_fault("kill:1@9"), parse_fault("kill:0@99"))
    rehearsal = Rehearsal(Path("train.py"), (), 2, 1, 1, faults, False, None)
    view = RunView()
    view.steps.append(StepView(1.0, 0, 14, 1, None))
    view.ranks = {rank: RankView(rank, f"local{rank}", 1, 1, 14) for rank in (0, 1)}
    view.ranks[1].processes = 2
    outcome = Outcome(0, view, tmp_path, ())
    assert "rank 1 that was to do it was replaced" in _why_missed(rehearsal, faults[1], outcome)
    assert _why_missed(rehearsal, faults[2], outcome) == "the run ended after step 14."


def test_a_rehearsal_that_succeeds_leaves_nothing_and_names_no_folder() -> None:
    done = _rehearse(
        *(EXAMPLE, "--nodes", "1", "--spares", "0", "--no-reference"),
        *("--fault", "kill:0@500", "--fault", "kill:0@3", "--", *_SMALL),
    )
    assert done.returncode == 2
    done = _rehearse(
        *(EXAMPLE, "--nodes", "2", "--spares", "0", "--no-reference"),
        *("--fault", "kill:1@3", "--", *_SMALL),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "deadpool-rehearsal-" not in done.stdout


def test_no_spare_is_said_once_with_the_next_step(tmp_path: Path) -> None:
    done = _rehearse(
        *(EXAMPLE, "--nodes", "2", "--spares", "0", "--no-reference"),
        *("--fault", "power-off:1@3", "--", *_SMALL),
    )
    assert done.returncode == 30, done.stdout + done.stderr
    assert done.stdout.count("no spare was held: submit again with --spares 1") == 1
    assert "FAILED: the run with the fault ended with exit code 30: no spare" in done.stdout
    _kept(done, tmp_path)


def test_a_script_that_fails_gives_its_exit_code_and_traceback(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ArithmeticError('seven')\n")
    done = _rehearse(script, "--nodes", "1", "--spares", "0", "--fault", "kill:0@5")
    assert done.returncode == 20, done.stdout + done.stderr
    assert "FAILED: the undisturbed run ended with exit code 20" in done.stdout
    assert "ArithmeticError: seven" in done.stdout
    assert "waiting" not in done.stdout
    assert (_kept(done, tmp_path) / "undisturbed" / "journal.jsonl").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "power-of:1@5"],
        ["--fault", "power-off:1"],
        ["--fault", "kill:first@5"],
        [],
        ["--fault", "kill:0@5", "--plot", "loss.pdf"],
        ["--fault", "kill:0@0"],
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_one_sentence(arguments: list[str]) -> None:
    done = _rehearse(EXAMPLE, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"deadpool: .+\n", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("faults", "sentence"),
    [
        (
            ["power-off:2@5"],
            "--fault power-off:2@5: 2 is no active node; "
            "those are local1, local2, with indices from 0 to 1",
        ),
        (
            ["vanish:local3@5"],
            "--fault vanish:local3@5: local3 is no active node; "
            "those are local1, local2, with indices from 0 to 1",
        ),
        (["kill:4@5"], "--fault kill:4@5: ranks go from 0 to 3"),
        (["freeze:1@0"], "--fault freeze:1@0: steps count from 1"),
        (
            ["power-off:1@5", "kill:2@9"],
            "--fault kill:2@9: rank 2 brings about power-off:1@5 already; "
            "let another rank or node be struck",
        ),
    ],
)
def test_targets_are_checked_before_anything_is_run(faults: list[str], sentence: str) -> None:
    given = [word for fault in faults for word in ("--fault", fault)]
    done = _rehearse(EXAMPLE, "--nodes", "2", "--nproc-per-node", "2", *given)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"deadpool: {sentence}\n")


def test_targets_by_name_index_and_rank_are_accepted() -> None:
    faults = ["freeze-node:local1@5", "vanish:1@1", "kill:3@2"]
    striking_ranks([parse_fault(text) for text in faults], ("local1", "local2"), 2)


def test_a_folder_with_something_in_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = _rehearse(EXAMPLE, "--fault", "kill:0@5", "--keep", tmp_path)
    assert done.returncode == 2
    assert "is not empty" in done.stderr


@pytest.mark.parametrize(
    ("signum", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix), (signal.SIGTERM, 143)],
)
def test_an_interrupt_ends_every_process_soon(
    tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    process = subprocess.Popen(
        [
            *(*_REHEARSE, str(EXAMPLE), "--nodes", "2", "--fault", "power-off:1@9000"),
            *("--no-reference", "--keep", str(tmp_path / "kept")),
            *("--", *_SMALL, "--steps", "100000"),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while _view(tmp_path / "kept" / "disturbed").step < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 6  # launcher, three agents, two ranks
        asked_at = time.monotonic()
        process.send_signal(signum)
        assert process.wait(timeout=60) == code
        assert time.monotonic() - asked_at < 25
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
    finally:
        process.kill()
        process.wait()
    assert process.stderr is not None
    assert process.stderr.read() == "Interrupted; every process of the rehearsal has ended.\n"


@pytest.mark.parametrize(
    "given",
    [("--checkpoint-dir", "x"), ("--checkpoint-every", 2), ("--checkpoint-every", 0)],
)
def test_checkpoints_need_a_folder_and_a_number_of_steps(given: tuple[object, ...]) -> None:
    done = _rehearse(EXAMPLE, "--fault", "kill:0@3", *given)
    assert done.returncode == 2
    assert "--checkpoint-dir and --checkpoint-every go together" in done.stderr


@pytest.mark.matrix
def test_both_runs_write_checkpoints_to_folders_of_their_own(tmp_path: Path) -> None:
    done = _rehearse(
        *(EXAMPLE, "--nodes", 1, "--spares", 1, "--fault", "kill:0@9"),
        *("--checkpoint-dir", tmp_path, "--checkpoint-every", 4, "--", *_SMALL),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.iterdir())) == 2
