"""``deadpool simulate`` and ``deadpool plan`` as they are called."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deadpool_launch.main_cli import run
from deadpool_launch.policy.spares import enough, needed
from deadpool_launch.whatif import paper
from deadpool_launch.whatif.strategies import ALL, ASSUMED, GIVEN

SIMULATE = "simulate --steps 5000 --step-time 10s --nodes 64 --spares 2 --seeds 8"
PLAN = (
    "plan --params 7B --nodes 16 --nproc-per-node 8 --sharding fsdp --step-time 5s "
    "--time-limit 7d --seeds 8"
)
FIRST_STEP = Path(__file__).parents[2] / "bench" / "results" / "first_step.json"


def said(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(shlex.split(arguments)) == 0
    return capsys.readouterr().out


def told(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(f"{arguments} --json", capsys))
    return found


# ---------------------------------------------------------------- simulate


def test_every_strategy_is_shown_in_80_columns_with_its_sources(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = said(SIMULATE, capsys)
    assert max(map(len, text.splitlines())) <= 80
    for strategy in ALL:
        assert text.count(strategy.title) == 2
        assert f"\n{strategy.name}:\n" in text
    assert "±" in text
    assert "arXiv 2607.01646" in text
    assert "Llama 3 405B" in text


def test_the_same_seed_gives_the_same_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(SIMULATE, capsys) == said(f"{SIMULATE} --seed 0", capsys)
    assert said(SIMULATE, capsys) != said(f"{SIMULATE} --seed 8", capsys)


def test_every_figure_has_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in told(SIMULATE, capsys)["strategies"]:
        for key, figure in strategy["figures"].items():
            assert figure["source"], (strategy["strategy"], key)


def test_programs_get_means_with_their_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(f"{SIMULATE} --strategy deadpool", capsys)
    (only,) = found["strategies"]
    assert found["seeds"] == [0, 8]
    assert found["job"]["undisturbed_s"] == 50_000
    total = only["means"]["total_s"]
    assert total["low"] < total["mean"] < total["high"]
    assert 0 < only["means"]["goodput"]["mean"] < 1


def test_the_users_own_costs_are_taken_and_said_to_be_his(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = f"{SIMULATE} --strategy deadpool --set deadpool.permanent=7s --transient 0"
    (only,) = told(f"{arguments} --set deadpool.overhead=0", capsys)["strategies"]
    assert only["figures"]["permanent"] == {"value": 7.0, "source": GIVEN}
    means = {name: each["mean"] for name, each in only["means"].items()}
    assert means["recovering_s"] <= 7 * means["faults"] + 900 * means["requeues"] + 1e-6
    assert means["overhead_s"] == 0


def test_what_was_measured_is_taken_from_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = told(f"{SIMULATE} --strategy deadpool --measured {FIRST_STEP}", capsys)["strategies"]
    medians = {
        case: each["median"]["first step"]
        for case, each in json.loads(FIRST_STEP.read_text())["results"].items()
    }
    figures = only["figures"]
    assert figures["permanent"]["value"] == medians["power-off, spare at-start"]
    assert figures["transient"]["value"] == medians["kill of one process"]
    assert str(FIRST_STEP) in figures["permanent"]["source"]


def test_a_record_of_faults_is_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "faults.csv"
    trace.write_text("# time,node,kind\n1h, 3, permanent\n10h,5,transient\n\n100h,64,permanent\n")
    found = told(f"{SIMULATE} --seeds 1 --strategy deadpool --trace {trace}", capsys)
    (only,) = found["strategies"]
    assert only["means"]["faults"]["mean"] == 2
    assert only["means"]["recovering_s"]["mean"] == 80
    assert str(trace) in found["faults"][0]


def test_groups_that_fail_together_cost_more_unless_replicas_are_outside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = f"{SIMULATE} --spares 200 --strategy deadpool --group 8 --group-mtbf 20h"
    inside, outside = (
        told(f"{arguments} --domain {domain}", capsys)["strategies"][0]["means"]["recovery_s"]
        for domain in (1, 8)
    )
    assert outside["high"] < inside["low"]


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "hours.png"
    said(f"{SIMULATE} --seeds 2 --plot {path}", capsys)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_more_holders_survive_what_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"{SIMULATE} --spares 200 --strategy deadpool --group 2 --group-mtbf 20h"
    one, two = (
        told(f"{arguments} --replication-factor {factor}", capsys)["strategies"][0]
        for factor in (1, 2)
    )
    assert two["figures"]["holders"] == {"value": 2, "source": "--replication-factor"}
    assert two["means"]["recovery_s"]["high"] < one["means"]["recovery_s"]["low"]


# ---------------------------------------------------------------- the published result


def test_the_published_ratio_comes_out_with_every_assumption_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = told("simulate --paper --seeds 150", capsys)
    assert found["ratio"]["low"] < paper.RATIO < found["ratio"]["high"]
    assert found["ratio"]["mean"] == pytest.approx(paper.RATIO, rel=0.05)
    assert found["share"] == pytest.approx(paper.SHARE, rel=0.05)
    assert found["ratio_by_formula"] == pytest.approx(paper.RATIO, rel=0.01)
    text = said("simulate --paper --seeds 5", capsys)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("published:", f"{ASSUMED}: a step takes 10 s", "solved for:"):
        assert word in text


def test_the_ratio_depends_on_the_replay_and_not_on_the_mtbf(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = told("simulate --paper --seeds 100", capsys)
    for each in found["ratio_at_node_mtbf_s"].values():
        assert each["low"] < 1.02 * paper.RATIO
        assert each["high"] > 0.98 * paper.RATIO
    assumptions = paper.Assumptions()
    solved = paper.solved(assumptions)
    assert paper.expected(assumptions, 4 * solved) > 2 * paper.RATIO
    assert paper.expected(paper.Assumptions(step_s=40.0), solved) > 2 * paper.RATIO


# ---------------------------------------------------------------- plan


def test_a_plan_names_memory_bytes_spares_and_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(f"{PLAN} --memory-per-node 512G", capsys)
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "memory for the copies on a node: 34.2 GiB",
        "512 GiB is there: enough",
        "<= 5 s a step: hidden",
        "spares to ask for: 2 (--nodes=18 in the batch script)",
        "DEADPOOL, 2 spares",
        "checkpoint, Young-Daly, 0 spares",
    ):
        assert part in text


def test_a_plan_says_what_does_not_fit_and_what_does_not_hide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = f"{PLAN} --step-time 1s --memory-per-node 16G"
    text = " ".join(said(arguments, capsys).split())
    assert "16 GiB is there: too little; the launcher would end with exit code 12" in text
    assert "copies: 4.89 GiB / 10 GB/s = 0.525 s <= 1 s a step: hidden" in text
    assert "not hidden: 2.44 s a step too long" in text
    slow = told(f"{arguments} --copy-rate 1G", capsys)
    assert [each["hidden"] for each in slow["step"]] == [False, False]
    fast = told(f"{arguments} --copy-rate 100G --send-rate 100G", capsys)
    assert [each["hidden"] for each in fast["step"]] == [True, True]
    assert slow["goodput"][0]["high"] < fast["goodput"][0]["low"]


def test_spares_are_those_of_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"{PLAN} --node-mtbf 2000h --transient 0 --probability 0.999"
    found = told(arguments, capsys)["spares"]
    assert found["enough"] == needed(2000.0, 168.0, 0.999, active=16, total=None)
    for row in found["running_out"]:
        count = row["spares"]
        assert row["probability"] == pytest.approx(1 - enough((16 + count) * 168 / 2000, count))
    none = told(f"{PLAN} --node-mtbf 100h", capsys)["spares"]
    assert none["enough"] is None


@pytest.fixture
def policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site that allows two holders, a user who asks for three and for every fourth step."""
    (tmp_path / "site.yaml").write_text("limits:\n  replication.factor: {max: 2}\n")
    (tmp_path / "mine.yaml").write_text("replication:\n  factor: 3\n  interval: 4\n")
    monkeypatch.setenv("DEADPOOL_SITE_POLICY", str(tmp_path / "site.yaml"))
    return tmp_path


