"""What a script does at its end is the rank's: exit work, forked children, codes, segfaults."""

from __future__ import annotations

from pathlib import Path

import local_run
import pytest
from local_run import explain, records

EXIT_WORK = """
import atexit, sys, threading, time
from pathlib import Path

here = Path(sys.argv[1])

def late():
    time.sleep(5)
    (here / "thread-done").touch()

threading.Thread(target=late).start()
atexit.register((here / "handler-done").touch)
"""


def test_exit_work_is_waited_for(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(EXIT_WORK)
    done = local_run.run(tmp_path / "run", "--nodes", 1, "--", tmp_path, script=script)
    assert done.returncode == 0, explain(done, tmp_path / "run")
    assert (tmp_path / "thread-done").exists()
    assert (tmp_path / "handler-done").exists()


FORKS = """
import os, sys, time
import deadpool_runtime

pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
time.sleep(2)
open(sys.argv[1] + "/rank-ended", "w").close()
"""


def test_end_of_a_forked_child_is_not_the_end_of_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = local_run.run(tmp_path / "run", "--nodes", 1, "--", tmp_path, script=script)
    assert done.returncode == 0, explain(done, tmp_path / "run")
    assert (tmp_path / "rank-ended").exists()


def test_exception_that_cannot_be_shown_still_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "mute.py"
    script.write_text(
        "class Mute(Exception):\n"
        "    def __str__(self):\n"
        "        raise RuntimeError('no words')\n"
        "raise Mute\n"
    )
    done = local_run.run(tmp_path / "run", "--nodes", 1, script=script)
    assert done.returncode == 20, explain(done, tmp_path / "run")
    assert "Mute" in done.stderr


@pytest.mark.parametrize("how", ["os.abort()", "ctypes.string_at(0)"])
def test_crash_at_the_same_place_again_and_again_ends(tmp_path: Path, how: str) -> None:
    script = tmp_path / "crash.py"
    script.write_text(f"import os, ctypes\nif os.environ['RANK'] == '1':\n    {how}\n")
    done = local_run.run(tmp_path / "run", "--nodes", 2, "--max-restarts", 1, script=script)
    assert done.returncode in (11, 32), explain(done, tmp_path / "run")
    assert not records(tmp_path / "run", "step")
