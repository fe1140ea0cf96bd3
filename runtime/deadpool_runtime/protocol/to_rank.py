"""What a rank is told, through its agent: to begin, to park, how to go on."""

from __future__ import annotations

import msgspec

from deadpool_runtime.protocol.base import Address, Message


class Begin(Message, frozen=True):
    """Run the user's script now, with the epoch's rendezvous store at ``store``.

    ``replacement``: the other ranks already train; build everything without peers, then park.
    ``attempt``: how often the script was started anew for all ranks (TORCHELASTIC_RESTART_COUNT).
    """

    epoch: int
    store: Address
    replacement: bool
    attempt: int


class Revoke(Message, frozen=True):
    """Communicators of every epoch before ``epoch`` are void: abort them, unwind, report
    ``Parked``.
    """

    epoch: int


class Holder(msgspec.Struct, frozen=True):
    """Where a rank's replica goes: the replicator of another node.

    ``segments``: the names of the segments that are to be sent (see ``replication.naming``); the
    own part always is. ``deputy``: the replicator of a third node, which gets the own part alone;
    it is small, so that two nodes may be lost at once while all else is with other ranks. ``more``:
    further holders, each with what it gets; a step is confirmed once all of them have theirs.
    """

    node: str
    address: Address
    segments: list[tuple[int, ...]]
    deputy: Address | None = None
    more: list[Holder] = []


class Piece(msgspec.Struct, frozen=True):
    """A part of a state that a rank fetches from the replicator at ``source``.

    It takes the copy that is kept there of ``rank``: a replica of it if ``replica``, else the slot
    in which that rank itself left its state. ``segments``: the names of those to take.
    ``base``: take the manifest and the own part too; exactly one piece of a plan is the base, and
    it comes first. ``adopted``: a base that is a peer's copy, for a rank that was set aside and has
    none of its own.
    """

    source: Address
    rank: int
    replica: bool
    segments: list[tuple[int, ...]]
    base: bool
    adopted: bool = False


class Shard(msgspec.Struct, frozen=True):
    """What ``rank``, which takes no part, had of the state that optimizers share out over the
    ranks; the receiver brings it in that rank's place.

    It is in the copy of ``rank`` on the receiver's node (a replica if ``replica``), in the segments
    of these names, or in the plan's durable checkpoint. ``source``: unless it is None, the
    replicator to fetch it from first; it is kept here as a replica then.
    """

    rank: int
    replica: bool
    segments: list[tuple[int, ...]]
    source: Address | None = None


class Protect(Message, frozen=True):
    """Every rank came to its first step and there is room for all copies: begin to train.

    ``holder``: None if no other node can hold this rank's replica.
    """

    epoch: int
    holder: Holder | None


class Plan(Message, frozen=True):
    """How this rank gets from parked to running in ``epoch``.

    Rebuild every group through ``store``, bring the state of ``step`` back, report ``Restored``.
    ``pieces``: what to fetch first; empty for a rank whose node has its whole state. ``holder``:
    where its replica goes from now on. ``checkpoint``: unless empty, the directory of the durable
    checkpoint of ``step`` to take the state from; there are no pieces then. ``aside``: the ranks
    that take no part until a later plan; the groups are smaller by them. ``former``: unless empty,
    the ranks (see ``replication.naming``) over which optimizers had shared out their state when the
    copies were made, which are others than take part now: it is shared out anew. Each of them
    brings its own shard, and the receiver ``shards`` besides. ``keep``: older steps that may have
    to be gone back to until the replicas of ``step`` are whole, where not every step has any.
    """

    epoch: int
    step: int
    store: Address
    pieces: list[Piece]
    holder: Holder | None
    checkpoint: str = ""
    aside: list[int] = msgspec.field(default_factory=list)
    former: tuple[int, ...] = ()
    shards: list[Shard] = msgspec.field(default_factory=list)
    keep: list[int] = msgspec.field(default_factory=list)


class Resume(Message, frozen=True):
    """Every rank restored the same state: go on with the step after the plan's."""

    epoch: int


class RaiseIt(Message, frozen=True):
    """Answer to ``StepRaised``: no fault of a peer explains the exception, it is the script's
    own.
    """

    step: int


class AllEnded(Message, frozen=True):
    """Every rank came to the end of its steps; leave ``job.steps``."""


class Hold(Message, frozen=True):
    """Begin no further step for now; answered by ``Holding`` at once, from any place in the steps.

    ``number`` tells one such request from the next.
    """

    epoch: int
    number: int


class HoldAfter(Message, frozen=True):
    """Every rank has answered ``Hold``: go on to the end of ``step`` and wait there.

    ``last``: the job is stopped there, so ``job.stopping`` is true from the beginning of that step.
    ``save``: the state after it is to go into a durable checkpoint.
    """

    epoch: int
    number: int
    step: int
    last: bool = False
    save: bool = False


class GoOn(Message, frozen=True):
    """What ``Hold`` asked for is no longer wanted."""

    epoch: int
    number: int


class Leave(Message, frozen=True):
    """The agent itself ends the rank; SIGTERM follows, for a script with a handler of its own."""


ToRank = Begin | Revoke | Protect | Plan | Resume | RaiseIt | AllEnded | Hold | HoldAfter | GoOn
