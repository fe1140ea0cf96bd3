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
import resource
import shlex
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import Path

import click
import msgspec

from deadpool_launch import chains, channel, checkpoints, faults, movers, supervisor
from deadpool_launch.agents import BACKLOG
from deadpool_launch.backends.base import Allocation, Check, SiteError
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.classify.model import Rule
from deadpool_launch.classify.rules import all_rules
from deadpool_launch.controller.config import Config
from deadpool_launch.controller.driver import JobDriver
from deadpool_launch.controller.events import Finish
from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.journal import Journal
from deadpool_launch.movers import MoverStep
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import agent_argv
from deadpool_launch.policy.kinds import expand_domains
from deadpool_launch.prepare import (
    Prepared,
    carriers,
    choose_folder,
    command_of,
    look,
    make_backend,
    make_mover_starter,
    movers_argv,
    prepare,
    settle_spares,
)
from deadpool_launch.statelog import STATE_NAME, StateLog
from deadpool_launch.status.beside import figures_served
from deadpool_launch.status.comment import comment_kept, comment_of
from deadpool_runtime import protocol

#: Heartbeats a node may miss before it counts as lost.
HEARTBEATS_PER_TIMEOUT = 6
FROZEN_AFTER_S = 1.0
#: Files and connections that the launcher may have open.
DESCRIPTORS_OF_A_NODE, SPARE_DESCRIPTORS = 5, 512
#: How often agents ask how the GPUs are.
DEVICE_S = 10.0
#: Beyond the time in which a lost node is noticed, and its loss told.
CONFIRM_MARGIN_S = 5.0
STOP_GRACE_S = 3.0
#: Building the native part takes under a minute; a machine that needs longer has another problem.
BUILD_S = 600
#: Variables that are not the same, or not there, in a step of the job.
_OF_THE_JOB = frozenset(
    {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_CPUS_PER_NODE", "SLURM_NETWORK"}
)
#: Finding it built takes less than this.
USUAL_BUILD_CHECK_S = 3


class Given(msgspec.Struct, frozen=True):
    """What a launcher that takes over needs besides what the controller knows."""

    options: LaunchOptions
    allocation: Allocation
    spec: protocol.JobSpec
    run_dir: str
    #: What Slurm told the batch script about the job, for a launcher in one of its steps.
    variables: dict[str, str] = {}


def launch(options: LaunchOptions) -> int:
    """Run the job; returns the exit code (``exits.ExitCode``).

    Raises ``DeadpoolError`` for everything that is found wrong before the job starts.
    """
    return asyncio.run(_launch(options))


async def _launch(options: LaunchOptions) -> int:
    backend = make_backend(options)
    # What is wrong with the command line shows before anything is written.
    rules = all_rules(None if options.rules is None else Path(options.rules))
    options = settle_spares(backend, options)
    look(backend, options)
    if options.checkpoint_dir is not None:
        checkpoints.make_directory(Path(options.checkpoint_dir))
        if (end := chains.ended(options)) is not None:
            click.echo(f"note: {end}")
            return end.exit_code
    run_dir = make_run_dir(Path(options.run_dir))
    journal = Journal(run_dir, click.echo)
    secret = channel.write_secret(run_dir)
    try:
        _build_native_part(journal)
        prepared = await prepare(backend, options)
        _tell_checks(prepared.checks, journal, ignored=options.ignore_preflight)
        given, config = _given(options, prepared, journal, run_dir, rules)
        listening = listen(prepared.allocation.launcher_host)
        driver = job_driver(given, config, backend, journal, secret, listening)
        _announce(journal, options, prepared, run_dir)
        driver.begin_log()
        port = listening.getsockname()[1]
        channel.write_address(run_dir, prepared.allocation.launcher_host, port)
        supervisor.keep(str(run_dir), listening)
        code = await to_the_end(driver, driver.run(), journal, given, backend)
        await requeue(options, driver, backend, journal)
        return code
    finally:
        await backend.close()
        journal.close()
        channel.forget(run_dir)


async def to_the_end(
    driver: JobDriver,
    running: Awaitable[int],
    journal: Journal,
    given: Given,
    backend: SlurmBackend | LocalBackend,
) -> int:
    """Run the job, told by signals when to stop; returns the exit code.

    A defect is left to the supervisor, if there is one, which starts the launcher again; the agents
    and all else that was started must outlive this process then.
    """

    def standing() -> str:
        return comment_of(driver.standing(), driver.finish)

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(signum, driver.request_stop, signum)
    try:
        async with (
            figures_served(given.options.metrics, Path(given.run_dir), journal),
            comment_kept(given.options.job_comment, standing, backend, journal),
        ):
            code = await running
    except Exception as error:
        if supervisor.supervised():
            traceback.print_exception(error)
            journal.close()
            # Not sys.exit: asyncio kills its child processes when the loop is closed.
            os._exit(ExitCode.INTERNAL)
        reason = f"internal error: {type(error).__name__}: {error}"
        await driver.end(Finish("internal error", ExitCode.INTERNAL, reason, ""))
        raise
    if driver.finish is not None and driver.finish.detail:
        # A full disk or a closed terminal changes nothing about the verdict.
        with contextlib.suppress(OSError):
            click.echo(driver.finish.detail.rstrip(), err=True)
    return code


async def requeue(
    options: LaunchOptions,
    driver: JobDriver,
    backend: SlurmBackend | LocalBackend,
    journal: Journal,
) -> bool:
    """Put the job back into the queue if it is to go on there; whether it is there again. Slurm
    kills a batch script for it.

    The end of a job of a chain may be the chain's.
    """
    finish = driver.finish
    if options.chain is not None and finish is not None and chains.is_last(finish.exit_code):
        end = chains.ChainEnd(options.chain, driver.job_id, finish.exit_code, finish.reason)
        await asyncio.to_thread(chains.end, options, end, backend.cancel_waiting, journal.say)
    if not options.requeue or finish is None or finish.exit_code != ExitCode.STOPPED_IN_TIME:
        return False
    if not driver.made_progress:
        journal.say("not requeued: no step was completed, so the next run would come no further")
        return False
    journal.say("the job goes back to Slurm's queue, as --requeue-before-limit asks")
    try:
        await asyncio.to_thread(backend.requeue)
    except SiteError as error:
        journal.say(f"it could not be requeued: {error}")
        return False
    return True


def listen(launcher_host: str) -> socket.socket:
    """The socket to which agents come, on a port of the system's choice."""
    host = "127.0.0.1" if launcher_host.startswith("127.") else "0.0.0.0"
    return socket.create_server((host, 0), backlog=BACKLOG)


def allow_descriptors(nodes: int) -> None:
    """Let this process have open what a job of so many nodes takes: for each an agent's connection,
    one that is not proved yet, and what its step is started with.

    A job that fits into the usual limit changes nothing, since children inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_OF_A_NODE * nodes + SPARE_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


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


def _tell_checks(checks: Sequence[Check], journal: Journal, *, ignored: bool) -> None:
    """Record every check; tell the user about warnings, and about failures: each was ignored on
    request, or cost a node.
    """
    for check in checks:
        journal.write("event", name="Check", check=check.name, ok=check.ok, text=check.text)
        if check.ok is not True:
            remedy = f"; {check.remedy}" if check.remedy else ""
            if check.ok is None:
                word = "warning"
            else:
                word = "ignored" if ignored else f"{check.leave_out} is left out"
            journal.say(f"{word}: {check.text}{remedy}")


def _confirm_timeout_s(options: LaunchOptions) -> float:
    """Longer than a lost node takes to be noticed, but not so long that a step seems to hang."""
    noticed_s = options.heartbeat_timeout_s
    return min(noticed_s + CONFIRM_MARGIN_S, (noticed_s + options.collective_timeout_s) / 2)


def _given(
    options: LaunchOptions,
    prepared: Prepared,
    journal: Journal,
    run_dir: Path,
    rules: tuple[Rule, ...],
) -> tuple[Given, Config]:
    """What the job is told once, for all its launchers."""
    plan, allocation = prepared.plan, prepared.allocation
    directory, found = _checkpoints(options, prepared, journal)
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
        confirm_timeout_s=options.confirm_timeout_s or _confirm_timeout_s(options),
        collective_timeout_s=options.collective_timeout_s,
        stop_grace_s=STOP_GRACE_S,
        record_final_state=options.record_final_state,
        fault_steps={rank: fault.step for rank, fault in fault_plan.items()},
        checkpoint_dir=directory,
        checkpoint_every=options.checkpoint_every,
        replication_interval=options.replication_interval,
        admission=list(options.admission),
        # The nodes of a rehearsal have the same GPUs.
        device_s=DEVICE_S if options.device != "ignore" and options.site == "slurm" else 0.0,
        pace_s=0.0 if options.straggler == "ignore" else options.straggler_window_s,
        interfaces=list(options.site_config.interfaces) if options.site == "slurm" else [],
    )
    config = Config(
        active=plan.active,
        spares=plan.spares,
        nproc_per_node=plan.nproc_per_node,
        extras=plan.extras,
        spare_start=options.spare_start,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        collective_timeout_s=options.collective_timeout_s,
        agent_start_s=options.agent_start_timeout_s,
        # A spare's ranks start once it has passed its checks.
        rank_start_s=options.rank_start_timeout_s + options.admission_s,
        park_s=options.park_timeout_s,
        build_s=options.first_step_timeout_s,
        restore_s=options.restore_timeout_s,
        load_s=options.load_timeout_s,
        max_restarts=options.max_restarts,
        replication_factor=options.replication_factor,
        replication_interval=options.replication_interval,
        rules=rules,
        max_attempts=options.max_attempts,
        node_restarts=options.local_restarts,
        node_restarts_within_s=options.local_restarts_within_s,
        shrink="shrink" in options.on_exhausted,
        max_incidents=options.incidents,
        incidents_within_s=options.incidents_within_s,
        readmit_after_s=options.readmit_after_s,
        quarantine_faults=options.quarantine_faults,
        quarantine_within_s=options.quarantine_within_s,
        admission_s=options.admission_s,
        device=options.device,
        straggler=options.straggler,
        straggler_factor=options.straggler_factor,
        straggler_windows=options.straggler_windows,
        straggler_window_s=options.straggler_window_s,
        domains={
            **options.site_config.domains(allocation.nodes),
            **expand_domains(options.failure_domains),
        },
        on_drain=options.on_drain,
        checkpoint_dir=directory,
        checkpoint_keep=options.checkpoint_keep,
        checkpoints=found,
        resume=options.resume == "auto" and bool(found),
    )
    return Given(options, allocation, spec, str(run_dir), _job_variables()), config


def _job_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _OF_THE_JOB}


def job_driver(
    given: Given,
    config: Config,
    backend: SlurmBackend | LocalBackend,
    journal: Journal,
    secret: bytes,
    listening: socket.socket,
) -> JobDriver:
    """What runs the job, at its beginning or in another launcher."""
    options, run_dir = given.options, Path(given.run_dir)
    allow_descriptors(len(config.active) + len(config.spares))
    return JobDriver(
        config=config,
        backend=backend,
        journal=journal,
        spec=given.spec,
        secret=secret,
        state_log=StateLog(
            run_dir / STATE_NAME,
            msgspec.msgpack.encode(given),
            lambda why: journal.say(
                f"{run_dir / STATE_NAME} cannot be written ({why}): if the launcher crashes, the "
                "job ends with it"
            ),
        ),
        listening=listening,
        run_dir=run_dir,
        agent_argv=lambda node, connect, epoch, born: agent_argv(
            sys.executable, node, connect, str(run_dir), epoch, carriers(options), born
        ),
        launcher_host=given.allocation.launcher_host,
        fault_plan=faults.striking_ranks(options.faults, config.active, config.nproc_per_node),
        movers=_mover_step(given, config, backend, journal),
        poll_s=options.slurm_poll_s,
        reserve_s=options.reserve_s,
        ends_at=backend.ends_at(),
        standby_launchers=_standby_launchers(options),
        host=given.allocation.batch_host,
    )


def _standby_launchers(options: LaunchOptions) -> int:
    """From inside a container an agent could start none outside of it."""
    possible = options.site == "slurm" and not options.site_config.container
    return options.standby_launchers if possible else 0


def _checkpoints(
    options: LaunchOptions, prepared: Prepared, journal: Journal
) -> tuple[str, tuple[int, ...]]:
    """Where this launch's durable checkpoints go, and the steps of those that are there already."""
    if options.checkpoint_dir is None:
        return "", ()
    command = command_of(options, prepared.plan)
    place = choose_folder(options, prepared.allocation, command)
    found = checkpoints.found(place, command.world_size)
    checkpoints.take(place.folder, command, prepared.allocation.restarts)
    journal.say(
        f"a durable checkpoint after every {options.checkpoint_every} steps goes to {place.folder}"
    )
    if found and options.resume == "never":
        journal.say(
            f"note: an earlier launch left the checkpoint of step {found[0]}; the script begins as "
            "it will, that checkpoint is used only if all copies are lost"
        )
    elif found:
        journal.say(
            f"an earlier launch left the checkpoint of step {found[0]}: training goes on from "
            "there, unless the script loads a state of its own"
        )
    elif place.taken_up:
        journal.say(f"note: no checkpoint in {place.folder} is complete: training begins anew")
    return str(place.folder), found


def _mover_step(
    given: Given, config: Config, backend: SlurmBackend | LocalBackend, journal: Journal
) -> MoverStep | None:
    options, run_dir = given.options, Path(given.run_dir)
    job_id = given.allocation.job_id
    starter = make_mover_starter(backend, job_id, options)
    if starter is None:
        return None
    log_dir = run_dir / "logs"
    argv = movers_argv(job_id, run_dir / channel.SECRET_NAME, 1)
    nodes = (*config.active, *(config.spares if config.spare_start == "at-start" else ()))
    command = starter.command(nodes, argv, movers.world_name(1), log_dir / movers.log_name(1, 1))
    journal.write("event", name="Movers", mpi=options.mpi, command=shlex.join(command))
    return MoverStep(
        starter,
        lambda world_id: movers_argv(job_id, run_dir / channel.SECRET_NAME, world_id),
        log_dir,
        journal.say,
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
        extras=list(plan.extras),
        unused=list(plan.unused),
        nproc_per_node=plan.nproc_per_node,
        world_size=plan.world_size,
        spare_start=options.spare_start,
        site=options.site,
        cluster=options.site_config.name,
        pid=os.getpid(),
        version=importlib.metadata.version("deadpool-launch"),
    )
    if options.policy:
        journal.write("event", name="Policy", settings=list(options.policy))
    spares = ", ".join(plan.spares) if plan.spares else "none"
    ranks = f"{plan.world_size} {'rank' if plan.world_size == 1 else 'ranks'}"
    journal.say(
        f"job {allocation.job_id}: {ranks} on {', '.join(plan.active)}; "
        f"spares: {spares}; run directory {run_dir}"
    )
    for remark in plan.remarks:
        journal.say(f"note: {remark}")
    journal.say(f"each rank prints to a file of its own in {run_dir / 'logs'}")
