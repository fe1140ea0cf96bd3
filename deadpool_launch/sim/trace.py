"""What happened in a simulated job, as lines for people: the same seed gives the same lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

import msgspec

from deadpool_launch.controller.events import Action, Event
from deadpool_launch.controller.wording import fold

#: Left out of every line: the time stands before it, and addresses are names with a number.
_LEFT_OUT = frozenset({"at", "pid", "store_port", "memory_nbytes", "memory_limit", "duration_s"})


class Trace:
    """``wanted``: whether lines are kept; without, nothing is worked out."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.lines: list[str] = []

    def note(self, now: float, text: str) -> None:
        """Something that is neither an event nor an action."""
        if self.wanted:
            self.lines.append(f"{now:10.4f}   * {text}")

    def turn(self, now: float, event: Event, actions: Iterable[Action]) -> None:
        """An event that the controller was told, and what it asked for."""
        if not self.wanted:
            return
        self.lines.append(f"{now:10.4f} --> {show(event)}")
        self.lines += [f"           <-- {show(action)}" for action in actions]


def show(value: object) -> str:
    """A message, event or action as one line."""
    if isinstance(value, msgspec.Struct):
        return _with_fields(value, value.__struct_fields__)
    if is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, [field.name for field in fields(value)])
    if isinstance(value, tuple | list):
        if value and all(type(item) is int for item in value):
            return fold(value)
        return "[" + ", ".join(show(item) for item in value) + "]"
    return str(value)


def _with_fields(value: object, names: Iterable[str]) -> str:
    parts = []
    for name in names:
        field = getattr(value, name)
        if name in _LEFT_OUT or field is None or field == "" or field == []:
            continue
        parts.append(f"{name}={show(field)}")
    return f"{type(value).__name__}({' '.join(parts)})"
