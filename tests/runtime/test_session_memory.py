"""A thousand steps and twenty recoveries leave processes and arenas as large as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from deadpool_runtime import protocol

STEPS, RECOVERIES = 1000, 20
#: By then every size is final, and some recoveries are over.
SETTLED = 300
#: What an allocator may keep for itself (bytes).
SLACK_NBYTES = 16 << 20
#: What the script keeps of its losses in job.state grows with the steps, in each of six slots.
GROWN_NBYTES = 6 * (64 << 10)


@dataclass(frozen=True)
class Sizes:
    """Of what lives through the whole job: rank 0 and the replicator of its node."""

    rank_nbytes: int
    rank_threads: int
    rank_files: int
    replicator_nbytes: int
    replicator_threads: int
    replicator_files: int
    arena_nbytes: int


def sizes(launcher: Any) -> Sizes:
    rank = psutil.Process(launcher.outcome.pids[0][-1])
    replicator = psutil.Process(launcher.node(0)._process.pid)
    arena = launcher.node(0).arena.path
    return Sizes(
        # Not the resident size: pages of the arena are counted there as they are touched.
        rank.memory_full_info().uss,
        rank.num_threads(),
        rank.num_fds(),
        replicator.memory_full_info().uss,
        replicator.num_threads(),
        replicator.num_fds(),
        sum(path.stat().st_blocks * 512 for path in arena.iterdir()),
    )


class Kills:
    """Kills ranks 1 and 2 by turns, spread evenly over the steps."""

    def __init__(self) -> None:
        self.due = [STEPS * (n + 1) // (RECOVERIES + 2) for n in range(RECOVERIES)]
        self.early: Sizes | None = None
        self.late: Sizes | None = None

    def __call__(self, launcher: Any, rank: int, message: Any) -> None:
        if not isinstance(message, protocol.StepDone) or rank != 0:
            return
        if message.step >= SETTLED and self.early is None:
            self.early = sizes(launcher)
        if message.step == STEPS - 10:
            self.late = sizes(launcher)
        if self.due and message.step >= self.due[0]:
            self.due.pop(0)
            launcher.kill(1 + len(self.due) % 2)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_memory_stays_flat(run_layout: Callable[..., Any], layout: str) -> None:
    kills = Kills()
    outcome, _ = run_layout(layout, f"--steps={STEPS}", on_message=kills, deadline_s=280.0)
    assert len(outcome.plans) >= RECOVERIES
    early, late = kills.early, kills.late
    assert early is not None
    assert late is not None
    told = f"{early}\n{late}"
    assert late.rank_nbytes < early.rank_nbytes + SLACK_NBYTES, told
    assert late.replicator_nbytes < early.replicator_nbytes + SLACK_NBYTES, told
    assert late.arena_nbytes <= early.arena_nbytes + GROWN_NBYTES, told
    for name in ("rank_threads", "rank_files", "replicator_threads", "replicator_files"):
        assert getattr(late, name) <= getattr(early, name) + 2, told
    print(told)
