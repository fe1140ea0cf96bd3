"""Wrong input of every command: one clear sentence, the right exit code, no traceback, and nothing
is left behind. The cases are in ``support/bad_*.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import pytest
from bad_files import FILES
from bad_inputs import SCRIPT, Case, Content
from bad_launches import LAUNCHES
from bad_questions import QUESTIONS
from journals import recorded, write

from deadpool_launch import cli, main_cli
from deadpool_launch.entry import run_command
from deadpool_launch.sim import cli as sim_cli

CASES = {**LAUNCHES, **FILES, **QUESTIONS}
#: How each program is called, and its command.
PROGRAMS: Mapping[str, tuple[Callable[[Sequence[str]], int], click.Command]] = {
    "deadpool-launch": (cli.run, cli.command),
    "deadpool": (main_cli.run, main_cli.command),
    sim_cli.PROGRAM: (
        lambda words: run_command(sim_cli.command, words, sim_cli.PROGRAM),
        sim_cli.command,
    ),
}
#: Words of Python, of a defect, and what a terminal would act on.
_NOT_FOR_PEOPLE = re.compile(
    r"Traceback|internal error|\b[A-Z]\w+(Error|Exception)\b|[\x00-\x1f\x7f]"
)
#: Any text is right.
_ANY_TEXT = {"--reason"}
_NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands are given: no Slurm, no job, nothing of the user's own."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "SBATCH", "DEADPOOL", "XDG_")):
            monkeypatch.delenv(name)
    for name, value in {
        "PATH": str(tmp_path / "bin"),
        "DEADPOOL_SITE": "generic",
        "DEADPOOL_SITE_POLICY": "",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def lay_out(folder: Path, files: Mapping[str, Content], links: Sequence[str] = ()) -> None:
    """Make these files and what every case has."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    write(folder / "swap", recorded("swap"))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.write_text(content)
        else:
            path.write_bytes(content)
    for name in links:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("nowhere")


def split(case: Case) -> tuple[str, list[str]]:
    """The case's program and its arguments."""
    program = next(each for each in PROGRAMS if case.words[: len(each.split())] == (*each.split(),))
    return program, list(case.words[len(program.split()) :])


class Another:
    """While entered, this process is somebody's who may not look into folders of mode 0700."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        for path in self._folder.rglob("*"):
            path.chmod(0o700)
        self._folder.chmod(0o755)
        os.seteuid(_NOBODY)

    def __exit__(self, *_: object) -> None:
        os.seteuid(0)


def wrong_with(case: Case, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is not as it should be about what is said of the case; empty if all is."""
    lay_out(folder, case.files, case.links)
    program, arguments = split(case)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        # Another cannot come from above to this folder.
        home = "home" if case.by_another else str(folder / "home")
        for name, value in {"HOME": home, **case.env}.items():
            patched.setenv(name, value)
        before = sorted(folder.rglob("*"))
        run, _ = PROGRAMS[program]
        if case.by_another:
            with Another(folder):
                code = run(arguments)
        else:
            code = run(arguments)
        left = sorted({*folder.rglob("*")} - {*before})
    out, error = capsys.readouterr()
    lines = error.splitlines()
    problems = [
        (code != case.code, f"exit code {code} instead of {case.code}"),
        (out, f"it also said {out[:300]!r}"),
        (len(lines) != case.lines or not error.endswith("\n"), "not one sentence"),
        (left, f"it left {left}"),
        (any(_NOT_FOR_PEOPLE.search(line) for line in lines), "not for people"),
        *((part not in error, f"nothing of {part!r}") for part in case.parts),
    ]
    found = [text for wrong, text in problems if wrong]
    return f"{case.line[:200]}: {'; '.join(found)}; it said {error[:600]!r}" if found else ""


@pytest.mark.parametrize("area", CASES)
def test_wrong_input_is_one_sentence_and_an_exit_code(
    area: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = os.geteuid() == 0
    wrong = [
        wrong_with(case, folder / str(number), capsys)
        for number, case in enumerate(CASES[area])
        if mine or not case.by_another
    ]
    assert not any(wrong), "\n".join(filter(None, wrong))


def commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """The command and all below it, by what is typed."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from commands(f"{name} {inner}", found)


def test_every_command_and_every_option_with_a_value_has_a_case() -> None:
    lines = [case.line for cases in CASES.values() for case in cases]
    lacking = []
    for program, (_, whole) in PROGRAMS.items():
        for name, command in commands(program, whole):
            of_it = [
                f"{line} ".replace("=", " ") for line in lines if f"{line} ".startswith(f"{name} ")
            ]
            if not of_it:
                lacking.append(name)
            for option in command.params:
                valued = isinstance(option, click.Option) and not option.is_flag
                given = any(
                    f" {name} " in line or f" '{name} " in line
                    for line in of_it
                    for name in option.opts
                )
                if valued and not given and not _ANY_TEXT & {*option.opts}:
                    lacking.append(f"{name} {option.opts[-1]}")
    assert not lacking


# ---------------------------------------------------------------- what is odd, but right


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("deadpool policy check x.yaml", "\ufeffspares:\r\n  count: 2\r\n"),
        ("deadpool policy check x.yaml", "# nothing yet\n"),
        ("deadpool policy check x.yaml", "spares.count: '2'\nheartbeat_timeout: 5\n"),
        ("deadpool sites --check x.yaml", "\ufeffkind: slurm\r\ngpus.per_node: 4\r\n"),
        ("deadpool-launch --site local --dry-run train.py --policy x.yaml", "max_restarts: 0\n"),
        ("deadpool-launch --print-script --nodes 2 -t 24h train.py --policy x.yaml", ""),
        ("deadpool policy show --policy x.yaml", ""),
        (
            "deadpool simulate --steps 9 --step-time 1 --nodes 4 --seeds 1 --trace x.yaml",
            "\ufeff9,1,permanent\r\n",
        ),
    ],
)
def test_odd_input_is_taken(
    line: str,
    text: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lay_out(folder / "at", {"x.yaml": text})
    monkeypatch.chdir(folder / "at")
    monkeypatch.setenv("COLUMNS", "0")
    program, arguments = split(Case((*line.split(),), ()))
    assert PROGRAMS[program][0](arguments) == 0
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------- as processes

_DEADPOOL = f"{sys.executable} -m deadpool_launch.main_cli"
_LAUNCHER = f"{sys.executable} -m deadpool_launch"


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        (f"{_DEADPOOL} events swap | head -n 1", 0, ""),
        (f"{_DEADPOOL} report swap --json >/dev/full", 2, "cannot be written (No space left on d"),
        (f"{_DEADPOOL} status swap >&-; {_DEADPOOL} classify - <&-", 2, "standard input is closed"),
        (f"rm -r ../at; {_DEADPOOL} status", 2, "was called is not there any more; cd into anoth"),
        (f"{_LAUNCHER} --site local \"$(printf 'caf\\351.py')\"", 2, "caf\\udce9.py: is not UTF-8"),
    ],
)
def test_what_only_a_process_meets_is_told_too(
    line: str, code: int, sentence: str, folder: Path
) -> None:
    lay_out(folder / "at", {})
    (folder / "at" / os.fsdecode(b"caf\xe9.py")).write_text(SCRIPT)
    done = subprocess.run(
        ["/bin/bash", "-c", line],
        cwd=folder / "at",
        env={**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert sentence in done.stderr
    assert done.stderr.count("\n") == bool(sentence)
    assert not _NOT_FOR_PEOPLE.search(done.stderr.rstrip("\n"))
