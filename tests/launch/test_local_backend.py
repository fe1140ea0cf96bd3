"""Nodes as process trees: whatever happens to them, nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from deadpool_launch.backends.base import AgentHandle
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.errors import StartFailed
from deadpool_launch.options import LaunchOptions
from deadpool_runtime.replication.arena import Arena, arena_path

#: An agent that ignores SIGTERM, with a child, a grandchild in a session of its own, and an orphan
#: whose parent has ended. Each writes its process id down and waits.
TREE = """
import os, signal, subprocess, sys, time
note = "import os, sys, time; open(sys.argv[1] + '/' + str(os.getpid()), 'w'); time.sleep(300)"
where = sys.argv[1]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
start = [sys.executable, "-c", note, where]
subprocess.Popen(start)
subprocess.Popen(start, start_new_session=True)
leave = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
subprocess.run([sys.executable, "-c", leave, *start])
subprocess.run(["env", "-i", *start])
"""
PROCESSES_OF_TREE = 4


def run(test: Callable[[LocalBackend], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a back end that is closed at the end."""

    async def body() -> None:
        backend = LocalBackend()
        try:
            async with asyncio.timeout(60):
                await test(backend)
        finally:
            await backend.close()

    asyncio.run(body())


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition; the test's time-out ends the wait."""
    while not true():
        await asyncio.sleep(0.01)


async def start_tree(backend: LocalBackend, node: str, where: Path) -> AgentHandle:
    """Start ``TREE`` on ``node`` and wait until all of it is up."""
    where.mkdir()
    argv = [sys.executable, "-c", TREE, str(where)]
    agent = await backend.start_agent(node, argv, where.parent / f"{node}.log")
    await until(lambda: len(list(where.iterdir())) == PROCESSES_OF_TREE)
    return agent


def alive(where: Path) -> set[int]:
    """Of the processes that wrote themselves down, those that still exist (zombies too)."""
    return {pid for path in where.iterdir() if psutil.pid_exists(pid := int(path.name))}


def stopped(where: Path) -> bool:
    """Whether every one of them is in the stopped state."""
    try:
        return all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in alive(where))
    except psutil.NoSuchProcess:
        return False


def test_node_count_is_what_was_asked_for() -> None:
    options = LaunchOptions(script="/t.py", site="local", nodes=3, spares=1, run_dir="/runs/x")
    allocation = LocalBackend().discover(options)
    assert allocation.nodes == ("local1", "local2", "local3", "local4")
    assert allocation.job_id.startswith("x.")
    assert allocation.job_id != LocalBackend().discover(options).job_id
    assert allocation.batch_host is None
    assert allocation.launcher_host == "127.0.0.1"
    assert allocation.env == {"GLOO_SOCKET_IFNAME": "lo"}


