"""What each communicator of a rank is doing, in a file that its node's agent can read at any time.

A process that is stuck cannot report: it may sit in C++ code or hold Python's lock. So it keeps a
record in shared memory: for each group the collectives it entered and those that are complete, and
for the script the step it is in, and of its newest steps how long each took, with and without the
time in which it waited for others. ``counting.hpp`` writes the groups and the waits, ``Recorder``
the rest; ``Reader`` is the agent's. All times are CLOCK_MONOTONIC of the node. Nothing here
imports torch.

The reader may come at any moment. Each field is written whole, and an entry about a collective
counts only while it carries that collective's number.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path

from deadpool_runtime.protocol import GroupStanding, Standing

MAGIC = int.from_bytes(b"dpgroups", "little")
#: Groups that are recorded; more than that go unrecorded.
GROUPS = 128
#: Of each group's collectives the newest so many are told apart.
RECENT = 8
#: So many of the newest steps have their times on record.
TIMED = 64
#: Names of operations by the number that stands in the file; ``counting.hpp`` has the same.
OPERATIONS = (
    "broadcast",
    "all_reduce",
    "all_reduce (sparse)",
    "all_reduce (coalesced)",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather (coalesced)",
    "all_gather_into_tensor (coalesced)",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor (coalesced)",
    "all_to_all_single",
    "all_to_all",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv (from any)",
    # From torch 2.14 on.
    "all_gather_single",
    "all_gather_single (coalesced)",
    "gather_single",
    "gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single (coalesced)",
    "all_to_all_single",
)


class _Entry(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint64), ("at_ns", ctypes.c_int64), ("op", ctypes.c_uint64))


class _Group(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("epoch", ctypes.c_uint64),
        ("entered", ctypes.c_uint64),
        ("completed", ctypes.c_uint64),
        ("peer_since_ns", ctypes.c_int64),
        ("peer_op", ctypes.c_uint64),
        ("recent", _Entry * RECENT),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("groups", ctypes.c_uint64),
        ("stepping", ctypes.c_uint64),
        ("step", ctypes.c_int64),
        ("since_ns", ctypes.c_int64),
        ("epoch", ctypes.c_uint64),
        ("waited_ns", ctypes.c_int64),
    )


class _Timed(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("own_ns", ctypes.c_int64),
        ("step_ns", ctypes.c_int64),
    )


class _File(ctypes.Structure):
    _fields_ = (("head", _Head), ("groups", _Group * GROUPS), ("timed", _Timed * TIMED))


NBYTES = ctypes.sizeof(_File)


def record_path(arena: Path, rank: int, born: int) -> Path:
    """Where the process of ``rank`` that was started in epoch ``born`` keeps its record."""
    return arena / f"progress-{rank}-{born}"


class Recorder:
    """This process's record; it stays mapped for as long as the process lives."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, NBYTES)
            self._memory = mmap.mmap(handle, NBYTES)
        finally:
            os.close(handle)
        self._file = _File.from_buffer(self._memory)
        self._file.head.magic = MAGIC
        #: When the step under way began, and how long the process had waited for others by then.
        self._from_ns: int | None = None
        self._waited_ns = 0
        self._timed = 0

    @property
    def address(self) -> int:
        """Where the record lies in this process's memory."""
        return ctypes.addressof(self._file)

    def stepping(self, epoch: int, step: int, blocked_s: float = 0.0) -> None:
        """Step ``step`` is complete, and the next one begins; said again, the clock of the next one
        starts again. ``blocked_s``: how long the runtime held the step up.
        """
        head, now_ns = self._file.head, time.monotonic_ns()
        if self._from_ns is None or step != head.step or epoch != head.epoch:
            waited_ns = head.waited_ns
            if self._from_ns is not None and (epoch, step) == (head.epoch, head.step + 1):
                step_ns = now_ns - self._from_ns
                own_ns = step_ns - (waited_ns - self._waited_ns) - int(blocked_s * 1e9)
                self._note(epoch, max(0, own_ns), step_ns)
            self._from_ns, self._waited_ns = now_ns, waited_ns
        head.stepping = 0
        head.epoch, head.step, head.since_ns = epoch, step, now_ns
        head.stepping = 1

    def _note(self, epoch: int, own_ns: int, step_ns: int) -> None:
        timed = self._file.timed[self._timed % TIMED]
        self._timed += 1
        timed.number = 0
        timed.epoch, timed.own_ns, timed.step_ns = epoch, own_ns, step_ns
        timed.number = self._timed

    def resting(self) -> None:
        """The script is in no step: before the first, in a recovery, or behind the last."""
        self._file.head.stepping = 0
        self._from_ns = None


class Reader:
    """The agent's view of a process's record."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError`` or ``ValueError`` while the process has not made it yet."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._memory = mmap.mmap(handle, NBYTES, prot=mmap.PROT_READ)
        finally:
            os.close(handle)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()

    def step_s(self, now_ns: int) -> float | None:
        """How long the process has been in its step; None while it is in none."""
        head = _Head.from_buffer_copy(self._memory)
        in_step = head.magic == MAGIC and head.stepping
        return _age_s(head.since_ns, now_ns) if in_step else None

    def timed(self, after: int) -> list[tuple[int, int, float, float]]:
        """Of the newest complete steps those numbered above ``after``, in order: number, epoch,
        seconds without the waits for others, and in all. Numbers count the steps of the process.
        """
        found = []
        for place in range(TIMED):
            at = _File.timed.offset + place * ctypes.sizeof(_Timed)
            each = _Timed.from_buffer_copy(self._memory, at)
            if each.number > after:
                found.append((each.number, each.epoch, each.own_ns / 1e9, each.step_ns / 1e9))
        return sorted(found)

    def standing(self, rank: int, born: int, now_ns: int) -> Standing | None:
        """What the process is doing; None while it is in no step."""
        head = _Head.from_buffer_copy(self._memory)
        if head.magic != MAGIC or not head.stepping:
            return None
        groups = []
        for index in range(min(head.groups, GROUPS)):
            at = ctypes.sizeof(_Head) + index * ctypes.sizeof(_Group)
            group = _Group.from_buffer_copy(self._memory, at)
            if group.epoch == head.epoch:
                groups.append(_group_standing(group, now_ns))
        return Standing(
            rank=rank,
            born=born,
            epoch=head.epoch,
            step=head.step + 1,
            step_s=_age_s(head.since_ns, now_ns),
            groups=groups,
        )


def _group_standing(group: _Group, now_ns: int) -> GroupStanding:
    """Of collectives that are under way the oldest is the one that is waited in."""
    # Counted by two threads: a completion may be seen before the entry that it belongs to.
    waits = group.entered > group.completed
    number = group.completed + 1 if waits else group.entered
    known = sorted((e.number, e.at_ns, e.op) for e in group.recent if e.number >= number)
    wait_s, op = 0.0, 0
    if known:
        # With more under way than are told apart, the oldest of those has waited less.
        _, at_ns, op = known[0]
        wait_s = _age_s(at_ns, now_ns) if waits else 0.0
    peer_s = _age_s(group.peer_since_ns, now_ns) if group.peer_since_ns else 0.0
    return GroupStanding(
        name=group.name.decode(errors="replace"),
        entered=group.entered,
        number=number,
        waits=waits,
        op=_operation(op) if number else "",
        wait_s=wait_s,
        peer_op=_operation(group.peer_op) if group.peer_since_ns else "",
        peer_s=peer_s,
    )


def _operation(number: int) -> str:
    return OPERATIONS[number] if number < len(OPERATIONS) else f"operation {number}"


def _age_s(at_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - at_ns) / 1e9)
