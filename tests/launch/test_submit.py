"""Submission: whole batch scripts for each site, what is refused, and what ``sbatch`` is given.

``DEADPOOL_REWRITE=1`` writes the scripts in ``batch_scripts`` anew; read the difference.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from deadpool_launch import cli
from deadpool_launch.submit import run
from deadpool_launch.submit.flags import PARAMETERS
from deadpool_launch.submit.request import read_time
from deadpool_launch.submit.script import BatchScript, time_limit
from deadpool_slurm.submission import asks_no_kill, sbatch_options

SCRIPTS = Path(__file__).with_name("batch_scripts")
PROGRAM = "/opt/env/bin/deadpool-launch"
NOW = "20260101-000000"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, on a login node of a cluster that no variable names."""
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH"))]:
        monkeypatch.delenv(name)
    for name in ("NERSC_HOST", "TACC_SYSTEM", "DEADPOOL_SITE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(run, "_program", lambda: [PROGRAM])
    monkeypatch.setattr("time.strftime", lambda _: NOW)
    monkeypatch.setattr(cli, "cluster_name", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def policy(folder: Path, text: str) -> None:
    path = folder / "home" / ".config" / "deadpool" / "policy.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def printed(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert cli.run(["--print-script", *shlex.split(line)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], line: str, code: int = 2) -> str:
    assert cli.run(shlex.split(line)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("deadpool-launch: ").rstrip("\n")


CASES = {
    "generic": "--nodes 4 --spares 1 -t 90 train.py -- --lr 3e-4",
    "generic-all": "train.py --nodes 4 --spares 2 -t 1-12 -A abc -p big -q high -J my-job "
    "--sbatch-arg=--comment='a b' --sbatch-arg=-Cfast --sbatch-arg=--output=out-%j "
    "--requeue-before-limit --checkpoint-dir /ckpt --checkpoint-every 500 "
    "--heartbeat-timeout 5s --on-exhausted shrink --record-final-state --nproc-per-node 2",
    "perlmutter": "--site perlmutter --nodes 16 --spares 2 -t 24:00:00 -A m1234_g train.py",
    "perlmutter-debug": "--site perlmutter -q debug --nodes 3 --spares 1 -t 10 train.py",
    "vista": "--site vista --nodes 16 --spares 2 -t 24:00:00 train.py",
    "vista-chain": "--site vista --nodes 60 --spares 4 -t 48:00:00 train.py --chain 5 "
    "--checkpoint-dir /scratch/ckpt --checkpoint-every 500",
}


@pytest.mark.parametrize("name", CASES)
def test_whole_script(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = printed(capsys, CASES[name])
    path = SCRIPTS / f"{name}.sh"
    if os.environ.get("DEADPOOL_REWRITE"):
        path.write_text(text)
    assert text == path.read_text()
    assert asks_no_kill(sbatch_options(text))


def test_every_script_is_of_a_case() -> None:
    assert {path.stem for path in SCRIPTS.iterdir()} == set(CASES)


def test_launcher_takes_what_the_script_calls_it_with(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options come out as they were given, in a job, where nothing is submitted."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for line in CASES.values():
        text = printed(capsys, line)
        words = shlex.split(text.splitlines()[-1])
        assert words[:2] == ["exec", PROGRAM]
        given = cli.command.make_context(cli.PROGRAM, shlex.split(line)).params
        taken = cli.command.make_context(cli.PROGRAM, words[2:]).params
        settled = cli.find_site(taken, os.environ)
        assert not run.submits(taken, settled, os.environ)
        same = set(given) - {*PARAMETERS, "site", "chain_name"}
        assert {name: taken[name] for name in same} == {name: given[name] for name in same}
        options = cli.to_options(taken, os.environ, NOW, settled)
        assert options.chain == (f"train-{NOW}" if "--chain" in line else None)


def test_values_are_quoted_as_shells_and_sbatch_read_them() -> None:
    options = ("--comment=it's #1", "--constraint=a&b")
    script = BatchScript(options, ("why",), ("module x",), ("a b",))
    text = script.text()
    assert tuple(sbatch_options(text)) == options
    assert text.endswith("\n# why\nmodule x\nexec 'a b'\n")


def test_spares_of_a_policy_are_counted_for_the_time_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy(folder, "spares.auto: {node_mtbf_hours: 20000, probability: 0.99}\n")
    assert "#SBATCH --nodes=66\n" in printed(capsys, "--nodes 64 -t 3-00:00:00 train.py")
    assert "--nodes=64 --spares=2 " in printed(capsys, "--nodes 64 -t 3-00:00:00 train.py")
    assert "spares.auto: how long" in refused(capsys, "--nodes 64 train.py --print-script")


def test_node_for_the_launcher_alone_is_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy(folder, "batch_host: never\n")
    text = printed(capsys, "--nodes 2 --spares 1 train.py")
    assert "#SBATCH --nodes=4\n" in text
    assert "in one allocation, and one node for the launcher alone.\n" in text


@pytest.mark.parametrize(
    ("reserve", "time", "signal"),
    [
        ("", "", 120),
        ("", "-t 60", 120),
        ("", "-t 4", 60),
        ("", "-t 1", 15),
        ("time_limit.reserve: 5m", "-t 60", 300),
        ("time_limit.reserve: 5m", "", 300),
    ],
)
def test_signal_comes_when_the_launcher_begins_the_end(
    folder: Path, capsys: pytest.CaptureFixture[str], reserve: str, time: str, signal: int
) -> None:
    policy(folder, reserve)
    text = printed(capsys, f"--nodes 2 {time} train.py")
    assert f"#SBATCH --signal=B:USR1@{signal}\n" in text


def test_reserve_must_fit_into_the_time_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy(folder, "time_limit.reserve: 5m")
    said = refused(capsys, "--nodes 2 -t 5 train.py")
    assert said == "time_limit.reserve 5m: must be shorter than the time limit, 00:05:00"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("24:00:00", 86400), ("5:30", 330), ("1-12", 129600), ("1-00:00:00", 86400)],
)
def test_time_limits_are_read_as_by_sbatch(text: str, seconds: float) -> None:
    assert read_time(text) == seconds
    assert read_time(time_limit(seconds)) == seconds


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--nodes 2 -t soon train.py", "--time soon: must be a time limit of at least a minute"),
        ("--nodes 2 -t 0 train.py", "--time 0: must be a time limit of at least a minute"),
        ("--nodes 2 -t 30s train.py", "--time 30s: must be a time limit of at least a minute"),
        ("--nodes 0 train.py", "--nodes 0: must be at least 1"),
        ("-t 60 train.py", "--time: to submit a job, name how many nodes are to be active (--nod"),
        ("--print-script train.py", "--print-script: to submit a job, name how many nodes"),
        ("--nodes 2 --site nowhere train.py", "--site nowhere: is no site; there are generic, lo"),
        ("--nodes 2 --site local -p a train.py", "--partition: nothing is submitted with --site l"),
        ("--nodes 2 --site local --print-script train.py", "--print-script: nothing is submitted"),
        ("--nodes 2 none.py", "there is no script none.py"),
        ("--nodes 2 -J 'a b' train.py", "--job-name a b: must be a letter or digit, and then"),
        ("--nodes 2 --sbatch-arg foo train.py", "--sbatch-arg foo: must be one option of sbatch"),
        (
            "--nodes 2 --sbatch-arg '-C gpu' train.py",
            "as one word, such as --sbatch-arg=--mail-typ",
        ),
        ("--nodes 2 --sbatch-arg=--nodes=3 train.py", "is set already; use --nodes and --spares"),
        ("--nodes 2 --sbatch-arg=-N3 train.py", "--sbatch-arg -N3: is set already; use --nodes"),
        ("--nodes 2 --sbatch-arg=--no-kill=off train.py", "is set already; every script has it"),
        ("--nodes 2 --sbatch-arg=-a1-5 train.py", "submit one job; --chain N makes N that follow"),
        ("--nodes 2 --sbatch-arg=-t5 train.py", "--sbatch-arg -t5: is set already; use --time"),
        ("--nodes 2 --chain 3 train.py", "--chain: each job goes on from the durable checkpoint"),
        ("--nodes 2 --chain 0 train.py", "--chain 0: must be from 1 to 100 jobs"),
        ("--nodes 2 --chain-name c train.py", "--chain: each job goes on from the durable check"),
        (
            "--nodes 2 --chain 3 --checkpoint-dir /c --checkpoint-every 5 --requeue-before-limit "
            "train.py",
            "--chain and --requeue-before-limit are two ways to go on after the time limit: keep",
        ),
        (
            "--nodes 2 --chain 3 --checkpoint-dir c --checkpoint-every 5 --sbatch-arg=-d1 train.py",
            "--sbatch-arg -d1: is set already; the jobs of a chain wait for each other",
        ),
        ("--nodes 2 --site vista --sbatch-arg=--mem=1 train.py", "site vista rejects --mem (submi"),
        ("--nodes 2 --site vista --sbatch-arg=-wn1 train.py", "vista rejects --nodelist (submit.f"),
        ("--nodes 2 --site vista --sbatch-arg=--exc=n1 train.py", "site vista rejects --exc (subm"),
        ("--nodes 2 --site vista -q high train.py", "--qos is needed for this job, and site vista"),
        ("--nodes 60 --spares 5 --site vista train.py", "--nodes 60: makes 65 nodes with 5 spares"),
        ("--nodes 9 --site vista -p gh-dev train.py", "and site vista allows 8 (limits.nodes, "),
        ("--nodes 2 --site vista -t 3-0 train.py", "--time 3-0: is longer than site vista allows,"),
        ("--nodes 4 --site perlmutter -q debug -t 60 train.py", "than site perlmutter allows, 00:"),
        ("--nodes 2 --site perlmutter --mpi pmix train.py", "--mpi pmix: site perlmutter has cray"),
        ("--nodes 2 --chain-name ../x train.py", "--chain-name ../x: must be a letter or digit"),
    ],
)
def test_mistake_is_told_in_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, sentence: str
) -> None:
    assert sentence in refused(capsys, line)
    assert not (folder / "deadpool-runs").exists()


