"""Typed messages between launcher, agents and ranks, and the frames they travel in.

What lives here: every message that crosses a process border, the msgpack codec, the framing and the
mutual proof of the job's secret. What does not: sockets, threads, event loops (``channel.py`` here
and
``deadpool_launch``'s drivers). Nothing here imports torch, so the launcher may use it.

There are three parties. The *launcher* talks to one *agent* per node over TCP; an agent talks to
each of its *ranks* over an inherited socket pair. Rank messages travel through the agent unchanged,
inside
``RankSaid`` and ``TellRanks``.

Every message names the epoch it belongs to where that matters; receivers drop what is older than
what they know.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Any, Final

import msgspec

#: Grows when messages change in a way that an older peer would misread.
PROTOCOL_VERSION: Final = 5
#: Largest frame accepted, in bytes. A longer announcement is an error, not an allocation.
MAX_FRAME_NBYTES: Final = 256 << 20
_LENGTH: Final = struct.Struct("!I")


class ProtocolError(Exception):
    """The peer sent something that is not a message of this protocol, or failed to prove the
    secret.
    """


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


class Address(msgspec.Struct, frozen=True):
    """Where a TCP server listens."""

    host: str
    port: int


# ---------------------------------------------------------------- launcher -> rank


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
    aside: list[int] = []
    former: tuple[int, ...] = ()
    shards: list[Shard] = []
    keep: list[int] = []


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


# ---------------------------------------------------------------- rank -> launcher


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
    replica: list[int] = []
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
    sizes: list[SegmentSize] = []


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


# ---------------------------------------------------------------- launcher -> agent


class AdmissionCheck(msgspec.Struct, frozen=True):
    """A shell command that ends well, within ``timeout_s``, on a node that is fit for ranks."""

    command: str
    timeout_s: float


class JobSpec(Message, frozen=True):
    """First message to an agent: what does not change while the job lives.

    ``heartbeat_s``: interval of ``Heartbeat``. ``frozen_after_s``: a rank whose process is stopped
    for longer is reported. ``confirm_timeout_s``: how long a rank waits for a confirmation; longer
    than it takes to notice a lost node, else its peers run ahead of the last step that is whole.
    ``stop_grace_s``: time between SIGTERM and SIGKILL. ``env``: added to every rank's environment.
    ``fault_steps``: rehearsals only, rank -> step at whose start it reports ``FaultPoint`` and
    waits. ``checkpoint_dir``: where durable checkpoints go, after every ``checkpoint_every`` steps;
    empty for none. ``replication_interval``: every so manieth step is replicated.
    ``launcher_grace_s``: how long an agent without a launcher waits for another.
    ``collective_timeout_s``: the longest that a step may take. ``admission``: what a node must pass
    before it takes the ranks of another one. ``pace_s``: how often an agent tells how fast its
    ranks go; 0 for never. ``device_s``: the same for asking how the GPUs are. ``interfaces``:
    regular expressions for those that carry the traffic between nodes, the best first.
    """

    job_id: str
    run_dir: str
    script: str
    script_args: list[str]
    world_size: int
    nproc_per_node: int
    env: dict[str, str]
    heartbeat_s: float
    frozen_after_s: float
    confirm_timeout_s: float
    stop_grace_s: float
    record_final_state: bool
    fault_steps: dict[int, int]
    checkpoint_dir: str = ""
    checkpoint_every: int = 0
    launcher_grace_s: float = 60.0
    admission: list[AdmissionCheck] = []
    collective_timeout_s: float = 600.0
    pace_s: float = 0.0
    device_s: float = 0.0
    interfaces: list[str] = []
    replication_interval: int = 1


class TakeStandings(Message, frozen=True):
    """Say what every rank of this node is doing; answered by ``Standings`` with this number."""

    number: int


class TakeStacks(Message, frozen=True):
    """Have the stacks of these ranks' threads written into the run directory, before anything that
    is told later is done; ``StackNotTaken`` says for which that failed.
    """

    ranks: list[int]


class StartRanks(Message, frozen=True):
    """Start a process for each of ``ranks`` (global ranks, in order of local rank) on this node."""

    epoch: int
    node_index: int
    ranks: list[int]
    local_ranks: list[int]


class KillRanks(Message, frozen=True):
    """SIGKILL the processes (whole trees) of these ranks; their exits are reported as usual."""

    ranks: list[int]
    reason: str


class TellRanks(Message, frozen=True):
    """Pass ``body`` on to these ranks of this node."""

    ranks: list[int]
    body: ToRank


class TakeInventory(Message, frozen=True):
    """Let no copy of an older epoch be written any more, then report the copies on this node."""

    epoch: int


class TryPaths(Message, frozen=True):
    """Find out which of these nodes can be reached, by calling their replicators, each for at most
    ``timeout_s``; answered by ``PathsTried`` with this number.
    """

    number: int
    peers: dict[str, Address]
    timeout_s: float


class StopAgent(Message, frozen=True):
    """End every rank (SIGTERM, grace, SIGKILL), clean up, then leave."""

    reason: str


ToAgent = (
    StartRanks
    | KillRanks
    | TellRanks
    | TakeInventory
    | TakeStandings
    | TakeStacks
    | TryPaths
    | StopAgent
)


class Welcome(Message, frozen=True):
    """Answer to ``AgentHello``; nothing else goes to the agent before it.

    ``term``: the launcher's incarnation; an agent refuses a lower one than it has seen. ``heard``:
    number of the agent's newest ``Report`` that is in the launcher's log; the later ones are sent
    again. ``spec``: None for an agent that has it already.
    """

    term: int
    heard: int
    spec: JobSpec | None


class Refused(Message, frozen=True):
    """Answer to ``AgentHello``: this agent takes no part in the job; it ends its ranks."""

    reason: str


class Order(Message, frozen=True):
    """A message to the agent. Numbers go up by one, over all terms: one that was not received
    before a launcher ended is sent again by the next, and none is obeyed twice. ``index``: the
    newest part of the log when it was decided upon.
    """

    term: int
    number: int
    body: ToAgent
    index: int = 0


class Heard(Message, frozen=True):
    """The agent's reports up to ``number`` are in the launcher's log and need not be kept.
    ``index``: the newest part of the log then.
    """

    number: int
    index: int = 0


class Ping(Message, frozen=True):
    """Answer with ``Pong``: the launcher asks whether it still leads the job."""

    number: int
    index: int


class LogPart(Message, frozen=True):
    """A part of the launcher's log, for a node that keeps a copy; answered by ``LogKept``.

    ``fresh``: it takes the place of all before. ``slot``: the node's number among all nodes of the
    job. ``voters``: the nodes whose agents decide who leads, from this part on; None if they are
    the same. ``host``: the launcher's own node; empty if it is none of the job's.
    """

    index: int
    fresh: bool
    data: bytes
    slot: int
    voters: list[str] | None = None
    host: str = ""


class Successors(Message, frozen=True):
    """Where to ask for a launcher when this one has been silent for ``silent_s``, in this order."""

    addresses: list[Address]
    silent_s: float


# The next three come from an agent that keeps the launcher's log, as answers to ``AgentHello``.


class Claim(Message, frozen=True):
    """Obey no launcher below ``term`` any more, if this copy of the log, which goes to ``mark``,
    has everything that this agent was told; answered by ``Granted``.
    """

    term: int
    mark: tuple[int, int]


class LauncherAt(Message, frozen=True):
    """The launcher is there now."""

    address: Address


class NoLauncher(Message, frozen=True):
    """There is no launcher to be had here; ``reason`` for people."""

    reason: str


FromLauncher = (
    Welcome
    | Refused
    | Order
    | Heard
    | Ping
    | LogPart
    | Successors
    | Claim
    | LauncherAt
    | NoLauncher
)


# ---------------------------------------------------------------- agent -> launcher


class AgentHello(Message, frozen=True):
    """First message of an agent on each of its connections. ``host``: the address at which its
    ranks' servers can be reached.

    ``term``: the highest one that it has seen; 0 if it has not been welcomed yet. ``heard``: number
    of the newest order that it has received. ``ranks``: rank and birth of every process of a rank
    that lives there. ``seen``: how far the launcher's log was, by term and part, when something
    was decided that the agent was told. ``born``: the how manieth agent of its node it is.
    """

    node: str
    host: str
    pid: int
    version: str
    protocol: int
    term: int = 0
    heard: int = 0
    ranks: list[tuple[int, int]] = []
    seen: tuple[int, int] = (0, 0)
    born: int = 1


class AgentReady(Message, frozen=True):
    """Ranks can start at once: the parked process has torch imported, the replicator listens.

    ``memory_nbytes``: how much more host memory copies may take on this node, the smaller of what
    is free in /dev/shm and what the job's memory limit leaves; ``memory_limit``: which of the two
    that is, in words.
    """

    warm_s: float
    replicator: Address
    memory_nbytes: int
    memory_limit: str


class ReplicatorUp(Message, frozen=True):
    """The replicator ended and a new one listens elsewhere; the copies are as they were."""

    replicator: Address
    reason: str


class Copy(msgspec.Struct, frozen=True):
    """A sealed copy of the state of ``rank`` after ``step``, made in ``epoch``.

    ``replica``: kept for another node's rank. ``segments``: the names of those it has.
    ``missing``: of those that belong to the state but are not in this copy.
    """

    rank: int
    step: int
    epoch: int
    replica: bool
    segments: list[tuple[int, ...]]
    missing: list[tuple[int, ...]]


class Inventory(Message, frozen=True):
    """Answer to ``TakeInventory``: every sealed copy on this node."""

    epoch: int
    copies: list[Copy]


class Heartbeat(Message, frozen=True):
    """The agent's event loop runs, and it has received the orders up to number ``heard``."""

    sequence: int
    heard: int


