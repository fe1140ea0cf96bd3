"""Starts, replaces and ends the movers: one process with MPI on each node, in a step of their own.

``MoverStep`` is owned by the job's driver, which calls ``restart`` whenever the set of nodes with a
living agent changed, and never waits for it. What goes wrong here is told in one line; replicas
then go over TCP. The command lines and the decision when to try again are pure and come first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from deadpool_launch.backends.local import last_line
from deadpool_launch.errors import StartFailed
from deadpool_runtime.replication.mover_messages import NO_MPI_EXIT

#: Time for a world to come up, in seconds; then its processes end.
START_TIMEOUT_S = 60.0
#: A world that ends sooner than this never was of use.
SHORT_LIFE_S = 30.0
#: So many short lives one after the other, and MPI is left alone until the nodes change.
MOST_SHORT_LIVES = 3
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
#: The set of nodes must have stood for so long: they come, and go, several at a time.
SETTLE_S = 0.2
#: What the MPICH wheel needs on a machine that has nothing but Ethernet.
MPICH_OVER_TCP: Mapping[str, str] = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "MPIR_CVAR_NOLOCAL": "1",
}


def mover_argv(
    python: str,
    job_id: str,
    world_id: int,
    secret_path: Path,
    start_timeout_s: float = START_TIMEOUT_S,
) -> list[str]:
    """Command line of one mover, the same on all nodes."""
    return [
        *(python, "-P", "-m", "deadpool_runtime.replication.mover"),
        f"--job-id={job_id}",
        f"--world-id={world_id}",
        f"--secret={secret_path}",
        f"--start-timeout={start_timeout_s:g}",
    ]


def world_name(world_id: int) -> str:
    """The name of the step that carries a world."""
    return f"deadpool-movers-{world_id}"


def log_name(epoch: int, world_id: int) -> str:
    """The file that has the output of a world."""
    return f"movers-e{epoch}-{world_id}.log"


def mpiexec_argv(
    mpiexec: str,
    nodes: Sequence[tuple[str, Mapping[str, str]]],
    argv: Sequence[str],
    end_together: bool = True,
) -> list[str]:
    """MPICH's Hydra starts all movers on this machine; each node has variables of its own.

    ``end_together``: when one dies the others are killed, as a world with a hole is of no use.
    """
    command = [mpiexec, "-launcher", "fork"]
    command += [] if end_together else ["-disable-auto-cleanup"]
    for index, (node, variables) in enumerate(nodes):
        command += [":"] if index else []
        command += ["-n", "1", "-env", "DEADPOOL_MOVER_NODE", node]
        for name, value in variables.items():
            command += ["-env", name, value]
        command += argv
    return command


@dataclass(frozen=True, slots=True)
class Lives:
    """How the worlds of one set of nodes have ended so far."""

    short: int = 0


def after_end(lives: Lives, lived_s: float, exit_code: int) -> tuple[Lives, float | None]:
    """What to do when a world ended by itself: seconds until the next, or None to leave it be."""
    if exit_code == NO_MPI_EXIT:
        return lives, None
    if lived_s >= SHORT_LIFE_S:
        return Lives(), FIRST_PAUSE_S
    lives = Lives(lives.short + 1)
    if lives.short >= MOST_SHORT_LIVES:
        return lives, None
    return lives, min(FIRST_PAUSE_S * 2.0 ** (lives.short - 1), LONGEST_PAUSE_S)


# ---------------------------------------------------------------- doing it


class StepHandle(Protocol):
    """The movers of one world; an agent's handle has the same form."""

    async def wait(self) -> int:
        """The exit code once the step has ended; repeatable."""

    async def stop(self, grace_s: float) -> None:
        """End every process of it that can be reached. Never raises."""

    def last_words(self) -> str:
        """What was said about its start or end, in one line; empty if nothing."""


class MoverStarter(Protocol):
    """A site's way to start one MPI process on each of some nodes."""

    def command(
        self, nodes: Sequence[str], argv: Sequence[str], name: str, log_path: Path
    ) -> list[str]:
        """The command that ``start_movers`` runs, also for ``--dry-run``."""

    async def start_movers(
        self, nodes: Sequence[str], argv: Sequence[str], name: str, log_path: Path
    ) -> StepHandle:
        """Start them without waiting. Raises ``StartFailed`` if it cannot even be tried."""

    async def end_left(self, argv: Sequence[str], name: str) -> None:
        """End what a launcher before this one started so; never raises."""


