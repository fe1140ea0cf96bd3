"""What the controller has begun, or is asked for, and waits for the end of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_runtime.protocol import Standing


@dataclass(frozen=True, slots=True)
class Look:
    """The question what every rank is doing, and what was answered so far."""

    number: int
    #: After this the answers that are there must do.
    by: float
    #: Nodes that have not answered.
    waiting: frozenset[str]
    standings: tuple[Standing, ...]


@dataclass(frozen=True, slots=True)
class Paths:
    """The question which nodes reach each other, and what was answered so far."""

    number: int
    #: Not decided before, unless it is clear who is cut off: a loss may explain it.
    by: float
    #: Why it was asked, as a sentence.
    reason: str
    #: No rank has failed to connect yet: it only takes long.
    early: bool
    #: Whom each node tries to reach, and whom it did not reach; no entry before it has answered.
    asked: Mapping[str, tuple[str, ...]]
    unreached: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Wish:
    """A node that is to be left by its ranks. ``why`` continues a sentence that starts with its
    name; ``slurms``: Slurm asked for it, and may think better of it; ``replicated``: not before
    every rank has a replica.
    """

    node: str
    why: str
    slurms: bool = False
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class Halt:
    """All ranks are brought to the end of the same step, where they wait."""

    number: int
    #: After this it is done without those that have not come.
    by: float
    #: To end the job there, rather than to move ranks.
    stop: bool
    #: The step; None until every rank has said which it is in.
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is to be ended at a boundary, before its time limit."""

    why: str
    by: float
    #: Its processes are being terminated already.
    ending: bool
    #: The checkpoint of the last step could not be written.
    unsaved: bool = False
