"""Policy files: what they may say, which level wins, and what a person is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_launch import cli, main_cli
from deadpool_launch.controller.config import Config
from deadpool_launch.errors import UsageError
from deadpool_launch.options import LaunchOptions
from deadpool_launch.policy import page
from deadpool_launch.policy.kinds import read_duration, show_duration
from deadpool_launch.policy.merge import settle
from deadpool_launch.policy.reading import PolicyFile, read
from deadpool_launch.policy.schema import BY_NAME, KEYS
from deadpool_runtime.protocol import AdmissionCheck

DOCS = Path(__file__).parents[2] / "docs" / "policy.md"


def file_of(text: str, path: str = "policy.yaml") -> PolicyFile:
    file, problems = read(text, path, may_limit=True)
    assert not problems, problems
    return file


def problems_of(text: str, *, may_limit: bool = True) -> list[str]:
    return [str(problem) for problem in read(text, "p.yaml", may_limit=may_limit)[1]]


@pytest.fixture
def levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, in which ``site.yaml`` is the site's file and ``user.yaml`` free."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "site.yaml").write_text("")
    (tmp_path / "user.yaml").write_text("")
    return tmp_path


def options_of(folder: Path, *arguments: str, job_id: str = "") -> LaunchOptions:
    """What a command line means with both files."""
    environ = {"DEADPOOL_SITE_POLICY": str(folder / "site.yaml"), "USER": "ann"}
    if job_id:
        environ["SLURM_JOB_ID"] = job_id
    given = ["train.py", "--policy", str(folder / "user.yaml"), *arguments]
    if not job_id:
        given += ["--site", "local"]
    context = cli.command.make_context(cli.PROGRAM, given)
    return cli.to_options(context.params, environ, "20260101-000000")


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("shrink", ("shrink", "stop")),
        ("[shrink, stop]", ("shrink", "stop")),
        ("[stop]", ("stop",)),
    ],
)
def test_what_is_done_without_spares_is_an_order_that_ends_in_stop(
    levels: Path, text: str, order: tuple[str, ...]
) -> None:
    (levels / "user.yaml").write_text(f"on_exhausted: {text}\n")
    assert options_of(levels).on_exhausted == order
    assert options_of(levels, "--on-exhausted", "stop").on_exhausted == ("stop",)
    assert options_of(levels, "--on-exhausted", "shrink").on_exhausted == ("shrink", "stop")


@pytest.mark.parametrize("text", ["durable", "[shrink, shrink]", "[stop, shrink]", "[]", "{a: b}"])
def test_no_other_order_is_taken(text: str) -> None:
    (problem,) = problems_of(f"on_exhausted: {text}\n")
    assert "must be a list of shrink and stop, each once at most, stop last" in problem


# ---------------------------------------------------------------- the schema


def test_documentation_is_that_of_the_schema() -> None:
    assert DOCS.read_text() == page.page(), (
        "docs/policy.md is stale: python -m deadpool_launch.policy.page > docs/policy.md"
    )


def test_every_key_stands_for_an_option_of_the_launcher_and_its_flag_exists() -> None:
    assert {key.field for key in KEYS} <= set(LaunchOptions.__struct_fields__)
    assert len({key.field for key in KEYS}) == len({key.name for key in KEYS}) == len(KEYS)
    flags = {flag for parameter in cli.command.params for flag in parameter.opts}
    assert {key.flag for key in KEYS if key.flag} <= flags


def test_every_default_can_be_written_into_a_file(levels: Path) -> None:
    lines = [
        f"{key.name}: {key.show(key.default)}"
        for key in KEYS
        if key.way in ("", "count") and key.name != "checkpoint.every"
    ]
    (levels / "user.yaml").write_text("\n".join(lines))
    without = LaunchOptions(script=str(levels / "train.py"), run_dir=options_of(levels).run_dir)
    read_back = options_of(levels)
    for key in KEYS:
        assert getattr(read_back, key.field) == getattr(without, key.field), key.name


def test_deadlines_of_the_options_are_those_of_the_controller() -> None:
    options, config = LaunchOptions(script=""), Config(("n1",), (), 1)
    assert (
        options.rank_start_timeout_s,
        options.park_timeout_s,
        options.first_step_timeout_s,
        options.restore_timeout_s,
        options.load_timeout_s,
        options.max_restarts,
        options.max_attempts,
        options.local_restarts,
        options.incidents,
        options.checkpoint_keep,
        options.replication_factor,
    ) == (
        config.rank_start_s,
        config.park_s,
        config.build_s,
        config.restore_s,
        config.load_s,
        config.max_restarts,
        config.max_attempts,
        config.node_restarts,
        config.max_incidents,
        config.checkpoint_keep,
        config.replication_factor,
    )


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("text", "value_s"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("90s", 90.0),
        ("5 m", 300.0),
        ("5min", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1:30", 90.0),
        ("1:30:00", 5400.0),
        ("1-12:00", 129600.0),
        ("1-00:00:00", 86400.0),
        ("2x", None),
        ("-3", None),
        ("1-2", None),
        ("", None),
        ("nan", None),
    ],
)
def test_durations(text: str, value_s: float | None) -> None:
    assert read_duration(text) == value_s


@given(st.integers(0, 10**7).map(lambda number: number / 10))
def test_duration_that_is_shown_is_read_back(value_s: float) -> None:
    assert read_duration(show_duration(value_s)) == pytest.approx(value_s)


@given(
    st.text(max_size=60)
    | st.builds("{}: {}".format, st.sampled_from(sorted(BY_NAME)), st.text(max_size=20))
)
def test_no_text_is_an_internal_error(text: str) -> None:
    read(text, "p.yaml", may_limit=True)


def test_yaml_does_not_make_a_number_of_a_time() -> None:
    assert file_of("recovery: {park_timeout: 1:30:00}").values["recovery.park_timeout"].value == (
        5400.0
    )


def test_checks_and_domains_are_read() -> None:
    file = file_of(
        "admission:\n  - command: nvidia-smi -L\n    timeout: 1m\n"
        'failure_domains: {"n[1-2]": rack1, n3: rack2}\n'
    )
    assert file.values["admission"].value == (AdmissionCheck("nvidia-smi -L", 60.0),)
    assert file.values["failure_domains"].value == (("n[1-2]", "rack1"), ("n3", "rack2"))


def test_a_section_may_be_written_with_dots() -> None:
    dotted, nested = file_of("spares.auto.hours: 8"), file_of("spares: {auto: {hours: 8}}")
    assert dotted.values == nested.values


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "\nspares: {cuont: 3}",
            "line 2: spares.cuont is not a key (did you mean count?); "
            "valid here are auto, count, fraction, order, start",
        ),
        ("node: 3", "line 1: node is a section; its keys are local_restarts, local_restarts_with"),
        ("spares.count: two", "line 1: spares.count: 'two' is wrong; must be a whole number of at"),
        ("spares.count: -1", "line 1: spares.count: '-1' is wrong; must be a whole number of at"),
        ("spares.count:", "line 1: spares.count: has no value; must be a whole number"),
        ("spares.fraction: 1", "'1' is wrong; must be a number above 0 and below 1, or none"),
        ("spares.start: soon", "'soon' is wrong; must be at-start or on-failure"),
        ("heartbeat_timeout: 3 parsec", "must be a duration such as 90s, 5m, 2h or 1-00:00:00, fr"),
        ("heartbeat_timeout: 1d", "from 0.5s to 10m"),
        (
            "collective_timeout: 30s\nheartbeat_timeout: 1m",
            "line 2: collective_timeout 30s must be longer than heartbeat_timeout, 1m",
        ),
        ("checkpoint.dir: here", "'here' is wrong; must be an absolute path"),
        ("spares.count: 1\nspares.count: 2", "line 2: spares.count stands here a second time"),
        ("spares.count: 1\nspares:\n  count: 2", "line 3: spares.count stands here a second time"),
        ("spares: {count: 1}\nspares.count: 2", "line 2: spares.count stands here a second time"),
        (
            "spares.count: 1\nspares.fraction: 0.1",
            "line 2: spares.count and spares.fraction both say how many spares are held; keep one",
        ),
        ("admission: true", "line 1: admission: must be a list of checks"),
        ("admission: [{command: x}]", "admission: check 1 has no timeout"),
        (
            "admission: [{command: x, time: 3}]",
            "time is not a key of check 1; valid are command and timeout",
        ),
        ("failure_domains: {'n[1': a}", "'n[1' is not a node list; must be node lists as Slurm"),
        ("failure_domains: {'n[1-3]': a, n2: b}", "n2 is in a and in b; name every node once"),
        ("spares: [", "line 1: is not YAML: "),
        ("- 1", "line 1: must be a mapping of keys to values; valid are admission, agent_start_"),
        ("limits: {spares.start: {max: at-start}}", "limits.spares.start: max is not valid; use f"),
        ("limits: {spares.count: 4}", "limits.spares.count must be a mapping with min or max or"),
        ("limits: {spares.count: {min: 4, max: 2}}", "limits.spares.count: min 4 is above max 2"),
        ("limits: {spares.cuont: {min: 4}}", "spares.cuont is not a key (did you mean count?)"),
        (
            "limits: {spares.count: {max: 2}}\nspares.count: 3",
            "line 2: spares.count: 3 is above the site's limit of 2 (line 1)",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_sentence(text: str, sentence: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith("p.yaml, line ")
    assert sentence in problem


def test_limits_have_no_place_in_a_users_file() -> None:
    (problem,) = problems_of("limits: {spares.count: {max: 9}}", may_limit=False)
    assert problem == "p.yaml, line 1: limits has effect only in the site's file; remove it here"


# ---------------------------------------------------------------- levels


def test_later_levels_win_key_by_key(levels: Path) -> None:
    (levels / "site.yaml").write_text("spares.count: 1\nheartbeat_timeout: 10s\nmax_restarts: 7\n")
    (levels / "user.yaml").write_text("heartbeat_timeout: 20s\nmax_restarts: 8\n")
    options = options_of(levels, "--max-restarts", "9")
    assert (options.spares, options.heartbeat_timeout_s, options.max_restarts) == (1, 20.0, 9)


def test_a_level_that_says_how_many_spares_undoes_the_other_ways(levels: Path) -> None:
    (levels / "site.yaml").write_text("spares.auto: {node_mtbf_hours: 100, hours: 9}\n")
    assert options_of(levels).node_mtbf_hours == 100
    (levels / "user.yaml").write_text("spares.fraction: 0.1\n")
    options = options_of(levels)
    assert (options.node_mtbf_hours, options.spare_hours, options.spare_fraction) == (
        None,
        None,
        0.1,
    )
    options = options_of(levels, "--spares", "2")
    assert (options.spares, options.spare_fraction) == (2, None)


def test_limits_win_over_the_command_line_and_a_person_is_told(levels: Path) -> None:
    site = levels / "site.yaml"
    site.write_text(
        "limits:\n  spares.count: {max: 4}\n  heartbeat_timeout: {min: 5s}\n"
        "  spares.start: {fixed: on-failure}\n  node.local_restarts: {max: 3}\n"
    )
    (levels / "user.yaml").write_text("node.local_restarts: unlimited\n")
    options = options_of(levels, "--spares", "9", "--spare-start", "at-start")
    assert (options.spares, options.spare_start, options.local_restarts) == (4, "on-failure", 3)
    assert options.heartbeat_timeout_s == 5.0
    settings, *changed = options.remarks
    assert settings == f"settings from {site} are in effect"
    assert changed == [
        f"--spares 9 is above the site's limit of 4 ({site}): 4 are held",
        "--spare-start at-start is not on-failure, which is fixed by the site's limit "
        f"({site}): on-failure is used",
        f"{levels / 'user.yaml'}:1: node.local_restarts unlimited is above the site's limit of 3 "
        f"({site}): 3 is used",
    ]


def test_way_to_count_spares_that_the_site_fixes_undoes_the_users(levels: Path) -> None:
    site = levels / "site.yaml"
    site.write_text("limits: {spares.fraction: {fixed: 0.25}}\n")
    options = options_of(levels, "--spares", "9")
    assert (options.spares, options.spare_fraction) == (0, 0.25)
    assert options.remarks[-1] == (
        f"--spares has no effect: spares.fraction is fixed at 0.25 ({site})"
    )


def test_site_file_does_not_bring_slurms_nodes_to_a_rehearsal(levels: Path) -> None:
    (levels / "site.yaml").write_text(
        "admission: [{command: nvidia-smi, timeout: 9s}]\nreplication.mpi: pmix\nspares.count: 1\n"
        "failure_domains: {n1: a}\n"
    )
    local, slurm = options_of(levels), options_of(levels, job_id="7")
    assert (local.admission, local.mpi, local.failure_domains, local.spares) == ((), "none", (), 1)
    assert (len(slurm.admission), slurm.mpi, len(slurm.failure_domains)) == (1, "pmix", 1)
    (levels / "user.yaml").write_text("admission: [{command: 'true', timeout: 9s}]\n")
    assert options_of(levels).admission == (AdmissionCheck("true", 9.0),)


def test_place_for_checkpoints_is_used_by_those_who_ask_for_some(levels: Path) -> None:
    (levels / "site.yaml").write_text("checkpoint.dir: /scratch/$USER\n")
    assert options_of(levels).checkpoint_dir is None
    asked = options_of(levels, "--checkpoint-every", "5")
    assert (asked.checkpoint_dir, asked.checkpoint_every) == ("/scratch/ann", 5)
    (levels / "site.yaml").write_text("checkpoint.dir: /scratch/$NOBODY\n")
    with pytest.raises(UsageError, match=r"site.yaml:1: checkpoint.dir .*NOBODY is not set"):
        options_of(levels, "--checkpoint-every", "5")
    (levels / "site.yaml").write_text("checkpoint.every: 5\n")
    with pytest.raises(UsageError, match=r"site.yaml:1: checkpoint.every needs a folder"):
        options_of(levels)


@pytest.mark.parametrize(
    ("confirm", "said"),
    [
        ("2s", "replication.confirm_timeout 2 s: must be longer than --heartbeat-timeout, 3 s"),
        (
            "11m",
            "--collective-timeout 600 s: must be longer than replication.confirm_timeout, 660 s, "
            "as a step waits for it",
        ),
    ],
)
def test_confirmation_outlasts_a_silent_node_and_no_step(
    levels: Path, confirm: str, said: str
) -> None:
    (levels / "user.yaml").write_text(f"replication.confirm_timeout: {confirm}\n")
    with pytest.raises(UsageError) as caught:
        options_of(levels)
    assert str(caught.value) == said


def test_files_that_are_named_must_be_there(levels: Path) -> None:
    (levels / "user.yaml").unlink()
    with pytest.raises(UsageError, match=r"--policy .*user.yaml: cannot be read \(No such file"):
        options_of(levels)


def test_origin_of_every_setting_is_kept_for_the_journal(levels: Path) -> None:
    (levels / "site.yaml").write_text("\nspares.count: 1\n")
    assert options_of(levels).policy == (f"spares.count: 1 ({levels / 'site.yaml'}:2)",)
    assert options_of(levels, "--spares", "2").policy == ()


def test_without_files_nothing_is_said() -> None:
    settled = settle(None, None, {}, on_slurm=True)
    assert settled.remarks == ()
    assert {setting.level for setting in settled.settings.values()} == {"default"}


# ---------------------------------------------------------------- commands


def test_check_tells_every_mistake(levels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = levels / "user.yaml"
    path.write_text("spares.cuont: 1\nlimits: {spares.count: {max: 2}}\nmax_restarts: x\n")
    assert main_cli.run(["policy", "check", str(path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}, line 1", f"{path}, line 3"]
    path.write_text("spares.count: 1\n")
    assert main_cli.run(["policy", "check", str(path)]) == 0
    assert main_cli.run(["policy", "check", str(levels / "none.yaml")]) == 2


def test_show_names_the_origin_of_every_value(
    levels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DEADPOOL_SITE_POLICY", "site.yaml")
    monkeypatch.delenv("COLUMNS", raising=False)
    (levels / "site.yaml").write_text("limits: {heartbeat_timeout: {min: 9s}}\n")
    (levels / "user.yaml").write_text("spares.count: 3\n")
    assert main_cli.run(["policy", "show", "--policy", "user.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == [key.name for key in KEYS]
    assert (shown["spares.count"]["value"], shown["spares.count"]["origin"]) == (3, "user.yaml:1")
    assert shown["heartbeat_timeout"]["origin"] == "limit in site.yaml:1"
    assert shown["max_restarts"]["level"] == "default"
    assert main_cli.run(["policy", "show", "--policy", "user.yaml"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    for key in KEYS:
        assert text.count(key.name) >= 2, "a row and its description"
