"""Faults that a rehearsal brings about on purpose, as data: ``KIND:TARGET@STEP``. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from deadpool_launch.errors import UsageError

_FORM = re.compile(r"(?P<kind>[a-z-]+):(?P<target>[A-Za-z0-9._-]+)@(?P<step>\d+)")


class FaultKind(StrEnum):
    """What happens to the target."""

    #: Every process of the node is killed at once.
    POWER_OFF = "power-off"
    #: The node falls silent: nothing is closed, nothing answers.
    VANISH = "vanish"
    #: Every process of the node is stopped.
    FREEZE_NODE = "freeze-node"
    #: The rank's process is killed.
    KILL = "kill"
    #: The rank's process is stopped.
    FREEZE = "freeze"


_RANK_KINDS = (FaultKind.KILL, FaultKind.FREEZE)


class Fault(msgspec.Struct, frozen=True):
    """One fault: it strikes when ``target`` (a node's name, or a global rank) begins ``step``."""

    kind: FaultKind
    target: str
    step: int

    @property
    def rank(self) -> int | None:
        """The global rank it strikes, or ``None`` if it strikes a node."""
        return int(self.target) if self.kind in _RANK_KINDS else None

    @property
    def node(self) -> str | None:
        """The node it strikes, or ``None`` if it strikes a rank."""
        return None if self.kind in _RANK_KINDS else self.target

    def __str__(self) -> str:
        return f"{self.kind}:{self.target}@{self.step}"


def parse_fault(text: str) -> Fault:
    """The fault that ``text`` describes; a ``UsageError`` says what is wrong with it."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"--fault {text}: not of the form KIND:TARGET@STEP, such as power-off:1@5")
    if match["kind"] not in list(FaultKind):
        raise UsageError(f"--fault {text}: the kind is one of {', '.join(FaultKind)}")
    kind = FaultKind(match["kind"])
    if kind in _RANK_KINDS and not match["target"].isdecimal():
        raise UsageError(
            f"--fault {text}: {kind} strikes a rank; the target is its number, such as {kind}:2@5"
        )
    if int(match["step"]) < 1:
        raise UsageError(f"--fault {text}: steps count from 1")
    return Fault(kind, match["target"], int(match["step"]))


def striking_ranks(
    faults: Sequence[Fault], active: Sequence[str], nproc_per_node: int
) -> dict[int, Fault]:
    """Which rank brings which fault about by reaching its step: the target, or the node's first.

    Raises a ``UsageError`` unless every fault strikes an active node or a rank that there is, and
    each rank at most once.
    """
    struck: dict[int, Fault] = {}
    for fault in faults:
        rank = _striking_rank(fault, active, nproc_per_node)
        if rank in struck:
            raise UsageError(
                f"--fault {fault}: rank {rank} brings about {struck[rank]} already; "
                "let another rank or node be struck"
            )
        struck[rank] = fault
    return struck


def _striking_rank(fault: Fault, active: Sequence[str], nproc_per_node: int) -> int:
    if fault.rank is not None:
        count = len(active) * nproc_per_node
        if fault.rank >= count:
            there = f"ranks go from 0 to {count - 1}" if count > 1 else "the only rank is 0"
            raise UsageError(f"--fault {fault}: {there}")
        return fault.rank
    indices = [str(index) for index in range(len(active))]
    for names in (list(active), indices):
        if fault.target in names:
            return names.index(fault.target) * nproc_per_node
    raise UsageError(
        f"--fault {fault}: {fault.target} is no active node; those are "
        f"{', '.join(active)}, with indices from 0 to {len(active) - 1}"
        if len(active) > 1
        else f"--fault {fault}: {fault.target} is no active node; the only one is "
        f"{active[0]}, with index 0"
    )
