"""The launcher's side of the movers: command lines, when to try again, and real worlds that come
and go without anybody waiting for them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from mpi_world import LONG_S, MpiWorld, mpi_world
from traces import living_children

from deadpool_launch import movers
from deadpool_launch.movers import Lives, MoverStep, after_end
from deadpool_launch.sites.model import GENERIC
from deadpool_launch.slurm_movers import SlurmMovers
from deadpool_runtime.replication.mover_messages import NO_MPI_EXIT
from deadpool_slurm.commands import CommandLineClient

MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))


def test_every_mover_has_the_same_command_line() -> None:
    argv = movers.mover_argv("py", "7", 3, Path("/runs/7/secret"))
    assert argv == [
        *("py", "-P", "-m", "deadpool_runtime.replication.mover"),
        *("--job-id=7", "--world-id=3"),
        *("--secret=/runs/7/secret", "--start-timeout=60"),
    ]


def test_mpiexec_tells_each_process_its_node() -> None:
    argv = movers.mpiexec_argv("mpiexec", [("a", {"X": "1"}), ("b", {})], ["mover"])
    assert argv == [
        *("mpiexec", "-launcher", "fork"),
        *("-n", "1", "-env", "DEADPOOL_MOVER_NODE", "a", "-env", "X", "1", "mover"),
        *(":", "-n", "1", "-env", "DEADPOOL_MOVER_NODE", "b", "mover"),
    ]


def test_slurm_starts_them_as_one_step_over_the_nodes() -> None:
    client = CommandLineClient({})
    starter = SlurmMovers(client, "7", {"SLURM_NETWORK": "job_vni"}, "pmi2", GENERIC, cpus=4)
    argv = starter.command(["n1", "n2", "n4"], ["mover"], "deadpool-movers-3", Path("/l/m.log"))
    assert {"--jobid=7", "--nodes=3", "--nodelist=n[1-2,4]", "--mpi=pmi2"} <= set(argv)
    assert {"--network=job_vni", "--cpus-per-task=4", "--job-name=deadpool-movers-3"} <= set(argv)
    assert argv[-1] == "mover"


def test_a_world_that_never_was_of_use_is_tried_a_few_times() -> None:
    lives, pauses = Lives(), []
    for _ in range(movers.MOST_SHORT_LIVES):
        lives, pause_s = after_end(lives, 0.5, 1)
        pauses.append(pause_s)
    assert pauses == [1.0, 2.0, None]


def test_a_world_that_served_is_always_followed_by_another() -> None:
    lives, _ = after_end(Lives(), 0.5, 1)
    lives, pause_s = after_end(lives, movers.SHORT_LIFE_S, 1)
    assert (lives, pause_s) == (Lives(), movers.FIRST_PAUSE_S)


def test_without_mpi_there_is_no_second_try() -> None:
    assert after_end(Lives(), 100.0, NO_MPI_EXIT)[1] is None


class Launcher:
    """A ``MoverStep`` for the nodes of an ``MpiWorld``, and what the user reads."""

    def __init__(self, world: MpiWorld, log_dir: Path, mpiexec: str = MPIEXEC) -> None:
        self.said: list[str] = []
        self.spoke = asyncio.Event()
        self.world = world
        self.step = MoverStep(
            movers.LocalMovers(mpiexec, lambda node: {"DEADPOOL_TEST_NODE": node}),
            lambda world_id: movers.mover_argv(
                sys.executable, world.job, world_id, world.secret_path
            ),
            log_dir,
            self._say,
        )

    def _say(self, text: str) -> None:
        self.said.append(text)
        self.spoke.set()

    async def wait_world(self, world_id: int, *nodes: str) -> None:
        await asyncio.to_thread(self.world.wait_world, world_id, nodes)


def run(
    scenario: Callable[[Launcher], Awaitable[None]],
    log_dir: Path,
    nodes: tuple[str, ...] = ("a", "b", "c"),
    mpiexec: str = MPIEXEC,
) -> list[str]:
    """Play a scenario to its end; what was said."""

    async def whole() -> list[str]:
        with mpi_world(nodes, start=False) as world:
            launcher = Launcher(world, log_dir, mpiexec)
            try:
                async with asyncio.timeout(LONG_S):
                    await scenario(launcher)
            finally:
                await launcher.step.close()
            return launcher.said

    return asyncio.run(whole())


def test_a_new_set_of_nodes_gets_a_new_world(tmp_path: Path) -> None:
    async def scenario(launcher: Launcher) -> None:
        launcher.step.restart(1, ["a", "b"])
        await launcher.wait_world(1, "a", "b")
        launcher.step.restart(2, ["a", "c"])
        await launcher.wait_world(2, "a", "c")
        await asyncio.to_thread(launcher.world.wait_gone, "b")

    before = set(living_children())
    assert run(scenario, tmp_path) == []
    assert set(living_children()) <= before


def test_one_node_needs_no_world(tmp_path: Path) -> None:
    async def scenario(launcher: Launcher) -> None:
        launcher.step.restart(1, ["a"])
        await launcher.step.close()
        assert launcher.step.world_id == 0

    assert run(scenario, tmp_path) == []


def test_nodes_that_come_one_after_the_other_get_one_world(tmp_path: Path) -> None:
    async def scenario(launcher: Launcher) -> None:
        for epoch, nodes in enumerate((["a", "b"], ["b", "c"], ["a", "b", "c"]), start=1):
            launcher.step.restart(epoch, nodes)
            await asyncio.sleep(0)
        await launcher.wait_world(1, "a", "b", "c")

    assert run(scenario, tmp_path) == []


def test_a_world_that_is_replaced_while_it_starts_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movers, "SETTLE_S", 0.0)

    async def scenario(launcher: Launcher) -> None:
        for epoch, nodes in enumerate((["a", "b"], ["b", "c"], ["a", "b", "c"]), start=1):
            launcher.step.restart(epoch, nodes)
            while launcher.step.world_id < epoch:
                await asyncio.sleep(0)
        await launcher.wait_world(3, "a", "b", "c")

    assert run(scenario, tmp_path) == []


def test_a_world_that_lost_a_process_is_replaced(tmp_path: Path) -> None:
    async def scenario(launcher: Launcher) -> None:
        launcher.step.restart(1, ["a", "b", "c"])
        await launcher.wait_world(1, "a", "b", "c")
        launcher.world.process("b").kill()
        await launcher.wait_world(2, "a", "b", "c")

    assert run(scenario, tmp_path) == []


def test_what_cannot_be_started_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(movers, "FIRST_PAUSE_S", 0.01)

    async def scenario(launcher: Launcher) -> None:
        launcher.step.restart(1, ["a", "b"])
        await launcher.spoke.wait()

    (line,) = run(scenario, tmp_path, mpiexec="/no/such/mpiexec")
    assert line.startswith("MPI cannot be used on these nodes (/no/such/mpiexec cannot be run")


def test_movers_of_a_local_node_carry_its_mark(tmp_path: Path) -> None:
    async def scenario(launcher: Launcher) -> None:
        launcher.step.restart(1, ["a", "b"])
        await launcher.wait_world(1, "a", "b")
        assert launcher.world.process("b").environ()["DEADPOOL_TEST_NODE"] == "b"

    assert run(scenario, tmp_path) == []
    assert "world 1 is up: 2 nodes" in (tmp_path / "movers-e1-1.log").read_text()
    assert os.listdir(tmp_path) == ["movers-e1-1.log"]
