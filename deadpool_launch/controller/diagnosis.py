"""Who holds a hanging job up: read from what every rank says it is doing.

In each group collectives are numbered by every member for itself, from one in each epoch. Members
that wait in number 118 wait for those that have entered fewer. A rank that waits itself is held up
by others; so the culprits are those that are waited for and wait for nothing. All of this is
inferred: it names ranks, and nothing is done to a rank that shows that it lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deadpool_launch.controller.wording import plural, ranks_text
from deadpool_runtime.protocol import GroupStanding, Standing

#: A step has overrun its limit if it has lasted at least this part of it; the agent's clock and the
#: launcher's differ a little.
_NEARLY = 0.98
#: Longer names of groups are hashes, of which the beginning will do.
_GROUP_NAME = 12
_STACKS_NAMED = 3


@dataclass(frozen=True, slots=True)
class Hang:
    """What holds the job up."""

    #: Ranks that are waited for and wait for nothing, or that all others wait for; empty if every
    #: rank came to the place where they wait.
    culprits: tuple[int, ...]
    #: Continues a sentence that starts with the culprits; the whole sentence if there are none.
    text: str


@dataclass(frozen=True, slots=True)
class _Wait:
    """A collective or a message that ranks wait in."""

    group: str
    #: Of the oldest collective that is not complete; None for a message.
    number: int | None
    ops: dict[int, str]
    waited_s: float
    #: Members that have not come to it.
    absent: tuple[int, ...]

    @property
    def what(self) -> str:
        """``all_reduce no. 118 of group 0``."""
        op = self.ops[min(self.ops)]
        number = f" no. {self.number}" if self.number is not None else ""
        return f"{op}{number} of {_group_text(self.group)}"

    @property
    def who(self) -> str:
        """``rank 2 has`` or ``3 ranks have``."""
        ranks = sorted(self.ops)
        return f"rank {ranks[0]} has" if len(ranks) == 1 else f"{plural(len(ranks), 'rank')} have"


def diagnose(standings: Sequence[Standing], limit_s: float) -> Hang | None:
    """What holds up the ranks whose step lasts longer than ``limit_s``; None if there are none."""
    late = [each for each in standings if each.step_s >= limit_s * _NEARLY]
    if not late:
        return None
    waiting = {each.rank for each in standings if any(map(_waits, each.groups))}
    waits = sorted(_waits_of(standings), key=lambda wait: -wait.waited_s)
    for candidates in ({each.rank for each in standings} - waiting, waiting):
        for wait in waits:
            culprits = tuple(rank for rank in wait.absent if rank in candidates)
            if culprits:
                return Hang(culprits, _absent_text(wait))
    if waits:
        return Hang((), _nobody_text(waits[0]))
    culprits = tuple(sorted(each.rank for each in late))
    step, longest_s = min(each.step for each in late), max(each.step_s for each in late)
    text = f"did not end step {step} within {longest_s:.0f} s, outside of any collective (inferred)"
    return Hang(culprits, text)


def _waits(group: GroupStanding) -> bool:
    return group.waits or bool(group.peer_op)


def _waits_of(standings: Iterable[Standing]) -> list[_Wait]:
    members: dict[str, dict[int, GroupStanding]] = {}
    for each in standings:
        for group in each.groups:
            members.setdefault(group.name, {})[each.rank] = group
    found = []
    for name, groups in sorted(members.items()):
        collective = {rank: group for rank, group in groups.items() if group.waits}
        if collective:
            number = min(group.number for group in collective.values())
            there = {rank: g for rank, g in collective.items() if g.number == number}
            found.append(
                _Wait(
                    name,
                    number,
                    {rank: group.op for rank, group in there.items()},
                    max(group.wait_s for group in there.values()),
                    tuple(sorted(r for r, group in groups.items() if group.entered < number)),
                )
            )
        messages = {rank: group for rank, group in groups.items() if group.peer_op}
        if messages:
            found.append(
                _Wait(
                    name,
                    None,
                    {rank: group.peer_op for rank, group in messages.items()},
                    max(group.peer_s for group in messages.values()),
                    tuple(sorted(rank for rank, group in groups.items() if not _waits(group))),
                )
            )
    return found


def _absent_text(wait: _Wait) -> str:
    verb = "answer" if wait.number is None else "come to"
    return (
        f"did not {verb} {wait.what} that {wait.who} waited in for {wait.waited_s:.0f} s (inferred)"
    )


def _nobody_text(wait: _Wait) -> str:
    """Every member came: a message was lost, unless they came to different things."""
    by_op: dict[str, list[int]] = {}
    for rank, op in sorted(wait.ops.items()):
        by_op.setdefault(op, []).append(rank)
    if wait.number is not None and len(by_op) > 1:
        parts = [f"{ranks_text(ranks)} in {op}" for op, ranks in by_op.items()]
        return (
            f"no. {wait.number} of {_group_text(wait.group)} is not the same on every rank: "
            f"{', '.join(parts)} for {wait.waited_s:.0f} s (inferred)"
        )
    return (
        f"{wait.who} waited in {wait.what} for {wait.waited_s:.0f} s, and none is missing: "
        "a message was lost (inferred)"
    )


def _group_text(name: str) -> str:
    return f"group {name if len(name) <= _GROUP_NAME else name[:8]}"


def stacks_text(names: Sequence[str]) -> str:
    """Where the stacks of the culprits are, as the end of a sentence."""
    if len(names) == 1:
        return f"; its stack is in {names[0]}"
    shown = ", ".join(names[:_STACKS_NAMED]) + (", …" if len(names) > _STACKS_NAMED else "")
    return f"; their stacks are in {shown}" if names else ""
