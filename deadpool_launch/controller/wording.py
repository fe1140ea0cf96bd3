"""Sentences for people: folded ranks, causes with their evidence, durations."""

from __future__ import annotations

import re
from collections.abc import Iterable

from deadpool_launch.controller.incident import Loss

_ERROR_LENGTH = 120
#: With more nodes than this only their number is told.
_NAMED_NODES = 8
#: Where an exception of C++ code was raised: a file and line in brackets, after the type if any.
_PLACE = re.compile(r"^([\w.]+: )?\[[^\[\]\s]+:\d+\] *")
#: An IPv4 address written as an IPv6 one.
_MAPPED = re.compile(r"\[::ffff:([\d.]+)\]")
_NEXT_SENTENCE = re.compile(r"(?<!\.)\. +(?=[A-Z])")


def fold(numbers: Iterable[int]) -> str:
    """Ranges instead of long lists: ``0-1,4``."""
    parts: list[str] = []
    run: list[int] = []
    for number in sorted(set(numbers)):
        if run and number != run[-1] + 1:
            parts.append(_span(run))
            run = []
        run.append(number)
    if run:
        parts.append(_span(run))
    return ",".join(parts)


def _span(run: list[int]) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """``rank 4`` or ``ranks 4-7``."""
    ranks = tuple(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {fold(ranks)}"


def steps_text(steps: Iterable[int]) -> str:
    """``step 4``, ``steps 4-7`` or ``no step``."""
    steps = tuple(steps)
    if not steps:
        return "no step"
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {fold(steps)}"


def exit_text(exit_code: int | None, signal: int | None) -> str:
    """How a process ended: ``signal 9`` or ``exit code 1``."""
    return f"signal {signal}" if signal is not None else f"exit code {exit_code}"


def loss_text(loss: Loss) -> str:
    """Who was lost and why: ``n2 lost (...)`` or ``rank 3 on n2 died (signal 9, seen)``."""
    if loss.whole_node:
        return f"{loss.node} {loss.cause}"
    return f"{ranks_text(loss.ranks)} on {loss.node} {loss.cause}"


def short_error(error: str) -> str:
    """An exception's text for a sentence: its first sentence on one line, without where it is in
    C++ code.
    """
    text = _PLACE.sub(r"\1", " ".join(error.split()))
    text = _NEXT_SENTENCE.split(_MAPPED.sub(r"\1", text))[0]
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    return text if len(text) <= _ERROR_LENGTH else f"{text[: _ERROR_LENGTH - 1].rstrip()}…"


def seconds(duration_s: float) -> str:
    """A limit as it was configured: ``30 s``."""
    return f"{duration_s:g} s"


def nodes_text(names: Iterable[str]) -> str:
    """``n1, n2``, or how many they are if that would be long."""
    names = tuple(names)
    return ", ".join(names) if len(names) <= _NAMED_NODES else f"{len(names)} nodes"


def size(nbytes: int) -> str:
    """A number of bytes for people: ``512 KiB``, ``1.5 GiB``."""
    value, unit = nbytes / 1024, "KiB"
    for larger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def plural(count: int, word: str) -> str:
    """``1 completed step``, ``2 completed steps``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
