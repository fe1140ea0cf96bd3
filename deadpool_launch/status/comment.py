"""How the job stands, as its comment in Slurm: where ``squeue`` shows it (``--job-comment``).

Only if it is asked for: a comment that the user gave the job is overwritten. It changes when the
job's nodes or what it does change, not with its steps, and not often.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from deadpool_launch.backends.base import Backend, SiteError
from deadpool_launch.controller.events import Finish
from deadpool_launch.controller.roles import NodeRole
from deadpool_launch.journal import Journal
from deadpool_launch.status.facts import state_word
from deadpool_runtime.protocol import JobStanding

#: Slurm's controller is not asked for more than a change in this time.
_LOOK_S, _LEAST_S = 2.0, 30.0


def comment_of(standing: JobStanding, finish: Finish | None = None) -> str:
    """``deadpool: training; nodes: 4 active, 0 spare, 1 lost; epoch 2``, or the verdict."""
    if finish is not None:
        return f"deadpool: {finish.verdict} (exit code {int(finish.exit_code)})"
    roles = Counter(standing.nodes.values())
    shown = [NodeRole.ACTIVE, NodeRole.SPARE]
    shown += [role for role in NodeRole if role not in shown and roles[role]]
    nodes = ", ".join(f"{roles[role]} {role}" for role in shown)
    incident = "" if standing.incident is None else f" (incident {standing.incident})"
    return f"deadpool: {state_word(standing)}{incident}; nodes: {nodes}; epoch {standing.epoch}"


@contextlib.asynccontextmanager
async def comment_kept(
    wanted: bool, text: Callable[[], str], backend: Backend, journal: Journal
) -> AsyncIterator[None]:
    """While this lasts, the job's comment is ``text()``, if that is wanted; and so it stays."""
    if not wanted:
        yield
        return
    keeping = asyncio.create_task(_keep(text, backend, journal))
    try:
        yield
    finally:
        given_up = keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        if not given_up:
            with contextlib.suppress(SiteError):
                await asyncio.to_thread(backend.comment, text())


async def _keep(text: Callable[[], str], backend: Backend, journal: Journal) -> None:
    told = ""
    while True:
        now = text()
        if now == told:
            await asyncio.sleep(_LOOK_S)
            continue
        try:
            await asyncio.to_thread(backend.comment, now)
        except SiteError as error:
            journal.say(f"the job's comment is kept no more: {error}")
            return
        told = now
        await asyncio.sleep(_LEAST_S)
