"""Whether copies of the state have room on the nodes, counted as ``deadpool plan`` does. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deadpool_launch.backends.base import Check
from deadpool_launch.controller.wording import size
from deadpool_launch.whatif.sizes import Layout, Model, Sizes, sizes, sizes_of_rank
from deadpool_runtime.replication.slotting import own_slots

#: As the launcher has it before the first step.
_REMEDY = (
    "give the job more memory (--mem) or the nodes a larger /dev/shm, or run fewer ranks on a node"
)
_PROBE_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class State:
    """How much state there is: a model, or so many bytes on each rank; neither: not said."""

    model: Model | None = None
    rank_nbytes: int | None = None

    def sizes(self, layout: Layout) -> Sizes | None:
        """What a node needs; None if it was not said how much state there is."""
        if self.model is not None:
            return sizes(self.model, layout)
        if self.rank_nbytes is not None:
            return sizes_of_rank(self.rank_nbytes, layout)
        return None


def fits_nbytes(layout: Layout, free_nbytes: int) -> int:
    """The most state on each rank of which all copies have room; what they take grows evenly."""
    least = sizes_of_rank(1, layout).memory_nbytes
    per_byte = (sizes_of_rank(_PROBE_NBYTES, layout).memory_nbytes - least) / _PROBE_NBYTES
    # A multiple of this is enough, and leaves room for what is rounded up.
    return max(0, int((free_nbytes - least) / per_byte) - (64 << 10)) >> 16 << 16


def room_checks(
    said: Mapping[str, Mapping[str, Any]], layout: Layout, state: State, sharers: int = 1
) -> list[Check]:
    """The memory of every node against what the busiest needs, as a spare may become that.

    ``sharers``: nodes that have one machine's memory together.
    """
    need = state.sizes(layout)
    found = {
        node: (facts["memory_nbytes"] // sharers, facts.get("memory_limit", ""))
        for node, facts in said.items()
        if facts.get("memory_nbytes") is not None
    }
    if not found:
        return [outside_check(layout, state)]
    smallest = min(found, key=lambda node: found[node][0])
    nbytes, limit = found[smallest]
    has = f"{smallest} has {size(nbytes)} ({limit}{_shared(sharers)})"
    if need is None:
        same, own = (
            size(fits_nbytes(replace(layout, sharding=sharding), nbytes))
            for sharding in ("ddp", "fsdp")
        )
        return [
            Check(
                "memory",
                True,
                f"{has}: room for {own_slots(layout.interval)} copies of {same} of state on each "
                f"rank where all have the same (ddp), or of {own} where each has its own (fsdp)"
                f"{_replicated(layout)}",
                "say how much there is: --params 7B --sharding fsdp, or --state-bytes 12G",
            )
        ]
    small = [node for node in found if found[node][0] < need.memory_nbytes]
    wants = _wants(need, layout)
    if not small:
        return [Check("memory", True, f"{wants}; {has}, the least of all")]
    if len(small) == len(found):
        return [Check("memory", False, f"{wants}; {has}", _REMEDY)]
    return [_small(node, found[node], wants) for node in small]


def _small(node: str, found: tuple[int, str], wants: str) -> Check:
    text = f"{wants}, {node} has {size(found[0])} ({found[1]})"
    return Check("memory", False, text, _REMEDY, leave_out=node)


def _wants(need: Sizes, layout: Layout) -> str:
    taken = size(need.memory_nbytes)
    return f"the copies of the state take {taken} on a node{_replicated(layout)}"


def _replicated(layout: Layout) -> str:
    """What the policy says of replicas that changes what they take."""
    told = {"factor": layout.factor, "interval": layout.interval}
    changed = [f"replication.{name}: {value}" for name, value in told.items() if value > 1]
    return f" ({', '.join(changed)})" if changed else ""


def outside_check(layout: Layout | None, state: State) -> Check:
    """What can be said without any node."""
    need = None if layout is None else state.sizes(layout)
    if need is None or layout is None:
        return Check("memory", None, "how much the nodes have is not known here", unknown=True)
    text = f"{_wants(need, layout)}; how much the nodes have is not known here"
    return Check("memory", None, text, unknown=True)


def _shared(sharers: int) -> str:
    return f", its part of what {sharers} nodes share" if sharers > 1 else ""
