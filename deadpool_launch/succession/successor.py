"""``python -m deadpool_launch.succession.successor``: the launcher of a job whose launcher died
with its host.

Only ``agent.keeper`` starts it, in a job step of its own, once enough agents obey its term. It has
the log from the keeper, and goes on from there. The batch script is gone, so it ends the job with
``scancel``; Slurm then shows the job as CANCELLED, and how it ended stands in the run directory
(``result.py``) and, where Slurm takes it, in the job's comment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click
import msgspec

from deadpool_launch import channel, statelog
from deadpool_launch.agent.keeper import ADDRESS_NAME, LOG_NAME
from deadpool_launch.agents import BACKLOG
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.controller import takeover
from deadpool_launch.driver import Given, job_driver, requeue, to_the_end
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import Journal
from deadpool_launch.succession import result
from deadpool_slurm import access
from deadpool_slurm.client import Comment, EndJob, SlurmError

#: Time that a batch script which lives after all has to end the job itself, with its exit code.
_BATCH_SCRIPT_S = 10.0
_TRIES, _TRY_AGAIN_S = 60, 5.0


@dataclass(frozen=True, slots=True)
class _Asked:
    """The command line."""

    run_dir: Path
    node: str
    host: str
    term: int
    lost_for_s: float
    directory: Path


async def _succeed(asked: _Asked) -> tuple[int, bool]:
    """The job's exit code, and whether Slurm has put it back into its queue."""
    read = statelog.read(asked.directory / LOG_NAME)
    given = msgspec.msgpack.decode(read.job, type=Given)
    kept = takeover.replayed(read.kept, read.entries)
    listening = socket.create_server(("0.0.0.0", 0), backlog=BACKLOG)
    _write_address(asked, listening)
    if not result.successor(asked.run_dir, asked.term):
        with contextlib.suppress(OSError):
            channel.write_address(asked.run_dir, asked.host, listening.getsockname()[1])
    result.announce(asked.run_dir, asked.term, asked.node)
    before = given.allocation.batch_host or "its host"
    allocation = replace(given.allocation, batch_host=asked.node, launcher_host=asked.host)
    given = msgspec.structs.replace(given, allocation=allocation)
    variables = _variables(os.environ, given.variables)
    backend = SlurmBackend(variables, site=given.options.site_config)
    backend.restore(allocation, asked.term, abroad=True)
    journal = Journal(asked.run_dir, click.echo)
    secret = channel.read_secret(asked.run_dir)
    driver = job_driver(given, kept.state.config, backend, journal, secret, listening)
    driver.take_over(kept, asked.term, asked.lost_for_s)
    ended = f"{before} was silent for {asked.lost_for_s:.1f} s"
    journal.write("launcher", term=asked.term, pid=os.getpid(), node=asked.node, ended=ended)
    running = driver.go_on(ended, kept.at, f"taken over by {asked.node} from its copy of the log")
    try:
        code = await to_the_end(driver, running, journal, given, backend)
        return code, await requeue(given.options, driver, backend, journal)
    finally:
        await backend.close()
        journal.close()
        channel.forget(asked.run_dir)


def _write_address(asked: _Asked, listening: socket.socket) -> None:
    fresh = asked.directory / f".{ADDRESS_NAME}"
    fresh.write_text(f"{asked.host} {listening.getsockname()[1]}")
    fresh.rename(asked.directory / ADDRESS_NAME)


def _variables(own: Mapping[str, str], of_the_job: Mapping[str, str]) -> dict[str, str]:
    """The environment as the batch script had it, as far as a launcher needs it."""
    kept = {
        name: value
        for name, value in own.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    return {**kept, **of_the_job, "SLURMD_NODENAME": own.get("SLURMD_NODENAME", "")}


async def _end_job(job_id: str, run_dir: Path) -> None:
    """Give the allocation back; again and again, as Slurm may be away."""
    client = access.client()
    ended = result.recorded(run_dir)
    if ended is not None:
        said = f"deadpool: {ended.verdict} (exit code {ended.exit_code}): {ended.reason}"
        with contextlib.suppress(SlurmError):
            await asyncio.to_thread(client.do, Comment(job_id, said))
    if result.somebody_waits(run_dir):
        await asyncio.sleep(_BATCH_SCRIPT_S)
    for _ in range(_TRIES):
        try:
            await asyncio.to_thread(client.do, EndJob(job_id))
            return
        except SlurmError as error:
            click.echo(f"the job cannot be ended: {error}", err=True)
            await asyncio.sleep(_TRY_AGAIN_S)


def main() -> None:
    """``--from``: the keeper's directory; ``--lost-for``: seconds since the last word from the
    launcher before.
    """
    parser = argparse.ArgumentParser(prog="deadpool_launch.succession.successor")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--node", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--term", type=int, required=True)
    parser.add_argument("--lost-for", type=float, required=True)
    parser.add_argument("--from", dest="directory", type=Path, required=True)
    given = parser.parse_args()
    asked = _Asked(
        given.run_dir, given.node, given.host, given.term, given.lost_for, given.directory
    )
    code: int = ExitCode.INTERNAL
    requeued = False
    try:
        code, requeued = asyncio.run(_succeed(asked))
    except Exception as error:
        traceback.print_exception(error)
        reason = f"internal error: {type(error).__name__}: {error}"
        ended = result.Result("internal error", code, reason, asked.node, asked.term)
        result.record(asked.run_dir, ended)
    if not requeued:
        asyncio.run(_end_job(os.environ["SLURM_JOB_ID"], asked.run_dir))
    sys.exit(code)


if __name__ == "__main__":
    main()
