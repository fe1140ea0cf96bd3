"""Faults as data: what strikes whom and when. Written and read as JSON."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.states import Phase
from deadpool_launch.errors import UsageError


class FaultKind(StrEnum):
    """What happens to the target."""

    #: The node loses power for ``for_s``, or for good; its connections are seen to close, or not.
    POWER = "power"
    #: The same, and nothing is closed: it falls silent.
    VANISH = "vanish"
    #: Every process of the node is stopped for ``for_s``, or for good.
    FREEZE_NODE = "freeze-node"
    #: The node is cut off from ``scope`` for ``for_s``, or for good.
    PARTITION = "partition"
    #: Everything on the node takes ten times as long for ``for_s``, or for good.
    SLOW = "slow"
    #: The node's agent is killed, and its ranks with it.
    AGENT = "agent"
    #: The node's replicator is killed and comes up elsewhere.
    REPLICATOR = "replicator"
    #: A copy on the node has a wrong bit, which its next reader notices.
    DAMAGE = "damage"
    #: The node's agent no longer tells its copies.
    MUTE = "mute"
    #: Agents no longer come up on the node: srun fails, or nothing is heard of it.
    SRUN = "srun"
    #: New processes on the node never come up.
    SLOW_UP = "slow-up"
    #: The rank's process dies by a signal.
    KILL = "kill"
    #: The same, and its last words are passed on long after its end.
    LATE = "late"
    #: The process stops, which its agent sees.
    FREEZE = "freeze"
    #: The process stops and outlives SIGKILL.
    UNKILLABLE = "unkillable"
    #: The process no longer answers Revoke or Plan.
    DEAF = "deaf"
    #: The state that the process restores next is wrong where others have the same.
    CORRUPT = "corrupt"
    #: The process does not come to the collective of its step, but unwinds when it is told.
    HANG = "hang"
    #: The same, and it holds Python's lock: it does not hear that it is to unwind.
    LOCK = "lock"
    #: A message of the collective that the rank waits in is lost, though every process lives.
    MESSAGE = "message"
    #: The rank's connections break in a collective, though every process lives.
    LINK = "link"
    #: The script raises inside a step.
    RAISE = "raise"
    #: The script fails outside of a step.
    FAIL = "fail"
    #: A durable checkpoint is damaged, which its next reader notices.
    DISK = "disk"
    #: No fault: an operator drains the node, or Slurm tells that it is drained.
    DRAIN = "drain"
    #: The time limit comes near.
    LIMIT = "limit"
    #: The next checkpoint that all have written cannot be committed.
    FULL = "full"


#: Their target is a rank.
RANK_KINDS = frozenset(
    {
        FaultKind.KILL,
        FaultKind.LATE,
        FaultKind.FREEZE,
        FaultKind.UNKILLABLE,
        FaultKind.DEAF,
        FaultKind.CORRUPT,
        FaultKind.HANG,
        FaultKind.LOCK,
        FaultKind.MESSAGE,
        FaultKind.LINK,
        FaultKind.RAISE,
        FaultKind.FAIL,
    }
)
#: They have no target.
DISK_KINDS = frozenset({FaultKind.DISK, FaultKind.FULL})
NO_TARGET_KINDS = DISK_KINDS | {FaultKind.LIMIT}
#: The script's own.
SCRIPT_KINDS = frozenset({FaultKind.RAISE, FaultKind.FAIL})
#: A node that was struck by one of these, or that has such a rank, may be given up.
NODE_KINDS = frozenset(
    {
        FaultKind.POWER,
        FaultKind.VANISH,
        FaultKind.FREEZE_NODE,
        FaultKind.PARTITION,
        FaultKind.AGENT,
        FaultKind.MUTE,
        FaultKind.SRUN,
        FaultKind.SLOW_UP,
        FaultKind.SLOW,
        FaultKind.UNKILLABLE,
    }
)
#: How often one of these does not last for good.
_TIMED = {
    FaultKind.FREEZE_NODE: 0.7,
    FaultKind.PARTITION: 0.7,
    FaultKind.SLOW: 0.7,
    FaultKind.POWER: 0.3,
    FaultKind.VANISH: 0.3,
}


class Scope(StrEnum):
    """Whom a node that is cut off does not reach."""

    ALL = "all"
    LAUNCHER = "launcher"
    PEERS = "peers"


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. It strikes ``at`` so many seconds, or, with ``phase``, when the job comes to that
    phase for the ``nth`` time, so many seconds after that.
    """

    kind: FaultKind
    #: A node's name or a rank's number.
    target: str = ""
    at: float = 0.0
    phase: Phase | None = None
    nth: int = 1
    #: How long it lasts; 0: for good.
    for_s: float = 0.0
    scope: Scope = Scope.ALL

    def __str__(self) -> str:
        when = f"at {self.at:g} s"
        if self.phase is not None:
            when = f"{self.at:g} s into {self.phase} no. {self.nth}"
        lasts = f" for {self.for_s:g} s" if self.for_s else ""
        scope = f" from {self.scope}" if self.kind is FaultKind.PARTITION else ""
        return f"{self.kind} {self.target}".strip() + f"{scope} {when}{lasts}"


