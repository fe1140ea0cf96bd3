"""Runs ``deadpool-launch --site local`` as a child process and reads its journal, for tests."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from deadpool_launch import journal

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"
#: Generous: a deadline for things that take seconds on a free machine.
LONG_S = 240
#: Agents may take this long to start; what a test gives itself comes later and wins.
PATIENCE = "--agent-start-timeout=240"


def command(run_dir: Path, *options: object, script: Path = SCRIPT) -> list[str]:
    """The launcher's command line; what follows ``--`` in ``options`` goes to the script."""
    given = [str(option) for option in options]
    # A policy says itself how long agents may take.
    patience = [] if "--policy" in given else [PATIENCE]
    at = given.index("--") if "--" in given else len(given)
    return [
        *(str(Path(sys.executable).parent / "deadpool-launch"), "--site", "local"),
        *("--run-dir", str(run_dir), "--record-final-state", *patience),
        *given[:at],
        str(script),
        *given[at:],
    ]


def run(
    run_dir: Path, *options: object, script: Path = SCRIPT, timeout_s: float = LONG_S
) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its end."""
    return subprocess.run(
        command(run_dir, *options, script=script),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def started(
    run_dir: Path, *options: object, script: Path = SCRIPT
) -> Iterator[subprocess.Popen[str]]:
    """The launcher as a running process; whatever is left of it is killed in the end."""
    process = subprocess.Popen(
        command(run_dir, *options, script=script),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        # The supervisor first: it would start the launcher again.
        children = family(process.pid)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait(what: str, holds: Callable[[], Any]) -> Any:
    """What ``holds`` returns, once that is true."""
    deadline = time.monotonic() + LONG_S
    while not (found := holds()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def family(pid: int) -> list[psutil.Process]:
    """All descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def launcher_of(run_dir: Path) -> int:
    """The process id of the newest launcher."""
    return int([*records(run_dir, "job"), *records(run_dir, "launcher")][-1]["pid"])


def agent_of(pid: int, node: str) -> psutil.Process:
    """The agent of a node, which is a descendant of the launcher ``pid``."""
    for child in family(pid):
        # Any process may end while it is looked at.
        with contextlib.suppress(psutil.Error):
            if "deadpool_launch.agent" in child.cmdline() and node in child.cmdline():
                return child
    raise AssertionError(f"no agent of {node}")


def records(run_dir: Path, kind: str, **fields: Any) -> list[dict[str, Any]]:
    """The journal's records of one kind with the given values."""
    return [
        record
        for record in journal.read(run_dir)
        if record["kind"] == kind and all(record.get(k) == v for k, v in fields.items())
    ]


def warm(run_dir: Path) -> set[str]:
    """Nodes that can take ranks at once."""
    return {record["node"] for record in records(run_dir, "event", name="AgentWarm")}


def final_state(run_dir: Path) -> dict[int, dict[str, str]]:
    """Digests of every rank's final state, by part."""
    return {record["rank"]: record["parts"] for record in records(run_dir, "final")}


def explain(done: subprocess.CompletedProcess[str], run_dir: Path) -> str:
    """All that helps to understand a failed test."""
    logs: Sequence[Path] = sorted((run_dir / "logs").glob("*.log"))
    parts = [done.stdout, done.stderr]
    parts += [f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in logs]
    return "\n".join(parts)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
