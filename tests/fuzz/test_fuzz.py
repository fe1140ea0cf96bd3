"""A slice of the fuzzing: some inputs for every reader. All of them: ``make fuzz``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent / "fuzz.py"


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FUZZ), *options], capture_output=True, text=True, timeout=250
    )


def test_no_reader_fails_on_what_is_not_for_it() -> None:
    done = _run("--inputs", "500", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") > 25


def test_an_unknown_parser_is_told_with_those_that_there_are() -> None:
    done = _run("--parser", "nonsense")
    assert done.returncode == 2
    assert "--parser nonsense: not one of messages-to-launcher, " in done.stderr
