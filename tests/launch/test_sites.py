"""Site files: what they may say, which level wins, which site is taken, and what comes of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from deadpool_launch import cli, main_cli
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.errors import UsageError
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight import slurm_rules
from deadpool_launch.sites import files, interfaces, template
from deadpool_launch.sites.merge import Settled, settle
from deadpool_launch.sites.model import SiteConfig
from deadpool_launch.sites.reading import SiteFile, read_site
from deadpool_launch.sites.schema import BY_NAME, KEYS
from deadpool_launch.slurm_movers import SlurmMovers
from deadpool_slurm import environ
from deadpool_slurm.client import SlurmError
from deadpool_slurm.commands import CommandLineClient

SHIPPED = Path(__file__).parents[2] / "site_configs"
NAMES = ["generic", "local", "perlmutter", "vista"]


def file_of(text: str, path: str = "site.yaml") -> SiteFile:
    file, problems = read_site(text, path)
    assert not problems, problems
    return file


def site_of(text: str, **which: str) -> SiteConfig:
    return settle("x", [file_of(text)], **which).site


def problems_of(text: str) -> list[str]:
    return [str(problem) for problem in read_site(text, "s.yaml")[1]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shipped files, none in /etc, and the folder of a user's own."""
    shipped, own = tmp_path / "shipped", tmp_path / "home" / "deadpool" / "sites"
    shutil.copytree(SHIPPED, shipped)
    own.mkdir(parents=True)
    monkeypatch.setattr(files, "folders", lambda _: [shipped, tmp_path / "etc", own])
    (tmp_path / "etc").mkdir()
    return own


def test_sites_that_come_with_it_are_good(home: Path) -> None:
    assert files.names({}) == NAMES
    for name in NAMES:
        assert files.load(name, {}).site.name == name


def test_template_is_made_from_the_keys_and_says_nothing() -> None:
    text = (SHIPPED / "template.yaml").read_text()
    assert text == template.template(), "python -m deadpool_launch.sites.template > it"
    assert site_of(text) == SiteConfig(name="x")


def test_template_holds_when_its_marks_of_a_comment_are_taken_away() -> None:
    lines = [
        line.removeprefix("# ")
        for line in template.template().splitlines()
        if line.removeprefix("# ").partition(":")[0] in {*BY_NAME, "partitions", "qos"}
    ]
    kept = [line for line in lines if not line.endswith((": none", ": "))]
    assert len(kept) > 15
    given = [line for line in kept if line.partition(":")[0] in BY_NAME]
    assert site_of("\n".join(given)) == SiteConfig(name="x")


def test_each_key_has_a_field_of_its_own() -> None:
    fields = [key.field for key in KEYS]
    assert sorted(fields) == sorted(set(SiteConfig.__struct_fields__) - {"name"})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "submit:\n  partiton: x",
            "line 2: submit.partiton is not a key (did you mean partition?)",
        ),
        ("gpu: 4", "line 1: gpu is not a key (did you mean gpus?); valid here are about, env,"),
        (
            "gpus.per_node: four",
            "line 1: gpus.per_node: 'four' is wrong; must be a whole number of",
        ),
        ("gpus.flag: --gres", "must be gpus-per-node, gres or none"),
        ("submit.exclusive: maybe", "submit.exclusive: 'maybe' is wrong; must be yes or no"),
        ("submit.forbidden: --mem", "submit.forbidden: must be a list of long options"),
        ("submit.forbidden: [mem]", "'mem' is wrong; must be a list of long options without"),
        ("submit.time: soon", "submit.time: 'soon' is wrong; must be a duration such as 90s"),
        ("submit.setup: [1, {}]", "submit.setup: must be a list of texts"),
        ("network.interfaces: ['(']", "network.interfaces: '(' is wrong (missing ), unterminated"),
        ("failure_domain.pattern: c.*", "must be a regular expression with one group"),
        ("env: {2X: a}", "env: '2X' is no variable's name"),
        ("env: [A]", "env: must be names of environment variables, each with a value"),
        ("env: {A: 1, A: 2}", "env: A is there twice; remove one"),
        ("limits.nodes: 0", "limits.nodes: '0' is wrong; must be a whole number of at least 1, or"),
        ("kind: pbs", "kind: 'pbs' is wrong; must be slurm or local"),
        (
            "partitions: gh",
            "line 1: partitions must be a mapping of names to keys and their values",
        ),
        ("qos: {a: 3}", "line 1: qos must be a mapping of names to keys and their values"),
        ("qos:\n  a:\n    kind: local", "line 3: kind is not a key"),
        ("qos:\n  a:\n    limits: {nodes: x}", "line 3: limits.nodes: 'x' is wrong"),
        ("limits: {nodes: 1}\nlimits.nodes: 2", "line 2: limits.nodes stands here a second time"),
        (
            "- a",
            "line 1: must be a mapping of keys to values; valid are about, env, failure_domain",
        ),
        ("a: [", "is not YAML: "),
        ("about:", "about: has no value; must be text on one line"),
        ("limits.nodes: !unknown", "limits.nodes: '' is wrong; must be how to find it out"),
    ],
)
def test_mistake_is_told_with_its_line_and_what_is_right(text: str, wrong: str) -> None:
    found = problems_of(text)
    assert found
    assert any(wrong in problem for problem in found), found
    assert all(problem.startswith("s.yaml, line ") for problem in found)


