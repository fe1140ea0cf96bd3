"""``deadpool rehearse``: run a script on this machine, break it on purpose, compare the outcome.

Both runs, the undisturbed and the broken one, are ordinary ``deadpool-launch --site local``
processes; everything shown comes from their journals.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from deadpool_launch import plot, timeline
from deadpool_launch.backends.local import local_nodes
from deadpool_launch.comparing import PartComparison, compare_finals
from deadpool_launch.controller.wording import ranks_text
from deadpool_launch.curves import loss_curve
from deadpool_launch.display import open_display, print_table
from deadpool_launch.entry import ScriptCommand
from deadpool_launch.errors import UsageError
from deadpool_launch.exits import ExitCode
from deadpool_launch.faults import Fault, parse_fault, striking_ranks
from deadpool_launch.options import CHECKPOINTS
from deadpool_launch.rehearsal_run import Interrupted, Interrupts, Outcome, run_once

#: Parts of the final state that hold nothing but states of random generators.
_RANDOM_PARTS = frozenset({"rng", "data"})
#: What a part is called here where that is not its key in the record.
_PART_NAMES = {"user": "job.state"}


class RehearsalCode(IntEnum):
    """Exit codes of a rehearsal whose runs both ended well but did not show what they should."""

    #: The final states of the two runs differ, or were not recorded.
    STATES_DIFFER = 40
    #: A fault was never brought about, so nothing was rehearsed.
    FAULT_NOT_FIRED = 41


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What to rehearse."""

    script: Path
    script_args: tuple[str, ...]
    nodes: int
    spares: int
    nproc_per_node: int
    faults: tuple[Fault, ...]
    reference: bool
    plot: Path | None
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    agent_start_timeout: str | None = None

    def launch_argv(self, run_dir: Path, faults: Sequence[Fault]) -> list[str]:
        """The ``deadpool-launch`` command line of one of the runs."""
        argv = [sys.executable, "-P", "-m", "deadpool_launch.cli"]
        argv += ["--site", "local", "--nodes", str(self.nodes), "--spares", str(self.spares)]
        argv += ["--nproc-per-node", str(self.nproc_per_node), "--run-dir", str(run_dir)]
        argv += ["--record-final-state"]
        if self.checkpoint_dir is not None:
            argv += ["--checkpoint-dir", str(self.checkpoint_dir)]
            argv += ["--checkpoint-every", str(self.checkpoint_every)]
        if self.agent_start_timeout is not None:
            argv += ["--agent-start-timeout", self.agent_start_timeout]
        for fault in faults:
            argv += ["--fault", str(fault)]
        return [*argv, str(self.script), "--", *self.script_args]


@click.command(
    cls=ScriptCommand,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
    options_metavar="[OPTIONS]",
)
@click.argument("script", metavar="SCRIPT", type=click.Path(path_type=Path))
@click.argument("script_args", nargs=-1, metavar="[-- SCRIPT ARGS]")
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    metavar="N",
    default=3,
    show_default=True,
    help="Active nodes.",
)
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    metavar="N",
    default=1,
    show_default=True,
    help="Spare nodes.",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Ranks on each active node.",
)
@click.option(
    "--fault",
    "fault_texts",
    metavar="KIND:TARGET@STEP",
    multiple=True,
    help="A fault to bring about, such as power-off:1@20 (the active node with index 1 loses power "
    "as its first rank begins step 20) or kill:2@5 (rank 2). Repeat it for several.",
)
@click.option(
    "--checkpoint-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write durable checkpoints here, each run to a folder of its own.",
)
@click.option(
    "--checkpoint-every", type=int, metavar="STEPS", help="Steps from one of them to the next."
)
@click.option(
    "--agent-start-timeout",
    metavar="TIME",
    help="Time for an agent to come up on a node, as for deadpool-launch.",
)
@click.option(
    "--reference/--no-reference",
    default=True,
    help="Run undisturbed first and compare the final states.  [default: reference]",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    metavar="FILE.png",
    help="Draw the loss curves of both runs.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Keep both run directories (journals and logs) here.  [default: kept in a temporary "
    "folder if the rehearsal fails, else removed]",
)
def rehearse(
    script: Path,
    script_args: tuple[str, ...],
    nodes: int,
    spares: int,
    nproc_per_node: int,
    fault_texts: tuple[str, ...],
    checkpoint_dir: Path | None,
    checkpoint_every: int | None,
    agent_start_timeout: str | None,
    reference: bool,
    plot_path: Path | None,
    keep: Path | None,
) -> int:
    """Run SCRIPT on this machine, once undisturbed and once with faults, and compare.

    Nodes are groups of processes on this machine; no Slurm is needed.

    Exit codes: 0 every fault was brought about and both runs ended with the same bits, 2 wrong
    command line, 40 the final states differ, 41 a fault was never brought about. A run that fails
    passes on its own code, one of those of deadpool-launch (see deadpool-launch --help).
    """
    rehearsal = Rehearsal(
        script=script,
        script_args=script_args,
        nodes=nodes,
        spares=spares,
        nproc_per_node=nproc_per_node,
        faults=tuple(parse_fault(text) for text in fault_texts),
        reference=reference,
        plot=plot_path,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        agent_start_timeout=agent_start_timeout,
    )
    check(rehearsal)
    base = run_directory(keep)
    wanted = True
    try:
        with Interrupts() as interrupts:
            code = run_rehearsal(rehearsal, base, Console(highlight=False), interrupts)
        wanted = keep is not None or code != ExitCode.OK
    except Interrupted as error:
        click.echo("Interrupted; every process of the rehearsal has ended.", err=True)
        code = error.exit_code
        wanted = keep is not None
    finally:
        if not wanted:
            shutil.rmtree(base, ignore_errors=True)
    if wanted:
        click.echo(f"Run directories (logs, journals): {base}")
    return code


