"""Nodes of a Slurm allocation; an agent is a one-node step of its own, started with ``srun``.

One step per node keeps a node's death to that node: ``srun`` ends a whole step when its connection
to one of the step's nodes breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_launch.backends.adopted import AdoptedProcess
from deadpool_launch.backends.asking import Asking
from deadpool_launch.backends.base import (
    AgentHandle,
    Allocation,
    Check,
    Sight,
    Sighting,
    SiteError,
)
from deadpool_launch.backends.slurm_orphans import OrphanStep
from deadpool_launch.backends.slurm_steps import SlurmAgent
from deadpool_launch.errors import NotInAllocation, StartFailed, UnsuitableError, UsageError
from deadpool_launch.options import NOT_IN_ALLOCATION, LaunchOptions
from deadpool_launch.preflight import gather, rules, slurm_rules
from deadpool_launch.preflight.facts import Answers, Facts, SlurmFacts
from deadpool_launch.sites import interfaces
from deadpool_launch.sites.model import GENERIC, SiteConfig
from deadpool_slurm import access, environ, parse, srun, ways
from deadpool_slurm.client import SlurmClient, SlurmError

#: Run on a node after its agent. An arena whose lock is held belongs to a living agent.
EPILOG = """\
#!/bin/sh
for arena in /dev/shm/deadpool-{job_id}-*-e*; do
    [ -e "$arena/lock" ] && flock --nonblock "$arena/lock" rm -rf "$arena"
