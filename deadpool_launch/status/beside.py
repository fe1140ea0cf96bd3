"""The launcher's side of ``exporter.py``: starts it beside the job, and ends it with the job.

Nothing of it may cost the job anything: what goes wrong is a line for people.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from deadpool_launch.errors import UsageError
from deadpool_launch.journal import Journal

#: Where figures are served if no host is named.
LOOPBACK = "127.0.0.1"
_MOST_PORT = 65535


def read_address(text: str) -> tuple[str, int]:
    """``9400``, ``0.0.0.0:9400`` or ``[::1]:9400`` as host and port. Raises ``UsageError``."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host, port = "", ""
    right = re.fullmatch("[0-9]{1,5}", port) is not None and int(port) <= _MOST_PORT
    if not right or (colon and not host):
        raise UsageError(
            f"--metrics {text}: must be a port, such as 9400 (on {LOOPBACK}), or HOST:PORT, such "
            "as 0.0.0.0:9400 or [::]:9400"
        )
    return host or LOOPBACK, int(port)


@contextlib.asynccontextmanager
async def figures_served(
    address: tuple[str, int] | None, run_dir: Path, journal: Journal
) -> AsyncIterator[None]:
    """While this lasts, the job's figures are served at ``address``, if there is one."""
    if address is None:
        yield
        return
    serving = asyncio.create_task(_serve(address, run_dir, journal))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _serve(address: tuple[str, int], run_dir: Path, journal: Journal) -> None:
    host, port = address
    module = "deadpool_launch.status.exporter"
    argv = [sys.executable, "-P", "-m", module, str(run_dir), host, str(port)]
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        journal.say(f"no figures are served: {error.strerror}")
        return
    assert process.stdout is not None
    try:
        said = (await process.stdout.readline()).decode("utf-8", "replace").strip()
        word, _, rest = said.partition(" ")
        if word == "at":
            journal.say(f"figures for Prometheus are at {rest}")
        else:
            journal.say(f"no figures are served at {host}:{port}: {rest or 'it ended at once'}")
        code = await process.wait()
        if word == "at":
            journal.say(f"figures are served no more (exit code {code}); the job goes on")
    finally:
        # It has nothing to end in order.
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
