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
    #: Nodes that nobody asked for: they replace lost ones when no spare is left.
    extras: tuple[str, ...] = ()
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
        width = max(len(n) for n in (*self.active, *self.spares, *self.extras, *self.unused))
        lines = []
        for index, node in enumerate(self.active):
            lines.append(self._line(node, width, f"active   {_ranks(self.ranks_of(index))}"))
        for number, node in enumerate(self.spares, start=1):
            lines.append(self._line(node, width, f"spare    number {number} to be used"))
        lines += [self._line(node, width, "extra    if no spare is left") for node in self.extras]
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
    if not nodes:
        raise UnsuitableError("the allocation has no nodes")
    candidates = usable_nodes(nodes, batch_host, options)
    total = len(candidates)
    if total == 0:
        raise UnsuitableError(
            "the allocation has no node but the batch host, which batch_host: never keeps free: "
            "allocate more nodes"
        )
    active_count = total - options.spares if options.nodes is None else options.nodes
    _check_sizes(total, active_count, options)

    usable = [node for node in candidates if node not in left_out]
    if len(usable) < active_count:
        raise UnsuitableError(
            f"{_count(active_count, 'active node')} needed, but only {len(usable)} of {total} can "
            f"be used: {', '.join(left_out)} failed the checks"
        )
    spare_count = min(options.spares, len(usable) - active_count)
    # The batch host goes to the end, so that it is taken last for ranks and last as a spare; or to
    # the front, where it is the first to be given ranks.
    at_front = options.batch_host == "active"
    ordered = sorted(usable, key=lambda node: (node == batch_host) is not at_front)
    active = tuple(ordered[:active_count])
    rest = ordered[active_count:]
    spares = _choose_spares(rest, spare_count, batch_host, options)
    left_over = tuple(node for node in rest if node not in spares)
    warm = options.spare_start == "at-start"
    check_factor(options.replication_factor, len(active), len(spares), warm_spares=warm)
    extras = left_over if options.extra_nodes == "spares" else ()
    unused = tuple(node for node in nodes if node not in (*active, *spares, *extras, *left_out))

    remarks = list(options.remarks)
    if spare_count == 0 and options.on_exhausted == ("stop",):
        remarks.append(
            "no spare is held: the loss of a node ends the job; --spares 1 would hold one"
            if options.spares == 0
            else "no spare is left: the loss of a node ends the job"
        )
    elif spare_count < options.spares:
        remarks.append(f"only {spare_count} of {options.spares} spares can be used")
    if left_over:
        count = len(left_over)
        use = "used only when no spare is left" if extras else "unused"
        remarks.append(
            f"{_count(count, 'node')} of the allocation {use} ({', '.join(left_over)}); "
            f"--spares {spare_count + count} would hold {'it' if count == 1 else 'them'} ready"
        )
    if batch_host in active:
        remarks.append(
            f"{batch_host} runs ranks beside the launcher: with a spare it would run only that"
        )
    return LaunchPlan(
        active, spares, unused, batch_host, options.nproc_per_node, extras, tuple(remarks)
    )


def usable_nodes(
    nodes: Sequence[str], batch_host: str | None, options: LaunchOptions
) -> tuple[str, ...]:
    """The nodes that may be active or spare."""
    never = options.batch_host == "never"
    return tuple(node for node in nodes if not (never and node == batch_host))


def _choose_spares(
    rest: Sequence[str], count: int, batch_host: str | None, options: LaunchOptions
) -> tuple[str, ...]:
    """Of the nodes that are left, those held back, in order of use; the batch host comes last.

    Where nodes that are left over are used too it is the last of those instead, if there are any.
    """
    others = [node for node in rest if node != batch_host]
    if options.spare_order == "reversed":
        others.reverse()
    kept = options.extra_nodes == "spares" and count <= len(others)
    if batch_host in rest and count and not kept:
        return (*others[: count - 1], *(node for node in rest if node == batch_host))
    return tuple(others[:count])


def agent_argv(
    python: str,
    node: str,
    connect: str,
    run_dir: str,
    epoch: int,
    carriers: str = "",
    born: int = 1,
) -> list[str]:
    """Command line of the agent of ``node``, started in this epoch of the job; it reads the job's
    secret from the run directory. ``carriers``: names of those that replicas may go by besides TCP,
    with commas; empty for all. ``born``: the how manieth agent of the node it is.
    """
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
        "--epoch",
        str(epoch),
        *(("--carriers", carriers) if carriers else ()),
        *(("--born", str(born)) if born > 1 else ()),
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


def check_factor(factor: int, active: int, spares: int, *, warm_spares: bool) -> None:
    """There must be so many other nodes that hold replicas; a single one is no must."""
    waiting = spares if warm_spares else 0
    total = active + waiting
    if 1 < factor >= total:
        held = f"{_count(active, 'active node')} and {_count(waiting, 'spare')}"
        idle = "; spares that start on failure hold none" if waiting < spares else ""
        raise UsageError(
            f"replication.factor {factor}: replicas go to so many other nodes, and {held} make "
            f"{max(0, total - 1)}{idle}: allocate {factor + 1} nodes or more, or set at most "
            f"{max(1, total - 1)}"
        )


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