def test_all_mistakes_are_found_at_once() -> None:
    text = "qos: {a: {nodes: 1}}\nkind: x\nlimits.time: y\n"
    assert [problem.split(":")[0] for problem in problems_of(text)] == [
        "s.yaml, line 1",
        "s.yaml, line 2",
        "s.yaml, line 3",
    ]


def test_later_files_win_by_key_and_by_variable(home: Path) -> None:
    etc = home.parents[2] / "etc" / "vista.yaml"
    etc.write_text("submit.account: site\nenv: {A: etc, B: etc}\nlimits.nodes: 7\n")
    (home / "vista.yaml").write_text("submit.account: mine\nenv: {B: mine}\n")
    settled = files.load("vista", {})
    assert settled.site.account == "mine"
    assert dict(settled.site.env) == {"A": "etc", "B": "mine"}
    assert settled.site.partition == "gh"
    assert settled.settings["submit.account"].origin == f"{home}/vista.yaml:1"
    # What any file says for a partition is more than what any says in general.
    assert settled.site.most_nodes == 64


def test_partition_and_qos_have_values_of_their_own() -> None:
    text = (
        "submit: {partition: a, qos: b}\nlimits: {nodes: 1, time: 1h, srun: 1}\n"
        "partitions: {a: {limits: {nodes: 2}}, c: {limits.nodes: 3, gpus.per_node: 8}}\n"
        "qos: {b: {limits: {time: 2h}}, d: {limits.time: unlimited}}\n"
    )
    usual, other = site_of(text), site_of(text, partition="c", qos="d")
    assert (usual.most_nodes, usual.most_time_s, usual.most_srun) == (2, 7200.0, 1)
    assert (other.most_nodes, other.most_time_s, other.gpus_per_node) == (3, None, 8)
    settled = settle("x", [file_of(text)], partition="c")
    assert settled.settings["limits.nodes"].origin == "site.yaml:3 (partitions.c)"


def test_unknown_value_counts_as_the_default_and_says_how_to_find_it() -> None:
    settled = settle("x", [file_of("limits.nodes: !unknown sinfo -o %s\n")])
    assert settled.site.most_nodes is None
    assert settled.settings["limits.nodes"].text == "unknown: sinfo -o %s"
    mine = settle("x", [file_of("limits.nodes: !unknown a"), file_of("limits.nodes: 5")])
    assert (mine.site.most_nodes, mine.settings["limits.nodes"].how) == (5, "")


def never() -> str | None:
    raise AssertionError("Slurm was asked")


