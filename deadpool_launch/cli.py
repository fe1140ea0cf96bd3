"""The ``deadpool-launch`` command: command line in, ``LaunchOptions`` out, one call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click

from deadpool_launch import supervisor
from deadpool_launch.entry import ScriptCommand, run_command
from deadpool_launch.errors import UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.faults import parse_fault
from deadpool_launch.options import (
    CHECKPOINTS,
    LaunchOptions,
    Mpi,
    check_mpi,
    choose_nproc,
    choose_site,
    default_run_dir,
)
from deadpool_launch.policy.effective import effective
from deadpool_launch.policy.kinds import A_DURATION, BadValue, Order, read_duration
from deadpool_launch.policy.schema import BY_NAME, KEYS
from deadpool_launch.sites import files
from deadpool_launch.sites.cluster import cluster_name
from deadpool_launch.sites.merge import Settled
from deadpool_launch.status.beside import read_address
from deadpool_launch.submit.flags import PARAMETERS, submission_options
from deadpool_launch.submit.run import submit, submits
from deadpool_launch.version import deadpool_version
from deadpool_slurm.environ import read_job

PROGRAM = "deadpool-launch"
#: Options by heading of ``--help``; what is not named here comes under the last heading.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Nodes and ranks": ("nodes", "spares", "nproc_per_node", "world_size", "spare_start"),
    "Site": ("site", "assume_no_kill", "ignore_preflight", "run_dir", "policy"),
    "Submission, outside of an allocation": PARAMETERS,
    "Faults and recovery": (
        *("heartbeat_timeout", "collective_timeout", "agent_start_timeout", "max_restarts"),
        *("standby_launchers", "on_exhausted", "checkpoint_dir", "checkpoint_every"),
        *("checkpoint_name", "requeue_before_limit", "chain_name", "mpi", "rules"),
    ),
    "Other": (),
}


def _default(key: str) -> str:
    """What holds where neither the command line nor a policy says anything."""
    return f"[default: {BY_NAME[key].show(BY_NAME[key].default).strip('[]')}]"


class _WordOrder(click.ParamType[tuple[str, ...]]):
    """Words with commas between them, as ``on_exhausted`` takes a list of them."""

    name = "order"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        kind = BY_NAME["on_exhausted"].kind
        assert isinstance(kind, Order)
        try:
            order: tuple[str, ...] = kind.of(str(value).split(","))
        except BadValue as error:
            self.fail(str(error), param, ctx)
        return order


class _Time(click.ParamType[float]):
    """Seconds, or a duration as policies take it."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = value if isinstance(value, float) else read_duration(str(value))
        if seconds is None:
            self.fail(f"{value!r} is not {A_DURATION}", param, ctx)
        return seconds


