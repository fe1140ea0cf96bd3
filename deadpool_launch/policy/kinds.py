"""The kinds of values that policy keys take: YAML in, checked value out, and back to text. Pure.

A kind reads YAML nodes instead of Python values, so that ``1:30:00`` is a time and not the number
that YAML 1.1 makes of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import yaml

from deadpool_runtime.protocol import AdmissionCheck
from deadpool_slurm.parse import expand_nodes

#: The value of a key, of the type that its ``LaunchOptions`` field has.
Value = Any

_NULL = "tag:yaml.org,2002:null"
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
#: Digits beyond these make no time.
_WITH_UNIT = re.compile(r"(\d{1,15}(?:\.\d{0,15})?|\.\d{1,15})\s*(ms|s|min|m|h|d)?")
_AS_IN_SLURM = re.compile(r"(?:(\d{1,9})-)?(\d{1,9}):(\d{1,2})(?::(\d{1,2}))?")
#: What a duration looks like.
A_DURATION = "a duration such as 90s, 5m, 2h or 1-00:00:00"


class BadValue(ValueError):
    """A value that its key does not take; the text continues a sentence that names the key."""


class Kind(Protocol):
    """What a key takes."""

    #: What is right, for the documentation and for errors: "must be <this>".
    @property
    def wanted(self) -> str: ...

    #: Values can be compared, so that a limit may name a least and a most.
    @property
    def ordered(self) -> bool: ...

    def parse(self, node: yaml.Node) -> Value:
        """The value; raises ``BadValue``."""

    def show(self, value: Value) -> str:
        """The value as it would stand in a policy file, on one line."""


@dataclass(frozen=True, slots=True)
class Count:
    """A whole number."""

    least: int = 0
    ordered: bool = True

    @property
    def wanted(self) -> str:
        return f"a whole number of at least {self.least}"

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < self.least:
            raise bad(text, self.wanted)
        return int(text)

    def show(self, value: Value) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Number:
    """A number above ``above`` and below ``below``."""

    above: float = 0.0
    below: float = math.inf
    ordered: bool = True

    @property
    def wanted(self) -> str:
        if math.isinf(self.below):
            return f"a number above {self.above:g}"
        return f"a number above {self.above:g} and below {self.below:g}"

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        try:
            value = float(text)
        except ValueError:
            raise bad(text, self.wanted) from None
        if not self.above < value < self.below:
            raise bad(text, self.wanted)
        return value

    def show(self, value: Value) -> str:
        return f"{value:.12g}"


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, written with a unit or as Slurm writes times."""

    least_s: float
    most_s: float
    ordered: bool = True

    @property
    def wanted(self) -> str:
        return f"{A_DURATION}, from {show_duration(self.least_s)} to {show_duration(self.most_s)}"

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        value = read_duration(text)
        if value is None or not self.least_s <= value <= self.most_s:
            raise bad(text, self.wanted)
        return value

    def show(self, value: Value) -> str:
        return show_duration(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]
    ordered: bool = False

    @property
    def wanted(self) -> str:
        return f"{', '.join(self.words[:-1])} or {self.words[-1]}"

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        if text not in self.words:
            raise bad(text, self.wanted)
        return text

    def show(self, value: Value) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Order:
    """Words in the order in which they are tried; the last of ``words`` ends every order."""

    words: tuple[str, ...]
    ordered: bool = False

    @property
    def wanted(self) -> str:
        last = self.words[-1]
        return f"a list of {', '.join(self.words[:-1])} and {last}, each once at most, {last} last"

    def parse(self, node: yaml.Node) -> Value:
        entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
        return self.of(scalar(entry, self.wanted) for entry in entries)

    def of(self, given: Iterable[str]) -> Value:
        """The order that these words make; raises ``BadValue``."""
        words = list(given)
        ended = words[-1:] == [self.words[-1]]
        order = words if ended or not words else [*words, self.words[-1]]
        if not order or len(set(order)) < len(order) or not set(order) <= set(self.words):
            raise bad(", ".join(words), self.wanted)
        return tuple(order)

    def show(self, value: Value) -> str:
        return f"[{', '.join(value)}]"


