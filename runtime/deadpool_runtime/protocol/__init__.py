"""Typed messages between launcher, agents and ranks, and the frames they travel in.

What lives here: every message that crosses the border between these processes, the msgpack codec,
the framing and the mutual proof of the job's secret. What does not: sockets, threads, event loops
(``link.py`` beside this, and ``deadpool_launch``'s drivers), and what a rank's own helpers say to
each other (``replication``). Nothing here imports torch, so the launcher may use it.

There are three parties. The *launcher* talks to one *agent* per node over TCP; an agent talks to
each of its *ranks* over an inherited socket pair. Rank messages travel through the agent unchanged,
inside ``RankSaid`` and ``TellRanks``.

Every message names the epoch it belongs to where that matters; receivers drop what is older than
what they know.

There is a module for each conversation; all else takes its names from here.
"""
# ruff: noqa: I001 - sorted, each of these names would be a statement of its own

from __future__ import annotations

from deadpool_runtime.protocol.base import (
    PROTOCOL_VERSION as PROTOCOL_VERSION,
    Address as Address,
    Message as Message,
    ProtocolError as ProtocolError,
)
from deadpool_runtime.protocol.connection import (
    AgentHello as AgentHello,
    FromLauncher as FromLauncher,
    Heard as Heard,
    Heartbeat as Heartbeat,
    Order as Order,
    Refused as Refused,
    Report as Report,
    ToLauncher as ToLauncher,
    Welcome as Welcome,
)
from deadpool_runtime.protocol.framing import (
    MAX_FRAME_NBYTES as MAX_FRAME_NBYTES,
    Codec as Codec,
    Frames as Frames,
    frame as frame,
)
from deadpool_runtime.protocol.from_agent import (
    AgentFailed as AgentFailed,
    AgentLeaving as AgentLeaving,
    AgentReady as AgentReady,
    Copy as Copy,
    DeviceLines as DeviceLines,
    FromAgent as FromAgent,
    GroupStanding as GroupStanding,
    Inventory as Inventory,
    Pace as Pace,
    Paces as Paces,
    PathsTried as PathsTried,
    RankExited as RankExited,
    RankSaid as RankSaid,
    RankStopped as RankStopped,
    ReplicatorUp as ReplicatorUp,
    StackNotTaken as StackNotTaken,
    Standing as Standing,
    Standings as Standings,
    StepsUntold as StepsUntold,
)
from deadpool_runtime.protocol.from_rank import (
    AtBoundary as AtBoundary,
    Attached as Attached,
    FaultPoint as FaultPoint,
    FinalState as FinalState,
    FromRank as FromRank,
    GroupsRebuilt as GroupsRebuilt,
    Holding as Holding,
    NotConnected as NotConnected,
    Note as Note,
    Parked as Parked,
    Protected as Protected,
    RankUp as RankUp,
    Restored as Restored,
    RestoreFailed as RestoreFailed,
    Saved as Saved,
    ScriptEnded as ScriptEnded,
    ScriptFailed as ScriptFailed,
    SegmentDigest as SegmentDigest,
    SegmentSize as SegmentSize,
    Snapshotted as Snapshotted,
    StepDone as StepDone,
    StepRaised as StepRaised,
    StepsEnded as StepsEnded,
)
from deadpool_runtime.protocol.operators import (
    Answer as Answer,
    AskStanding as AskStanding,
    Denied as Denied,
    Done as Done,
    DrainNode as DrainNode,
    JobStanding as JobStanding,
    Question as Question,
    Reply as Reply,
    Request as Request,
)
from deadpool_runtime.protocol.secret import (
    NONCE_NBYTES as NONCE_NBYTES,
    PROOF_NBYTES as PROOF_NBYTES,
    new_nonce as new_nonce,
    proof as proof,
    proof_holds as proof_holds,
)
from deadpool_runtime.protocol.succession import (
    Claim as Claim,
    Granted as Granted,
    LauncherAt as LauncherAt,
    LogKept as LogKept,
    LogPart as LogPart,
    NoLauncher as NoLauncher,
    Ping as Ping,
    Pong as Pong,
    Successors as Successors,
)
from deadpool_runtime.protocol.to_agent import (
    AdmissionCheck as AdmissionCheck,
    JobSpec as JobSpec,
    KillRanks as KillRanks,
    StartRanks as StartRanks,
    StopAgent as StopAgent,
    TakeInventory as TakeInventory,
    TakeStacks as TakeStacks,
    TakeStandings as TakeStandings,
    TellRanks as TellRanks,
    ToAgent as ToAgent,
    TryPaths as TryPaths,
)
from deadpool_runtime.protocol.to_rank import (
    AllEnded as AllEnded,
    Begin as Begin,
    GoOn as GoOn,
    Hold as Hold,
    HoldAfter as HoldAfter,
    Holder as Holder,
    Leave as Leave,
    Piece as Piece,
    Plan as Plan,
    Protect as Protect,
    RaiseIt as RaiseIt,
    Resume as Resume,
    Revoke as Revoke,
    Shard as Shard,
    ToRank as ToRank,
)