class _GroupedCommand(ScriptCommand):
    """A command whose options are listed under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in _GROUPS}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None or not isinstance(parameter, click.Option):
                continue
            headings = [name for name, members in _GROUPS.items() if parameter.name in members]
            rows[headings[0] if headings else "Other"].append(row)
        for heading, records in rows.items():
            with formatter.section(heading):
                formatter.write_dl(records)


@click.command(
    cls=_GroupedCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    options_metavar="[OPTIONS]",
    epilog=(
        "Options may stand before or after SCRIPT; what follows -- is the script's own. "
        "Exit codes: 0 done, 2 wrong command line, 10 unsuitable allocation, 11 start failed, "
        "12 too little memory, 20 script failed, 21 fault of the whole job, 30 no spare left, "
        "31 state lost, 32 recovery failed, 70 defect, 75 stopped before the time limit, "
        "130 Ctrl-C, "
        "143 SIGTERM (scancel, time limit)."
    ),
)
@click.argument("script", metavar="SCRIPT")
@click.argument("extra", nargs=-1, metavar="[-- SCRIPT ARGS]")
@click.option("--nodes", type=int, metavar="N", help="Active nodes.  [default: all but the spares]")
@click.option(
    "--spares",
    type=int,
    metavar="N",
    help=f"Nodes held back to replace lost ones.  {_default('spares.count')}",
)
@click.option(
    "--nproc-per-node",
    default="auto",
    show_default=True,
    metavar="auto|gpu|N",
    help="Ranks on each node; auto: one per GPU, or one.",
)
@click.option(
    "--world-size", type=int, metavar="N", help="Number of ranks the script counts on; checked."
)
@click.option(
    "--spare-start",
    type=click.Choice(["at-start", "on-failure"]),
    help=f"When the agents on spares start.  {_default('spares.start')}",
)
@click.option(
    "--site",
    metavar="NAME",
    help="The cluster (deadpool sites lists them); local: process trees on this machine.  "
    "[default: the cluster that it is]",
)
@click.option(
    "--assume-no-kill",
    is_flag=True,
    help="The job was submitted with --no-kill, even if Slurm does not show it.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings that the command line does not name.  [default: ~/.config/deadpool/policy.yaml]",
)
@click.option("--ignore-preflight", is_flag=True, help="Go on although a check failed.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Logs and journal; all nodes must see it.  [default: deadpool-runs/JOB_ID]",
)
@click.option(
    "--heartbeat-timeout",
    type=_Time(),
    metavar="TIME",
    help=f"Silence after which a node counts as lost.  {_default('heartbeat_timeout')}",
)
@click.option(
    "--collective-timeout",
    type=_Time(),
    metavar="TIME",
    help=f"The longest that a step may take; then it hangs.  {_default('collective_timeout')}",
)
@click.option(
    "--agent-start-timeout",
    type=_Time(),
    metavar="TIME",
    help=f"Time for an agent to come up on a node.  {_default('agent_start_timeout')}",
)
@click.option(
    "--max-restarts",
    type=int,
    metavar="N",
    help=f"Restarts of all ranks from the script's own checkpoints.  {_default('max_restarts')}",
)
@click.option(
    "--standby-launchers",
    type=int,
    metavar="N",
    help="Nodes of which one takes over when the launcher's own dies (Slurm).  "
    f"{_default('standby_launchers')}",
)
@click.option(
    "--on-exhausted",
    type=_WordOrder(),
    metavar="ORDER",
    help="What is done when no spare is left: stop, or shrink,stop: go on with fewer ranks.  "
    f"{_default('on_exhausted')}",
)
@click.option(
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Durable checkpoints go here; all nodes must see it.",
)
@click.option(
    "--checkpoint-every", type=int, metavar="STEPS", help="Steps from one of them to the next."
)
@click.option(
    "--checkpoint-name",
    metavar="NAME",
    help="Their folder in DIR; training goes on from what is in it.  [default: the job's own]",
)
@click.option(
    "--requeue-before-limit",
    is_flag=True,
    help="Put a job that was stopped before its time limit back into Slurm's queue.",
)
@click.option(
    "--mpi",
    type=click.Choice(get_args(Mpi)),
    help="Send replicas by MPI: how srun starts it (mpiexec: --site local).  "
    f"{_default('replication.mpi')}",
)
@click.option(
    "--rules",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rules (YAML) that tell kinds of faults apart, tried before the packaged ones.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    help="Serve figures for Prometheus there; without HOST for this machine only.  "
    "[default: nowhere]",
)
@click.option(
    "--job-comment",
    is_flag=True,
    help="Have the job's comment in Slurm say how it stands (squeue -o %k).",
)
@click.option(
    "--record-final-state", is_flag=True, help="Write digests of every rank's last state."
)
@click.option(
    "--chain-name",
    metavar="NAME",
    help="This job is one of a chain (--chain) of that name; sets --checkpoint-name too.",
)
@submission_options
@click.option("--fault", "faults", multiple=True, hidden=True, metavar="KIND:TARGET@STEP")
@click.option("--dry-run", is_flag=True, help="Show the plan and commands; start nothing.")
@click.version_option(deadpool_version(), prog_name=PROGRAM)
def command(**given: Any) -> int:
    """Run SCRIPT on every active node and keep it running when nodes die.

    In a batch script submitted with sbatch --no-kill it uses the job's nodes. Outside of a job,
    with --nodes, it writes such a script and submits it.
    """
    timestamp = time.strftime("%Y%m%d-%H%M%S")
    settled = find_site(given, os.environ)
    if submits(given, settled, os.environ):
        options = to_options(given, os.environ, timestamp, settled, submitted=True)
        return submit(click.get_current_context(), options, settled, timestamp)
    options = to_options(given, os.environ, timestamp, settled)
    if options.dry_run:
        from deadpool_launch.dry_run import show

        click.echo(show(options))
        return ExitCode.OK
    from deadpool_launch.driver import launch

    return launch(options)


def find_site(given: Mapping[str, Any], environ: Mapping[str, str]) -> Settled:
    """The site, with what its files say for the job's partition and QOS."""
    job = read_job(environ)
    return files.choose(
        given["site"],
        environ,
        cluster_name,
        partition=given["partition"] or (job.partition if job is not None else None),
        qos=given["qos"] or (job.qos if job is not None else None),
    )


