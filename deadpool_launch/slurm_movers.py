"""Starts the movers as a step of the Slurm job; see ``movers`` for who asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadpool_launch.backends.slurm_steps import SlurmAgent
from deadpool_launch.errors import StartFailed
from deadpool_launch.movers import StepHandle
from deadpool_launch.sites.model import SiteConfig
from deadpool_slurm import environ, parse, srun
from deadpool_slurm.client import EndStep, SlurmClient, SlurmError


class SlurmMovers:
    """``MoverStarter`` of a Slurm job.

    ``mpi``: how ``srun`` starts processes of the site's MPI library (``srun --mpi=list`` names the
    kinds). ``site``: what it needs besides. ``cpus``: how many the movers may use on
    each node; without a number Slurm gives one.
    """

    def __init__(
        self,
        client: SlurmClient,
        job_id: str,
        variables: Mapping[str, str],
        mpi: str,
        site: SiteConfig,
        cpus: int | None = None,
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._variables = variables
        self._mpi = mpi
        self._site = site
        self._cpus = cpus

    def command(
        self, nodes: Sequence[str], argv: Sequence[str], name: str, log_path: Path
    ) -> list[str]:
        """The ``srun`` command, also for ``--dry-run``."""
        return srun.mover_step(
            job_id=self._job_id,
            nodelist=parse.fold_nodes(nodes),
            node_count=len(nodes),
            cpus=self._cpus,
            name=name,
            log_path=log_path,
            argv=self._site.inside(argv, sys.executable),
            mpi=self._mpi,
            network=self._variables.get("SLURM_NETWORK") or self._site.network_request,
            options=self._site.srun_options,
        )

    async def start_movers(
        self, nodes: Sequence[str], argv: Sequence[str], name: str, log_path: Path
    ) -> StepHandle:
        """Start the step; what ``srun`` says goes to ``<log_path>.srun``."""
        said_path = Path(f"{log_path}.srun")
        try:
            with said_path.open("wb") as said:
                process = await asyncio.create_subprocess_exec(
                    *self.command(nodes, argv, name, log_path),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env={
                        **environ.for_srun(self._variables, self._job_id),
                        **dict(self._site.mpi_env),
                    },
                    start_new_session=True,
                )
        except OSError as error:
            raise StartFailed(f"srun cannot be run: {error}") from error
        return SlurmAgent(self._client, self._job_id, name, process, said_path)

    async def end_left(self, argv: Sequence[str], name: str) -> None:
        """End the step of that name."""
        with contextlib.suppress(SlurmError):
            await asyncio.to_thread(self._client.do, EndStep(self._job_id, name, "KILL"))
