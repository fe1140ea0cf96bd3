"""An incident, as far as it has come, and the losses that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deadpool_runtime.replication.naming import Ranks


@dataclass(frozen=True, slots=True)
class Loss:
    """Ranks that went away together, and why."""

    node: str
    ranks: tuple[int, ...]
    #: Continues the sentence "n2 ..." or "rank 3 on n2 ...".
    cause: str
    whole_node: bool


@dataclass(frozen=True, slots=True)
class Incident:
    """Everything from the first sign of a fault until the verdict."""

    number: int
    opened_at: float
    #: The first sign, as a sentence.
    reason: str
    #: Epochs used so far on the rung that was climbed to last.
    attempts: int = 0
    #: The highest rung that it took, and the one that it climbed to because others did not help;
    #: see ``ladder.py``.
    rung: int = 0
    climbed: int = 0
    #: How often a plan came to nothing on that rung though nobody was lost.
    stalls: int = 0
    #: No process may go on: all are to be ended before the next plan.
    anew: bool = False
    #: Losses of the current epoch, in order of arrival.
    losses: tuple[Loss, ...] = ()
    #: Phases already marked in the current epoch.
    marked: frozenset[str] = frozenset()
    #: Ranks that it sets aside, and ranks that it takes back in.
    shed: Ranks = ()
    regained: Ranks = ()
    #: The step that all ranks go back to; None until a plan is out.
    step: int | None = None
    #: Steps that are not tried again: restored states differed, or restoring failed twice.
    refused: frozenset[int] = frozenset()
    #: Steps that could not be restored, once for each time.
    failed: tuple[int, ...] = ()
    #: By rank, the nodes that the present plan has it fetch from; nodes without ranks that somebody
    #: could not fetch from, which others are preferred to.
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    doubted: frozenset[str] = frozenset()
    #: Newest step that every rank is known to have completed before a plan set it back.
    newest: int = -1
    #: ``Resume`` was told in the current epoch.
    resumed: bool = False
    #: Seconds until every rank had a replica again; None until then.
    bare_s: float | None = None
    #: Step of the durable checkpoint that the ranks were sent back to; None if they were not.
    checkpoint: int | None = None
    #: The plan of the current epoch is to read that checkpoint.
    reading: bool = False
    #: Steps of the durable checkpoints that turned out to be of no use.
    unusable: tuple[int, ...] = ()
    #: It is no fault: the ranks of a node are moved.
    planned: bool = False
    #: Nor is anything moved: training begins with a checkpoint of an earlier launch.
    begins: bool = False
    #: When the current epoch was opened some rank had no replica yet: there may be copies of its
    #: state on one node only.
    bare: bool = False