class RankSaid(Message, frozen=True):
    """A rank's message. ``born``: the epoch in which the rank's process was started."""

    rank: int
    born: int
    body: FromRank


class RankExited(Message, frozen=True):
    """A rank's process is gone. Exactly one of ``exit_code`` and ``signal`` is set."""

    rank: int
    born: int
    exit_code: int | None
    signal: int | None


class RankStopped(Message, frozen=True):
    """A rank's process has been in the stopped state (SIGSTOP, tracing) for ``for_s`` seconds."""

    rank: int
    born: int
    for_s: float


class GroupStanding(msgspec.Struct, frozen=True):
    """What a rank does in one of its process groups, in which its peers count as it does.

    ``entered``: collectives begun in this epoch. ``waits``: ``number`` is under way, and has been
    for ``wait_s``; else it is the newest, and complete. ``peer_op``: the operation by which a
    single message is waited for, for ``peer_s``; empty if none is.
    """

    name: str
    entered: int
    number: int
    waits: bool
    op: str
    wait_s: float
    peer_op: str = ""
    peer_s: float = 0.0


class Standing(msgspec.Struct, frozen=True):
    """What a rank is doing: it has been in ``step`` for ``step_s``."""

    rank: int
    born: int
    epoch: int
    step: int
    step_s: float
    groups: list[GroupStanding]