def to_options(
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    timestamp: str,
    settled: Settled | None = None,
    *,
    submitted: bool = False,
) -> LaunchOptions:
    """The command line's values, checked; ``timestamp`` names the run directory outside a job.

    ``submitted``: they are for a job that is to be submitted.
    """
    script = _readable_script(given["script"])
    at = (settled or find_site(given, environ)).site
    site = at.kind if submitted else choose_site(at.kind, environ)
    every = given["checkpoint_every"]
    if every is not None and every < 1:
        raise UsageError(CHECKPOINTS)
    policy = effective(environ, given["policy"], _named(given), on_slurm=site == "slurm")
    check_mpi(policy["mpi"], at)
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    run_dir = given["run_dir"] or default_run_dir(
        environ.get("SLURM_JOB_ID") if site == "slurm" else None,
        timestamp,
        lambda name: Path(name).exists(),
    )
    return LaunchOptions(
        script=str(script),
        script_args=tuple(given["extra"]),
        site=site,
        site_config=at,
        chain=given["chain_name"],
        nodes=given["nodes"],
        nproc_per_node=choose_nproc(
            given["nproc_per_node"],
            # What a submitted job will have is known there only.
            int(gpus) if gpus.isdecimal() else at.gpus_per_node or int(submitted),
        ),
        world_size=given["world_size"],
        run_dir=str(Path(run_dir).absolute()),
        assume_no_kill=given["assume_no_kill"],
        ignore_preflight=given["ignore_preflight"],
        record_final_state=given["record_final_state"],
        job_comment=given["job_comment"],
        metrics=None if given["metrics"] is None else read_address(given["metrics"]),
        requeue=given["requeue_before_limit"],
        checkpoint_name=given["checkpoint_name"] or given["chain_name"],
        faults=tuple(parse_fault(text) for text in given["faults"]),
        dry_run=given["dry_run"],
        **policy,
    )


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    """The command line's values of keys that policies have too."""
    parameters = {key.name: key.flag[2:].replace("-", "_") for key in KEYS if key.flag}
    named = {name: given[parameter] for name, parameter in parameters.items()}
    return {
        name: str(value.absolute()) if isinstance(value, Path) else value
        for name, value in named.items()
        if value is not None
    }


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code, with every error told in one sentence."""
    return run_command(command, arguments, PROGRAM)


def main() -> None:
    """The launcher without a supervisor, or as the child of one (``supervisor.main``)."""
    supervisor.attach()
    sys.exit(run(sys.argv[1:]))


def _readable_script(given: str) -> Path:
    path = Path(given).absolute()
    if not path.is_file():
        raise UsageError(f"there is no script {given}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {given} cannot be read")
    return path


if __name__ == "__main__":
    main()
