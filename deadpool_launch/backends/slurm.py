"""Nodes of a Slurm allocation; an agent is a one-node step of its own, started with ``srun``.

One step per node keeps a node's death to that node: ``srun`` ends a whole step when its connection
to one of the step's nodes breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from deadpool_launch import preflight
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
from deadpool_launch.backends.slurm_steps import NodeProbe, SlurmAgent
from deadpool_launch.errors import NotInAllocation, StartFailed, UnsuitableError, UsageError
from deadpool_launch.options import NOT_IN_ALLOCATION, LaunchOptions
from deadpool_launch.preflight_probe import probe, token_path
from deadpool_launch.sites import interfaces
from deadpool_launch.sites.model import GENERIC, SiteConfig
from deadpool_slurm import access, environ, parse, srun, versions
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
        self._way: access.Choice | None = None
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
                raise UnsuitableError(
                    f"the nodes of job {job.job_id} cannot be found: SLURM_JOB_NODELIST is not "
                    f"set, and {error}"
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
        allocation = self._found()
        srun_path = shutil.which("srun", path=self.variables.get("PATH"))
        checks = preflight.access_checks(self._way, srun=srun_path is not None)
        if any(check.ok is False for check in checks):
            return checks
        checks += await asyncio.to_thread(self._slurm_checks, allocation, options)
        left_out = {check.leave_out for check in checks}
        nodes = [node for node in allocation.nodes if node not in left_out]
        return [*checks, *await self._probe(allocation, nodes, options)]

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
        except access.BadAccess as error:
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

    # ------------------------------------------------------------ preflight

    def _slurm_checks(self, allocation: Allocation, options: LaunchOptions) -> list[Check]:
        checks = [self._no_kill_check(options)]
        checks += preflight.srun_checks(len(allocation.nodes), options)
        try:
            config = self.client.config()
            version = versions.parse_version(config.get("SLURM_VERSION", ""))
            checks += preflight.version_checks(version, config)
            checks += preflight.network_checks(self._network, config)
        except SlurmError as error:
            checks.append(Check("slurm", None, f"Slurm's configuration cannot be read: {error}"))
        try:
            job = self.client.job(allocation.job_id)
            checks += preflight.job_checks(allocation.nodes, job)
            if options.requeue:
                checks += preflight.requeue_checks(job)
            checks += preflight.state_checks(job.nodes, self.client.nodes(job.nodes))
        except SlurmError as error:
            checks.append(Check("node state", None, f"the nodes' states cannot be read: {error}"))
        return checks

    def _no_kill_check(self, options: LaunchOptions) -> Check:
        assert self._job is not None
        evidence, problem = None, ""
        try:
            submission = self.client.job(self._job.job_id, submission=True).submission
        except SlurmError as error:
            submission, problem = None, str(error)
        if submission is not None and submission.asks_no_kill():
            evidence = "--no-kill was given at submission"
        elif self._job.no_kill_variable:
            evidence = "SBATCH_NO_KILL is set"
        if submission is not None:
            problem = submission.problem
        return preflight.no_kill_check(evidence, options.assume_no_kill, problem)

    async def _probe(
        self, allocation: Allocation, nodes: Sequence[str], options: LaunchOptions
    ) -> list[Check]:
        """Run the probe on these nodes at once.

        This is also the job's first step on purpose: Slurm makes a job's first step only when every
        node answers, and runs the site's prolog on each node then.
        """
        run_dir = Path(options.run_dir)
        token = secrets.token_hex(8)
        try:
            run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            token_path(run_dir, token).write_text(token)
        except OSError as error:
            return [preflight.run_dir_problem(run_dir, error)]
        checks: list[Check] = []
        shared = [run_dir]
        if options.checkpoint_dir is not None:
            checkpoint_dir = Path(options.checkpoint_dir)
            try:
                token_path(checkpoint_dir, token).write_text(token)
                shared.append(checkpoint_dir)
            except OSError as error:
                checks.append(preflight.not_looked_at(checkpoint_dir, error))
        admission = msgspec.json.encode(options.admission).decode()
        argv = [sys.executable, "-m", "deadpool_launch.preflight_probe", str(run_dir), token]
        argv += [admission, *map(str, shared[1:])]
        probing = NodeProbe(self.client, allocation.job_id, argv, self.variables, self._site)
        try:
            own = await asyncio.to_thread(probe, run_dir, token, (), *shared[1:])
            await probing.ask(
                nodes, allocation.nodes, options.agent_start_timeout_s + options.admission_s
            )
        finally:
            for directory in shared:
                with contextlib.suppress(OSError):
                    token_path(directory, token).unlink()
        directories = preflight.Directories(*map(str, shared))
        return [
            *checks,
            *preflight.probe_checks(nodes, probing.answers, own, probing.silence, directories),
            *([preflight.given_up_check(probing.given_up)] if probing.given_up else []),
        ]
