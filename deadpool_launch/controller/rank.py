"""One rank, as the controller knows it: the stages of its process, and what is summed up of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from deadpool_launch.classify.model import Kind
from deadpool_runtime.protocol import Pace, SegmentDigest
from deadpool_runtime.replication.naming import Ranks


class Stage(StrEnum):
    """What the process behind one rank is doing."""

    #: There is no process, and none was ordered.
    ABSENT = "absent"
    #: Ordered from the agent, not yet up.
    STARTING = "starting"
    #: Up, and waits for ``Begin``.
    UP = "up"
    #: The script runs but has not come to its first step: it cannot be unwound.
    SCRIPT = "script"
    #: The script is in its steps and can be unwound.
    ATTACHED = "attached"
    #: Told to park in the current epoch, has not said that it did.
    UNWINDING = "unwinding"
    #: Parked in the current epoch.
    PARKED = "parked"
    #: Has the plan of the current epoch.
    RESTORING = "restoring"
    #: Kill was ordered, the exit is awaited.
    DYING = "dying"
    #: The script failed; whether that is its own fault is not yet known.
    FAILED = "failed"
    #: The script came to its end.
    ENDED = "ended"


#: A process is there and was not condemned.
LIVE = frozenset(
    {
        Stage.STARTING,
        Stage.UP,
        Stage.SCRIPT,
        Stage.ATTACHED,
        Stage.UNWINDING,
        Stage.PARKED,
        Stage.RESTORING,
    }
)
#: The process was told ``Begin`` and must hear of every new epoch.
BEGUN = frozenset({Stage.SCRIPT, Stage.ATTACHED, Stage.UNWINDING, Stage.PARKED, Stage.RESTORING})


class Trait:
    """What the table of ranks sums up: bits of ``Rank.traits``."""

    #: The bit of each stage, and those of all stages together.
    STAGE: Mapping[Stage, int] = {stage: 1 << place for place, stage in enumerate(Stage)}
    ANY_STAGE = (1 << len(Stage)) - 1
    #: Survivors of a loss, those who take the places of the lost; which of each have not parked.
    SURVIVOR = 1 << 20
    SURVIVOR_NOT_PARKED = 1 << 21
    NEWCOMER = 1 << 22
    NEWCOMER_NOT_PARKED = 1 << 23
    REBUILT = 1 << 24
    RESTORED = 1 << 25
    #: An exception of it is not explained yet.
    SIGN = 1 << 26
    #: It lives, and no exception has left its step.
    LIVE_NOT_RAISED = 1 << 30
    #: It takes no part: what every rank must have is not asked of it.
    ASIDE = 1 << 33
    OVERDUE = 1 << 27
    #: It has not said which step it is in, not come to the boundary that all wait at.
    NOT_HELD = 1 << 31
    NOT_THERE = 1 << 32
    #: It has not reported its digests after step 0, after step 1.
    NO_DIGESTS = (1 << 28, 1 << 29)


def stage_traits(*stages: Stage) -> int:
    """The bits of these stages."""
    traits = 0
    for stage in stages:
        traits |= Trait.STAGE[stage]
    return traits


@dataclass(frozen=True, slots=True)
class Rank:
    """One logical rank and the process that stands behind it now.

    The first group of fields belongs to the rank and outlives its processes; the second belongs to
    the process and is fresh for each one.
    """

    rank: int
    #: Newest step completed in the history that counts; -1 before the first. Set back by a plan.
    completed: int = -1
    #: Size of each segment of its state, and of the own part; None until it attached.
    segments: Mapping[Ranks, int] | None = None
    own_nbytes: int = 0
    #: Host memory that writing its part of a durable checkpoint takes.
    save_nbytes: int = 0
    #: Digests of its segments after steps 0 and 1; None until they are reported.
    digests: tuple[tuple[SegmentDigest, ...] | None, tuple[SegmentDigest, ...] | None] = (
        None,
        None,
    )
    #: The ranks that have one whole model together with it, and why the job needs them all; the
    #: latter is empty if it does not.
    replica: Ranks = ()
    fixed: str = ""
    #: Its optimizers share out their state over the ranks that take part.
    shares: bool = False
    #: Its script came to the first step with a state that steps were made in.
    brings_state: bool = False
    #: It takes no part: there is no node for its replica. Its process, if any, is ``DYING``.
    aside: bool = False
    #: Up to this step the copy of a peer stands for its own: it was aside then, or still is.
    adopts: int = -1
    #: Step during which a process of this rank died by itself last; None if none did.
    died_in: int | None = None

    stage: Stage = Stage.ABSENT
    #: Epoch in which the process was started; with ``rank`` it names the process.
    born: int = 0
    #: When patience with this stage ends.
    deadline: float | None = None
    store_port: int = 0
    #: The process joins a job that already trains, and has not yet resumed with it.
    replacement: bool = False
    #: The process has the job's state: it completed a step or restored one.
    holds: bool = False
    rebuilt: bool = False
    #: Digests of the restored segments; None until ``Restored``.
    restored: tuple[SegmentDigest, ...] | None = None
    #: Epoch in which a replica of it was first confirmed last; 0 before.
    protected: int = 0
    #: How many steps of the process went on without a confirmed replica of the step before.
    unprotected: int = 0
    steps_ended: bool = False
    #: Step whose body raised; None if none did.
    raised: int | None = None
    #: ``RaiseIt`` was answered.
    raise_told: bool = False
    #: When the process first showed that something is wrong in it.
    sign_at: float = 0.0
    error: str = ""
    traceback: str = ""
    #: What a rule called that when it was shown; None if no rule knew it.
    fault: Kind | None = None
    #: The process of a ``FAILED`` rank is gone.
    exited: bool = False
    #: When its step will have lasted for too long; None unless it is late.
    overdue_at: float | None = None
    #: How fast it goes, and whether that has not been looked at yet.
    pace: Pace | None = None
    pace_is_new: bool = False
    #: For how many windows in a row it has been slow, or no longer slow, and their steps.
    windows: int = 0
    windows_steps: int = 0
    #: People were told that it is slow, and not that it no longer is.
    slow: bool = False
    #: How long it was given to park.
    patience_s: float = 0.0
    #: The newest step it had begun when it was held back; None while that is not known.
    held: int | None = None
    #: It waits at the boundary that the halt is about.
    there: bool = False

    @property
    def goes_on(self) -> bool:
        """It has steps left to run, and takes part."""
        return not (self.steps_ended or self.aside or self.stage is Stage.ENDED)

    @property
    def traits(self) -> int:
        """What the table of all ranks sums up; see ``Trait``."""
        stage = self.stage
        if self.aside:
            return Trait.ASIDE | (Trait.STAGE[stage] if stage is Stage.DYING else 0)
        traits = Trait.STAGE[stage]
        if self.replacement or stage not in LIVE:
            traits |= Trait.NEWCOMER
            if stage is not Stage.PARKED:
                traits |= Trait.NEWCOMER_NOT_PARKED
        else:
            traits |= Trait.SURVIVOR
            if stage is not Stage.PARKED:
                traits |= Trait.SURVIVOR_NOT_PARKED
        if self.rebuilt:
            traits |= Trait.REBUILT
        if self.restored is not None:
            traits |= Trait.RESTORED
        if self.raised is not None or stage is Stage.FAILED:
            traits |= Trait.SIGN
        if self.raised is None and stage in LIVE:
            traits |= Trait.LIVE_NOT_RAISED
        if self.overdue_at is not None:
            traits |= Trait.OVERDUE
        if self.held is None:
            traits |= Trait.NOT_HELD
        if not (self.there or self.steps_ended):
            traits |= Trait.NOT_THERE
        for digests, trait in zip(self.digests, Trait.NO_DIGESTS, strict=True):
            if digests is None:
                traits |= trait
        return traits
