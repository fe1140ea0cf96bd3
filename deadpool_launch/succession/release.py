"""The job's allocation is given back where nobody is left to do it: its launcher's host died, and
too few nodes are left to agree on another launcher.

Slurm would keep such a job RUNNING until its time limit. A node that keeps the launcher's log waits
for Slurm's word, which takes ``SlurmdTimeout``: its own view is not enough, as it may be the one
that is cut off.
"""

from __future__ import annotations

import asyncio
import re

from deadpool_slurm.client import EndJob, SlurmClient, SlurmError
from deadpool_slurm.parse import Health

_POLL_S = 10.0
#: Longer than Slurm takes to mark a node DOWN with any usual setting.
_PATIENCE_S = 1800.0
_LAUNCHER_STEP = re.compile(r"deadpool-launcher-(\d+)")


def launcher_step(term: int) -> str:
    """The name of the step that a launcher of this term runs in, on another node than the first."""
    return f"deadpool-launcher-{term}"


async def give_back(
    client: SlurmClient,
    job_id: str,
    host: str,
    term: int,
    *,
    poll_s: float = _POLL_S,
    patience_s: float = _PATIENCE_S,
) -> bool:
    """End the job once Slurm says that ``host``, the node of its launcher of this term, is dead;
    whether it did. Not if there is a newer launcher.
    """
    for _ in range(int(patience_s / poll_s)):
        try:
            steps = await asyncio.to_thread(client.steps, job_id)
            newer = [int(found[1]) for step in steps if (found := _LAUNCHER_STEP.fullmatch(step))]
            if max(newer, default=0) > term:
                return False
            node = (await asyncio.to_thread(client.nodes, [host])).get(host)
            if node is not None and node.health is Health.DEAD:
                await asyncio.to_thread(client.do, EndJob(job_id))
                return True
        except SlurmError:
            pass
        await asyncio.sleep(poll_s)
    return False
