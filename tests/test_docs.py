"""The README and the pages of docs/: every command in them is one that a test runs, and nothing
that they name is missing.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from doc_pages import (
    SHELL,
    Command,
    anchors,
    blocks,
    commands,
    included,
    links,
    options,
    pages,
)

from deadpool_launch import cli, main_cli, rehearse
from deadpool_launch.exits import ExitCode, PreflightCode
from deadpool_slurm import submission

ROOT = Path(__file__).parents[1]
PAGES = pages()
COMMANDS = [command for page in PAGES.items() for command in commands(*page)]

#: The beginning of a command, and what runs it: a test, or ``--help`` with this file.
HELP = "--help"
SHOWN_BY = {
    "deadpool-launch": "tests/cluster/test_hot_swap.py::test_power_off_in_the_middle_of_backward",
    "deadpool rehearse": (
        "tests/launch/test_rehearse.py"
        "::test_a_lost_node_is_replaced_and_the_final_state_has_the_same_bits"
    ),
    "deadpool drain": (
        "tests/launch/test_planned.py"
        "::test_drained_node_hands_its_ranks_over_and_no_step_is_run_again"
    ),
    "deadpool classify": (
        "tests/launch/test_classify_command.py::test_people_are_told_kind_rule_line_and_consequence"
    ),
    "deadpool policy check": "tests/launch/test_policy.py::test_check_tells_every_mistake",
    "deadpool policy show": (
        "tests/launch/test_policy.py::test_show_names_the_origin_of_every_value"
    ),
    "deadpool version": (
        "tests/launch/test_cli.py::test_deadpool_version_names_what_a_job_depends_on"
    ),
    "deadpool sites": (
        "tests/launch/test_sites.py::test_command_shows_values_origins_and_what_is_not_known"
    ),
    "deadpool sites --check": "tests/launch/test_sites.py::test_command_checks_a_file",
    "deadpool status": "tests/status/test_commands.py::test_status_of_a_killed_job_is_one_screen",
    "deadpool events": "tests/status/test_commands.py::test_events_are_narrowed_down",
    "deadpool report": (
        "tests/status/test_commands.py"
        "::test_report_is_written_beside_the_journal_or_where_it_is_asked_for"
    ),
    "deadpool preflight": (
        "tests/cluster/test_preflight_on_slurm.py::test_self_test_and_mpi_world_in_a_job"
    ),
    "salloc": "tests/cluster/test_preflight_on_slurm.py::test_self_test_and_mpi_world_in_a_job",
    "deadpool plan": (
        "tests/whatif/test_commands.py::test_a_plan_names_memory_bytes_spares_and_goodput"
    ),
    "deadpool simulate": "tests/whatif/test_commands.py::test_a_picture_is_drawn",
    "pip install": "tests/test_packaging.py::test_both_console_scripts_are_installed",
    ". .venv/bin/activate": "tests/test_packaging.py::test_both_console_scripts_are_installed",
    "sbatch": (
        "tests/cluster/test_preflight_on_slurm.py::test_no_kill_in_the_batch_script_is_found"
    ),
    "scontrol show config": "tests/slurm/test_versions.py::test_kill_on_bad_exit_is_noted",
    # `.ci/run` is `make test`, which begins with `make check`; `make test-all` leaves nothing out.
    "make check": ".ci/run",
    "make test": ".ci/run",
    "make test-all": ".ci/run",
    "make demo": (
        "tests/launch/test_rehearse.py"
        "::test_a_lost_node_is_replaced_and_the_final_state_has_the_same_bits"
    ),
    "make docs": "tests/test_docs.py::test_site_is_built",
    "make integrations": "tests/integrations/test_frameworks.py::test_a_loss_changes_nothing",
    "make fuzz": "tests/fuzz/test_fuzz.py::test_no_reader_fails_on_what_is_not_for_it",
    "make cluster": "tests/cluster/test_mini_cluster.py::test_all_nodes_are_idle",
    "make cluster-shell": HELP,
    "make cluster-fault": HELP,
    "make cluster-down": HELP,
    "make chaos": HELP,
    "make soak": HELP,
    "make bench": HELP,
    "python bench/first_step.py": HELP,
    "python bench/links.py": HELP,
    "python bench/overhead.py": HELP,
    "python bench/recovery.py": HELP,
    "python bench/rebuild.py": HELP,
    "python bench/scale.py": HELP,
    "python bench/paper.py": HELP,
    "python bench/compare.py": HELP,
    "python bench/evaluation.py": (
        "tests/bench/test_evaluation.py::test_page_is_that_of_the_results"
    ),
    "python tests/chaos/chaos.py": HELP,
    "python -m deadpool_launch.sim": "tests/sim/test_sim_seeds.py::test_no_seed_breaks_a_promise",
    "python -m deadpool_launch.policy.page": (
        "tests/launch/test_policy.py::test_documentation_is_that_of_the_schema"
    ),
}
#: Programs whose imports cost many seconds.
SLOW = ("bench/overhead.py", "bench/rebuild.py", "bench/scale.py")
#: Options of other programs than ours.
FOREIGN = {
    *("--exclude", "--gpus-per-node", "--gpus-per-task", "--gres", "--mem", "--no-kill"),
    *("--ckpt-step", "--enable-ft-package", "--rampup-batch-size", "--rerun-mode"),
    *("--dataloader-type", "--iterations-to-skip", "--step-batch-size-schedule"),
    "--use-torch-fsdp2",
}
#: Values for the words in capitals that stand for something.
PLACEHOLDERS = {"KIND": "pmi2", "N": "3", "STEPS": "3", "SECONDS": "60"}


def _shown_by(command: Command) -> str | None:
    """What runs the command: the entry for the longest beginning of it."""
    for count in range(len(command.words), 0, -1):
        if shown := SHOWN_BY.get(" ".join(command.words[:count])):
            return shown
    return None


def _clicked(command: Command) -> tuple[click.Command, list[str]] | None:
    """The click command that is meant, and the words that follow its name."""
    program, *words = command.words
    if program == cli.PROGRAM:
        return cli.command, words
    if program != main_cli.PROGRAM:
        return None
    found: click.Command = main_cli.command
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        inner = found.get_command(click.Context(found), words[0])
        assert inner is not None, f"{command.where}: {words[0]} is no command of {found.name}"
        found, words = inner, words[1:]
    return found, words


def _known(command: click.Command) -> set[str]:
    named = {name for parameter in command.params for name in parameter.opts}
    return named | {"--help", "--version"}


def test_every_command_is_run_by_a_test() -> None:
    without = [f"{one.where}: {' '.join(one.words)}" for one in COMMANDS if not _shown_by(one)]
    assert without == [], "name in SHOWN_BY a test that runs such a command"
    for shown in {*SHOWN_BY.values()} - {HELP}:
        path, _, test = shown.partition("::")
        assert (ROOT / path).is_file(), shown
        assert not test or f"def {test}(" in (ROOT / path).read_text(), shown


def test_no_entry_is_for_a_command_that_no_page_has() -> None:
    used = {_shown_by(command) for command in COMMANDS}
    assert {shown for shown in SHOWN_BY.values() if shown not in used} == set()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory that the pages' commands count on, outside any allocation."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "DEADPOOL"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "LOG", "FILE"):
        Path(name).touch()


@pytest.mark.usefixtures("folder")
def test_options_exist_and_whole_commands_are_understood() -> None:
    for command in COMMANDS:
        meant = _clicked(command)
        if meant is None:
            continue
        clicked, words = meant
        ours = words[: words.index("--")] if "--" in words else words
        named = {word.partition("=")[0] for word in ours if word.startswith("-") and word != "-"}
        assert named <= _known(clicked), command.where
        if command.whole and "--help" not in named:
            given = [PLACEHOLDERS.get(word, word) for word in words]
            try:
                clicked.make_context(clicked.name, given)
            except click.ClickException as error:
                pytest.fail(f"{command.where}: {error.format_message()}")


def _launches(*, submitted: bool) -> list[Command]:
    """Launches that can be copied: those for a login node, or those for inside of a job."""
    return [
        one
        for one in COMMANDS
        if one.whole
        and one.words[0] == cli.PROGRAM
        and submitted == ("--nodes" in one.words and "local" not in one.words)
    ]


@pytest.mark.usefixtures("folder")
def test_jobs_can_be_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as their batch scripts, on a cluster that no file describes."""
    monkeypatch.setattr(cli, "cluster_name", lambda: None)
    launches = _launches(submitted=True)
    assert len(launches) >= 3
    for command in launches:
        words = command.words[1:]
        code = cli.run(["--print-script", *words])
        script, wrong = capsys.readouterr()
        assert code == ExitCode.OK, f"{command.where}: {wrong}"
        options = submission.sbatch_options(script)
        active, spares = (int(words[words.index(name) + 1]) for name in ("--nodes", "--spares"))
        assert f"--nodes={active + spares}" in options, command.where
        assert ("--dependency=singleton" in options) == ("--chain" in words), command.where
        assert submission.asks_no_kill(options), command.where
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0, script