def read_faults(path: Path) -> list[Fault]:
    """The list of faults in a JSON file; a ``UsageError`` says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Fault])
    except OSError as error:
        raise UsageError(f"--fault {path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageError(f"--fault {path}: not a list of faults: {error}") from error


def faults_text(faults: Sequence[Fault]) -> str:
    """As JSON on one line; ``read_faults`` reads it."""
    return msgspec.json.encode(list(faults)).decode()


def check_targets(faults: Sequence[Fault], nodes: Sequence[str], world_size: int) -> None:
    """A ``UsageError`` unless every fault strikes a node or rank that there is."""
    for fault in faults:
        if fault.kind in RANK_KINDS:
            ranks = [str(rank) for rank in range(world_size)]
            if fault.target not in ranks:
                last = world_size - 1
                raise UsageError(
                    f"--fault: {fault.kind} strikes a rank, of which the numbers go from 0 to "
                    f"{last}; {fault.target!r} is none"
                )
        elif fault.kind not in NO_TARGET_KINDS and fault.target not in nodes:
            raise UsageError(
                f"--fault: {fault.kind} strikes a node, one of {', '.join(nodes)}; "
                f"{fault.target!r} is none"
            )


# ---------------------------------------------------------------- from a seed

#: The span in which most first faults strike: the job trains, or has just begun to.
STRIKE_FROM_S, STRIKE_TO_S = 1.2, 3.6
#: The longest that one lasts which does not last for good.
LAST_S = 3.0
#: Faults that follow another one at about this time find the job in the middle of its repair.
FOLLOW_S = 1.5
_PHASES = (
    Phase.LAUNCHING,
    Phase.TRAINING,
    Phase.GATHERING,
    Phase.PARKING,
    Phase.INVENTORY,
    Phase.RESTORING,
    Phase.CLEARING,
)
#: How often each kind is drawn; those that are not named once.
_WEIGHTS = {
    FaultKind.POWER: 5,
    FaultKind.KILL: 5,
    FaultKind.PARTITION: 3,
    FaultKind.DAMAGE: 2,
    FaultKind.CORRUPT: 2,
    FaultKind.DISK: 2,
    FaultKind.DRAIN: 5,
}
_DRAWN = [kind for kind in FaultKind for _ in range(_WEIGHTS.get(kind, 1))]
_HOW_MANY = (0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6)


def random_faults(dice: random.Random, config: Config) -> list[Fault]:
    """A few faults. Some strike together, many while the job recovers from the first."""
    faults: list[Fault] = []
    first = dice.uniform(0.0, STRIKE_FROM_S)
    if dice.random() < 0.85:
        first = dice.uniform(STRIKE_FROM_S, STRIKE_TO_S)
    for place in range(dice.choice(_HOW_MANY)):
        phase, nth, at = None, 1, first
        if place:
            at = first + dice.choice((0.01, FOLLOW_S, 2 * FOLLOW_S)) * dice.random()
            if dice.random() < 0.5:
                phase, nth, at = dice.choice(_PHASES), dice.choice((1, 1, 2)), dice.random() * 0.3
        kind = dice.choice(_DRAWN)
        faults.append(_random_fault(dice, kind, _target(dice, kind, config), phase, nth, at))
    return faults


def _target(dice: random.Random, kind: FaultKind, config: Config) -> str:
    """A rank, or a node: mostly one that trains."""
    if kind in NO_TARGET_KINDS:
        return ""
    if kind in RANK_KINDS:
        return str(dice.randrange(config.world_size))
    return dice.choice(config.active if dice.random() < 0.7 else config.nodes)


def _random_fault(
    dice: random.Random, kind: FaultKind, target: str, phase: Phase | None, nth: int, at: float
) -> Fault:
    passes = kind in _TIMED and dice.random() < _TIMED[kind]
    for_s = round(dice.uniform(0.05, LAST_S), 3) if passes else 0.0
    scope = Scope.ALL
    if kind is FaultKind.PARTITION:
        scope = dice.choice((Scope.ALL, Scope.ALL, Scope.LAUNCHER, Scope.PEERS))
    return Fault(kind, target, round(at, 3), phase, nth, for_s, scope)
