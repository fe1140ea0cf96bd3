"""A job on nodes whose /dev/shm is too small for the copies, however small it is."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import local_run
import pytest
from local_run import records

#: Parameters and AdamW's state of such a model take 50 MiB, before the first step 17 MiB.
WIDTH = 200_000


def in_small_memory(size: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that has a /dev/shm of its own."""
    mounted = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    own = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    if subprocess.run([*own, mounted], capture_output=True).returncode != 0:
        pytest.skip("mounting a file system takes privileges")
    return subprocess.run(
        [*own, f"{mounted} && exec {shlex.join(command)}"],
        capture_output=True,
        text=True,
        timeout=local_run.LONG_S,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("size", ["8m", "100m"])
def test_user_reads_what_is_needed_and_what_is_there(tmp_path: Path, size: str) -> None:
    """With 8 MiB not even the copy before the first step can be made."""
    run_dir = tmp_path / "run"
    options = ("--nodes", 2, "--", "--steps", 5, "--width", WIDTH)
    done = in_small_memory(size, local_run.command(run_dir, *options))
    assert done.returncode == 12, done.stdout + done.stderr
    (end,) = records(run_dir, "end")
    assert end["reason"].startswith(
        "local1 has too little memory for the copies of the state: 164 MiB needed "
        "(1 rank x 3 copies of 54.4 MiB and 3 replicas of rank 1 of "
    )
    assert f", {size[:-1]} MiB is what is free in /dev/shm; give the job more" in end["reason"]
    # Nobody has to find that sentence among those of each rank whose copy could not be made.
    assert "No copy of step" not in done.stdout + done.stderr
    assert not records(run_dir, "incident")
    assert not records(run_dir, "step", step=1)
