"""What a rank says, through its agent: how far it is, what it has, what went wrong."""

from __future__ import annotations

import msgspec

from deadpool_runtime.protocol.base import Message


class RankUp(Message, frozen=True):
    """The rank's process lives and its store server listens on ``store_port`` of its node."""

    pid: int
    store_port: int


class SegmentSize(msgspec.Struct, frozen=True):
    """A segment of the state: its name (see ``replication.naming``), and how large it will be once
    the optimizers have made their state.
    """

    ranks: tuple[int, ...]
    nbytes: int


class SegmentDigest(msgspec.Struct, frozen=True):
    """What the bytes of the segment with this name were; the same on all its ranks if they
    agree.
    """

    ranks: tuple[int, ...]
    digest: str


class Attached(Message, frozen=True):
    """The script called ``attach`` and reached its first step; from here on the rank can be
    unwound. It waits for ``Protect``.

    ``segments`` and ``own_nbytes``: the size of one copy of its state. ``save_nbytes``: host memory
    that writing its part of a durable checkpoint takes besides; 0 if none is written. ``replica``:
    the ranks that keep one whole model together with this one, itself included; the job can go on
    without them while others do the same. ``fixed``: why it cannot; empty if it can. ``shares``:
    optimizers share out their state over the ranks that take part, as ZeroRedundancyOptimizer does.
    ``brings_state``: the script has loaded a state that steps were made in.
    """

    layout: str
    segments: list[SegmentSize]
    own_nbytes: int
    save_nbytes: int = 0
    replica: list[int] = msgspec.field(default_factory=list)
    fixed: str = ""
    shares: bool = False
    brings_state: bool = False


class StepDone(Message, frozen=True):
    """State ``step`` is complete in this process.

    ``duration_s``: wall time of the step's body; ``blocked_s``: of it, time the runtime held the
    training thread back. ``loss``: what the script reported, if anything. ``unprotected``: how
    many steps of this process went on without a confirmed replica of the step before.
    ``confirmed``: the newest step of which it has a confirmed replica; -1 before the first.
    """

    epoch: int
    step: int
    duration_s: float
    blocked_s: float
    loss: float | None
    unprotected: int
    confirmed: int = -1


class Snapshotted(Message, frozen=True):
    """The copy of state ``step`` is sealed in the arena. Sent for steps 0 and 1 only."""

    epoch: int
    step: int
    segments: list[SegmentDigest]


class Protected(Message, frozen=True):
    """The first replica of this epoch is confirmed: the rank may be lost again."""

    epoch: int
    step: int


class Saved(Message, frozen=True):
    """This rank's part of the durable checkpoint of ``step`` is on disk."""

    epoch: int
    step: int
    nbytes: int
    duration_s: float


class Parked(Message, frozen=True):
    """The training thread is unwound and waits for a ``Plan`` of ``epoch``.

    Whatever it was copying is sealed or given up. ``aborted_s``: seconds from the receipt of
    ``Revoke`` until the collectives were broken (0 if none).
    """

    epoch: int
    aborted_s: float


class GroupsRebuilt(Message, frozen=True):
    """All process groups have live backends of ``epoch`` again."""

    epoch: int
    groups: int


class NotConnected(Message, frozen=True):
    """The groups of ``epoch`` could not be connected here, for ``reason``; the rank waits for the
    next epoch.
    """

    epoch: int
    reason: str


class Restored(Message, frozen=True):
    """The state of ``step`` is in place; ``segments`` says what was restored.

    ``sizes``: how large the segments will be from now on; empty if as ``Attached`` said.
    """

    epoch: int
    step: int
    segments: list[SegmentDigest]
    sizes: list[SegmentSize] = msgspec.field(default_factory=list)


class RestoreFailed(Message, frozen=True):
    """The plan of ``epoch`` cannot be carried out here: a copy is damaged or could not be fetched.

    Damaged copies are marked as such and will not be in the next inventory. The rank waits for
    the next epoch.
    """

    epoch: int
    step: int
    reason: str


class StepRaised(Message, frozen=True):
    """An exception left the body of ``step``; the rank waits for ``Revoke`` or ``RaiseIt``."""

    epoch: int
    step: int
    error: str


class StepsEnded(Message, frozen=True):
    """The last step is complete; the rank waits for ``AllEnded`` (or a ``Revoke``)."""

    epoch: int
    step: int


class Holding(Message, frozen=True):
    """Answer to ``Hold``: ``step`` is the newest step that this rank has begun; it begins no later
    one before it is told more.
    """

    epoch: int
    number: int
    step: int


class AtBoundary(Message, frozen=True):
    """The rank has completed the step of ``HoldAfter`` and waits; its script does nothing."""

    epoch: int
    number: int
    step: int


class ScriptFailed(Message, frozen=True):
    """The user's script ended with an exception or a non-zero exit; the process exits after
    this.
    """

    error: str
    traceback: str
    exit_code: int


class ScriptEnded(Message, frozen=True):
    """The user's script came to its end; the process exits with 0 after this."""


class FaultPoint(Message, frozen=True):
    """Rehearsals only: the rank reached the step at which it was told to wait for an injected
    fault.
    """

    step: int


class FinalState(Message, frozen=True):
    """Digests of this rank's state after its last step, by part (parameters, optimizer, rng, …)."""

    step: int
    parts: dict[str, str]


class Note(Message, frozen=True):
    """Something the user should read in the launcher's log."""

    text: str


FromRank = (
    RankUp
    | Attached
    | StepDone
    | Snapshotted
    | Protected
    | Saved
    | Parked
    | GroupsRebuilt
    | NotConnected
    | Restored
    | RestoreFailed
    | StepRaised
    | StepsEnded
    | Holding
    | AtBoundary
    | ScriptFailed
    | ScriptEnded
    | FaultPoint
    | FinalState
    | Note
)
