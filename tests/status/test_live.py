"""A job that runs: what is shown of it meanwhile, and the report of it afterwards."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import local_run
from local_run import records, wait

from deadpool_launch.main_cli import run
from deadpool_launch.status.metrics import METRICS, names_in


def _told(run_dir: Path, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["status", str(run_dir), "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def _told_of(run_dir: Path, step: int, capsys: Any) -> dict[str, Any] | None:
    told = _told(run_dir, capsys)
    return told if told["step"] == step else None


def test_job_is_shown_as_it_is_and_its_report_has_all_of_it(tmp_path: Path, capsys: Any) -> None:
    run_dir = tmp_path / "run"
    size = ("--nodes", 2, "--spares", 1, "--agent-start-timeout", 300, "--metrics", 0)
    fault = ("--fault", "power-off:1@4")
    script = ("--", "--steps", 10, "--hold", "0:8:forward")
    with local_run.started(run_dir, *size, *fault, *script) as process:
        wait("rank 0 in step 8", (run_dir / "hold-0-8").exists)
        (url,) = wait(
            "figures",
            lambda: [
                record["text"].rpartition(" ")[2]
                for record in records(run_dir, "say")
                if "figures for Prometheus" in record["text"]
            ],
        )
        # Rank 0 stands in step 8; the word of the other one may come later.
        meanwhile = wait("step 7", lambda: _told_of(run_dir, 7, capsys))
        with urllib.request.urlopen(url, timeout=120) as answer:
            figures = answer.read().decode()
        (run_dir / "release-0-8").touch()
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 0, out
    assert (meanwhile["state"], meanwhile["launcher_answers"]) == ("training", True)
    assert meanwhile["last_incident"]["verdict"] == "continued"
    roles = {node["node"]: node["role"] for node in meanwhile["nodes"]}
    assert roles == {"local1": "active", "local2": "lost", "local3": "active"}
    assert meanwhile["protection"]["state"] == "whole"
    assert meanwhile["protection"]["lag_steps"] >= 0
    assert set(METRICS) - names_in(figures) == {"deadpool_exit_code", "deadpool_checkpoint_step"}
    assert 'deadpool_nodes{role="lost"} 1' in figures
    afterwards = _told(run_dir, capsys)
    assert (afterwards["state"], afterwards["exit_code"]) == ("completed", 0)
    assert run(["report", str(run_dir)]) == 0
    facts = json.loads((run_dir / "report.json").read_text())
    losses = facts["goodput"]["losses"]
    total = facts["goodput"]["productive_node_s"] + sum(loss["node_s"] for loss in losses)
    assert abs(total - facts["goodput"]["total_node_s"]) < 1e-3
    assert {"start", "spare", "lost", "cut", "recovery", "end"} <= {loss["kind"] for loss in losses}
    (incident,) = facts["incidents"]
    labels = [phase["label"] for phase in incident["phases"]]
    for label in (
        *("fault", "detected", "attributed", "new epoch", "spare admitted", "groups rebuilt"),
        *("state restored", "first step", "redundancy back", "continued"),
    ):
        assert label in labels
    (lost,) = [node for node in facts["nodes"] if node["node"] == "local2"]
    assert lost["evidence"]
    assert facts["protection"]["lag_steps_max"] >= 1
    assert records(run_dir, "node", node="local2", role="lost")
    assert "local2" in (run_dir / "report.html").read_text()