done
exit 0
"""

#: More agents than one launcher starts.
_NAMES_A_TERM = 100_000


def _epilog_path(log_path: Path) -> Path:
    return log_path.with_name("clean-node.sh")


class SlurmBackend(Asking):
    """``Backend`` on the nodes of the allocation this process runs in."""

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        client: SlurmClient | None = None,
        site: SiteConfig = GENERIC,
    ) -> None:
        #: The environment of the batch script.
        self.variables = os.environ if variables is None else variables
        self._job = environ.read_job(self.variables)
        self._way: ways.Choice | None = None
        #: Its calls block, so make them in a thread.
        self.client = client or self._found_client()
        self._site = site
        self._allocation: Allocation | None = None
        self._started = 0
        self._agents: list[SlurmAgent | OrphanStep] = []
        #: Whether processes of launchers before this one are on another host.
        self._abroad = False

    @property
    def job_id(self) -> str:
        """The job's."""
        return self._found().job_id

    def discover(self, options: LaunchOptions) -> Allocation:
        """The nodes the job was given; those it has lost since are found by the preflight."""
        job = self._job
        if job is None:
            raise NotInAllocation(NOT_IN_ALLOCATION)
        if job.in_srun_step:
            raise UnsuitableError(
                "deadpool-launch was started by srun: call it once, directly in the batch script "
                "(it starts its own steps)"
            )
        batch_host, launcher_host = job.node, job.node or socket.gethostname()
        nodes = parse.expand_nodes(job.nodelist)
        if not nodes:
            try:
                nodes = self.client.job(job.job_id).nodes
            except SlurmError as error:
                listed = f"{job.nodelist} is no list of nodes" if job.nodelist else "is not set"
                raise UnsuitableError(
                    f"the nodes of job {job.job_id} cannot be found: SLURM_JOB_NODELIST {listed}, "
                    f"and {error}"
                ) from error
        if (own := interfaces.address(self._site.interfaces)) is not None:
            launcher_host = own
        elif self._site.host_suffix is not None:
            launcher_host += self._site.host_suffix
        elif batch_host is not None:
            with contextlib.suppress(SlurmError, KeyError):
                launcher_host = self.client.nodes([batch_host])[batch_host].address
        if batch_host not in nodes:
            batch_host = None
        env = self._site.added_to(self.variables)
        self._allocation = Allocation(
            job.job_id, nodes, batch_host, launcher_host, env, restarts=job.restarts
        )
        return self._allocation

    def hours_left(self) -> float | None:
        """Until the job's time limit; ``None`` if it has none, or Slurm does not say."""
        end = self._job.end_time if self._job is not None else None
        if end is None:
            with contextlib.suppress(SlurmError):
                moment = self.client.job(self._found().job_id).end_time
                end = moment.timestamp() if moment is not None else None
        return max(0.0, end - time.time()) / 3600 if end is not None else None

    async def preflight(self, options: LaunchOptions) -> list[Check]:
        """Slurm's side of the job first, then one short step on every node."""
        return rules.at_start(self._found().nodes, options, await self.examine(options))

    async def examine(self, options: LaunchOptions, *, thorough: bool = False) -> Facts:
        """What ``preflight`` judges. ``thorough``: the nodes call each other too, and ``srun`` is
        asked for kinds of MPI that nobody named.
        """
        allocation = self._found()
        assert self._job is not None
        has_srun = shutil.which("srun", path=self.variables.get("PATH")) is not None
        without = SlurmFacts(way=self._way, has_srun=has_srun)
        if slurm_rules.no_access(without):
            return Facts(nodes=allocation.nodes, slurm=without, answers=Answers())
        slurm = await asyncio.to_thread(
            gather.job_facts,
            self.client,
            self._job,
            self.variables,
            self._network,
            mpi_too=thorough or options.mpi != "none",
        )
        slurm = replace(slurm, way=self._way)
        checks = slurm_rules.slurm_checks(allocation.nodes, slurm, options)
        left_out = {check.leave_out for check in checks}
        asked = gather.Asked(
            allocation.job_id,
            [node for node in allocation.nodes if node not in left_out],
            allocation.nodes,
            allocation.launcher_host,
        )
        answers = await gather.node_answers(
            self.client, self.variables, self._site, asked, options, ports=thorough
        )
        return Facts(nodes=allocation.nodes, slurm=slurm, answers=answers)

    def cluster(self) -> Facts:
        """What can be known outside of a job. Blocks."""
        return Facts(
            slurm=gather.cluster_facts(self.client, self.variables, self._network, mpi_too=True)
        )

    async def start_agent(self, node: str, argv: Sequence[str], log_path: Path) -> AgentHandle:
        """Start the agent in a step of its own; what ``srun`` says goes to ``<log_path>.srun``."""
        self._started += 1
        name = f"deadpool-{node}-{self._started}"
        said_path = Path(f"{log_path}.srun")
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            self._write_epilog(_epilog_path(log_path))
            with said_path.open("wb") as said:
                process = await asyncio.create_subprocess_exec(
                    *self._agent_step(node, argv, log_path, name),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=self._srun_environ(),
                    start_new_session=True,
                )
        except OSError as error:
            raise StartFailed(f"srun cannot be run: {error}") from error
        agent = SlurmAgent(self.client, self._found().job_id, name, process, said_path)
        self._agents.append(agent)
        return agent

    def restore(self, allocation: Allocation, term: int, *, abroad: bool = False) -> None:
        """The allocation is what it was; steps get names that none has had. ``abroad``: earlier
        launchers ran on other hosts.
        """
        self._allocation = allocation
        self._started = (term - 1) * _NAMES_A_TERM
        self._abroad = abroad

    def adopt(self, node: str, saved: Mapping[str, Any]) -> AgentHandle:
        """The step, and the ``srun`` that watches it, go on without the launcher they came from;
        on a host that is gone ``srun`` does not.
        """
        if self._abroad or saved.get("orphan"):
            orphan = OrphanStep(self.client, self._found().job_id, saved["step"])
            self._agents.append(orphan)
            return orphan
        agent = SlurmAgent(
            self.client,
            self._found().job_id,
            saved["step"],
            AdoptedProcess(saved["pid"], saved["created"]),
            Path(saved["said"]) if "said" in saved else None,
        )
        self._agents.append(agent)
        return agent

    def agent_command(self, node: str, argv: Sequence[str], log_path: Path) -> list[str]:
        """The ``srun`` command for the agent of ``node``."""
        return self._agent_step(node, argv, log_path, f"deadpool-{node}")

    def ends_at(self) -> float | None:
        """From the environment, where Slurm puts it there (23.02 and later)."""
        return self._job.end_time if self._job is not None else None

    def look(self, nodes: Sequence[str]) -> Sight:
        """Two short commands."""
        try:
            job = self.client.job(self._found().job_id)
            found = self.client.nodes(nodes)
        except SlurmError as error:
            raise SiteError(str(error)) from error
        end = job.end_time
        return Sight(
            {
                name: Sighting(facts.state, facts.health.value, facts.reason)
                for name, facts in found.items()
            },
            end.timestamp() if end is not None else None,
        )

    def leave(self) -> None:
        """Let what was started go on."""
        self._agents.clear()

    async def close(self) -> None:
        """End every step that is left."""
        await asyncio.gather(*(agent.stop(0.0) for agent in self._agents))

    def _agent_step(self, node: str, argv: Sequence[str], log_path: Path, name: str) -> list[str]:
        return srun.agent_step(
            job_id=self._found().job_id,
            node=node,
            cpus=self._cpus_of(node),
            name=name,
            log_path=log_path,
            argv=self._site.inside(argv, sys.executable),
            task_epilog=_epilog_path(log_path),
            network=self._network,
            options=(*self._site.gpu_options, *self._site.srun_options),
            cpu_bind=self._site.cpu_bind,
        )

    @property
    def _network(self) -> str | None:
        """What the job's submission or the site asks of the network."""
        return self.variables.get("SLURM_NETWORK") or self._site.network_request

    def _write_epilog(self, path: Path) -> None:
        """A killed agent cannot remove its arena; Slurm then does, by this script."""
        if path.exists():
            return
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(EPILOG.format(job_id=self._found().job_id))
        fresh.chmod(0o700)
        fresh.rename(path)

    def _found_client(self) -> SlurmClient:
        try:
            found, self._way = access.find(self.variables)
        except ways.BadAccess as error:
            raise UsageError(str(error)) from error
        return found

    def _found(self) -> Allocation:
        assert self._allocation is not None, "discover comes first"
        return self._allocation

    def _cpus_of(self, node: str) -> int | None:
        assert self._job is not None
        names = parse.expand_nodes(self._job.nodelist)
        return dict(zip(names, self._job.cpus_per_node, strict=False)).get(node)

    def _srun_environ(self) -> dict[str, str]:
        return environ.for_srun(self.variables, self._found().job_id)
