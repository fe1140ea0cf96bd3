"""The operator's end of a running job: find its launcher, ask it one thing, get one answer.

A job is known by its run directory, in which only its user can read where the launcher listens and
the secret that both prove to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from deadpool_launch import channel
from deadpool_launch.errors import DeadpoolError, UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import JOURNAL_NAME, read, record_of
from deadpool_runtime import protocol
from deadpool_slurm import access
from deadpool_slurm.client import SlurmError

#: Where run directories are unless they are named.
RUNS = "deadpool-runs"
CONNECT_S = 10.0
ANSWER_S = 60.0
#: Of a journal, to see that it is one.
_BEGIN_NBYTES = 64 << 10


class NotReached(DeadpoolError):
    """The job has ended, or its launcher cannot be asked."""

    exit_code = ExitCode.UNSUITABLE


def find_run(
    job: str | None,
    environ: Mapping[str, str],
    work_dir: Callable[[str], Path | None],
    flag: str = "--job ",
) -> Path:
    """The run directory that ``--job`` names: a path, or a job's number.

    Without it the job around this process, or the one run below ``deadpool-runs`` that goes on.
    ``work_dir`` finds the folder from which Slurm's job of a number was submitted. ``flag``: empty
    where the job is an argument. Raises ``UsageError``.
    """
    named_by = flag
    if job is None and (inside := environ.get("SLURM_JOB_ID")):
        job, named_by = inside, "SLURM_JOB_ID "
    if job is None:
        return _the_only_one(flag)
    if os.path.isdir(job):
        return Path(job)
    if not job.isdecimal():
        what = "a file, and no" if os.path.isfile(job) else "there is no such"
        raise UsageError(f"{named_by}{job}: {what} run directory")
    folders = [Path(RUNS)]
    submitted_from = work_dir(job)
    if submitted_from is not None:
        folders.append(submitted_from / RUNS)
    for folder in folders:
        if found := _newest(folder, job):
            return found
    where = " and ".join(map(str, folders))
    raise UsageError(
        f"{named_by}{job}: there is no run directory of this job in {where}; name it: {flag}RUN_DIR"
    )


def _the_only_one(flag: str) -> Path:
    going_on = [path.parent for path in Path(RUNS).glob(f"*/{channel.ADDRESS_NAME}")]
    if len(going_on) == 1:
        return going_on[0]
    if going_on:
        names = ", ".join(sorted(str(path) for path in going_on))
        how = "with --job" if flag else "as an argument"
        raise UsageError(f"there are several jobs: give one of them {how}: {names}")
    raise UsageError(f"no job goes on in {RUNS}: name one with {flag}RUN_DIR or {flag}JOBID")


def _newest(folder: Path, job_id: str) -> Path | None:
    """Of a job that launches twice, or was requeued, the newest run."""
    name = re.compile(rf"{job_id}(?:-(\d+))?")
    found: list[tuple[int, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if match := name.fullmatch(path.name):
                found.append((int(match[1] or 1), path))
    return max(found)[1] if found else None


def slurm_work_dir(job_id: str) -> Path | None:
    """Where Slurm's job was submitted; None if Slurm does not say."""
    try:
        facts = access.client(os.environ).job(job_id)
    except SlurmError:
        return None
    return Path(facts.work_dir) if facts.work_dir else None


def ask(run_dir: Path, question: protocol.Question) -> protocol.Answer:
    """Ask the launcher of this run directory. Raises ``NotReached`` or ``UsageError``."""
    try:
        host, port = channel.read_address(run_dir)
        secret = channel.read_secret(run_dir)
    except FileNotFoundError:
        raise _absent(run_dir) from None
    except PermissionError as error:
        raise UsageError(f"{error.filename} can be read by the job's user only") from error
    except (OSError, ValueError) as error:
        raise NotReached(f"{run_dir} does not say where the launcher is: {error}") from error
    try:
        return asyncio.run(_ask(host, port, secret, question))
    except (OSError, TimeoutError, protocol.ProtocolError) as error:
        why = str(error) or f"no answer within {ANSWER_S:g} s"
        raise NotReached(
            f"the launcher of {run_dir} cannot be reached at {host}:{port} ({why}); is it still "
            "there?"
        ) from error


def require_journal(run_dir: Path) -> Path:
    """The folder itself, if it is a run directory that can be read; else raises ``UsageError``."""
    path = run_dir / JOURNAL_NAME
    try:
        with path.open("rb") as file:
            begin = file.read(_BEGIN_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{run_dir} is no run directory: it has no {JOURNAL_NAME}") from None
    except PermissionError as error:
        raise UsageError(f"{path} can be read by the job's user only") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from error
    records = [record_of(line) for line in begin[: begin.rfind(b"\n") + 1].splitlines()]
    if records and not any(record and {"at", "kind"} <= record.keys() for record in records):
        raise UsageError(f"{path} has no record of a job; name the run directory of one")
    return run_dir


def standing_of(run_dir: Path) -> protocol.JobStanding | None:
    """How the job stands in its launcher's own words; None if that does not answer."""
    try:
        answer = ask(run_dir, protocol.AskStanding())
    except (DeadpoolError, OSError):
        return None
    return answer if isinstance(answer, protocol.JobStanding) else None


def is_alive(run_dir: Path) -> bool:
    """Whether the job's launcher answers."""
    return standing_of(run_dir) is not None


def _absent(run_dir: Path) -> DeadpoolError:
    """There is no address, or no secret any more."""
    try:
        require_journal(run_dir)
    except UsageError as error:
        return error
    for record in read(run_dir):
        if record["kind"] == "end":
            return NotReached(f"the job of {run_dir} has ended: {record['reason']}")
    return NotReached(f"the job of {run_dir} has not begun yet, or has ended without a word")


async def _ask(host: str, port: int, secret: bytes, question: protocol.Question) -> protocol.Answer:
    async with asyncio.timeout(CONNECT_S):
        reader, writer = await asyncio.open_connection(host, port)
    try:
        await channel.connect_handshake(reader, writer, secret, CONNECT_S)
        stream = channel.MessageStream(reader, writer, protocol.Reply)
        stream.send(protocol.Request(protocol.PROTOCOL_VERSION, question))
        async with asyncio.timeout(ANSWER_S):
            replies = await stream.receive()
    finally:
        writer.close()
    if not replies:
        raise channel.BrokenOff("it ended before it answered")
    answer: protocol.Answer = replies[0].body
    return answer