class Standings(Message, frozen=True):
    """Ranks of this node that have been in one step for a large part of the deadline, unless they
    were told of and nothing changed; with ``asked``, the answer to that question: every rank that
    is in a step. ``moved``: rank and birth of those that were told of and have gone on.
    """

    standings: list[Standing]
    moved: list[tuple[int, int]]
    asked: int = 0


class Pace(msgspec.Struct, frozen=True):
    """How fast a rank goes: the medians of its ``steps`` newest steps, in seconds. ``own_s``:
    without the time in which it waited for others in collectives or was held up by the runtime;
    ``low_s``: the quarter of them that took the least took no longer than this.
    """

    rank: int
    born: int
    epoch: int
    steps: int
    own_s: float
    low_s: float
    step_s: float


class Paces(Message, frozen=True):
    """How fast the ranks of this node go, now and then, each by its steps since it was last told
    of.
    """

    paces: list[Pace]


class DeviceLines(Message, frozen=True):
    """What the kernel's log or the GPUs' library says of the GPUs of this node; only news."""

    lines: list[str]


class StackNotTaken(Message, frozen=True):
    """The stacks of this rank's process could not be had."""

    rank: int
    born: int
    reason: str


class PathsTried(Message, frozen=True):
    """Answer to ``TryPaths``: the nodes that could not be reached."""

    number: int
    unreached: list[str]


class AgentFailed(Message, frozen=True):
    """The agent cannot serve (the parked process did not come up, run directory not writable …)."""

    reason: str


class AgentLeaving(Message, frozen=True):
    """Answer to ``StopAgent``: nothing of the job is left on this node."""

    leftovers: list[str]


