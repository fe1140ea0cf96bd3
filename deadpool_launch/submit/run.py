"""Submitting: the script of a command line, shown or given to ``sbatch``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from deadpool_launch.classify.rules import all_rules
from deadpool_launch.errors import DeadpoolError, UnsuitableError, UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import make_plan
from deadpool_launch.policy import spares
from deadpool_launch.sites.merge import Settled
from deadpool_launch.submit import flags, request
from deadpool_launch.submit.line import launch_line
from deadpool_launch.submit.script import BatchScript

#: Scripts go where the run directories are.
FOLDER = Path("deadpool-runs")
#: A busy controller takes its time with a job.
_SBATCH_S = 120.0


def submits(given: Mapping[str, Any], settled: Settled, environ: Mapping[str, str]) -> bool:
    """Whether the command line is for ``sbatch``, and not for an allocation that is there.

    Raises ``UsageError`` if it is for both, or for neither.
    """
    named = flags.wanted(given).named()
    if given["print_script"]:
        named.append("--print-script")
    if settled.site.kind == "local":
        if named:
            raise UsageError(f"{named[0]}: nothing is submitted with --site {settled.site.name}")
        return False
    if given["nodes"] is None and named and "SLURM_JOB_ID" not in environ:
        raise UsageError(
            f"{named[0]}: to submit a job, name how many nodes are to be active (--nodes N)"
        )
    if "SLURM_JOB_ID" not in environ:
        return given["nodes"] is not None
    if given["print_script"]:
        if given["nodes"] is None:
            raise UsageError("--print-script: name how many nodes are to be active (--nodes N)")
        return True
    if named:
        raise UsageError(
            f"{named[0]} has no effect here: this is job {environ['SLURM_JOB_ID']}, and the "
            "launcher uses its nodes; leave the option out, or submit from outside of the job"
        )
    return False


def submit(
    ctx: click.Context, options: LaunchOptions, settled: Settled, timestamp: str
) -> ExitCode:
    """Write the script and submit it, or show it. ``options``: with spares still to be settled."""
    given = ctx.params
    wanted = flags.wanted(given)
    options = _with_spares(options, request.seconds_wanted(wanted, settled))
    _check_ahead(options, given["nproc_per_node"])
    name = request.job_name(wanted, options.script, timestamp)
    script = request.batch_script(
        wanted, options, settled, name, _command(ctx, options, settled, name)
    )
    if given["print_script"] or options.dry_run:
        click.echo(script.text(), nl=False)
        return ExitCode.OK
    if shutil.which("sbatch") is None:
        raise UnsuitableError(
            "there is no sbatch here: submit from a login node of the cluster (--print-script "
            "shows the script), or use --site local"
        )
    path = _write(script, FOLDER / f"{name}-{timestamp}.sbatch")
    jobs: list[str] = []
    for _ in range(wanted.chain or 1):
        try:
            jobs.append(_sbatch(path))
        except DeadpoolError as error:
            if not jobs:
                raise
            raise UsageError(f"{error}; submitted before: {', '.join(jobs)}") from error
    for remark in options.remarks:
        click.echo(f"note: {remark}")
    click.echo(_told(jobs, options, settled, path))
    return ExitCode.OK


def _with_spares(options: LaunchOptions, time_s: float | None) -> LaunchOptions:
    """The options with a number of spares where a policy names a share or a failure rate."""
    hours = time_s / 3600 if time_s is not None else None
    chosen = spares.choose(options, total=None, hours_left=hours)
    if chosen is None:
        return options
    return msgspec.structs.replace(
        options, spares=chosen.count, remarks=(*options.remarks, chosen.remark)
    )


def _check_ahead(options: LaunchOptions, nproc_per_node: str) -> None:
    """What the launcher would refuse in the job, after a day in the queue, is refused here."""
    all_rules(None if options.rules is None else Path(options.rules))
    known = nproc_per_node.isdecimal() or options.site_config.gpus_per_node is not None
    nodes = [f"n{number}" for number in range(request.nodes_wanted(options))]
    make_plan(
        nodes,
        nodes[-1],
        options if known else msgspec.structs.replace(options, world_size=None),
    )


def _command(ctx: click.Context, options: LaunchOptions, settled: Settled, name: str) -> list[str]:
    said = {
        parameter: value
        for parameter, value in ctx.params.items()
        if ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE
    }
    instead = {
        "--site": settled.site.name,
        "--nodes": str(options.nodes),
        "--spares": str(options.spares),
    }
    if ctx.params["chain"] is not None:
        instead["--chain-name"] = name
    left_out = (*flags.PARAMETERS, "dry_run")
    return launch_line(_program(), ctx.command.params, said, instead, left_out)


def _program() -> list[str]:
    """This program, by a path that is the same on every node."""
    beside = Path(sys.executable).with_name("deadpool-launch")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "deadpool_launch"]


def _write(script: BatchScript, path: Path) -> Path:
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(script.text())
    except OSError as error:
        raise UsageError(
            f"{path}: the batch script cannot be written ({error.strerror}); submit from a folder "
            "that you can write and all nodes see"
        ) from error
    return path


def _sbatch(path: Path) -> str:
    """The job's number. Options of ``sbatch`` in the environment are the user's."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SBATCH_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnsuitableError(
            f"sbatch did not answer within {_SBATCH_S:g} s; squeue says whether {path} was "
            "submitted"
        ) from None
    except OSError as error:
        raise UnsuitableError(
            f"sbatch cannot be run ({os.strerror(error.errno or 0)}); the script is {path}"
        ) from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
        raise UsageError(f"sbatch refused {path}: {said or f'exit code {done.returncode}'}")
    return done.stdout.strip().partition(";")[0]


def _told(jobs: list[str], options: LaunchOptions, settled: Settled, path: Path) -> str:
    which = f"job {jobs[0]}" if len(jobs) == 1 else f"jobs {', '.join(jobs)}, one after the other"
    held = request.nodes_text(options)
    return f"{which}: {held} on site {settled.site.name}; script {path}"
