"""The pytest fixtures of the mini cluster; `tests/conftest.py` loads them for every test.

`cluster` is one cluster of five nodes for the whole session. `slurm` is the same object, made
whole before each test (all nodes on, idle, no jobs, Slurm's usual time-out) and examined after it:
a process, a shared-memory or a temporary file that a job left on a node fails the test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mini_cluster import MiniCluster
from mini_cluster_nodes import wait_until
from mini_cluster_settings import CannotRunHere, check_machine

#: Slurm's own default; a test that wants nodes marked DOWN soon calls `set_slurmd_timeout`.
SLURMD_TIMEOUT_S = 300


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniCluster]:
    """One running cluster for the whole session; most tests want `slurm` instead."""
    reason = _why_it_cannot_run()
    if reason:
        pytest.fail(reason, pytrace=False)
    with MiniCluster(nodes=5, slurmd_timeout_s=SLURMD_TIMEOUT_S) as running:
        yield running


@pytest.fixture
def slurm(cluster: MiniCluster) -> Iterator[MiniCluster]:
    """The cluster, whole and idle at the start, with nothing left on its nodes at the end."""
    with kept_whole(cluster):
        yield cluster


@pytest.fixture(scope="session")
def newer_cluster() -> Iterator[MiniCluster]:
    """A cluster of the Slurm that ``DEADPOOL_SLURM_PREFIX`` names; the test is skipped without."""
    prefix = os.environ.get("DEADPOOL_SLURM_PREFIX")
    if not prefix:
        pytest.skip("DEADPOOL_SLURM_PREFIX does not say where a Slurm 25.11 is installed")
    reason = _why_it_cannot_run(Path(prefix))
    if reason:
        pytest.fail(reason, pytrace=False)
    with MiniCluster(nodes=3, slurmd_timeout_s=SLURMD_TIMEOUT_S, prefix=Path(prefix)) as running:
        yield running


@pytest.fixture
def newer_slurm(newer_cluster: MiniCluster) -> Iterator[MiniCluster]:
    """What ``slurm`` is to ``cluster``."""
    with kept_whole(newer_cluster):
        yield newer_cluster


@contextmanager
def kept_whole(cluster: MiniCluster) -> Iterator[None]:
    """Within it the cluster is whole and idle at first, and must be clean at the end."""
    cluster.set_slurmd_timeout(SLURMD_TIMEOUT_S)
    cluster.reset()
    cluster.sweep()
    yield
    cluster.reset()
    left = _what_stays(cluster)
    if left:
        cluster.sweep()
        text = "\n".join(left)
        pytest.fail(f"left on the nodes after all jobs had ended:\n{text}", pytrace=False)


def _why_it_cannot_run(prefix: Path | None = None) -> str:
    try:
        check_machine(prefix)
    except CannotRunHere as reason:
        return str(reason)
    return ""


def _what_stays(cluster: MiniCluster) -> list[str]:
    """What is on the nodes once processes that are just ending have had time to do so."""
    try:
        wait_until(cluster.leftovers, lambda left: not left, what="nodes are clean", timeout_s=60)
    except TimeoutError:
        return cluster.leftovers()
    return []