def test_options_of_a_submission_have_no_place_in_a_job(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for option in ("-t 60", "-p a", "-q a", "-A a", "-J a", "--sbatch-arg=--x", "--chain 2"):
        assert " has no effect here: this is job 7" in refused(capsys, f"{option} train.py")


def test_setup_and_limit_of_srun_come_from_a_users_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "home" / ".config" / "deadpool" / "sites" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        "submit: {setup: [module load pytorch, 'export A=1'], options: [--reservation=x],\n"
        "  memory: '0', time: 2h}\n"
        "gpus: {per_node: 4, flag: gres}\nnetwork.request: job_vni\nlimits.srun: 3\n"
    )
    text = printed(capsys, "--site mine --nodes 2 --spares 1 train.py")
    assert "\nmodule load pytorch\nexport A=1\nexec " in text
    wanted = {"--reservation=x", "--mem=0", "--time=02:00:00", "--gres=gpu:4", "--network=job_vni"}
    assert wanted <= set(sbatch_options(text))
    said = refused(capsys, "--site mine --nodes 3 --spares 1 train.py")
    assert said.startswith("--nodes 3: 4 srun would run at once, one for each agent, and site mine")
    late = "--site mine --nodes 3 --spares 1 --spare-start on-failure train.py"
    assert "--spare-start=on-failure" in printed(capsys, late)


