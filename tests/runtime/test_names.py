"""Stores do without the names of addresses, and nothing else of the process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_runtime import stores

SCRIPT = Path(__file__).parents[1] / "scripts" / "ask_for_names.py"
#: Far above what it takes, since the machine is shared.
LONG_S = 240


def test_stores_ask_no_name_server_and_the_script_still_does(tmp_path: Path) -> None:
    own = ["unshare", "--mount", "--net", "--propagation", "private"]
    if subprocess.run([*own, "mount", "--bind", "/tmp", "/tmp"], capture_output=True).returncode:
        pytest.skip("mounting a file and a network of one's own take privileges")
    done = subprocess.run(
        [*own, sys.executable, SCRIPT, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    asked = json.loads(done.stdout)
    assert asked["stores"] == 0
    assert asked["own"] > 0
    assert "hostname of the client" not in done.stderr


def test_only_the_line_is_kept_back(capfd: pytest.CaptureFixture[str]) -> None:
    with stores._without_line(b"hostname"):
        os.write(2, b"first\n[W] The hostname of a socket\nlast")
    os.write(2, b" words\n")
    assert capfd.readouterr().err == "first\nlast words\n"
