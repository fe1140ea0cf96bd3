"""One run of ``deadpool-launch`` from options to exit code: plan, run directory, checks, then the
job.

What lives here is the order of things before and after the job itself, which
``controller.driver`` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from deadpool_launch import channel, faults
from deadpool_launch.backends.base import Backend, Check
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.driver import JobDriver
from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.journal import Journal
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import agent_argv
from deadpool_launch.prepare import Prepared, look, make_backend, prepare
from deadpool_runtime import protocol

#: Heartbeats a node may miss before it counts as lost.
HEARTBEATS_PER_TIMEOUT = 6
FROZEN_AFTER_S = 1.0
#: Beyond the time in which a lost node is noticed, and its loss told.
CONFIRM_MARGIN_S = 5.0
#: Largest script arguments, in bytes of UTF-8; they travel to every rank in one packet.
MAX_ARGUMENTS_NBYTES = 64 << 10
STOP_GRACE_S = 3.0
#: Building the native part takes under a minute; a machine that needs longer has another problem.
BUILD_S = 600
#: Finding it built takes less than this.
USUAL_BUILD_CHECK_S = 3


def launch(options: LaunchOptions) -> int:
    """Run the job; returns the exit code (``exits.ExitCode``).

    Raises ``DeadpoolError`` for everything that is found wrong before the job starts.
    """
    return asyncio.run(_launch(options))


async def _launch(options: LaunchOptions) -> int:
    backend = make_backend(options)
    # What is wrong with the command line shows before anything is written.
    _check_arguments(options.script_args)
    look(backend, options)
    run_dir = make_run_dir(Path(options.run_dir))
    journal = Journal(run_dir, click.echo)
    secret = channel.write_secret(run_dir)
    try:
        _build_native_part(journal)
        prepared = await prepare(backend, options)
        _tell_checks(prepared.checks, journal)
        driver = _job_driver(options, prepared, backend, journal, secret, run_dir)
        _announce(journal, options, prepared, run_dir)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, driver.request_stop, signum)
        code = await driver.run()
        if driver.finish is not None and driver.finish.detail:
            # A full disk or a closed terminal changes nothing about the verdict.
            with contextlib.suppress(OSError):
                click.echo(driver.finish.detail.rstrip(), err=True)
        return code
    finally:
        await backend.close()
        journal.close()
        # The secret is of no use once no agent of this job can be there any more.
        (run_dir / channel.SECRET_NAME).unlink(missing_ok=True)


def _check_arguments(script_args: Sequence[str]) -> None:
    for argument in script_args:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            raise UsageError(
                f"script argument {argument.encode('utf-8', 'backslashreplace').decode()}: is not "
                "UTF-8; write such names into a file and give the script that file"
            )
    nbytes = sum(len(argument.encode()) + 1 for argument in script_args)
    if nbytes > MAX_ARGUMENTS_NBYTES:
        raise UsageError(
            f"the script's arguments have {nbytes} bytes, and {MAX_ARGUMENTS_NBYTES} at most can "
            "be passed on: write them into a file and give the script that file"
        )


def make_run_dir(path: Path) -> Path:
    """Make the run directory (mode 0700) with its ``logs``; a used one is refused, nothing in it is
    overwritten.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(
                f"--run-dir {path}: holds another run already; name a new or empty directory"
            )
        path.chmod(0o700)
        (path / "logs").mkdir(mode=0o700)
    except OSError as error:
        raise UsageError(
            f"--run-dir {path}: cannot be used ({error.strerror}); "
            "name a directory that you can write"
        ) from error
    return path.resolve()


