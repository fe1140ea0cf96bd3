"""The ``deadpool-launch`` command: command line in, ``LaunchOptions`` out, one call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from deadpool_launch.entry import ScriptCommand, run_command
from deadpool_launch.errors import UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.faults import parse_fault
from deadpool_launch.options import LaunchOptions, choose_nproc, choose_site, default_run_dir
from deadpool_launch.version import deadpool_version

PROGRAM = "deadpool-launch"
#: Options by heading of ``--help``; what is not named here comes under the last heading.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Nodes and ranks": ("nodes", "spares", "nproc_per_node", "world_size", "spare_start"),
    "Site": ("site", "assume_no_kill", "ignore_preflight", "run_dir"),
    "Faults and recovery": ("heartbeat_timeout", "agent_start_timeout", "max_restarts"),
    "Other": (),
}


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
        "20 script failed, 30 no spare left, 31 state lost, 32 recovery failed, 70 defect, "
        "130 Ctrl-C, 143 SIGTERM (scancel, time limit)."
    ),
)
@click.argument("script", metavar="SCRIPT")
@click.argument("extra", nargs=-1, metavar="[-- SCRIPT ARGS]")
@click.option("--nodes", type=int, metavar="N", help="Active nodes.  [default: all but the spares]")
@click.option(
    "--spares",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Nodes held back to replace lost ones.",
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
    default="at-start",
    show_default=True,
    help="When the agents on spares start.",
)
@click.option(
    "--site",
    type=click.Choice(["slurm", "local"]),
    help="Where nodes come from; local: process trees on this machine.  "
    "[default: slurm inside an allocation]",
)
@click.option(
    "--assume-no-kill",
    is_flag=True,
    help="The job was submitted with --no-kill, even if Slurm does not show it.",
)
@click.option("--ignore-preflight", is_flag=True, help="Go on although a check failed.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Logs and journal; all nodes must see it.  [default: deadpool-runs/JOB_ID]",
)
@click.option(
    "--heartbeat-timeout",
    type=float,
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Silence after which a node counts as lost.",
)
@click.option(
    "--agent-start-timeout",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for an agent to come up on a node.",
)
@click.option(
    "--max-restarts",
    type=int,
    default=3,
    show_default=True,
    metavar="N",
    help="Restarts of all ranks from the script's own checkpoints.",
)
@click.option(
    "--record-final-state", is_flag=True, help="Write digests of every rank's last state."
)
@click.option("--fault", "faults", multiple=True, hidden=True, metavar="KIND:TARGET@STEP")
@click.option("--dry-run", is_flag=True, help="Show the plan and commands; start nothing.")
@click.version_option(deadpool_version(), prog_name=PROGRAM)
def command(**given: Any) -> int:
    """Run SCRIPT on every active node and keep it running when nodes die.

    Call it directly in a batch script submitted with sbatch --no-kill.
    """
    options = to_options(given, os.environ, time.strftime("%Y%m%d-%H%M%S"))
    if options.dry_run:
        from deadpool_launch.dry_run import show

        click.echo(show(options))
        return ExitCode.OK
    from deadpool_launch.driver import launch

    return launch(options)


def to_options(
    given: Mapping[str, Any], environ: Mapping[str, str], timestamp: str
) -> LaunchOptions:
    """The command line's values, checked; ``timestamp`` names the run directory outside a job."""
    script = _readable_script(given["script"])
    site = choose_site(given["site"], environ)
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
        nodes=given["nodes"],
        spares=given["spares"],
        nproc_per_node=choose_nproc(
            given["nproc_per_node"], int(gpus) if gpus.isdecimal() else None
        ),
        world_size=given["world_size"],
        spare_start=given["spare_start"],
        run_dir=str(Path(run_dir).absolute()),
        heartbeat_timeout_s=given["heartbeat_timeout"],
        agent_start_timeout_s=given["agent_start_timeout"],
        max_restarts=given["max_restarts"],
        assume_no_kill=given["assume_no_kill"],
        ignore_preflight=given["ignore_preflight"],
        record_final_state=given["record_final_state"],
        faults=tuple(parse_fault(text) for text in given["faults"]),
        dry_run=given["dry_run"],
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code, with every error told in one sentence."""
    return run_command(command, arguments, PROGRAM)


def main() -> None:
    """Entry point."""
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
