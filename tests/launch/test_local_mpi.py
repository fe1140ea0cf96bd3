"""A whole job on the local site whose replicas go by MPI, until a process of that is killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import local_run
import psutil
import pytest
from local_run import final_state, records

OPTIONS = ("--nodes", 2, "--mpi", "mpiexec", "--", "--steps", 150, "--step-s", 0.1)


def movers(pid: int) -> dict[str, psutil.Process]:
    """The job's processes with MPI, by node."""
    found = {}
    for process in local_run.family(pid):
        try:
            if "deadpool_runtime.replication.mover" in process.cmdline():
                found[process.environ()["DEADPOOL_MOVER_NODE"]] = process
        except (psutil.Error, KeyError):
            continue
    return {node: process for node, process in found.items() if "mpiexec" not in process.name()}


def wait_line(run_dir: Path, running: Any, told: Callable[[str], bool]) -> str:
    """The first line for people that is as told."""
    deadline = time.monotonic() + local_run.LONG_S
    while time.monotonic() < deadline:
        for record in records(run_dir, "say"):
            if told(record["text"]):
                return str(record["text"])
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.05)
    raise AssertionError(f"not told: {[record['text'] for record in records(run_dir, 'say')]}")


@pytest.mark.matrix
def test_death_of_a_process_with_mpi_costs_the_links_nothing_but_mpi(tmp_path: Path) -> None:
    run_dir, plain = tmp_path / "run", tmp_path / "plain"
    with local_run.started(run_dir, *OPTIONS) as running:
        wait_line(run_dir, running, lambda text: "go by mpi, not tcp any more" in text)
        victim = movers(running.pid)["local2"]
        before = local_run.family(running.pid)
        victim.kill()
        line = wait_line(run_dir, running, lambda text: "go by tcp, not mpi any more" in text)
        assert line.startswith("rank ")
        assert running.wait(local_run.LONG_S) == 0
        _, left = psutil.wait_procs(before, timeout=30)
        assert not left
    assert not records(run_dir, "incident")
    (started,) = records(run_dir, "event", name="Movers")
    assert "-env DEADPOOL_MOVER_NODE local2" in started["command"]
    done = local_run.run(plain, *("--nodes", 2, *OPTIONS[4:-1], 0))
    assert done.returncode == 0
    assert final_state(run_dir) == final_state(plain)


@pytest.mark.matrix
def test_loss_of_a_node_is_survived_as_without_mpi(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = (*OPTIONS[:4], "--spares", 1, "--fault", "power-off:0@60", *OPTIONS[4:6], 80)
    done = local_run.run(run_dir, *options, *OPTIONS[-2:])
    assert done.returncode == 0, local_run.explain(done, run_dir)
    (closed,) = records(run_dir, "incident", phase="closed")
    assert closed["verdict"] == "continued"
    # The nodes that are left have a world of their own.
    assert sorted((run_dir / "logs").glob("movers-e*-*.log"))[-1].name > "movers-e1-1.log"


def test_killed_launcher_leaves_no_process_with_mpi(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, *OPTIONS) as running:
        wait_line(run_dir, running, lambda text: "go by mpi, not tcp any more" in text)
        children = local_run.family(running.pid)
        running.kill()
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left


def test_mpi_that_cannot_be_had_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mpi4py without a library: each process says so and ends."""
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    run_dir = tmp_path / "run"
    done = local_run.run(run_dir, *OPTIONS[:-3], 40, *OPTIONS[-2:])
    assert done.returncode == 0, local_run.explain(done, run_dir)
    lines = [record["text"] for record in records(run_dir, "say") if "MPI" in record["text"]]
    assert len(lines) == 1
    assert lines[0].startswith("MPI cannot be used on these nodes (")
    assert lines[0].endswith("): replicas go over TCP")
