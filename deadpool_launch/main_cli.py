"""The ``deadpool`` command: what is not a launch. Larger subcommands are loaded when called."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence

import click

from deadpool_launch.entry import NamedGroup, run_command
from deadpool_launch.exits import ExitCode
from deadpool_launch.version import deadpool_version, installed_version

#: Subcommands that live elsewhere: name -> module and attribute of the click command, and one line.
_ELSEWHERE: Mapping[str, tuple[str, str, str]] = {
    "rehearse": (
        "deadpool_launch.rehearse",
        "rehearse",
        "Strike a script with faults and compare it with a quiet run.",
    ),
    "drain": (
        "deadpool_launch.drain",
        "drain",
        "Move the ranks of a node of a running job to a spare, at the end of a step.",
    ),
    "status": (
        "deadpool_launch.status.command",
        "status",
        "Show how a job stands: nodes, ranks, step, copies, the last incident.",
    ),
    "events": (
        "deadpool_launch.status.events",
        "events",
        "Show what was noticed and decided, line by line.",
    ),
    "report": (
        "deadpool_launch.report.command",
        "report",
        "Write a page about a job: goodput, incidents, nodes.",
    ),
    "classify": (
        "deadpool_launch.classify.command",
        "classify",
        "Find the first root error in a log and say which kind of fault it is.",
    ),
    "preflight": (
        "deadpool_launch.preflight.command",
        "preflight",
        "Say whether hot swap can work on this cluster, allocation or machine.",
    ),
    "plan": (
        "deadpool_launch.whatif.plan",
        "plan",
        "What a job needs and what to ask Slurm for: memory, spares, expected goodput.",
    ),
    "simulate": (
        "deadpool_launch.whatif.simulate",
        "simulate",
        "What faults would cost a job under each way to live with them.",
    ),
    "policy": (
        "deadpool_launch.policy.commands",
        "policy",
        "Check a policy.yaml, or show the values in effect and where they came from.",
    ),
    "sites": (
        "deadpool_launch.sites.command",
        "sites",
        "List the clusters that are known, or show what holds on one of them.",
    ),
}
PROGRAM = "deadpool"
_SLURM_TIMEOUT_S = 5.0


class _LazyGroup(NamedGroup):
    """A group that imports a subcommand's module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, attribute, _ = _ELSEWHERE[cmd_name]
        loaded = getattr(importlib.import_module(module), attribute)
        assert isinstance(loaded, click.Command)
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            here = self.commands.get(name)
            rows.append((name, here.get_short_help_str(limit=70) if here else _ELSEWHERE[name][2]))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(
    cls=_LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
def command() -> None:
    """Tools around deadpool-launch."""


@command.command()
def version() -> None:
    """Show the versions of everything a job depends on."""
    rows = {
        "deadpool": deadpool_version(),
        "python": platform.python_version(),
        "torch": installed_version("torch") or "not installed",
        "slurm": slurm_version(),
        "native shim": shim_state(),
    }
    for name, value in rows.items():
        click.echo(f"{name:<12} {value}")


def slurm_version() -> str:
    """What ``sinfo -V`` prints, or why there is nothing."""
    try:
        done = subprocess.run(
            ["sinfo", "-V"], capture_output=True, text=True, timeout=_SLURM_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return "not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"sinfo does not answer ({type(error).__name__})"
    return done.stdout.strip() or "no configuration found"


def shim_state() -> str:
    """Whether the native part of the runtime is compiled for this torch.

    Asked in another process, since the launcher's commands do not load the runtime's groups.
    """
    code = (
        "from deadpool_runtime.groups import native; path = native.library_path(); "
        "print(path if path.exists() else 'not built yet')"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({type(error).__name__})"
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return said[-1] if said else "unknown"


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code, with every error told in one sentence."""
    if list(arguments) in ([], ["policy"]):
        run_command(command, [*arguments, "--help"], PROGRAM)
        return ExitCode.USAGE
    return run_command(command, arguments, PROGRAM)


def main() -> None:
    """Entry point."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
