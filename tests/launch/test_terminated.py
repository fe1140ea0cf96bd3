"""Slurm's SIGTERM at the time limit reaches every process of the job: what goes on all the same."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import local_run
import psutil
from local_run import records, wait

ENDLESS = ("--", "--steps", 100000, "--step-s", 0.02)


def test_terminated_ranks_and_replicators_go_on_until_the_launcher_ends_the_job(
    tmp_path: Path,
) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "checkpoints"
    saves = ("--checkpoint-dir", folder, "--checkpoint-every", 100000)
    with local_run.started(run_dir, "--nodes", 2, *saves, *ENDLESS) as process:
        wait("steps", lambda: records(run_dir, "step", step=2))
        (job,) = records(run_dir, "job")
        nodes = [local_run.agent_of(process.pid, name) for name in ("local1", "local2")]
        # (An agent ends by itself after a while, without the launcher's word.)
        struck = [each for node in nodes for each in node.children(recursive=True)]
        for each in struck:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGTERM)
        before = max(record["step"] for record in records(run_dir, "step"))
        wait("more steps", lambda: records(run_dir, "step", step=before + 5))
        os.kill(job["pid"], signal.SIGUSR1)
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 75, out
    (end,) = records(run_dir, "end")
    assert end["reason"].endswith(", whose checkpoint is complete"), out
    assert not records(run_dir, "incident")
    assert not records(run_dir, "event", name="ReplicatorUp")


SCRIPT = """\
import os, signal, subprocess, sys, time
from pathlib import Path

where = Path(sys.argv[1])
forked = os.fork()
if forked == 0:
    time.sleep(3600)
executed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
for pid in (forked, executed.pid):
    os.kill(pid, signal.SIGTERM)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (forked, executed.pid)]
if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: (where / "handled").touch())
(where / "codes").write_text(repr(codes))
while True:
    time.sleep(0.05)
"""


def ended(tmp_path: Path, mode: str) -> str:
    """What the script saw its children end with, once the job was stopped."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run_dir = tmp_path / "run"
    with local_run.started(run_dir, "--", tmp_path, mode, script=script) as process:
        wait("the script", (tmp_path / "codes").exists)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=local_run.LONG_S)
    assert process.returncode == 143, out
    return (tmp_path / "codes").read_text()


def test_what_a_script_forks_or_executes_is_ended_by_sigterm_as_usual(tmp_path: Path) -> None:
    assert ended(tmp_path, "") == "[-15, -15]"


def test_script_with_a_handler_for_sigterm_gets_it_at_the_end(tmp_path: Path) -> None:
    ended(tmp_path, "handled")
    assert (tmp_path / "handled").exists()
