"""Running Slurm steps: one that carries an agent, and one that asks every node for its facts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_launch.backends import adopted
from deadpool_launch.preflight.node_rules import read_probe
from deadpool_launch.sites.model import SiteConfig
from deadpool_slurm import environ, parse, srun
from deadpool_slurm.client import EndStep, KeepNodes, SlurmClient, SlurmError

#: How long Slurm may take to end a step after SIGKILL, and our own commands after their work, in
#: seconds; then only ``srun`` is killed.
_KILL_TIMEOUT_S = 5.0
_LIST_AGAIN_S = 0.2
_PREFLIGHT_STEP = "deadpool-preflight"
#: How long the first step may wait for resources when it is likely to be refused, in seconds.
_SOON_S = 5
_BUSY = "Requested nodes are busy"
_ERROR = re.compile(r"^(?:srun|slurmstepd): error: ")


class SlurmAgent:
    """``AgentHandle`` of a step: our ``srun`` here, and the step's processes on its node."""

    def __init__(
        self,
        client: SlurmClient,
        job_id: str,
        step_name: str,
        process: asyncio.subprocess.Process | adopted.AdoptedProcess,
        said_path: Path | None = None,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._step_name = step_name
        self._process = process
        self._said_path = said_path
        self._killed = False

    async def wait(self) -> int:
        """The exit code of ``srun``, which is the agent's unless the step broke."""
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """End the step through Slurm, then ``srun``: killing ``srun`` alone leaves the step."""
        if self._process.returncode == 0 or self._killed:
            return
        if grace_s > 0 and await self._ended("TERM", grace_s):
            return
        # Also if srun has ended badly: it may have lost a step that is still alive.
        if not await self._ended("KILL", _KILL_TIMEOUT_S):
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        # Once is enough: on a dead node the next try would wait in vain like this one.
        self._killed = True

    def last_words(self) -> str:
        """What ``srun`` reported last, errors before anything else."""
        if self._said_path is None:
            return ""
        try:
            return last_error(self._said_path.read_text(errors="replace").splitlines())
        except OSError:
            return ""

    def saved(self) -> dict[str, Any]:
        """The step's name, and which process ``srun`` is."""
        said = {"said": str(self._said_path)} if self._said_path is not None else {}
        return {"step": self._step_name, **adopted.mark(self._process.pid), **said}

    async def _ended(self, signal: str, within_s: float) -> bool:
        """Whether ``srun`` has ended ``within_s`` after the step was to be sent the signal."""
        scancel = asyncio.create_task(self._scancel(signal))
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
                await asyncio.shield(scancel)
        except TimeoutError:
            # With a dead node or controller scancel takes its own time; nobody waits for it.
            scancel.cancel()
        return self._process.returncode is not None

    async def _scancel(self, signal: str) -> None:
        """Signal the step; again while Slurm does not list it, as ``srun`` may be making it."""
        change = EndStep(self._job_id, self._step_name, signal)
        while True:
            with contextlib.suppress(SlurmError):
                if await asyncio.to_thread(self._client.do, change):
                    return
            if self._process.returncode is not None:
                return
            await asyncio.sleep(_LIST_AGAIN_S)


class NodeProbe:
    """Asks nodes for their facts with one step, or two if the first was refused or cut short."""

    def __init__(
        self,
        client: SlurmClient,
        job_id: str,
        argv: Sequence[str],
        variables: Mapping[str, str],
        site: SiteConfig,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._argv = site.inside(argv, sys.executable)
        self._variables = variables
        self._site = site
        #: The facts of each node that answered.
        self.answers: dict[str, dict[str, Any]] = {}
        #: For each node that did not, what is known of why.
        self.silence: dict[str, str] = {}
        #: Nodes that were given back to Slurm.
        self.given_up: tuple[str, ...] = ()

    async def ask(self, nodes: Sequence[str], all_nodes: Sequence[str], timeout_s: float) -> None:
        """Fill ``answers`` and ``silence``; takes ``timeout_s`` and a few seconds at most.

        ``all_nodes``: the job's, with those that are not asked because they are known to be bad.

        A second step may follow. When one node cannot be reached, ``srun`` ends the whole step, and
        nodes that were merely slower go silent with it. And Slurm refuses a job's first step while
        any of its nodes is silent: such a node is then given back.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        bad = [node for node in all_nodes if node not in nodes]
        # With a bad node in the job the first step may well be refused: find out soon.
        said = await self._ask_once(nodes, deadline, _SOON_S if bad else srun.IMMEDIATE_S)
        if bad and any(_BUSY in line for line in said):
            await self._give_back(nodes, bad)
            blamed = []
        else:
            blamed = [node for node in nodes if blame(node, said)]
        again = [node for node in nodes if node not in self.answers and node not in blamed]
        if again and loop.time() < deadline:
            said += await self._ask_once(again, deadline, srun.IMMEDIATE_S)
        for node in nodes:
            if node not in self.answers:
                self.silence[node] = (
                    blame(node, said)
                    or ("" if self.answers else last_error(said))
                    or f"no answer within {timeout_s:g} s"
                )

    async def _give_back(self, keep: Sequence[str], bad: Sequence[str]) -> None:
        with contextlib.suppress(SlurmError):
            await asyncio.to_thread(self._client.do, KeepNodes(self._job_id, tuple(keep)))
            self.given_up = tuple(bad)

    async def _ask_once(self, nodes: Sequence[str], deadline: float, immediate_s: int) -> list[str]:
        """Run one step; returns what ``srun`` said besides the nodes' answers."""
        argv = srun.all_nodes_step(
            job_id=self._job_id,
            nodelist=parse.fold_nodes(nodes),
            node_count=len(nodes),
            name=_PREFLIGHT_STEP,
            argv=self._argv,
            network=self._variables.get("SLURM_NETWORK") or self._site.network_request,
            options=self._site.srun_options,
            immediate_s=immediate_s,
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environ.for_srun(self._variables, self._job_id),
                start_new_session=True,
            )
        except OSError as error:
            return [f"srun: error: it cannot be run: {error}"]
        assert process.stdout is not None
        said: list[str] = []
        complete = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    while line := (await process.stdout.readline()).decode(errors="replace"):
                        facts = read_probe(line, time.time())
                        if facts is not None:
                            self.answers[str(facts["node"])] = facts
                        elif line.strip():
                            said.append(line.strip())
                    complete = True
            if complete:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _KILL_TIMEOUT_S)
        finally:
            # Also for somebody who does not wait for the answers.
            await SlurmAgent(self._client, self._job_id, _PREFLIGHT_STEP, process).stop(0.0)
        return said


def last_error(lines: Sequence[str]) -> str:
    """The last error that Slurm reported in these lines; without one their last line."""
    errors = [line for line in lines if _ERROR.match(line)]
    chosen = [*lines[-1:], *errors[-1:]]
    return _ERROR.sub("", chosen[-1].strip()) if chosen else ""


def blame(node: str, lines: Sequence[str]) -> str:
    """The last error in these lines that names the node; empty if none does."""
    named = re.compile(rf"(?<![\w.-]){re.escape(node)}(?![\w-])")
    errors = [line for line in lines if _ERROR.match(line) and named.search(line)]
    return _ERROR.sub("", errors[-1]) if errors else ""