class MoverStep:
    """The movers of the job: at most one world at a time, and a later one has a higher number.

    None of its methods waits for anything. ``say`` gets a line for people now and then.
    """

    def __init__(
        self,
        starter: MoverStarter,
        argv: Callable[[int], Sequence[str]],
        log_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self._starter = starter
        self._argv = argv
        self._log_dir = log_dir
        self._say = say
        #: Called with the number of each world that is about to start.
        self.on_world: Callable[[int], None] = lambda _: None
        self._world_id = 0
        self._keeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def world_id(self) -> int:
        """Number of the last world that was started; 0 before the first."""
        return self._world_id

    def restart(self, epoch: int, nodes: Sequence[str]) -> None:
        """End the present world and start one over ``nodes``, those whose agent is ready.

        Fewer than two nodes need none.
        """
        self._drop()
        if len(nodes) >= 2:
            self._keeping = asyncio.create_task(self._keep(epoch, tuple(nodes)))

    def take_over(self, world_id: int) -> None:
        """End the last world of a launcher that ended; the next one has a higher number."""
        self._world_id = world_id
        ending = asyncio.create_task(
            self._starter.end_left(self._argv(world_id), world_name(world_id))
        )
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def stop(self) -> None:
        """End the present world, if there is one."""
        self._drop()

    async def close(self) -> None:
        """Wait until every world that was ended is gone, as far as it can be reached."""
        self._drop()
        while self._ending:
            await asyncio.wait(self._ending)

    def _drop(self) -> None:
        keeping, self._keeping = self._keeping, None
        if keeping is not None:
            keeping.cancel()
            self._ending.add(keeping)
            keeping.add_done_callback(self._ending.discard)

    async def _keep(self, epoch: int, nodes: tuple[str, ...]) -> None:
        """Have a world over these nodes until cancelled, or until trying is of no use."""
        await asyncio.sleep(SETTLE_S)
        lives = Lives()
        loop = asyncio.get_running_loop()
        while True:
            began_at = loop.time()
            code, why = await self._one_life(epoch, nodes)
            lives, pause_s = after_end(lives, loop.time() - began_at, code)
            if pause_s is None:
                self._say(f"MPI cannot be used on these nodes ({why}): replicas go over TCP")
                return
            if not lives.short:
                self._say(f"the MPI processes ended ({why}): replicas go over TCP for now")
            await asyncio.sleep(pause_s)

    async def _one_life(self, epoch: int, nodes: tuple[str, ...]) -> tuple[int, str]:
        """One world from its start to its end; the exit code, and why it ended."""
        self._world_id += 1
        self.on_world(self._world_id)
        starting = asyncio.ensure_future(
            self._starter.start_movers(
                nodes,
                self._argv(self._world_id),
                world_name(self._world_id),
                self._log_dir / log_name(epoch, self._world_id),
            )
        )
        try:
            step = await asyncio.shield(starting)
        except StartFailed as error:
            return 1, str(error)
        except asyncio.CancelledError:
            # What is half started could not be ended.
            with contextlib.suppress(StartFailed):
                await (await starting).stop(0.0)
            raise
        try:
            code = await step.wait()
        finally:
            # Also when it ended by itself: a step can lose its ``srun`` and live on.
            await step.stop(0.0)
        return code, step.last_words() or f"exit code {code}"


class LocalMovers:
    """``MoverStarter`` for nodes that are process trees on this machine: MPICH's ``mpiexec``."""

    def __init__(self, mpiexec: str, variables_of: Callable[[str], Mapping[str, str]]) -> None:
        self._mpiexec = mpiexec
        #: What marks a process as belonging to a node.
        self._variables_of = variables_of

    def command(
        self, nodes: Sequence[str], argv: Sequence[str], name: str, log_path: Path
    ) -> list[str]:
        """The ``mpiexec`` command; the output goes to ``log_path``."""
        places = [(node, self._variables_of(node)) for node in nodes]
        return mpiexec_argv(self._mpiexec, places, argv)

    async def start_movers(
        self, nodes: Sequence[str], argv: Sequence[str], name: str, log_path: Path
    ) -> StepHandle:
        """Start them as children, in a session of their own."""
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self.command(nodes, argv, name, log_path),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**os.environ, **MPICH_OVER_TCP},
                    start_new_session=True,
                )
        except OSError as error:
            raise StartFailed(f"{self._mpiexec} cannot be run: {error}") from error
        return LocalMoverStep(process, log_path)

    async def end_left(self, argv: Sequence[str], name: str) -> None:
        """Kill every process that has this command line in its own: ``mpiexec`` and the movers."""
        words = set(argv[1:])
        for process in psutil.Process(os.getppid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if words <= set(process.cmdline()):
                    process.kill()


class LocalMoverStep:
    """``StepHandle`` of an ``mpiexec``."""

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._process = process
        self._log_path = log_path

    async def wait(self) -> int:
        """The exit code of ``mpiexec``."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Kill ``mpiexec``, its proxy and the movers."""
        family = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def last_words(self) -> str:
        """The last line of what they said."""
        return last_line(self._log_path)
