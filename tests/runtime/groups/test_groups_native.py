"""The shim is compiled once per machine, and says plainly when it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadpool_runtime.groups import native
from deadpool_runtime.groups.errors import ShimUnavailable


def _start(cache: Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"DEADPOOL_CACHE": str(cache)} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "deadpool_runtime.groups.native"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.matrix
def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    log = tmp_path / "compiled"
    counting = tmp_path / "counting-compiler"
    counting.write_text(f'#!/bin/sh\necho once >> {log}\nexec {compiler} "$@"\n')
    counting.chmod(0o700)
    cache = tmp_path / "not" / "there" / "yet"
    started = time.monotonic()
    processes = [_start(cache, CXX=str(counting)) for _ in range(2)]
    outputs = [process.communicate()[0] for process in processes]
    print(f"compiled in {time.monotonic() - started:.1f} s")
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert log.read_text() == "once\n"
    assert Path(outputs[0].strip()).is_file()
    assert cache.stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]

    again = _start(cache, CXX="/no/such/compiler")
    assert (again.communicate()[0], again.returncode) == (outputs[0], 0)


def test_cached_shim_is_found_without_torch() -> None:
    check = (
        "import sys; from deadpool_runtime.groups import native; native.ensure_built(); "
        "sys.exit('torch' in sys.modules)"
    )
    native.ensure_built()
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"PATH": "/nowhere", "CXX": ""}, "install g++"), ({"CXX": "/no/such/cxx"}, "/no/such/cxx")],
)
def test_missing_compiler_is_said_in_one_sentence(
    tmp_path: Path, variables: dict[str, str], words: str
) -> None:
    process = _start(tmp_path / "cache", **variables)
    _, errors = process.communicate()
    assert process.returncode == 3
    assert words in errors
    assert len(errors.splitlines()) == 1


def test_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    failing = tmp_path / "failing-compiler"
    failing.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    failing.chmod(0o700)
    process = _start(tmp_path / "cache", CXX=str(failing))
    _, errors = process.communicate()
    assert process.returncode == 3
    assert "error: no such flag" in errors
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_cache_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("DEADPOOL_CACHE", str(tmp_path))
    with pytest.raises(ShimUnavailable, match="chmod 700"):
        native.ensure_built()