def test_exit_code_of_an_agent_is_told_more_than_once(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        code = "import sys; print('one\\ntwo'); sys.exit(7)"
        agent = await backend.start_agent(
            "local1", [sys.executable, "-c", code], tmp_path / "a.log"
        )
        assert [await agent.wait(), await agent.wait()] == [7, 7]
        assert agent.last_words() == "two"
        await agent.stop(1.0)

    run(test)


def test_agent_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        with pytest.raises(StartFailed, match="local1"):
            await backend.start_agent("local1", ["/no/such/program"], tmp_path / "a.log")

    run(test)


def test_stop_waits_for_an_agent_that_ends_by_itself(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        code = (
            "import signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
            "print('up', flush=True)\n"
            "time.sleep(300)"
        )
        log = tmp_path / "a.log"
        agent = await backend.start_agent("local1", [sys.executable, "-c", code], log)
        await until(lambda: log.read_text() == "up\n")
        await agent.stop(30.0)
        assert await agent.wait() == 3

    run(test)


@pytest.mark.parametrize("grace_s", [0.0, 0.2])
def test_stop_leaves_no_process_of_the_node(tmp_path: Path, grace_s: float) -> None:
    async def test(backend: LocalBackend) -> None:
        agent = await start_tree(backend, "local1", tmp_path / "one")
        await start_tree(backend, "local2", tmp_path / "two")
        await agent.stop(grace_s)
        assert await agent.wait() == -signal.SIGKILL
        assert alive(tmp_path / "one") == set()
        assert len(alive(tmp_path / "two")) == PROCESSES_OF_TREE
        await agent.stop(grace_s)

    run(test)
    assert alive(tmp_path / "two") == set()


def test_orphans_of_a_dead_agent_still_belong_to_its_node(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        agent = await start_tree(backend, "local1", tmp_path / "one")
        (own,) = [child for child in psutil.Process().children() if TREE in child.cmdline()]
        own.kill()
        assert await agent.wait() == -signal.SIGKILL
        assert len(alive(tmp_path / "one")) == PROCESSES_OF_TREE
        await agent.stop(0.0)
        assert alive(tmp_path / "one") == set()

    run(test)


@pytest.mark.parametrize("fault", [LocalBackend.vanish, LocalBackend.freeze])
def test_silenced_node_stands_still_and_can_be_ended(
    tmp_path: Path, fault: Callable[[LocalBackend, str], None]
) -> None:
    async def test(backend: LocalBackend) -> None:
        agent = await start_tree(backend, "local1", tmp_path / "one")
        fault(backend, "local1")
        await until(lambda: stopped(tmp_path / "one"))
        assert len(alive(tmp_path / "one")) == PROCESSES_OF_TREE
        await agent.stop(0.0)
        assert alive(tmp_path / "one") == set()

    run(test)


def test_power_off_kills_the_agent_with_everything_else(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        agent = await start_tree(backend, "local1", tmp_path / "one")
        await backend.power_off("local1")
        assert await agent.wait() == -signal.SIGKILL
        assert alive(tmp_path / "one") == set()

    run(test)


def test_memory_of_a_node_goes_when_it_is_powered_off_and_not_before(tmp_path: Path) -> None:
    options = LaunchOptions(script="/t.py", site="local", nodes=11, run_dir=str(tmp_path))

    async def test(backend: LocalBackend) -> None:
        job_id = backend.discover(options).job_id
        arenas = {node: Arena.create(arena_path(job_id, node, 2)) for node in ("local1", "local11")}
        await start_tree(backend, "local1", tmp_path / "one")
        backend.freeze("local1")
        assert arenas["local1"].path.exists()
        await backend.power_off("local1")
        assert not arenas["local1"].path.exists()
        assert arenas["local11"].path.exists()
        for arena in arenas.values():
            arena.remove()

    run(test)


def test_node_can_be_started_again_after_its_end(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        first = await start_tree(backend, "local1", tmp_path / "one")
        await first.stop(0.0)
        second = await start_tree(backend, "local1", tmp_path / "two")
        assert len(alive(tmp_path / "two")) == PROCESSES_OF_TREE
        await second.stop(0.0)

    run(test)
    assert alive(tmp_path / "two") == set()


def test_two_launchers_on_one_machine_do_not_mistake_each_others_nodes(tmp_path: Path) -> None:
    async def test(backend: LocalBackend) -> None:
        other = LocalBackend()
        await start_tree(backend, "local1", tmp_path / "one")
        await start_tree(other, "local1", tmp_path / "two")
        await other.close()
        assert alive(tmp_path / "two") == set()
        assert len(alive(tmp_path / "one")) == PROCESSES_OF_TREE

    run(test)


def test_preflight_tells_an_unusable_run_directory(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()

    async def test(backend: LocalBackend) -> None:
        good = LaunchOptions(script="/t.py", site="local", run_dir=str(tmp_path / "runs" / "1"))
        assert [check.ok for check in await backend.preflight(good)] == [True, True]
        assert os.listdir(good.run_dir) == []
        bad = LaunchOptions(script="/t.py", site="local", run_dir=str(blocked / "1"))
        first = (await backend.preflight(bad))[0]
        assert first.ok is False
        assert first.remedy == "choose another --run-dir"

    run(test)