@dataclass(frozen=True, slots=True)
class FilePath:
    """A path that begins with ``/``, ``~`` or a variable; ``files.py`` fills variables in."""

    ordered: bool = False
    wanted: str = "an absolute path, in which $VARIABLES may stand"

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        if not text.startswith(("/", "~", "$")):
            raise bad(text, self.wanted)
        return text

    def show(self, value: Value) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Domains:
    """Node lists and the name of the failure domain that each is."""

    ordered: bool = False
    wanted: str = 'node lists as Slurm writes them, each with a name, such as "n[1-8]": rack1'

    def parse(self, node: yaml.Node) -> Value:
        pairs: list[tuple[str, str]] = []
        named: dict[str, str] = {}
        for key, value in mapping(node, self.wanted):
            pattern, name = scalar(key, self.wanted), scalar(value, self.wanted)
            nodes = expand_nodes(pattern)
            if not nodes:
                raise BadValue(f"{pattern!r} is not a node list; must be {self.wanted}")
            for member in nodes:
                if member in named:
                    raise BadValue(
                        f"{member} is in {named[member]} and in {name}; "
                        "name every node once at most"
                    )
                named[member] = name
            pairs.append((pattern, name))
        return tuple(pairs)

    def show(self, value: Value) -> str:
        return ", ".join(f"{pattern}: {name}" for pattern, name in value) or "{}"


@dataclass(frozen=True, slots=True)
class Checks:
    """Commands that a node must pass, with their time limits."""

    ordered: bool = False
    wanted: str = "a list of checks, each with a command and a timeout (a duration)"

    def parse(self, node: yaml.Node) -> Value:
        if not isinstance(node, yaml.SequenceNode):
            raise BadValue(f"must be {self.wanted}")
        return tuple(self._check(number, entry) for number, entry in enumerate(node.value, start=1))

    def _check(self, number: int, entry: yaml.Node) -> AdmissionCheck:
        found: dict[str, yaml.Node] = {}
        for key, value in mapping(entry, self.wanted):
            name = scalar(key, self.wanted)
            if name not in ("command", "timeout"):
                raise BadValue(
                    f"{name} is not a key of check {number}; valid are command and timeout"
                )
            if name in found:
                raise BadValue(f"{name} is in check {number} twice; remove one")
            found[name] = value
        if "command" not in found or "timeout" not in found:
            missing = "command" if "command" not in found else "timeout"
            raise BadValue(f"check {number} has no {missing}; must be {self.wanted}")
        command = scalar(found["command"], "a shell command").strip()
        if not command:
            raise BadValue(f"the command of check {number} is empty")
        return AdmissionCheck(command, Duration(0.1, 3600.0).parse(found["timeout"]))

    def show(self, value: Value) -> str:
        return ", ".join(f"{c.command} ({show_duration(c.timeout_s)})" for c in value) or "[]"


def read_duration(text: str) -> float | None:
    """Seconds; ``None`` if the text is not a duration. A bare number is in seconds."""
    if match := _WITH_UNIT.fullmatch(text.strip()):
        return float(match[1]) * _UNITS_S[match[2] or "s"]
    if match := _AS_IN_SLURM.fullmatch(text.strip()):
        days, first, second, third = match.groups()
        # As in Slurm: MM:SS without days and without a third part, else from hours on.
        if third is None and days is None:
            first, second, third = "0", first, second
        return 86400.0 * int(days or 0) + 3600 * int(first) + 60 * int(second) + int(third or 0)
    return None


def show_duration(value_s: float) -> str:
    """Seconds with the largest unit that leaves a whole number."""
    for unit in ("d", "h", "m"):
        if value_s >= _UNITS_S[unit] and value_s % _UNITS_S[unit] == 0:
            return f"{value_s / _UNITS_S[unit]:g}{unit}"
    return f"{value_s:.12g}s"


def expand_domains(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    """The failure domain of each node that is named."""
    return {node: name for pattern, name in pairs for node in expand_nodes(pattern)}


def bad(text: str, wanted: str) -> BadValue:
    """The error for this text."""
    return BadValue(f"{text!r} is wrong; must be {wanted}")


def scalar(node: yaml.Node, wanted: str) -> str:
    """The text of a single value; raises ``BadValue``."""
    if not isinstance(node, yaml.ScalarNode):
        raise BadValue(f"must be {wanted}")
    if node.tag == _NULL:
        raise BadValue(f"has no value; must be {wanted}")
    return str(node.value)


def mapping(node: yaml.Node, wanted: str) -> list[tuple[yaml.Node, yaml.Node]]:
    """The pairs of a mapping; raises ``BadValue``."""
    if not isinstance(node, yaml.MappingNode):
        raise BadValue(f"must be {wanted}")
    return list(node.value)
