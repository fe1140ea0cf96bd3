"""What all tests share: helper modules can be imported, and no test leaves anything behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in ("cluster", "support"):
    sys.path.insert(0, str(Path(__file__).with_name(folder)))

pytest_plugins = ["mini_cluster_fixtures"]


@pytest.fixture(autouse=True)
def _no_traces(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, or a file in /dev/shm or /tmp.

    Fixtures of a wider scope are set up before this one, so what they keep is not counted. On the
    mini cluster nodes come and go; the fixture ``slurm`` looks for processes there.
    """
    from traces import new_traces, traces

    processes = "cluster" not in request.fixturenames
    before = traces(processes)
    yield
    left = new_traces(before, processes, patience_s=30)
    assert not left, f"left behind: {sorted(left)}"