@pytest.mark.parametrize(
    ("asked", "environ", "cluster", "name"),
    [
        ("vista", {"NERSC_HOST": "perlmutter"}, None, "vista"),
        (None, {"DEADPOOL_SITE": "local", "NERSC_HOST": "perlmutter"}, None, "local"),
        (None, {"NERSC_HOST": "perlmutter"}, None, "perlmutter"),
        ("slurm", {"NERSC_HOST": "perlmutter"}, None, "perlmutter"),
        (None, {"SLURM_CLUSTER_NAME": "vista", "NERSC_HOST": "perlmutter"}, None, "vista"),
        (None, {"SLURM_CLUSTER_NAME": "mini"}, None, "generic"),
        (None, {"NERSC_HOST": "muller"}, "perlmutter", "perlmutter"),
        (None, {}, "mini", "generic"),
    ],
)
def test_site_is_chosen_by_name_environment_or_cluster(
    home: Path, asked: str | None, environ: dict[str, str], cluster: str | None, name: str
) -> None:
    ask = (lambda: cluster) if cluster is not None else never
    assert files.choose(asked, environ, ask).site.name == name


def test_own_site_is_recognised_by_its_cluster(tmp_path: Path) -> None:
    own = tmp_path / "deadpool" / "sites"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("match.clusters: [mini]\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert files.choose(None, environ, lambda: "mini").site.name == "mine"
    assert files.choose(None, {**environ, "SLURM_CLUSTER_NAME": "mini"}, never).site.name == "mine"


def test_site_that_nobody_described_is_told_with_those_that_are(home: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^--site vsita: is no site \(did you mean vista\?\); the"
    ):
        files.choose("vsita", {}, never)
    with pytest.raises(UsageError, match=r"^DEADPOOL_SITE x: is no site; there are generic, local"):
        files.choose(None, {"DEADPOOL_SITE": "x"}, never)
    with pytest.raises(UsageError, match=r"^--site ../x: must be the name of a site, not a path"):
        files.choose("../x", {}, never)


def test_broken_file_of_a_user_is_told_with_how_to_see_all(home: Path) -> None:
    (home / "mine.yaml").write_text("kind: x\nlimits: 3\n")
    with pytest.raises(UsageError, match=r"mine.yaml, line 1: kind: 'x' is wrong.*--check"):
        files.load("mine", {})


def test_nodes_that_fail_together() -> None:
    by_two = SiteConfig(domain_size=2)
    assert by_two.domains(["nid001233", "nid001234", "nid001235", "login"]) == {
        "nid001233": "nid616",
        "nid001234": "nid617",
        "nid001235": "nid617",
    }
    by_name = SiteConfig(domain_pattern=r"(c\d+)-.*", domain_size=2)
    assert by_name.domains(["c600-001", "c600-002", "c601-001", "x"]) == {
        "c600-001": "c600",
        "c600-002": "c600",
        "c601-001": "c601",
    }
    assert SiteConfig().domains(["n1"]) == {}


@pytest.mark.parametrize(
    ("names", "patterns", "found"),
    [
        (["lo", "hsn10", "hsn2", "eth0"], [r"hsn\d+"], ("hsn2", "hsn10")),
        (["lo", "eth0", "ib0"], [r"ib\d+", "eth.*"], ("ib0",)),
        (["lo", "eth0"], [r"ib\d+", "eth.*"], ("eth0",)),
        (["lo", "xib0"], [r"ib\d+"], ()),
        (["lo"], [], ()),
    ],
)
def test_interfaces_of_the_first_pattern_that_fits(
    names: list[str], patterns: list[str], found: tuple[str, ...]
) -> None:
    assert interfaces.fitting(names, patterns) == found


def test_interface_is_named_to_gloo_and_nccl_unless_the_user_did() -> None:
    assert interfaces.variables(["lo"], {}) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    assert interfaces.variables(["lo"], {"GLOO_SOCKET_IFNAME": "x"}) == {"NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces.variables(["none.such"], {}) == {}
    assert interfaces.address(["lo"]) == "127.0.0.1"
    assert interfaces.address(["none.such"]) is None


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"SLINGSHOT_VNIS": "17"}, {}),
        ({"SLINGSHOT_VNIS": "17,4"}, {"SLINGSHOT_VNIS": "4"}),
        ({"SLINGSHOT_VNIS": "17,"}, {}),
    ],
)
def test_virtual_network_that_all_steps_have_is_the_last(
    given: dict[str, str], changed: dict[str, str]
) -> None:
    assert environ.shared_network(given) == changed


