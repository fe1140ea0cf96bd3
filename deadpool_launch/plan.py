"""Which node does what: nodes and options in, a printable ``LaunchPlan`` out. Pure.

The batch host carries the launcher and is the job's one special node. It is therefore the last node
to be given ranks: with spares it is the last spare, and it is active only where every node is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.options import LaunchOptions


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The nodes of a job by role, and the size of its world."""

    #: Nodes that run ranks from the start, in the order of their ranks.
    active: tuple[str, ...]
    #: Nodes held back, in the order in which they replace lost ones.
    spares: tuple[str, ...]
    #: Nodes of the allocation that are used for nothing.
    unused: tuple[str, ...]
    batch_host: str | None
    nproc_per_node: int
    #: What the user should know about this plan.
    remarks: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.active) * self.nproc_per_node

    def ranks_of(self, index: int) -> tuple[int, ...]:
        """The global ranks of the active node at ``index``, in order of local rank."""
        return tuple(range(index * self.nproc_per_node, (index + 1) * self.nproc_per_node))

    def describe(self) -> str:
        """The plan for a person: one line a node, then the remarks."""
        width = max(len(node) for node in (*self.active, *self.spares, *self.unused))
        lines = []
        for index, node in enumerate(self.active):
            lines.append(self._line(node, width, f"active   {_ranks(self.ranks_of(index))}"))
        for number, node in enumerate(self.spares, start=1):
            lines.append(self._line(node, width, f"spare    number {number} to be used"))
        lines += [self._line(node, width, "unused") for node in self.unused]
        lines.append(
            f"{_count(self.world_size, 'rank')} on {_count(len(self.active), 'active node')}, "
            f"{_count(len(self.spares), 'spare')}"
        )
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def _line(self, node: str, width: int, role: str) -> str:
        return f"{node:<{width}}  {role}" + ("  (batch host)" if node == self.batch_host else "")


def make_plan(
    nodes: Sequence[str],
    batch_host: str | None,
    options: LaunchOptions,
    left_out: Sequence[str] = (),
) -> LaunchPlan:
    """Give each node of the allocation its role.

    ``nodes`` are all of the allocation's. Those in ``left_out`` failed their checks and are not
    used: that costs spares first, and is an error only when not even the active ones are left.
    """
    total = len(nodes)
    if total == 0:
        raise UnsuitableError("the allocation has no nodes")
    active_count = total - options.spares if options.nodes is None else options.nodes
    _check_sizes(total, active_count, options)

    usable = [node for node in nodes if node not in left_out]
    if len(usable) < active_count:
        raise UnsuitableError(
            f"{_count(active_count, 'active node')} needed, but only {len(usable)} of {total} can "
            f"be used: {', '.join(left_out)} failed the checks"
        )
    spare_count = min(options.spares, len(usable) - active_count)
    # The batch host goes to the end, so that it is taken last for ranks and last as a spare.
    ordered = sorted(usable, key=lambda node: node == batch_host)
    active = tuple(ordered[:active_count])
    rest = ordered[active_count:]
    unused_count = len(rest) - spare_count
    if batch_host in rest:
        spares = (*rest[: spare_count - 1], rest[-1]) if spare_count else ()
    else:
        spares = tuple(rest[:spare_count])
    unused = tuple(node for node in rest if node not in spares)

    remarks = []
    if spare_count == 0:
        remarks.append(
            "no spare is held: the loss of a node ends the job; --spares 1 would hold one"
            if options.spares == 0
            else "no spare is left: the loss of a node ends the job"
        )
    elif spare_count < options.spares:
        remarks.append(f"only {spare_count} of {options.spares} spares can be used")
    if unused_count:
        remarks.append(
            f"{_count(unused_count, 'node')} of the allocation unused ({', '.join(unused)}); "
            f"--spares {spare_count + unused_count} would hold them as spares"
        )
    if batch_host in active:
        remarks.append(
            f"{batch_host} runs ranks beside the launcher: with a spare it would run only that"
        )
    return LaunchPlan(active, spares, unused, batch_host, options.nproc_per_node, tuple(remarks))


def agent_argv(python: str, node: str, connect: str, run_dir: str) -> list[str]:
    """Command line of the agent of ``node``; it reads the job's secret from the run directory."""
    return [
        python,
        "-m",
        "deadpool_launch.agent",
        "--node",
        node,
        "--connect",
        connect,
        "--run-dir",
        run_dir,
    ]


def _check_sizes(total: int, active_count: int, options: LaunchOptions) -> None:
    if options.nodes is None and options.spares >= total:
        raise UsageError(
            f"--spares {options.spares}: the allocation has {_count(total, 'node')}, so at most "
            f"{_count(total - 1, 'spare')} can be held; allocate {options.spares + 1} or more"
        )
    if active_count + options.spares > total:
        raise UsageError(
            f"--nodes {options.nodes} and --spares {options.spares} need "
            f"{_count(active_count + options.spares, 'node')}, but the allocation has {total}: "
            f"allocate more (sbatch --nodes={active_count + options.spares}) or ask for fewer"
        )
    world_size = active_count * options.nproc_per_node
    if options.world_size is not None and options.world_size != world_size:
        raise UsageError(
            f"--world-size {options.world_size}: {_count(active_count, 'active node')} with "
            f"--nproc-per-node {options.nproc_per_node} make {world_size}"
        )
    for fault in options.faults:
        if fault.rank is not None and fault.rank >= world_size:
            raise UsageError(f"--fault {fault}: ranks go from 0 to {world_size - 1}")


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
