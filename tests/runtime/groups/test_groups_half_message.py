"""A peer that is killed in the middle of a large message leaves no survivor behind in it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_runtime.groups.registry import GroupRegistry

#: Far above the milliseconds it takes, far below the group's time-out.
FREED_WITHIN_S = 20.0
GROUP_TIMEOUT = timedelta(minutes=30)
NUMEL = 16_000_000


def _broadcast_for_ever(crew: Any, rank: int) -> None:
    registry = GroupRegistry()
    registry.install(detached=False)
    store = dist.PrefixStore("group", crew.client())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=GROUP_TIMEOUT)
    data = torch.ones(NUMEL)
    client = crew.client()
    for count in range(1_000_000):
        dist.broadcast(data, src=1)
        if count == 1:
            client.set(f"running/{rank}", "")


def _survive(crew: Any, rank: int) -> float:
    """Seconds from the abort until the collective raised."""
    times: list[float] = []
    registries: list[GroupRegistry] = []
    make = GroupRegistry.install

    def remember(registry: GroupRegistry, detached: bool) -> None:
        registries.append(registry)
        make(registry, detached)

    GroupRegistry.install = remember  # type: ignore

    def abort_after_the_kill() -> None:
        crew.client().wait(["killed"], timedelta(seconds=60))
        times.append(time.monotonic())
        registries[0].abort(2)

    threading.Thread(target=abort_after_the_kill, daemon=True).start()
    with pytest.raises(RuntimeError):
        _broadcast_for_ever(crew, rank)
    raised_at = time.monotonic()
    return max(0.0, raised_at - times[0]) if times else 0.0


@pytest.mark.parametrize("seed", range(8))
def test_survivors_of_a_kill_in_mid_message_are_freed(
    new_crew: Callable[[], Any], seed: int
) -> None:
    crew = new_crew()
    survivors = [crew.start(_survive, crew, rank) for rank in (0, 2)]
    victim = crew.start(_broadcast_for_ever, crew, 1)
    crew.store.wait([f"running/{rank}" for rank in range(3)], timedelta(seconds=60))
    # Any moment will do; different ones hit different parts of a message.
    time.sleep(random.Random(seed).uniform(0, 0.1))
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait_until_dead()
    crew.store.set("killed", "")
    elapsed_s = [survivor.result() for survivor in survivors]
    print(f"freed after {[round(value * 1e3, 1) for value in elapsed_s]} ms")
    assert max(elapsed_s) < FREED_WITHIN_S
