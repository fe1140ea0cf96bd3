"""The mini cluster for people: `python tests/cluster/mini_cluster_cli.py up`, then `shell`.

`up` stays in the foreground and shows every change of a node or a job; Ctrl-C takes the cluster
down. The other commands find the running cluster through one file of the user's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import click
from mini_cluster import MiniCluster
from mini_cluster_nodes import ProcessMark, merged_environment, wait_until
from mini_cluster_settings import HEAD, CannotRunHere, check_machine

#: What `fault` can do to a node: the names of the methods of MiniCluster, with hyphens, and the
#: names that `deadpool rehearse` has for them.
FAULTS = (
    "power-off",
    "vanish",
    "power-on",
    "freeze",
    "freeze-node",
    "thaw",
    "partition",
    "heal",
    "drain",
    "resume",
    "mark-down",
)
#: Faults with a method of another name.
_METHODS = {"freeze-node": "freeze"}

_PROGRAM = Path(__file__).with_name("mini_cluster.py")
_WELCOME = """\
{count} idle after {after_s:.1f} s. Work in the shared directory, which every node sees:
  {base}
It is removed with the cluster, when Ctrl-C ends this command. In another terminal,
  make cluster-shell     opens a shell on the head, in that directory;
  {program} fault power-off n2
                         strikes, and power-on undoes it (likewise freeze-node and thaw,
                         partition and heal, drain and resume; vanish: power-on)."""


def state_file() -> Path:
    """The file that tells where the user's running cluster is; removed with the cluster."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "deadpool-cluster"
    return Path(tempfile.gettempdir()) / f"deadpool-cluster-{os.getuid()}"


def running_cluster() -> MiniCluster:
    """The user's cluster; a sentence instead of a traceback when there is none."""
    file = state_file()
    if not file.exists():
        raise click.ClickException("No cluster is running; start one with `up` (make cluster).")
    if file.stat().st_uid != os.getuid():
        raise click.ClickException(f"{file} belongs to another user; not used.")
    try:
        return MiniCluster.attach(file)
    except RuntimeError:
        file.unlink()
        raise click.ClickException(
            "The cluster that was running has ended; start one with `up` (make cluster)."
        ) from None


def summary(cluster: MiniCluster) -> list[str]:
    """One line for the nodes of each state and one for each job in the queue."""
    lines = []
    alike: dict[str, list[str]] = {}
    for node, state in cluster.node_states().items():
        off = "" if cluster.is_on(node) else ", its power is off"
        alike.setdefault(f"{state.lower()}{off}", []).append(node)
    for state, nodes in alike.items():
        lines.append(f"{fold_nodes(nodes)} {state}")
    for job in cluster.squeue():
        lines.append(f"job {job.job_id} {job.name}: {job.state} on {', '.join(job.nodes) or '-'}")
    return lines


def fold_nodes(nodes: Sequence[str]) -> str:
    """Runs of numbered nodes as ranges: `n1-n3,n5`."""
    runs: list[list[int]] = []
    for number in sorted(int(node.removeprefix("n")) for node in nodes):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"n{run[0]}-n{run[-1]}" if len(run) > 1 else f"n{run[0]}" for run in runs)


def _end_by_exception(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@click.group()
def main() -> None:
    """A real Slurm cluster on this one machine. Needs root and tools/debian-packages.sh."""
    try:
        check_machine()
    except CannotRunHere as reason:
        raise click.ClickException(str(reason)) from None


@main.command()
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(1, 64))
@click.option(
    "--slurmd-timeout",
    "slurmd_timeout_s",
    default=300,
    show_default=True,
    type=click.IntRange(min=3),
    help="Seconds of silence after which Slurm marks a node DOWN.",
)
def up(nodes: int, slurmd_timeout_s: int) -> None:
    """Start the cluster and show what happens in it until Ctrl-C."""
    file = state_file()
    if file.exists():
        running_cluster()
        raise click.ClickException("A cluster is running already; `down` ends it.")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_by_exception)
    try:
        began = time.monotonic()
        new = MiniCluster(nodes, state_file=file, slurmd_timeout_s=slurmd_timeout_s)
        with new as cluster:
            click.echo(
                _WELCOME.format(
                    count="1 node is" if nodes == 1 else f"{nodes} nodes are",
                    after_s=time.monotonic() - began,
                    base=cluster.base,
                    program=f"{os.path.relpath(sys.executable)} {os.path.relpath(_PROGRAM)}",
                )
            )
            _show_changes(cluster)
    except KeyboardInterrupt:
        click.echo("The cluster is down.")


def _show_changes(cluster: MiniCluster) -> None:
    shown: list[str] = []
    while True:
        try:
            lines = summary(cluster)
        except RuntimeError as error:  # The user may have stopped slurmctld; it may come back.
            lines = [str(error)]
        for line in lines:
            if line not in shown:
                click.echo(f"{time.strftime('%H:%M:%S')}  {line}")
        shown = lines
        time.sleep(1)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--node", default=HEAD, show_default=True, help="Where: head, n1, n2 ...")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def shell(node: str, command: tuple[str, ...]) -> None:
    """Open a shell on the head or a node, or run COMMAND there."""
    cluster = running_cluster()
    _check_node(cluster, node, with_head=True)
    if not cluster.is_on(node):
        raise click.ClickException(f"Node {node} is off; `fault power-on {node}` starts it.")
    argv = cluster.shell_command(node, command or ("bash", "-i"))
    os.execvpe(argv[0], argv, merged_environment(None))


@main.command()
def status() -> None:
    """Show the nodes and the queue of the running cluster."""
    cluster = running_cluster()
    for line in summary(cluster):
        click.echo(line)
    click.echo(f"shared directory: {cluster.base}\nlogs: {cluster.logs}")


@main.command()
@click.argument("kind", type=click.Choice(FAULTS))
@click.argument("node")
def fault(kind: str, node: str) -> None:
    """Do something to a node: cut its power, pull its cable, drain it ..., or undo that."""
    cluster = running_cluster()
    _check_node(cluster, node, with_head=False)
    try:
        getattr(cluster, _METHODS.get(kind, kind.replace("-", "_")))(node)
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(f"{error}.") from None
    click.echo(f"{kind} {node}: done")


@main.command()
def down() -> None:
    """End the running cluster; returns when nothing of it is left."""
    running_cluster()
    file = state_file()
    state = json.loads(file.read_text())
    owner = ProcessMark(*state["owner"])
    if owner.is_alive():
        os.kill(owner.pid, signal.SIGTERM)

    def is_gone() -> bool:
        return not file.exists() and not Path(state["root"]).exists()

    wait_until(is_gone, bool, what="the cluster is gone", timeout_s=60)
    click.echo("The cluster is down.")


def _check_node(cluster: MiniCluster, node: str, *, with_head: bool) -> None:
    names = ((HEAD,) if with_head else ()) + cluster.node_names
    if node not in names:
        raise click.ClickException(f"There is no node {node!r}; there are {', '.join(names)}.")


if __name__ == "__main__":
    sys.exit(main())