@pytest.mark.usefixtures("folder")
def test_launches_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """With --dry-run, on three nodes of this machine where Slurm would give some."""
    launches = _launches(submitted=False)
    assert len(launches) >= 4
    for command in launches:
        words = [word for word in command.words[1:] if word != "--requeue-before-limit"]
        planned = ["--dry-run", "--site", "local", "--nodes", "3", *words]
        assert cli.run(planned) == ExitCode.OK, f"{command.where}: {capsys.readouterr().err}"
        assert "train.py" in capsys.readouterr().out, command.where


def test_every_option_that_is_named_exists() -> None:
    known = set(FOREIGN) | _known(cli.command) | _known(rehearse.rehearse)
    for name in main_cli.command.list_commands(click.Context(main_cli.command)):
        inner = main_cli.command.get_command(click.Context(main_cli.command), name)
        assert inner is not None
        known |= _known(inner)
        if isinstance(inner, click.Group):
            known |= {option for each in inner.commands.values() for option in _known(each)}
    unknown = {f"{name}: {o}" for name, text in PAGES.items() for o in options(text) - known}
    assert unknown == set()


def test_make_knows_every_target_and_its_program() -> None:
    for words in {one.words for one in COMMANDS if one.words[0] == "make"}:
        for program in _made(words):
            assert (ROOT / program[0]).is_file(), words


