"""Rehearsals from end to end: real launchers, real processes, a real loss of a node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deadpool_launch.follow import JournalTail, RunView

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
    assert re.search(r"parameters +differs on 0, 1 of 2 ranks", done.stdout)


def test_a_fault_that_is_never_reached_is_no_rehearsal() -> None:
    done = _rehearse(
        *(EXAMPLE, "--nodes", "1", "--spares", "0", "--no-reference"),
        *("--fault", "kill:0@500", "--", *_SMALL),
    )
    assert done.returncode == 41, done.stdout + done.stderr
    assert "NOT REHEARSED: kill:0@500" in done.stdout


def test_a_script_that_fails_gives_its_exit_code_and_traceback(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ArithmeticError('seven')\n")
    done = _rehearse(script, "--nodes", "1", "--spares", "0", "--fault", "kill:0@5")
    assert done.returncode == 20, done.stdout + done.stderr
    assert "FAILED: the undisturbed run ended with exit code 20" in done.stdout
    assert "ArithmeticError: seven" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "power-of:1@5"],
        ["--fault", "power-off:1"],
        ["--fault", "kill:first@5"],
        [],
        ["--fault", "kill:0@5", "--plot", "loss.pdf"],
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_one_sentence(arguments: list[str]) -> None:
    done = _rehearse(EXAMPLE, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"deadpool: .+\n", done.stderr), done.stderr


def test_a_folder_with_something_in_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = _rehearse(EXAMPLE, "--fault", "kill:0@5", "--keep", tmp_path)
    assert done.returncode == 2
    assert "is not empty" in done.stderr


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_every_process_within_ten_seconds(
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
        assert time.monotonic() - asked_at < 10
        _, alive = psutil.wait_procs(family, timeout=1)
        assert not alive
    finally:
        process.kill()
        process.wait()
    assert process.stderr is not None
    assert process.stderr.read() == "Interrupted; every process of the rehearsal has ended.\n"