class NoSlurm(CommandLineClient):
    """A Slurm that does not answer."""

    def _run(self, *argv: str) -> str:
        raise SlurmError("it is away")


JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_CPUS_PER_NODE": "64(x2)",
    "SLURMD_NODENAME": "n1",
}


def backend_on(site: SiteConfig, **variables: str) -> SlurmBackend:
    given = {**JOB, **variables}
    backend = SlurmBackend(given, NoSlurm(given), site)
    backend.discover(LaunchOptions(script="/t.py", site="slurm"))
    return backend


AGENT = [sys.executable, "-m", "agent"]


def test_site_says_how_agents_are_started() -> None:
    site = SiteConfig(
        gpus_per_node=4,
        gpu_flag="gres",
        cpu_bind="cores",
        srun_options=("--environment=pytorch",),
        network_request="job_vni,single_node_vni",
        container=("shifter", "--image=a b"),
        container_python="/opt/python",
    )
    argv = backend_on(site).agent_command("n2", AGENT, Path("/l"))
    wanted = {"--gres=gpu:4", "--cpu-bind=cores", "--environment=pytorch", "--cpus-per-task=64"}
    assert wanted | {"--network=job_vni,single_node_vni"} <= set(argv)
    assert argv[-5:] == ["shifter", "--image=a b", "/opt/python", "-m", "agent"]
    argv = backend_on(site, SLURM_NETWORK="no_vni").agent_command("n2", AGENT, Path("/l"))
    assert [word for word in argv if word.startswith("--network")] == ["--network=no_vni"]


def test_site_that_says_nothing_changes_nothing() -> None:
    argv = backend_on(SiteConfig()).agent_command("n2", AGENT, Path("/l"))
    assert "--cpu-bind=none" in argv
    assert not any(word.startswith(("--g", "--network")) for word in argv)
    assert argv[-3:] == AGENT


def test_site_says_how_processes_with_mpi_are_started() -> None:
    site = SiteConfig(srun_options=("--x",), container=("box",), network_request="job_vni")
    starter = SlurmMovers(CommandLineClient({}), "7", {}, "pmi2", site)
    argv = starter.command(["n1", "n2"], ["mover"], "name", Path("/l"))
    assert {"--x", "--network=job_vni"} <= set(argv)
    assert argv[-2:] == ["box", "mover"]


def test_launcher_listens_on_the_sites_network() -> None:
    options = LaunchOptions(script="/t.py", site="slurm")
    by_name = SiteConfig(host_suffix="i", interfaces=("none.such",))
    assert backend_on(by_name).discover(options).launcher_host == "n1i"
    by_interface = SiteConfig(host_suffix="i", interfaces=("lo",))
    assert backend_on(by_interface).discover(options).launcher_host == "127.0.0.1"
    assert backend_on(SiteConfig()).discover(options).launcher_host == "n1"


def test_ranks_get_the_sites_variables_unless_the_user_set_them() -> None:
    site = SiteConfig(env=(("NCCL_CROSS_NIC", "1"), ("FI_X", "0")))
    env = backend_on(site, FI_X="mine").discover(LaunchOptions(script="/t.py", site="slurm")).env
    assert env == {"NCCL_CROSS_NIC": "1"}


def test_more_srun_than_the_site_advises_are_told_of() -> None:
    site = SiteConfig(name="big", most_srun=3)
    options = LaunchOptions(script="/t.py", site="slurm", site_config=site, nodes=3, spares=1)
    (check,) = slurm_rules.srun_checks(5, options)
    assert check.ok is None
    assert check.text.startswith("4 srun run at once, one for each agent, and site big advises 3")
    late = LaunchOptions(
        script="/t.py", site="slurm", site_config=site, spares=1, spare_start="on-failure"
    )
    assert slurm_rules.srun_checks(4, late) == []


