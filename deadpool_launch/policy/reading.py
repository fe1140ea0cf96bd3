"""The text of a policy file to checked values and limits, or to problems with line numbers. Pure.

Everything that is wrong is found in one go. How files are merged is in ``merge.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from deadpool_launch.dotted import LeafReader, Names, Problem, line_of
from deadpool_launch.dotted import read as read_yaml
from deadpool_launch.policy.kinds import BadValue, Value
from deadpool_launch.policy.schema import BY_NAME, NAME_OF, Key
from deadpool_launch.timeouts import IN_ORDER

LIMITS = "limits"
_BOUNDS = ("min", "max", "fixed")
_NAMES = Names(BY_NAME)


@dataclass(frozen=True, slots=True)
class Given:
    """A value that a file gives."""

    value: Value
    line: int


@dataclass(frozen=True, slots=True)
class Limit:
    """What a site allows for one key; ``fixed`` stands alone."""

    line: int
    least: Value = None
    most: Value = None
    fixed: Given | None = None


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """What one file says."""

    path: str
    values: Mapping[str, Given] = field(default_factory=dict)
    limits: Mapping[str, Limit] = field(default_factory=dict)


def read(text: str, path: str, *, may_limit: bool) -> tuple[PolicyFile, list[Problem]]:
    """The file's content, and what is wrong with it; with problems the content is incomplete.

    ``may_limit``: it is a site's file, in which ``limits`` may stand.
    """
    reader = _Reader(path)
    unreadable = read_yaml(text, path, "policy", lambda root: reader.read_root(root, may_limit))
    if unreadable:
        return PolicyFile(path), unreadable
    values, limits = reader.values, reader.limits
    for name, limit in limits.items():
        if name in values and (why := breaks(BY_NAME[name], values[name].value, limit)):
            reader.problems.append(
                Problem(path, values[name].line, f"{name}: {why} (line {limit.line})")
            )
    problems = sorted(reader.problems, key=lambda problem: problem.line)
    return PolicyFile(path, values, limits), problems


def breaks(key: Key, value: Value, limit: Limit) -> str:
    """How a value breaks a limit, in words that go on with where that stands; empty if it holds."""
    shown = key.show(value)
    if limit.fixed is not None:
        if value == limit.fixed.value:
            return ""
        return f"{shown} is not {key.show(limit.fixed.value)}, which is fixed by the site's limit"
    if value is None and not key.word_is_most:
        return ""
    if limit.most is not None and (value is None or value > limit.most):
        return f"{shown} is above the site's limit of {key.show(limit.most)}"
    if limit.least is not None and value is not None and value < limit.least:
        return f"{shown} is below the site's limit of {key.show(limit.least)}"
    return ""


class _Reader(LeafReader):
    def __init__(self, path: str) -> None:
        super().__init__(path, _NAMES)
        self.values: dict[str, Given] = {}
        self.limits: dict[str, Limit] = {}

    def read_root(self, root: yaml.Node, may_limit: bool) -> None:
        if not isinstance(root, yaml.MappingNode):
            self.wrong(root, f"must be a mapping of keys to values; valid are {_top_words()}")
            return
        for name, at, node in self.leaves(root, "", {LIMITS}):
            if name == LIMITS:
                if not may_limit:
                    self.wrong(at, f"{LIMITS} has effect only in the site's file; remove it here")
                elif isinstance(node, yaml.MappingNode):
                    self._read_limits(node)
                else:
                    self.wrong(at, f"{LIMITS} must be a mapping of keys to min, max or fixed")
            else:
                value = self._value(BY_NAME[name], at, node)
                if value is not None:
                    self.values[name] = value
        self._check_ways()
        self._check_orders()

    def _read_limits(self, section: yaml.MappingNode) -> None:
        for name, at, node in self.leaves(section, "", set()):
            limit = self._limit(BY_NAME[name], at, node)
            if limit is not None:
                self.limits[name] = limit

    def _value(self, key: Key, at: yaml.Node, node: yaml.Node) -> Given | None:
        if key.word and isinstance(node, yaml.ScalarNode) and node.value == key.word:
            return Given(None, line_of(at))
        try:
            return Given(key.kind.parse(node), line_of(at))
        except BadValue as error:
            alternative = f", or {key.word}" if key.word else ""
            self.wrong(at, f"{key.name}: {error}{alternative}")
            return None

    def _limit(self, key: Key, at: yaml.Node, node: yaml.Node) -> Limit | None:
        name = f"{LIMITS}.{key.name}"
        usable = _BOUNDS if key.kind.ordered else ("fixed",)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            self.wrong(at, f"{name} must be a mapping with {' or '.join(usable)}")
            return None
        found: dict[str, Given] = {}
        for word, value in node.value:
            if word.value not in usable:
                self.wrong(word, f"{name}: {word.value} is not valid; use {' or '.join(usable)}")
                return None
            given = self._value(key, word, value)
            if given is None:
                return None
            if given.value is None and word.value != "fixed":
                self.wrong(word, f"{name}: {word.value} must be {key.kind.wanted}")
                return None
            found[word.value] = given
        if "fixed" in found and len(found) > 1:
            self.wrong(at, f"{name}: fixed stands alone, without min and max")
            return None
        least, most = (found[word].value if word in found else None for word in ("min", "max"))
        if least is not None and most is not None and least > most:
            self.wrong(at, f"{name}: min {key.show(least)} is above max {key.show(most)}")
            return None
        return Limit(line_of(at), least, most, found.get("fixed"))

    def _check_orders(self) -> None:
        """Durations of one file that must be in an order are in it."""
        for order in IN_ORDER:
            shorter, longer = NAME_OF[order.shorter], NAME_OF[order.longer]
            if shorter not in self.values or longer not in self.values:
                continue
            first, second = self.values[shorter], self.values[longer]
            if order.holds(first.value, second.value):
                continue
            shown = (BY_NAME[shorter].show(first.value), BY_NAME[longer].show(second.value))
            self.problems.append(
                Problem(
                    self.path,
                    max(first.line, second.line),
                    f"{longer} {shown[1]} must be longer than {shorter}, {shown[0]}",
                )
            )

    def _check_ways(self) -> None:
        """One file says in one way how many spares there are."""
        first: dict[str, str] = {}
        for name in self.values:
            if BY_NAME[name].way:
                first.setdefault(BY_NAME[name].way, name)
        if len(first) > 1:
            names = list(first.values())
            self.problems.append(
                Problem(
                    self.path,
                    self.values[names[1]].line,
                    f"{' and '.join(names)} both say how many spares are held; keep one of them",
                )
            )


def _top_words() -> str:
    return ", ".join(sorted({*_NAMES.valid_in(""), LIMITS}))