SBATCH = """\
#!/bin/sh
[ "$1" = --parsable ] || exit 9
echo "$2" >> {calls}
if [ "$(wc -l < {calls})" -gt {good} ]; then
    echo 'sbatch: error: Batch job submission failed' >&2
    exit 1
fi
echo "$((40 + $(wc -l < {calls})));cluster"
"""


def sbatch_in_path(folder: Path, monkeypatch: pytest.MonkeyPatch, good: int) -> Path:
    """A stand-in that takes so many jobs; returns the file that lists what it was given."""
    calls = folder / "calls"
    program = folder / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(SBATCH.format(calls=calls, good=good))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return calls


CHAIN = "--checkpoint-dir /c --checkpoint-every 5 --chain 3"


def test_chain_is_submitted_job_by_job(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = sbatch_in_path(folder, monkeypatch, good=9)
    assert cli.run(shlex.split(f"--nodes 2 {CHAIN} train.py")) == 0
    path = f"deadpool-runs/train-{NOW}-{NOW}.sbatch"
    assert calls.read_text().splitlines() == [path] * 3
    assert capsys.readouterr().out == (
        f"jobs 41, 42, 43, one after the other: 2 active nodes and 0 spares on site generic; "
        f"script {path}\n"
    )
    assert "#SBATCH --dependency=singleton\n" in Path(path).read_text()


def test_sbatch_that_refuses_is_quoted_with_what_it_took_before(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch_in_path(folder, monkeypatch, good=2)
    said = refused(capsys, f"--nodes 2 {CHAIN} train.py")
    assert said.endswith(".sbatch: Batch job submission failed; submitted before: 41, 42")


def test_without_sbatch_it_is_said_where_to_submit(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    said = refused(capsys, "--nodes 2 train.py", code=10)
    assert said.startswith("there is no sbatch here: submit from a login node of the cluster")
    assert not (folder / "deadpool-runs").exists()


def test_dry_run_outside_of_a_job_shows_the_script(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["--nodes", "2", "train.py", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert not (folder / "deadpool-runs").exists()