@pytest.mark.parametrize("command", [PLAN, f"{SIMULATE} --strategy deadpool"])
def test_replicas_are_those_of_the_policy_that_holds(
    command: str, policies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, mine = policies / "site.yaml", policies / "mine.yaml"
    text = said(f"{command} --policy {mine}", capsys)
    assert max(len(line) for line in text.splitlines() if str(policies) not in line) <= 80
    for part in (f"limit in {site}:2", f"{mine}:3"):
        assert part in " ".join(text.split())
    given = said(f"{command} --replication-factor 3 --replication-interval 2", capsys)
    flat = " ".join(given.split())
    assert f"--replication-factor: the site has a limit in {site}:2; 2 is used" in flat
    assert "--replication-interval" in flat
    assert f"{mine}" not in flat


def test_a_plan_reckons_with_holders_and_interval(
    policies: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = told(PLAN, capsys)
    found = told(f"{PLAN} --policy {policies / 'mine.yaml'}", capsys)
    assert [found["replication"][key]["value"] for key in ("factor", "interval")] == [2, 4]
    assert [one["replication"][key]["value"] for key in ("factor", "interval")] == [1, 1]
    before, after = one["memory"], found["memory"]
    assert (after["slots"], after["replica_slots"]) == (5, 3)
    assert after["copies_nbytes"] == pytest.approx(5 / 3 * before["copies_nbytes"])
    assert after["replicas_nbytes"] == pytest.approx(2 * before["replicas_nbytes"], rel=0.01)
    assert after["nbytes"] > before["nbytes"]
    (copies, sent), (same, twice) = one["step"], found["step"]
    assert copies == same
    assert twice["nbytes"] == pytest.approx(2 * sent["nbytes"], rel=0.01)
    assert (twice["every"], twice["mean_nbytes"]) == (4, twice["nbytes"] / 4)
    # Training waits for all holders in the step behind, whatever the interval.
    assert (sent["hidden"], twice["hidden"]) == (True, False)
    assert one["replay"] == {"most": 1, "mean": pytest.approx(sent["takes_s"] / 5)}
    assert found["replay"] == {"most": 4, "mean": 2.5}
    waits = (twice["takes_s"] / 5 - 1) / 4
    assert found["goodput"][0]["mean"] == pytest.approx(1 / (1.01 + waits), rel=0.01)


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("simulate", "--steps is missing; say what to simulate, such as"),
        (f"{SIMULATE} --steps 1.5", "--steps 1.5: must be a whole number of at least 1"),
        (f"{SIMULATE} --step-time soon", "--step-time soon: must be a duration such as 90s"),
        (f"{SIMULATE} --step-time 0", "--step-time 0: must be a duration"),
        (f"{SIMULATE} --transient 1.5", "--transient 1.5: must be a number from 0 and below 1"),
        (f"{SIMULATE} --weibull 50", "--weibull 50: must be a shape from 0.1 to 10"),
        (f"{SIMULATE} --group 4", "--group and --group-mtbf: give both or neither"),
        (f"{SIMULATE} --strategy luck", "--strategy luck: not one of fixed, young-daly"),
        (f"{SIMULATE} --set luck", "--set luck: must be STRATEGY.FIGURE=VALUE; figures are"),
        (f"{SIMULATE} --set luck.save=1s", "--set luck.save=1s: luck is not simulated"),
        (f"{SIMULATE} --set fixed.save=much", "save (standstill for a durable checkpoint) must"),
        (f"{SIMULATE} --set deadpool.copy-every=0", "must be a number, at least 1"),
        (f"{SIMULATE} --least-nodes 65", "--least-nodes 65: must be at most the 64 of --nodes"),
        (f"{SIMULATE} --trace /none.csv", "/none.csv: cannot be read as lines of text"),
        (f"{SIMULATE} --measured /none.json", "/none.json: is not what bench/first_step.py"),
        (f"{SIMULATE} --plot a.pdf", "--plot a.pdf: must end in .png"),
        ("simulate --paper --nodes 4", "--nodes: --paper sets it; leave out one of them"),
        ("simulate --paper --set a.b=1", "--set: --paper sets it"),
        ("plan", "--params is missing; say what to plan, such as --params 7B"),
        (f"{PLAN} --params many", "--params many: must be a whole number of at least 1"),
        (f"{PLAN} --tp 3", "--tp 3 x --pp 1: 128 ranks (16 nodes x 8) are not a multiple of 3"),
        (f"{PLAN} --dp 64", "--dp 64: must be 128"),
        (f"{PLAN} --shard 4", "--shard: is for --sharding hsdp only"),
        (f"{PLAN} --memory-per-node lots", "--memory-per-node lots: must be a size such as 512G"),
        (f"{PLAN} --time-limit 1s", "--step-time: must be shorter than --time-limit"),
        (f"{PLAN} --probability 0", "--probability 0: must be a number above 0"),
        (f"{PLAN} --replication-factor 0", "must be a whole number of at least 1"),
        (
            f"{PLAN} --replication-factor 18",
            "18: replicas go to so many other nodes, and 16 active",
        ),
        (f"{PLAN} --policy /none.yaml", "--policy /none.yaml: cannot be read"),
        (f"{SIMULATE} --replication-factor 66", "and 64 active nodes and 2 spares make 65"),
        (f"{SIMULATE} --set deadpool.holders=1e9", "replicas go to so many other nodes"),
        ("simulate --paper --replication-factor 2", "--replication-factor: --paper sets it"),
        (f"{PLAN} --dtype fp8", "is not one of 'fp32', 'bf16'"),
    ],
)
def test_wrong_input_is_exit_code_2_and_one_sentence(
    arguments: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shlex.split(arguments)) == 2
    told_on = capsys.readouterr()
    assert told_on.out == ""
    assert part in told_on.err
    assert len(told_on.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no fault later than its begin; name at least one"),
        ("0,1,permanent\n", "has no fault later than its begin"),
        ("1h,1\n", "line 1: must be TIME,NODE,KIND"),
        ("1h,1,permanent\nsoon,1,permanent\n", "line 2: must be TIME,NODE,KIND"),
        ("1h,n1,permanent\n", "line 1: must be TIME,NODE,KIND"),
        ("1h,1,fatal\n", "line 1: must be TIME,NODE,KIND"),
        ("1h,66,permanent\n", "line 1: there is no node 66; the job has 66 nodes"),
    ],
)
def test_a_wrong_record_is_named_with_its_line(
    text: str, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "faults.csv"
    trace.write_text(text)
    assert run([*shlex.split(SIMULATE), "--trace", str(trace)]) == 2
    assert f"{trace}" in (error := capsys.readouterr().err)
    assert part in error


def test_neither_command_imports_torch() -> None:
    code = (
        "import sys, deadpool_launch.whatif.simulate, deadpool_launch.whatif.plan;"
        "sys.exit(bool({'torch', 'mpi4py', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
