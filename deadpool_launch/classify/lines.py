"""Lines of a log made readable: colours and noise removed, whose they are, which end they tell.

Pure. Output of several ranks is often in one file; ``srun --label`` writes ``3: `` before each
line, ``torch`` ``[rank3]: ``, ``torchrun --tee`` ``[default3]:``.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

#: Colours and cursor movements, titles of windows, and characters that no text has.
_NOISE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-Z\\-_]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]"
)
_LABEL = re.compile(r"^ *(?:(\d{1,7}): |\[(?:rank|default)(\d{1,7})\]: ?)")
LABEL_BYTES = re.compile(_LABEL.pattern.encode())
#: What ``srun`` says about tasks that did not end well.
_SRUN = re.compile(r"\bsrun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$")
_EXITED = re.compile(r"Exited with exit code (\d{1,9})\b")
#: What ``torchrun`` says: a negative code is a signal. Seen in a line of its log and in its table.
_TORCHRUN = re.compile(r"\(exitcode: (-?\d{1,9})\)|^exitcode +: (-?\d{1,9}) \(pid: ")
#: Digits of a rank, at most.
_RANK_DIGITS = 7
_SIGNALS = {
    text: number
    for number in signal.Signals
    if (text := signal.strsignal(number)) is not None and number != signal.SIGCHLD
}
XID = re.compile(r"NVRM: Xid \([^)]*\): (\d{1,4})\b")


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its label; ``rank``: whose it is, if it says so."""

    text: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How processes ended, as a line tells it."""

    ranks: frozenset[int]
    exit_code: int | None
    signal: int | None


def clean(raw: bytes) -> list[Line]:
    """What is readable of one line; several where a progress bar went back to its beginning."""
    parts = raw.decode("utf-8", "replace").rstrip("\r\n").split("\r")
    return [_labelled(_NOISE.sub("", part).rstrip()) for part in parts if part]


def _labelled(text: str) -> Line:
    """``srun`` labels what ``torch`` has labelled already; the inner one is the global rank."""
    rank = None
    while (found := _LABEL.match(text)) is not None:
        rank = int(found[1] or found[2])
        text = text[found.end() :]
    return Line(text, rank)


def ending(text: str) -> Ending | None:
    """What the line says about the end of processes; None if it is not about that."""
    if (found := _SRUN.search(text)) is not None:
        if (exited := _EXITED.match(found[2])) is not None:
            return Ending(_ranks(found[1]), int(exited[1]), None)
        number = _SIGNALS.get(found[2])
        return Ending(_ranks(found[1]), None, number) if number is not None else None
    if (found := _TORCHRUN.search(text.lstrip())) is not None:
        code = int(found[1] or found[2])
        known = (None, -code) if code < 0 else (code, None)
        return Ending(frozenset(), *known)
    return None


def _ranks(listed: str) -> frozenset[int]:
    """``0-3,7`` as numbers; of an absurdly long range only the ends."""
    ranks: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if len(first) > _RANK_DIGITS or len(last) > _RANK_DIGITS:
            continue
        if first.isdecimal() and (not last or last.isdecimal()):
            low, high = int(first), int(last or first)
            ranks.update(range(low, high + 1) if high - low < 100_000 else (low, high))
    return frozenset(ranks)
