"""The agent's care for its node's replicator, with real processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from deadpool_launch.agent import replicator as module
from deadpool_launch.agent.replicator import NodeReplicator
from deadpool_runtime import protocol
from deadpool_runtime.replication.arena import Arena, arena_path

LONG_S = 60.0


class Care:
    """A replicator in an arena of its own, and what its agent is told."""

    def __init__(self, folder: Path) -> None:
        self.arena = Arena.create(arena_path(f"test.{secrets.token_hex(6)}", "n1", 1))
        secret = folder / "secret"
        secret.write_bytes(secrets.token_bytes(32))
        self.ups: asyncio.Queue[tuple[protocol.Address, str]] = asyncio.Queue()
        self.failures: asyncio.Queue[str] = asyncio.Queue()
        self.log = folder / "replicator.log"
        self.replicator = NodeReplicator(
            arena=self.arena.path,
            host="127.0.0.1",
            node="n1",
            secret=secret,
            log_path=self.log,
            environment=os.environ,
            on_up=lambda address, reason: self.ups.put_nowait((address, reason)),
            on_failed=self.failures.put_nowait,
        )

    async def up(self) -> tuple[protocol.Address, str]:
        """The next time that one listens."""
        return await asyncio.wait_for(self.ups.get(), LONG_S)


def run(folder: Path, test: Callable[[Care], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a replicator that is up; nothing of it is left."""

    async def body() -> None:
        care = Care(folder)
        try:
            await care.replicator.start()
            await test(care)
        finally:
            pid = care.replicator.pid
            await care.replicator.stop()
            care.arena.remove()
        assert pid is None or not psutil.pid_exists(pid)
        assert not care.arena.path.exists()

    asyncio.run(body())


def test_first_one_needs_no_explanation(tmp_path: Path) -> None:
    async def test(care: Care) -> None:
        address, reason = await care.up()
        assert (address.host, reason) == ("127.0.0.1", "")
        assert await care.replicator.fence(2)

    run(tmp_path, test)


def test_one_that_dies_is_replaced_and_the_copies_stay(tmp_path: Path) -> None:
    async def test(care: Care) -> None:
        first, _ = await care.up()
        copy = care.arena.own_path(0, 1)
        copy.write_bytes(b"x")
        assert care.replicator.pid is not None
        os.kill(care.replicator.pid, signal.SIGKILL)
        second, reason = await care.up()
        assert second != first
        assert reason == "ended (signal 9)"
        assert copy.exists()
        assert await care.replicator.fence(3)

    run(tmp_path, test)


def test_one_that_does_not_answer_is_replaced_by_one_that_knows_the_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(care: Care) -> None:
        await care.up()
        assert care.replicator.pid is not None
        os.kill(care.replicator.pid, signal.SIGSTOP)
        assert await care.replicator.fence(4)
        _, reason = await care.up()
        assert reason == "did not answer within 1 s"

    monkeypatch.setattr(module, "FENCE_S", 1.0)
    monkeypatch.setattr(module, "FENCE_PATIENCE_S", LONG_S)
    run(tmp_path, test)


def test_fence_waits_for_one_that_is_coming_up(tmp_path: Path) -> None:
    async def test(care: Care) -> None:
        await care.up()
        assert care.replicator.pid is not None
        os.kill(care.replicator.pid, signal.SIGKILL)
        assert await care.replicator.fence(5)

    run(tmp_path, test)


def test_one_that_never_comes_up_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def body() -> None:
        care = Care(tmp_path)
        (tmp_path / "secret").unlink()
        try:
            await care.replicator.start()
            reason = await asyncio.wait_for(care.failures.get(), LONG_S)
            assert reason.startswith("the replicator ended (exit code 1): FileNotFoundError")
            assert care.ups.empty()
        finally:
            await care.replicator.stop()
            care.arena.remove()

    asyncio.run(body())
