"""Readers of what Slurm's commands print. Pure: text in, values out; what cannot be read is left
out.

The text of ``scontrol -o`` is the primary source, since every version prints it; its shape changed
between versions (``DOWN*+DRAIN`` before 21.08, ``DOWN+DRAIN+NOT_RESPONDING`` since) and both are
read. Lists of nodes are ClusterShell's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from ClusterShell.NodeSet import (
    RESOLVER_NOGROUP,
    NodeSet,
    NodeSetException,
)

from deadpool_slurm.submission import SubmitText

#: A list of more nodes is not Slurm's, which has 64,000 at most.
MOST_NODES = 1 << 17
#: Digits of the largest number that Slurm prints.
_MOST_DIGITS = 20


class Health(StrEnum):
    """What a node's state means for a running job."""

    #: It can run a rank, or does.
    OK = "ok"
    #: It may finish what it runs; nothing new should be put there.
    CORDONED = "cordoned"
    #: Slurm does not hear from it; our own heartbeats decide.
    SUSPECT = "suspect"
    #: It is lost to the job.
    DEAD = "dead"


_DEAD = frozenset({"DOWN", "ERROR", "FUTURE", "UNKNOWN", "POWERED_DOWN", "POWERING_DOWN"}) | {
    "REBOOT_ISSUED",
    "INVALID_REG",
    "INVAL",
}
_SUSPECT = frozenset({"NOT_RESPONDING", "NO_RESPOND"})
_CORDONED = frozenset({"DRAIN", "DRAINING", "DRAINED", "FAIL", "FAILING", "REBOOT_REQUESTED"}) | {
    "REBOOT",
    "POWER_DOWN",
    "POWER_DRAIN",
    "MAINTENANCE",
    "MAINT",
    "BLOCKED",
}
#: Marks that ``sinfo`` and older versions of ``scontrol`` put behind a state.
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
#: Keys of ``scontrol -o``: ``JobId``, ``CPUs/Task``, ``AllocNode:Sid``.
_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z0-9_/:]*)=")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, as Slurm sees it."""

    name: str
    address: str
    state: str
    reason: str
    cpus: int | None
    health: Health


@dataclass(frozen=True, slots=True)
class JobFacts:
    """One job, as Slurm sees it now (the nodes that are left, unlike the environment's list)."""

    job_id: str
    state: str
    nodes: tuple[str, ...]
    batch_host: str | None
    submit_line: str | None
    stepmgr: bool
    #: When its time limit ends it, by the clock of the node that asked; ``None`` without a limit.
    end_time: datetime | None = None
    #: Whether it may be put back into the queue; ``None`` if Slurm does not say.
    can_requeue: bool | None = None
    #: The folder it was submitted from.
    work_dir: str | None = None
    #: What was put on it with ``Comment``.
    comment: str | None = None
    #: How it was submitted; ``None`` unless it was asked for.
    submission: SubmitText | None = None


def expand_nodes(nodelist: str) -> tuple[str, ...]:
    """``n[1-3],m7`` as ``("n1", "n2", "n3", "m7")``; an empty or unreadable list is empty.

    The parts keep their order, which is that of Slurm's per-node lists
    (``SLURM_JOB_CPUS_PER_NODE``).
    """
    parts = filter(None, (part.strip() for part in _OUTER_COMMA.split(nodelist)))
    names: dict[str, None] = {}
    try:
        for part in parts:
            # Before it is read, as reading makes all of it.
            if len(names) + _count(part) > MOST_NODES:
                return ()
            names.update(dict.fromkeys(NodeSet(part, resolver=RESOLVER_NOGROUP)))
    # ClusterShell lets errors of its own working through where a list is far from any.
    except (NodeSetException, ValueError, ArithmeticError, AssertionError, RecursionError):
        return ()
    return tuple(names)


def _count(part: str) -> int:
    """How many names a part of a list stands for; too many for a list if Slurm writes none such."""
    count = 1
    for inside in _BRACKET.findall(part):
        count *= sum(_span(_RANGE.fullmatch(each)) for each in inside.split(","))
    return count


def _span(numbers: re.Match[str] | None) -> int:
    if numbers is None or len(numbers[0]) > 2 * _MOST_DIGITS:
        return MOST_NODES + 1
    return max(1, int(numbers[2] or numbers[1]) - int(numbers[1]) + 1)


def fold_nodes(names: Iterable[str]) -> str:
    """Names as Slurm's bracket form."""
    return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))


