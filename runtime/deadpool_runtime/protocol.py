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
PROTOCOL_VERSION: Final = 1
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


class Plan(Message, frozen=True):
    """How this rank gets from parked to running in ``epoch``.

    Rebuild every group through ``store``, bring the state of ``step`` back, report ``Restored``.
    ``sources`` maps each rank that has no state of ``step`` to the healthy rank that sends it the
    replicated part. ``own`` is this rank's own part (``StepDone.own``) when it is in ``sources``.
    """

    epoch: int
    step: int
    store: Address
    sources: dict[int, int]
    own: bytes


class Resume(Message, frozen=True):
    """Every rank restored the same state: go on with the step after the plan's."""

    epoch: int


class Confirmed(Message, frozen=True):
    """This rank's own part of ``step`` is kept outside the node."""

    step: int


class RaiseIt(Message, frozen=True):
    """Answer to ``StepRaised``: no fault of a peer explains the exception, it is the script's
    own.
    """

    step: int


class AllEnded(Message, frozen=True):
    """Every rank came to the end of its steps; leave ``job.steps``."""


ToRank = Begin | Revoke | Plan | Resume | Confirmed | RaiseIt | AllEnded


# ---------------------------------------------------------------- rank -> launcher


class RankUp(Message, frozen=True):
    """The rank's process lives and its store server listens on ``store_port`` of its node."""

    pid: int
    store_port: int


class Attached(Message, frozen=True):
    """The script called ``attach`` and reached its first step; from here on the rank can be
    unwound.
    """

    layout: str


class StepDone(Message, frozen=True):
    """State ``step`` is complete in this process.

    ``own``: the part that no peer holds (RNG, data position, user's state), opaque to the launcher.
    ``digest``: xxh3 of the replicated state, only for steps 0 and 1, else empty.
    ``duration_s``: wall time of the step's body; ``blocked_s``: of it, time the runtime held the
    training thread back. ``loss``: what the script reported, if anything.
    """

    epoch: int
    step: int
    own: bytes
    digest: str
    duration_s: float
    blocked_s: float
    loss: float | None


class Parked(Message, frozen=True):
    """The training thread is unwound and waits for a ``Plan`` of ``epoch``.

    ``slots``: the steps whose whole state this process holds, ascending; empty for a new process.
    ``aborted_s``: seconds from the receipt of ``Revoke`` until the collectives were broken (0 if
    none).
    """

    epoch: int
    slots: list[int]
    aborted_s: float


class GroupsRebuilt(Message, frozen=True):
    """All process groups have live backends of ``epoch`` again."""

    epoch: int
    groups: int


class Restored(Message, frozen=True):
    """The state of ``step`` is in place; ``digest`` is the xxh3 of its replicated part."""

    epoch: int
    step: int
    digest: str


class StepRaised(Message, frozen=True):
    """An exception left the body of ``step``; the rank waits for ``Revoke`` or ``RaiseIt``."""

    epoch: int
    step: int
    error: str


class StepsEnded(Message, frozen=True):
    """The last step is complete; the rank waits for ``AllEnded`` (or a ``Revoke``)."""

    epoch: int
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
    | Parked
    | GroupsRebuilt
    | Restored
    | StepRaised
    | StepsEnded
    | ScriptFailed
    | ScriptEnded
    | FaultPoint
    | FinalState
    | Note
)


# ---------------------------------------------------------------- launcher -> agent


class JobSpec(Message, frozen=True):
    """First message to an agent: what does not change while the job lives.

    ``heartbeat_s``: interval of ``Heartbeat``. ``frozen_after_s``: a rank whose process is stopped
    for longer is reported. ``confirm_timeout_s``: how long a rank waits for a confirmation; longer
    than it takes to notice a lost node, else its peers run ahead of the last step that is whole.
    ``stop_grace_s``: time between SIGTERM and SIGKILL. ``env``: added to every rank's environment.
    ``fault_steps``: rehearsals only, rank -> step at whose start it reports ``FaultPoint`` and
    waits.
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


class StopAgent(Message, frozen=True):
    """End every rank (SIGTERM, grace, SIGKILL), clean up, then leave."""

    reason: str


ToAgent = JobSpec | StartRanks | KillRanks | TellRanks | StopAgent


# ---------------------------------------------------------------- agent -> launcher


class AgentHello(Message, frozen=True):
    """First message of an agent. ``host``: the address at which its ranks' servers can be
    reached.
    """

    node: str
    host: str
    pid: int
    version: str
    protocol: int


class AgentReady(Message, frozen=True):
    """The parked process has the interpreter up and torch imported; ranks can start at once."""

    warm_s: float


class Heartbeat(Message, frozen=True):
    """The agent's event loop runs."""

    sequence: int


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


class AgentFailed(Message, frozen=True):
    """The agent cannot serve (the parked process did not come up, run directory not writable …)."""

    reason: str


class AgentLeaving(Message, frozen=True):
    """Answer to ``StopAgent``: nothing of the job is left on this node."""

    leftovers: list[str]


FromAgent = (
    AgentHello
    | AgentReady
    | Heartbeat
    | RankSaid
    | RankExited
    | RankStopped
    | AgentFailed
    | AgentLeaving
)


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
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
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
