"""What a mover and the replicator of its node say to each other, over a Unix socket in the arena.

The mover connects, both prove the job's secret (``protocol.proof``, the replicator is the server),
the mover says ``MoverHello``; from then on the replicator asks and the mover answers. The bytes of
the state never travel there: both ends have the arena's files. Frames and codec are those of
``protocol``.
"""

from __future__ import annotations

from deadpool_runtime.protocol import Message

#: Name of the socket in the arena; the replicator listens on it.
SOCKET_NAME = "mover.sock"
#: Arena files a mover touches have names that begin with one of these.
FILE_PREFIXES = ("own-", "held-")
#: Most bytes in one request: an MPI library counts a message's bytes in a signed 32-bit number.
MAX_MOVE_NBYTES = 1 << 30
#: Exit code of a mover that cannot have MPI at all: another try would end the same way.
NO_MPI_EXIT = 6
#: Marks the line in which a world that is only tried says which it was (``mover_trial``).
TRIAL_SAYS = "deadpool-mpi "

# ---------------------------------------------------------------- mover -> replicator


class MoverHello(Message, frozen=True):
    """The mover's MPI world is up.

    ``world_id``: its number, given by the launcher; a later world has a higher one. ``nonce``: made
    by the world itself, so that no two worlds are taken for each other. ``nodes``: by MPI rank.
    ``tag_limit``: the highest MPI tag. ``library``: the MPI library, for the log.
    """

    world_id: int
    nonce: str
    rank: int
    nodes: list[str]
    tag_limit: int
    library: str


class Moved(Message, frozen=True):
    """This request is complete."""

    number: int


class Refused(Message, frozen=True):
    """This request names something that a mover does not touch; it moved nothing."""

    number: int
    reason: str


class Broken(Message, frozen=True):
    """MPI failed. The mover ends after this."""

    reason: str


FromMover = MoverHello | Moved | Refused | Broken

# ---------------------------------------------------------------- replicator -> mover


class SendRange(Message, frozen=True):
    """Send a range of an arena file to the mover of MPI rank ``rank``."""

    number: int
    file: str
    offset: int
    nbytes: int
    rank: int
    tag: int


class ReceiveRange(Message, frozen=True):
    """Receive a range of an arena file from the mover of MPI rank ``rank``; ``file`` is empty if
    the bytes are to be thrown away.
    """

    number: int
    file: str
    offset: int
    nbytes: int
    rank: int
    tag: int


class ForgetSend(Message, frozen=True):
    """Nobody waits for this ``SendRange`` any more; it may never complete."""

    number: int


class Leave(Message, frozen=True):
    """The replicator ends in good order: end too, with exit code 0."""


ToMover = SendRange | ReceiveRange | ForgetSend | Leave