def records(text: str) -> list[dict[str, str]]:
    """``Key=value`` records of ``scontrol -o``, one a line; a value runs until the next key."""
    found: list[dict[str, str]] = []
    for line in text.splitlines():
        keys = list(_KEY.finditer(line))
        ends = [key.start() for key in keys[1:]] + [len(line)]
        record: dict[str, str] = {}
        for key, end in zip(keys, ends, strict=False):
            record.setdefault(key[1], line[key.end() : end].strip())
        if record:
            found.append(record)
    return found


def health_of(state: str) -> Health:
    """The meaning of a state in any spelling: ``IDLE``, ``down*``, ``MIXED+NOT_RESPONDING``."""
    flags = state_flags(state)
    if flags & _DEAD:
        return Health.DEAD
    if not flags or flags & _SUSPECT:
        return Health.SUSPECT
    if flags & _CORDONED:
        return Health.CORDONED
    return Health.OK


def state_flags(state: str) -> frozenset[str]:
    """The base state and the flags of a state, in capitals, with marks (``*``) spelled out."""
    flags: set[str] = set()
    for part in state.strip().upper().split("+"):
        word = part.strip()
        while word and word[-1] in _MARKS:
            flags.add(_MARKS[word[-1]])
            word = word[:-1]
        if word:
            flags.add(word)
    return frozenset(flags)


def parse_nodes(text: str) -> dict[str, NodeFacts]:
    """Output of ``scontrol -o show node``, by node name."""
    return {
        record["NodeName"]: NodeFacts(
            name=record["NodeName"],
            address=record.get("NodeAddr") or record["NodeName"],
            state=record["State"],
            reason=record.get("Reason", ""),
            cpus=_number(record.get("CPUTot")),
            health=health_of(record["State"]),
        )
        for record in records(text)
        if "NodeName" in record and "State" in record
    }


def parse_job(text: str) -> JobFacts | None:
    """Output of ``scontrol -o show job ID`` (the first record), or ``None`` if it holds no job."""
    for record in records(text):
        if "JobId" in record and "JobState" in record:
            return JobFacts(
                job_id=record["JobId"],
                state=record["JobState"],
                nodes=expand_nodes(_given(record.get("NodeList")) or ""),
                batch_host=_given(record.get("BatchHost")),
                submit_line=_given(record.get("SubmitLine")),
                stepmgr=record.get("StepMgrEnabled", "No").lower() == "yes",
                # Without a limit Slurm shows a moment a year from the start all the same.
                end_time=None
                if record.get("TimeLimit") == "UNLIMITED"
                else _moment(record.get("EndTime")),
                can_requeue={"1": True, "0": False}.get(record.get("Requeue", "")),
                work_dir=_given(record.get("WorkDir")),
                comment=_given(record.get("Comment")),
            )
    return None


def parse_whole_values(text: str) -> tuple[str | None, str | None]:
    """Submit line and comment in the output of ``scontrol --json show job ID``, as they were given.

    In text a value ends where it looks like the next key (``sbatch job.sh lr=3``). The shape of all
    else in it changes with every version; these are text in all that have them: the comment is
    there since 23.02, the line, as in text, since 25.11.
    """
    try:
        job = json.loads(text)["jobs"][0]
        line, comment = job.get("submit_line"), job.get("comment")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None, None
    return _text(line), _text(comment)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _moment(text: str | None) -> datetime | None:
    """``2026-11-30T22:05:00``; ``Unknown`` and the like are no moment."""
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None


def parse_sinfo(text: str) -> dict[str, Health]:
    """Output of ``sinfo -h -N -o '%N|%T|%E'``; of a node's several lines the worst counts."""
    order = list(Health)
    found: dict[str, Health] = {}
    for line in text.splitlines():
        name, bar, rest = line.partition("|")
        if bar:
            health = health_of(rest.partition("|")[0])
            found[name.strip()] = max(found.get(name.strip(), Health.OK), health, key=order.index)
    return found


def parse_config(text: str) -> dict[str, str]:
    """The table of ``scontrol show config``: ``Name = value`` lines."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals and name.strip()}


def parse_steps(text: str) -> dict[str, str]:
    """Output of ``squeue -h --steps -o '%i|%j'``: step ids (``12.3``) by step name."""
    pairs = (line.strip().partition("|") for line in text.splitlines())
    return {name.strip(): step_id.strip() for step_id, bar, name in pairs if bar}


def _given(value: str | None) -> str | None:
    return None if value in (None, "", "(null)", "N/A", "None") else value


def _number(text: str | None) -> int | None:
    readable = text is not None and text.isdecimal() and len(text) <= _MOST_DIGITS
    return int(text or "") if readable else None
