"""The launcher's part in having movers on a Slurm job, told what to do line by line; for tests.

``mover_launcher.py JOB_ID SECRET_FILE LOG_DIR NETMOD``. Each line of input is ``EPOCH NODE...``, a
restart over these nodes; the end of input ends the movers. What the user would read is printed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from deadpool_launch import movers
from deadpool_launch.sites.model import SiteConfig
from deadpool_launch.slurm_movers import SlurmMovers
from deadpool_slurm.commands import CommandLineClient


async def main() -> None:
    job_id, secret, log_dir, netmod = sys.argv[1:5]
    variables = {**os.environ, "SLURM_JOB_ID": job_id}
    added = {**movers.MPICH_OVER_TCP, "MPIR_CVAR_CH4_NETMOD": netmod, "UCX_TLS": "tcp,self"}
    site = SiteConfig(mpi_env=tuple(added.items()))
    starter = SlurmMovers(CommandLineClient(variables), job_id, variables, "pmi2", site)
    step = movers.MoverStep(
        starter,
        lambda world_id: movers.mover_argv(sys.executable, job_id, world_id, Path(secret)),
        Path(log_dir),
        lambda text: print(text, flush=True),
    )
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        step.restart(int(line[0]), line[1:])
    await step.close()


if __name__ == "__main__":
    asyncio.run(main())