@pytest.mark.parametrize(
    ("request_", "parameters", "missing"),
    [
        ("job_vni,single_node_vni", "job_vni=all,single_node_vni=user", ""),
        ("job_vni,single_node_vni", "job_vni=all", "single_node_vni"),
        ("job_vni,single_node_vni", "job_vni,single_node_vni", ""),
        ("job_vni,single_node_vni", "vnis=1-9,job_vni=none", "job_vni and single_node_vni"),
        ("job_vni", "(null)", "job_vni"),
        ("no_vni", "(null)", ""),
        (None, "(null)", ""),
    ],
)
def test_steps_that_the_switch_may_refuse_are_told_of(
    request_: str | None, parameters: str, missing: str
) -> None:
    checks = slurm_rules.network_checks(request_, {"SwitchParameters": parameters})
    assert [check.ok for check in checks] == ([None] if missing else [])
    if missing:
        assert f"this cluster does not allow {missing} (" in checks[0].text
    assert slurm_rules.network_checks(request_, {}) == []


def test_gpus_of_the_site_are_the_ranks_of_a_node(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")

    def nproc(*arguments: str, **variables: str) -> int:
        context = cli.command.make_context(cli.PROGRAM, ["t.py", *arguments])
        return cli.to_options(context.params, {**JOB, **variables}, "now").nproc_per_node

    assert nproc("--site=perlmutter") == 4
    assert nproc("--site=perlmutter", SLURM_GPUS_ON_NODE="2") == 2
    assert nproc("--site=vista", SLURM_JOB_PARTITION="gg") == 1
    assert nproc("--site=generic") == 1


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main_cli.run(["sites", *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_command_lists_the_sites_within_80_columns(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEADPOOL_SITE", "vista")
    (home / "mine.yaml").write_text("about: '[bold]my own[/bold]'\n")
    lines = shown(capsys).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if "Slurm" in line] == [
        *("generic", "mine", "perlmutter"),
        "*",
    ]
    assert any(line.startswith("*  vista ") for line in lines)
    assert any("[bold]my own[/bold]" in line for line in lines)


def test_command_shows_values_origins_and_what_is_not_known(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, "vista", "--partition", "gh-dev")
    assert max(map(len, text.splitlines())) <= 80
    assert "(partitions.gh-dev)" in text
    assert "Not known: mpi.kinds, limits.srun." in " ".join(text.split())
    found = json.loads(shown(capsys, "vista", "-p", "gh-dev", "--json"))
    assert set(found) == set(BY_NAME)
    assert found["limits.nodes"]["value"] == 8
    assert found["limits.nodes"]["origin"].endswith("vista.yaml:33 (partitions.gh-dev)")
    assert found["mpi.kinds"]["unknown"].startswith("srun --mpi=list")


def test_command_checks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("kind: slurm\n")
    assert shown(capsys, "--check", str(path)) == f"{path}: good\n"
    path.write_text("kind: x\ngpus: 3\n")
    assert shown(capsys, "--check", str(path), code=2).count("\n") == 2
    assert "cannot be read (No such file" in shown(capsys, "--check", "none.yaml", code=2)


def test_mistake_with_the_command_is_told_in_one_sentence(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "NAME x: is no site; there are" in shown(capsys, "x", code=2)
    assert "--json: name the site to show" in shown(capsys, "--json", code=2)
    assert "--qos: name the site to show" in shown(capsys, "-q", "a", code=2)


def test_every_value_of_the_shipped_files_has_a_place(home: Path) -> None:
    """What stands in a file is shown with the line on which it stands there."""
    for name in NAMES:
        settled: Settled = files.load(name, {})
        for setting in settled.settings.values():
            if setting.path:
                line = Path(setting.path).read_text().splitlines()[setting.line - 1]
                assert setting.key.name.rpartition(".")[2] in line
        assert yaml.compose((SHIPPED / f"{name}.yaml").read_text()) is not None
