"""What all tests share: helper modules can be imported, and no test leaves anything behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

for folder in ("cluster", "support", "chaos", "fuzz"):
    sys.path.insert(0, str(Path(__file__).with_name(folder)))

# How long an example takes says nothing on a machine that others use too; and every run tries the
# same examples: new ones are what `make fuzz` is for.
hypothesis.settings.register_profile("same-each-time", deadline=None, derandomize=True)
hypothesis.settings.load_profile("same-each-time")

# No test depends on what the site that it runs on prescribes.
os.environ["DEADPOOL_SITE_POLICY"] = ""
os.environ["DEADPOOL_SITE"] = "generic"

pytest_plugins = ["mini_cluster_fixtures"]


@pytest.fixture(autouse=True)
def _no_traces(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Fail a test that leaves a process, a temporary file, or a file of ours in /dev/shm.

    Programs that the test starts get a temporary directory of their own. Fixtures of a wider scope
    are set up before this one, so what they keep is not counted. On the mini cluster nodes come and
    go and have directories of their own; the fixture ``slurm`` looks there.
    """
    from traces import new_traces, traces

    if "cluster" in request.fixturenames or request.node.get_closest_marker("cluster"):
        yield
        return
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(directory))
    before = traces(directory)
    yield
    left = new_traces(before, directory, patience_s=30)
    assert not left, f"left behind: {sorted(left)}"