def _helped() -> list[object]:
    names = [name for name, by in SHOWN_BY.items() if by == HELP]
    return [
        pytest.param(name, marks=[pytest.mark.matrix] if name.endswith(SLOW) else [])
        for name in names
    ]


@functools.cache
def _help_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", _helped())
def test_programs_explain_themselves_and_what_is_given_to_them(name: str) -> None:
    """Options, and the first word where it is a command of the program."""
    for command in COMMANDS:
        if _shown_by(command) != HELP or not " ".join(command.words).startswith(name):
            continue
        program, *given = (
            _made(command.words)[0] if command.words[0] == "make" else command.words[1:]
        )
        help_text = _help_of(program)
        for place, word in enumerate(given):
            if word.startswith("--") or (place == 0 and re.fullmatch("[a-z]+", word)):
                assert word in help_text, command.where


def _made(words: Sequence[str]) -> list[list[str]]:
    """What ``make`` would give to Python."""
    done = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return [shlex.split(line) for line in re.findall(r"bin/python (\S+\.py.*)", done.stdout)]


def test_batch_scripts_are_bash_and_outlive_a_node() -> None:
    scripts = [
        block.text
        for text in PAGES.values()
        for block in blocks(text)
        if block.language == SHELL and block.text.startswith("#!")
    ]
    assert len(scripts) >= 3
    for script in scripts:
        assert submission.asks_no_kill(submission.sbatch_options(script)), script
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0, script


def test_every_block_says_what_it_is() -> None:
    languages = {SHELL, "python", "yaml", "text"}
    wrong = [
        f"{name}:{block.line}"
        for name, text in PAGES.items()
        for block in blocks(text)
        if block.language not in languages
    ]
    assert wrong == []


def test_links_and_anchors_hold() -> None:
    broken = []
    for name, text in PAGES.items():
        for target in links(text):
            if re.match(r"https?://", target):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path if path else ROOT / name
            if not file.is_file() or (anchor and anchor not in anchors(file.read_text())):
                broken.append(f"{name}: {target}")
    assert broken == []


def test_what_is_included_exists() -> None:
    for name, text in PAGES.items():
        for file, part in included(text):
            whole = (ROOT / file).read_text()
            for edge in ("start", "end"):
                assert part is None or f"--8<-- [{edge}:{part}]" in whole, f"{name}: {file}:{part}"


def test_every_page_has_its_place_in_the_site() -> None:
    named = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(there), "nav in mkdocs.yml names every page once"


def test_exit_codes_are_those_of_the_launcher() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", text, re.MULTILINE)
    told = [int(code) for row in rows for code in row.split(", ")]
    assert told == sorted(ExitCode)
    (more,) = re.findall(r"`deadpool rehearse` adds (\d+) .*? and (\d+) ", text)
    assert tuple(map(int, more)) == tuple(rehearse.RehearsalCode)
    (more,) = re.findall(r"`deadpool preflight` adds (\d+) [^`]*? and (\d+) ", text)
    assert tuple(map(int, more)) == tuple(PreflightCode)


def test_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make setup installs the extra docs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--8<--" not in (tmp_path / "site" / "index.html").read_text()
