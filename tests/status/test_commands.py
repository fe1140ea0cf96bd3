"""``deadpool status``, ``events`` and ``report`` as they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from journals import recorded, write

from deadpool_launch.main_cli import run


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a job that was killed while it wrote; nothing else goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return write(tmp_path / "deadpool-runs" / "12", recorded("swap")[:-1], torn='{"at":17')


def test_status_of_a_killed_job_is_one_screen(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert any("its launcher does not answer" in line for line in lines)


def test_status_as_json_is_one_object(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", str(run_dir), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["launcher_answers"] is False
    assert facts["last_incident"]["verdict"] == "continued"


def test_watching_ends_with_the_job(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, recorded("swap"))
    assert run(["status", str(run_dir), "--watch"]) == 0
    assert "completed (exit code 0)" in capsys.readouterr().out
    assert run(["events", str(run_dir), "--follow", "--kind", "end"]) == 0
    assert "end: completed" in capsys.readouterr().out


def test_events_are_narrowed_down(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", "12", "--kind", "incident", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["kind"] for record in found} == {"incident"}
    assert len(found) > 5


def test_report_is_written_beside_the_journal_or_where_it_is_asked_for(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "12"]) == 0
    assert capsys.readouterr().out == "deadpool-runs/12/report.html\n"
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    assert json.loads((run_dir / "report.json").read_text())["job"]["state"] == (
        "ended without a word"
    )
    (tmp_path / "there").mkdir()
    assert run(["report", "12", "--to", "there"]) == 0
    assert sorted(path.name for path in Path("there").iterdir()) == ["report.html", "report.json"]
    capsys.readouterr()
    assert run(["report", "12", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1


@pytest.mark.parametrize("command", ["status", "events", "report"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no job goes on in deadpool-runs: name one with RUN_DIR or JOBID"),
        (["nowhere"], "nowhere: there is no such run directory"),
        (["99"], "99: there is no run directory of this job in deadpool-runs; name it: RUN_DIR"),
        (["empty"], "empty is no run directory: it has no journal.jsonl"),
        (["12", "--jsn"], "--jsn is not an option of deadpool {}; did you mean --json?"),
    ],
)
def test_what_is_no_job_is_one_sentence(
    run_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    sentence: str,
) -> None:
    (tmp_path / "empty").mkdir()
    assert run([command, *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"deadpool: {sentence.format(command)}\n")


def test_report_that_cannot_be_written_names_the_way_out(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", "12", "--to", "not/there"]) == 2
    assert capsys.readouterr().err == (
        "deadpool: not/there/report.json cannot be written (No such file or directory); name "
        "another folder with --to DIR\n"
    )


def test_kind_that_does_not_exist_is_one_sentence(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["events", "12", "--kind", "incidnt"]) == 2
    assert "did you mean incident?" in capsys.readouterr().err
