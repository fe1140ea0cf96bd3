"""Which step every rank goes back to, and who sends its state to whom: two pure functions.

A rank with a process that trained holds the whole state of a few steps (its *slots*). A new process
holds nothing: it gets the replicated part from a donor, and its own part (RNG, data position) from
what the driver kept of its predecessor. A step can be restored when each rank has it in one of the
two ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from deadpool_launch.controller.wording import ranks_text, steps_text


@dataclass(frozen=True, slots=True)
class Agreement:
    """The chosen step, or None, and why."""

    step: int | None
    reason: str


def agree_on_step(
    slots: Mapping[int, Sequence[int]],
    own: Mapping[int, Sequence[int]],
    refused: Set[int] = frozenset(),
) -> Agreement:
    """The newest step that can be made whole on every rank.

    ``slots`` has an entry for every rank, empty for a new process; ``own`` the steps of each rank
    whose own part the driver keeps. Steps in ``refused`` are not taken.

    Own parts help a rank with slots too: one that was itself restored a moment ago holds only the
    step it was restored to, and when that one is refused an older step has to come from a donor.
    """
    donated = frozenset(step for steps in slots.values() for step in steps) - refused
    usable = [
        step
        for step in donated
        if all(step in held or step in own.get(rank, ()) for rank, held in slots.items())
    ]
    if usable:
        step = max(usable)
        return Agreement(step, f"step {step} is the newest that is whole on every rank")
    if not any(slots.values()):
        return Agreement(None, f"no rank of {ranks_text(sorted(slots))} holds a step")
    holders = {rank: steps for rank, steps in slots.items() if steps}
    empty = [rank for rank, steps in slots.items() if not steps]
    having: dict[str, list[int]] = defaultdict(list)
    for rank, steps in sorted(holders.items()):
        having[f"with {steps_text(sorted(steps))}"].append(rank)
    for rank in sorted(empty):
        having[f"with the own part of {steps_text(sorted(own.get(rank, ())))}"].append(rank)
    who = ", ".join(f"{ranks_text(ranks)} {what}" for what, ranks in having.items())
    but = f"; {steps_text(sorted(refused))} refused" if refused else ""
    return Agreement(None, f"no step is whole on every rank: {who}{but}")


def choose_sources(needing: Sequence[int], donors: Mapping[int, str]) -> dict[int, int]:
    """Spread the ranks that need state over the donors (rank -> node), node by node.

    One node's network serves as few receivers as possible: a second donor of a node is used only
    when every node already serves one.
    """
    if not needing:
        return {}
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(donors):
        by_node[donors[rank]].append(rank)
    rounds = max(map(len, by_node.values()))
    order = [
        ranks[turn] for turn in range(rounds) for ranks in by_node.values() if turn < len(ranks)
    ]
    return {rank: order[i % len(order)] for i, rank in enumerate(sorted(needing))}
