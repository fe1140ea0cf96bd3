"""``deadpool classify``: what it prints, its exit codes, and what it does with odd files."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_launch.classify.command import clocked_time_left, numbered
from deadpool_launch.main_cli import run

LOG = "step 1\n3: OSError: [Errno 28] No space left on device\n3: \n0: step 2\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank.log"
    path.write_text(LOG)
    return path


def test_people_are_told_kind_rule_line_and_consequence(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["classify", str(log)]) == 0
    assert capsys.readouterr().out == (
        "job: rule disk-full: a file system is full\n"
        f"  {log}, line 2, rank 3: OSError: [Errno 28] No space left on device\n"
        "  the job ends with exit code 21; no spare is used\n"
    )


def test_programs_get_the_same(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", "--json", str(log)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {
        "log": str(log),
        "kind": "job",
        "rule": "disk-full",
        "reason": "a file system is full",
        "line": 2,
        "text": "OSError: [Errno 28] No space left on device",
        "ranks": [3],
        "all_ranks": 2,
        "xids": [],
        "action": "the job ends with exit code 21; no spare is used",
    }


def test_nothing_found_is_exit_code_1_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("step 1\n")
    assert run(["classify", str(tmp_path / "log")]) == 1
    assert "log: no rule knows an error in it" in capsys.readouterr().err
    assert run(["classify", "--json", str(tmp_path / "log")]) == 1
    assert json.loads(capsys.readouterr().out)["kind"] is None


def test_what_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["classify", str(tmp_path)]) == 2
    assert "is a directory; name one of the files in it" in capsys.readouterr().err
    assert run(["classify", str(tmp_path / "none")]) == 2
    assert "none: cannot be read (No such file" in capsys.readouterr().err


def test_own_rules_come_first(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("rules: [{name: ours, kind: user, reason: r, when: {error: '^step 1$'}}]")
    assert run(["classify", str(log), "--rules", str(mine)]) == 0
    assert "user: rule ours: r\n" in capsys.readouterr().out
    mine.write_text("rules: [{name: ours, kind: user, reason: r, when: {eror: a}}]")
    assert run(["classify", str(log), "--rules", str(mine)]) == 2
    assert "mine.yaml: rule ours: eror is not a key here" in capsys.readouterr().err


def test_clock_confirms_the_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***\n")
    assert run(["classify", str(log), "--time-left", "-1"]) == 0
    assert "rule walltime" in capsys.readouterr().out
    assert run(["classify", str(log), "--time-left", "3600"]) == 0
    assert "rule cancelled" in capsys.readouterr().out
    assert clocked_time_left({"SLURM_JOB_END_TIME": "1010"}, 1000.0) == 10.0
    assert clocked_time_left({"SLURM_JOB_END_TIME": "soon"}, 1000.0) is None
    assert clocked_time_left({}, 1000.0) is None


def test_line_of_any_length_is_one_line() -> None:
    stream = io.BytesIO(b"a" * 300_000 + b"\nb\n" + b"c" * 70_000)
    assert [(number, raw[:2], len(raw)) for number, raw in numbered(stream)] == [
        (1, b"aa", 65_536),
        (2, b"b\n", 2),
        (3, b"cc", 65_536),
    ]


def test_large_log_without_line_ends_takes_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "huge"
    with log.open("wb") as stream:
        stream.truncate(300 << 20)  # sparse: nothing is on disk
        stream.seek(0, io.SEEK_END)
        stream.write(b"\nNVRM: Xid (PCI:0000:3b:00): 79, pid=1\n")
    limit = 250 << 20

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-m", "deadpool_launch.main_cli", "classify", "--json", str(log)],
        capture_output=True,
        text=True,
        preexec_fn=small,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["rule"], json.loads(done.stdout)["line"]) == ("xid-hardware", 2)