def check(rehearsal: Rehearsal) -> None:
    """Raise a ``UsageError`` for what would otherwise be found only after the first run."""
    if not rehearsal.script.is_file():
        raise UsageError(f"there is no script {rehearsal.script}")
    if not rehearsal.faults:
        raise UsageError(
            "nothing to rehearse: name at least one --fault, such as --fault power-off:1@20"
        )
    every = rehearsal.checkpoint_every
    if (rehearsal.checkpoint_dir is None) != (every is None) or (every is not None and every < 1):
        raise UsageError(CHECKPOINTS)
    striking_ranks(rehearsal.faults, local_nodes(rehearsal.nodes), rehearsal.nproc_per_node)
    if rehearsal.plot is not None:
        plot.check_path(rehearsal.plot)
        plot.require_matplotlib()


def run_directory(keep: Path | None) -> Path:
    """The folder for both runs' directories: ``keep`` (new or empty), or a temporary one."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="deadpool-rehearsal-"))
    try:
        keep.mkdir(parents=True, exist_ok=True)
        used = any(keep.iterdir())
    except OSError as error:
        raise UsageError(f"--keep {keep}: cannot be used ({error.strerror})") from error
    if used:
        raise UsageError(f"--keep {keep}: is not empty; name a new or empty folder")
    return keep.absolute()


def run_rehearsal(
    rehearsal: Rehearsal, base: Path, console: Console, interrupts: Interrupts
) -> int:
    """Both runs, the report, and the exit code."""
    reference: Outcome | None = None
    if rehearsal.reference:
        run_dir, display = base / "undisturbed", open_display(console, "undisturbed run")
        reference = run_once(rehearsal.launch_argv(run_dir, ()), run_dir, display, interrupts)
        if reference.exit_code != 0:
            _report_failure("undisturbed run", reference, console)
            return reference.exit_code
        console.print()
    faults = rehearsal.faults
    run_dir = base / "disturbed"
    display = open_display(console, f"run with {', '.join(map(str, faults))}")
    disturbed = run_once(rehearsal.launch_argv(run_dir, faults), run_dir, display, interrupts)
    console.print()
    for incident in disturbed.view.incidents.values():
        print_table(timeline.render(incident, console.width), console)
        console.print()
    if rehearsal.plot is not None:
        title = f"{rehearsal.script.name} with {', '.join(map(str, faults))}"
        undisturbed = None if reference is None else reference.view
        plot.draw(undisturbed, disturbed.view, rehearsal.plot, title)
        console.print(f"Loss curves: {rehearsal.plot}", markup=False)
    return _verdict(rehearsal, reference, disturbed, console)


# ---------------------------------------------------------------- report


def _verdict(
    rehearsal: Rehearsal, reference: Outcome | None, disturbed: Outcome, console: Console
) -> int:
    if reference is not None:
        print_table(_runs_table(reference, disturbed), console)
        console.print()
    if disturbed.exit_code != 0:
        _report_failure("run with the fault", disturbed, console)
        return disturbed.exit_code
    fired = {str(record["fault"]) for record in disturbed.view.faults}
    missed = [fault for fault in rehearsal.faults if str(fault) not in fired]
    comparisons = [] if reference is None else compare_finals(reference.view, disturbed.view)
    if comparisons:
        print_table(_states_table(comparisons), console)
        console.print()
    if missed:
        for fault in missed:
            console.print(
                f"NOT REHEARSED: {fault} was never brought about; "
                f"{_why_missed(rehearsal, fault, disturbed)}",
                style="bold red",
            )
        return RehearsalCode.FAULT_NOT_FIRED
    if reference is None:
        console.print(
            "RECOVERED: training went on to its end. Nothing was compared (--no-reference).",
            style="bold green",
        )
        return 0
    if not comparisons:
        console.print(
            "NOT COMPARED: no final state was recorded; does the script call deadpool.attach?",
            style="bold red",
        )
        return RehearsalCode.STATES_DIFFER
    if not all(comparison.equal for comparison in comparisons):
        console.print("DIFFERENT: the final states are not the same bits.", style="bold red")
        if {comparison.part for comparison in comparisons if not comparison.equal} <= _RANDOM_PARTS:
            console.print(
                "Only random generators differ: a script that does not seed Python's random, "
                "numpy.random and torch differs from run to run without any fault."
            )
        else:
            console.print(
                "Often this is state that attach was not given (scheduler, scaler, averaged "
                "weights) or a counter outside job.state."
            )
        return RehearsalCode.STATES_DIFFER
    console.print(
        "SAME BITS: the final state equals that of the undisturbed run on every rank.",
        style="bold green",
    )
    return 0


def _why_missed(rehearsal: Rehearsal, fault: Fault, disturbed: Outcome) -> str:
    view = disturbed.view
    if not view.steps:
        return "no step was reported; does the script call deadpool.attach?"
    nodes = local_nodes(rehearsal.nodes)
    (rank,) = striking_ranks((fault,), nodes, rehearsal.nproc_per_node)
    shown = view.ranks.get(rank)
    if fault.step <= view.step and shown is not None and shown.processes > 1:
        return (
            f"the process of rank {rank} that was to do it was replaced before; name another rank "
            f"or node, or rehearse the faults one at a time."
        )
    return f"the run ended after step {view.step}."


def _states_table(comparisons: Sequence[PartComparison]) -> Table:
    table = Table(title="Final state", title_justify="left", title_style="bold", box=None)
    table.add_column("part", no_wrap=True)
    table.add_column("against the undisturbed run")
    for comparison in comparisons:
        total = len(comparison.equal_ranks) + len(comparison.other_ranks)
        part = _PART_NAMES.get(comparison.part, comparison.part)
        if comparison.empty:
            table.add_row(part, "[dim]none[/]")
        elif comparison.equal:
            where = "the only rank" if total == 1 else f"all {total} ranks"
            table.add_row(part, f"[green]same bits on {where}[/]")
        else:
            where = f"{ranks_text(comparison.other_ranks)} of {total}"
            table.add_row(part, f"[bold red]differs on {where}[/]")
    return table


def _runs_table(reference: Outcome, disturbed: Outcome) -> Table:
    table = Table(box=None)
    for name in ("run", "steps", "last loss", "seconds"):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    struck = "with the faults" if len(disturbed.view.faults) > 1 else "with the fault"
    for name, outcome in (("undisturbed", reference), (struck, disturbed)):
        view = outcome.view
        curve = loss_curve(view)
        seconds = view.since_start_s(view.newest_at)
        loss = f"{curve[-1].loss:.6f}" if curve else ""
        table.add_row(name, str(view.step), loss, f"{seconds:.1f}")
    return table


def _report_failure(name: str, outcome: Outcome, console: Console) -> None:
    end = outcome.view.end
    told = {text for _, text in outcome.view.says}
    reason = ""
    if end is not None:
        reason = f": {end.verdict}"
        # The display has just shown the launcher's last line, which gives the reason.
        if not any(end.reason in text for text in told):
            reason += f", {end.reason}"
    console.print(
        f"FAILED: the {name} ended with exit code {outcome.exit_code}{reason}",
        style="bold red",
        markup=False,
    )
    # What the launcher told people was shown already; the rest is a traceback or its own error.
    for line in outcome.last_lines:
        text = line.partition(" ")[2]
        if text not in told and str(outcome.run_dir) not in text:
            console.print(f"  {line}", markup=False, soft_wrap=True)