def _build_native_part(journal: Journal) -> None:
    """Have the shim for this torch ready before any node needs it; a no-op after the first time."""
    command = [sys.executable, "-P", "-m", "deadpool_runtime.groups.native"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as building:
        try:
            out, errors = building.communicate(timeout=USUAL_BUILD_CHECK_S)
        except subprocess.TimeoutExpired:
            journal.say("compiling the native part for this torch, once; it takes half a minute")
            try:
                out, errors = building.communicate(timeout=BUILD_S)
            except subprocess.TimeoutExpired as error:
                building.kill()
                raise UnsuitableError(
                    f"building the native part took longer than {BUILD_S} s; "
                    f"run it by hand: {shlex.join(command)}"
                ) from error
    if building.returncode != 0:
        lines = errors.strip().splitlines()
        raise UnsuitableError(lines[-1] if lines else f"{shlex.join(command)} failed")
    journal.write("event", name="NativePartReady", path=out.strip())


def _tell_checks(checks: Sequence[Check], journal: Journal) -> None:
    """Record every check; tell the user about warnings and about failures that were ignored on
    request.
    """
    for check in checks:
        journal.write("event", name="Check", check=check.name, ok=check.ok, text=check.text)
        if check.ok is not True:
            remedy = f"; {check.remedy}" if check.remedy else ""
            word = "warning" if check.ok is None else "ignored"
            journal.say(f"{word}: {check.text}{remedy}")


def _job_driver(
    options: LaunchOptions,
    prepared: Prepared,
    backend: Backend,
    journal: Journal,
    secret: bytes,
    run_dir: Path,
) -> JobDriver:
    plan, allocation = prepared.plan, prepared.allocation
    fault_plan = faults.striking_ranks(options.faults, plan.active, plan.nproc_per_node)
    spec = protocol.JobSpec(
        job_id=allocation.job_id,
        run_dir=str(run_dir),
        script=options.script,
        script_args=list(options.script_args),
        world_size=plan.world_size,
        nproc_per_node=plan.nproc_per_node,
        env=dict(allocation.env),
        heartbeat_s=options.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT,
        frozen_after_s=FROZEN_AFTER_S,
        confirm_timeout_s=options.heartbeat_timeout_s + CONFIRM_MARGIN_S,
        stop_grace_s=STOP_GRACE_S,
        record_final_state=options.record_final_state,
        fault_steps={rank: fault.step for rank, fault in fault_plan.items()},
    )
    config = Config(
        active=plan.active,
        spares=plan.spares,
        nproc_per_node=plan.nproc_per_node,
        spare_start=options.spare_start,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        agent_start_s=options.agent_start_timeout_s,
        max_restarts=options.max_restarts,
    )
    return JobDriver(
        config=config,
        backend=backend,
        journal=journal,
        spec=spec,
        secret=secret,
        run_dir=run_dir,
        agent_argv=lambda node, connect: agent_argv(sys.executable, node, connect, str(run_dir)),
        launcher_host=allocation.launcher_host,
        fault_plan=fault_plan,
    )


def _announce(
    journal: Journal,
    options: LaunchOptions,
    prepared: Prepared,
    run_dir: Path,
) -> None:
    plan, allocation = prepared.plan, prepared.allocation
    journal.write(
        "job",
        job_id=allocation.job_id,
        script=options.script,
        script_args=list(options.script_args),
        active=list(plan.active),
        spares=list(plan.spares),
        unused=list(plan.unused),
        nproc_per_node=plan.nproc_per_node,
        world_size=plan.world_size,
        spare_start=options.spare_start,
        site=options.site,
        pid=os.getpid(),
        version=importlib.metadata.version("deadpool-launch"),
    )
    spares = ", ".join(plan.spares) if plan.spares else "none"
    ranks = f"{plan.world_size} {'rank' if plan.world_size == 1 else 'ranks'}"
    journal.say(
        f"job {allocation.job_id}: {ranks} on {', '.join(plan.active)}; "
        f"spares: {spares}; run directory {run_dir}"
    )
    for remark in plan.remarks:
        journal.say(f"note: {remark}")
    journal.say(f"each rank prints to a file of its own in {run_dir / 'logs'}")