class StepsUntold(Message, frozen=True):
    """So many reports of completed steps were given up, each for a later one of the same rank:
    the agent had no launcher to tell them to, and no more room.
    """

    count: int


FromAgent = (
    AgentReady
    | ReplicatorUp
    | Inventory
    | RankSaid
    | RankExited
    | RankStopped
    | StepsUntold
    | Standings
    | Paces
    | DeviceLines
    | StackNotTaken
    | PathsTried
    | AgentFailed
    | AgentLeaving
)


class Report(Message, frozen=True):
    """A message of the agent. Numbers go up, over all terms; one that no launcher has in its log
    is sent again to the next.
    """

    number: int
    body: FromAgent


class Pong(Message, frozen=True):
    """Answer to ``Ping``: the agent obeys this launcher."""

    number: int


class LogKept(Message, frozen=True):
    """This node has the parts of the log up to ``index``. ``address``: where agents find it if
    they lose their launcher.
    """

    index: int
    address: Address


class Granted(Message, frozen=True):
    """Answer to ``Claim``."""

    term: int


# ---------------------------------------------------------------- operator -> launcher


class DrainNode(Message, frozen=True):
    """Take ``node`` out of the job; ``reason``: why, in the operator's words, or nothing."""

    node: str
    reason: str


class AskStanding(Message, frozen=True):
    """Say how the job stands; answered by ``JobStanding``."""


#: What an operator may ask. Each has one answer.
Question = DrainNode | AskStanding


class Request(Message, frozen=True):
    """First and only message of an operator's connection; answered by ``Reply``."""

    protocol: int
    body: Question


class Done(Message, frozen=True):
    """It is done, or has begun; ``text`` is a sentence."""

    text: str


class Denied(Message, frozen=True):
    """It cannot be done; ``text`` says why. ``mistaken``: what was asked for makes no sense for
    this job (a node that it does not have).
    """

    text: str
    mistaken: bool = False


class JobStanding(Message, frozen=True):
    """How the job stands. ``phase``: what the whole job is doing, in the launcher's word for it;
    ``step``: the newest that every rank has completed; ``nodes``: what each node is to the job;
    ``ranks``: how many take part; ``bare``: not every rank has a replica after an incident;
    ``incident``: the open one's number.
    """

    phase: str
    term: int
    epoch: int
    step: int
    nodes: dict[str, str]
    ranks: int
    bare: bool
    incident: int | None


Answer = Done | Denied | JobStanding


class Reply(Message, frozen=True):
    """The answer to a ``Request``; the connection ends with it."""

    body: Answer


ToLauncher = AgentHello | Heartbeat | Report | Pong | LogKept | Granted | Request


# ---------------------------------------------------------------- codec and frames

_encoder = msgspec.msgpack.Encoder()


class Codec:
    """Encodes messages and decodes those of one union; unknown or malformed input raises
    ``ProtocolError``.
    """

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def decode(self, body: bytes) -> Any:
        """The message in ``body`` (without its length prefix)."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error


def frame(message: Message) -> bytes:
    """The message as it goes on the wire: four bytes of length (big-endian), then msgpack."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_NBYTES:
        raise ProtocolError(f"message of {len(body)} bytes is over the limit of {MAX_FRAME_NBYTES}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a byte stream into message bodies: feed bytes as they arrive, iterate over what is
    whole.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add ``data``; return the bodies that are now complete, in order."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(self._buffer, start)
            if nbytes > MAX_FRAME_NBYTES:
                raise ProtocolError(f"peer announced a frame of {nbytes} bytes")
            end = start + _LENGTH.size + nbytes
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies


# ---------------------------------------------------------------- proof of the secret

NONCE_NBYTES: Final = 32
#: Bytes of one proof (SHA-256).
PROOF_NBYTES: Final = 32


def new_nonce() -> bytes:
    """A fresh challenge."""
    return secrets.token_bytes(NONCE_NBYTES)


def proof(secret: bytes, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """HMAC-SHA256 over both challenges; ``side`` ("client" or "server") keeps one from being
    replayed as the other.

    Order on the wire: server sends its nonce; client sends its nonce and its proof; server checks
    it and sends its own proof; client checks that. Neither side sends anything else before.
    """
    return hmac.new(secret, side.encode() + server_nonce + client_nonce, hashlib.sha256).digest()


def proof_holds(expected: bytes, got: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(expected, got)
