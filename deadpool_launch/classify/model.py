"""What is observed of a fault, what a rule asks of it, and the verdict. Pure.

The rules come from ``rules.py`` (YAML) and are tried in order; the first whose conditions all hold
gives the verdict. The controller asks about what a rank says and how it ends, ``scan.py`` about
lines of a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

#: Longest text that a pattern is tried on, in characters: a pattern of a user's may be a slow one.
MAX_ERROR = 2_000
MAX_TRACEBACK = 20_000
#: What differs between ranks and times in one and the same error.
_PARTICULAR = re.compile(r"0x[0-9a-fA-F]+|\d+")
#: The module of an exception's type, which some name with it and some do not.
_MODULE = re.compile(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_]\w*(?::|$))")
#: Marks that Slurm adds to a node state, as in ``DOWN*`` and ``IDLE+DRAIN``.
_STATE_MARKS = "*~#!%$@^-"
#: A shell and ``srun`` give the death by a signal as this much plus its number.
_SIGNAL_BASE = 128
_LAST_SIGNAL = 64


class Kind(StrEnum):
    """Whose fault it is, which says what helps."""

    #: Gone when the rank starts again on its node.
    TRANSIENT = "transient"
    #: The node has it; another one does not.
    PERMANENT = "permanent"
    #: The script does the same again wherever it runs.
    USER = "user"
    #: It hits every node alike; no spare helps.
    JOB = "job"
    #: What somebody else's end looks like from here; it is the cause of nothing.
    ECHO = "echo"


@dataclass(frozen=True, slots=True)
class Observation:
    """All that is known of one fault; what is not known keeps its default and fits no condition."""

    #: First line of the first error: of chained exceptions, of the one that was raised first.
    error: str = ""
    #: That error with its traceback and the further lines of its message.
    traceback: str = ""
    exit_code: int | None = None
    signal: int | None = None
    #: XIDs of NVIDIA's driver, seen on the node or in the log.
    xids: frozenset[int] = frozenset()
    #: As ``sinfo`` and ``scontrol`` write it, say ``IDLE+DRAIN``; empty if not known.
    node_state: str = ""
    #: So many ranks show the same error, of so many.
    ranks_alike: int = 1
    ranks: int = 1
    #: How often this fault has now hit the same step of the same rank.
    times_at_step: int = 1
    #: Seconds until the job's time limit.
    time_left_s: float | None = None

    @property
    def ended_by(self) -> int | None:
        """The signal that ended the process, also where a shell made an exit code of it."""
        if self.signal is not None or self.exit_code is None:
            return self.signal
        signal = self.exit_code - _SIGNAL_BASE
        return signal if 0 < signal <= _LAST_SIGNAL else None

    @property
    def everywhere(self) -> bool:
        """Every rank shows it; a job of one rank has no others to compare it with."""
        return 1 < self.ranks <= self.ranks_alike

    @property
    def node_states(self) -> frozenset[str]:
        """The words of ``node_state``, without Slurm's marks."""
        words = self.node_state.upper().split("+")
        return frozenset(word.strip(_STATE_MARKS) for word in words) - {""}


@dataclass(frozen=True, slots=True)
class Rule:
    """A name, a verdict, and conditions of which all that are given must hold."""

    name: str
    kind: Kind
    #: Why; continues a sentence after the rule's name.
    reason: str
    #: Pattern searched for in ``Observation.error``; empty: no condition.
    error: str = ""
    #: The same in ``Observation.traceback``, or in the error if there is no traceback.
    traceback: str = ""
    exit_codes: frozenset[int] = frozenset()
    #: Any of these ended the process, see ``Observation.ended_by``.
    signals: frozenset[int] = frozenset()
    #: Any of these was seen.
    xids: frozenset[int] = frozenset()
    #: The node has any of these words in its state.
    node_states: frozenset[str] = frozenset()
    everywhere: bool | None = None
    #: At least so many times at the same step.
    repeats: int = 0
    #: At most so many seconds are left to the time limit.
    time_left_s: float | None = None

    def fits(self, seen: Observation) -> bool:
        """Whether every condition holds."""
        text = seen.error[:MAX_ERROR]
        left_s = seen.time_left_s
        return (
            (self.repeats <= seen.times_at_step)
            and (self.everywhere is None or self.everywhere == seen.everywhere)
            and (not self.xids or bool(self.xids & seen.xids))
            and (not self.exit_codes or seen.exit_code in self.exit_codes)
            and (not self.signals or seen.ended_by in self.signals)
            and (not self.node_states or bool(self.node_states & seen.node_states))
            and (self.time_left_s is None or (left_s is not None and left_s <= self.time_left_s))
            and (not self.error or _compiled(self.error).search(text) is not None)
            and (
                not self.traceback
                or _compiled(self.traceback).search(seen.traceback[:MAX_TRACEBACK] or text)
                is not None
            )
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a fault is, by which rule and why."""

    kind: Kind
    rule: str
    reason: str

    @property
    def text(self) -> str:
        """For the middle of a sentence: ``rule gpu-ecc: its memory is damaged``."""
        return f"rule {self.rule}: {self.reason}"


def classify(seen: Observation, rules: Iterable[Rule]) -> Verdict | None:
    """The verdict of the first rule that fits; None if none does."""
    for rule in rules:
        if rule.fits(seen):
            return Verdict(rule.kind, rule.name, rule.reason)
    return None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Kept here, so that a rule is a plain value."""
    return re.compile(pattern)


@lru_cache(maxsize=4096)
def signature(error: str) -> str:
    """The error without what differs between ranks that have the same trouble, as numbers do."""
    return _PARTICULAR.sub("#", _MODULE.sub("", error[:MAX_ERROR]))


def count_alike(error: str, errors: Sequence[str]) -> int:
    """How many of ``errors`` are ``error``, but for numbers."""
    wanted = signature(error)
    return sum(signature(other) == wanted for other in errors)
