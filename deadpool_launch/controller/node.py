"""One node of the allocation, as the controller knows it, and what its agent is doing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deadpool_launch.classify.model import Verdict
from deadpool_runtime.protocol import Address, Copy


class AgentStage(StrEnum):
    """What a node's agent is doing."""

    OFF = "off"
    STARTING = "starting"
    CONNECTED = "connected"
    WARM = "warm"
    #: Failed to start, or lost; the node is not used again.
    GONE = "gone"


class Cause(StrEnum):
    """What a node is given up for."""

    #: It may pass: the node is tried again.
    PASSING = "passing"
    #: The job has no use for it as it is: it comes back only if somebody vouches for it.
    UNFIT = "unfit"
    #: The same, and the next job should do without it.
    SICK = "sick"


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the allocation."""

    name: str
    stage: AgentStage = AgentStage.OFF
    #: Where servers of its ranks are reached; empty until its agent connected.
    host: str = ""
    #: Set while the agent is coming up.
    deadline: float | None = None
    #: Why it is gone; continues a sentence that starts with its name.
    gone: str = ""
    #: How many agents were ordered there so far; the newest is known by this number.
    born: int = 0
    #: When it was given up, as far as that still counts, and what that was for the last time.
    faults: tuple[float, ...] = ()
    cause: Cause = Cause.PASSING
    #: A fault of its hardware that was seen; None if none was.
    trouble: Verdict | None = None
    #: When it is tried again, and how many tries have failed since it was given up; see
    #: ``quarantine.py``.
    back_at: float | None = None
    tries: int = 0
    #: Its state in Slurm's words, while that is not a healthy one.
    slurm: str = ""
    #: Where its replicator listens; None until its agent is warm.
    replicator: Address | None = None
    #: Host memory that copies may take there, and what sets the limit, in words.
    memory_nbytes: int = 0
    memory_limit: str = ""
    #: Set from the question which copies it has until the answer.
    inventory_by: float | None = None
    #: The answer of the current epoch.
    copies: tuple[Copy, ...] = ()
