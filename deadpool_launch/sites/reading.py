"""The text of a site file to checked values, or to problems with line numbers. Pure.

A value may be marked as not known, with how to find it out: ``gpus.per_node: !unknown sinfo -o %G``
leaves the key as it is without the file, and is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from deadpool_launch.dotted import LeafReader, Problem, line_of, read
from deadpool_launch.policy.kinds import BadValue, Value
from deadpool_launch.sites.kinds import Text
from deadpool_launch.sites.schema import BY_NAME, NAMES, OVERRIDABLE, OVERRIDES, SiteKey

_UNKNOWN = "!unknown"
_HOW = Text("how to find it out, as text on one line")


@dataclass(frozen=True, slots=True)
class Given:
    """What a file says of one key: a value, or how to find it out."""

    value: Value
    line: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class SiteFile:
    """What one file says. ``overrides``: by section and name (``("partitions", "debug")``)."""

    path: str
    values: Mapping[str, Given] = field(default_factory=dict)
    overrides: Mapping[tuple[str, str], Mapping[str, Given]] = field(default_factory=dict)


def read_site(text: str, path: str) -> tuple[SiteFile, list[Problem]]:
    """The file's content, and what is wrong with it; with problems the content is incomplete."""
    reader = _Reader(path)
    problems = read(text, path, "site file", reader.read_root) + reader.problems
    problems.sort(key=lambda problem: problem.line)
    return SiteFile(path, reader.values, reader.overrides), problems


class _Reader(LeafReader):
    def __init__(self, path: str) -> None:
        super().__init__(path, NAMES)
        self.values: dict[str, Given] = {}
        self.overrides: dict[tuple[str, str], dict[str, Given]] = {}

    def read_root(self, root: yaml.Node) -> None:
        if not isinstance(root, yaml.MappingNode):
            valid = ", ".join(sorted({*NAMES.valid_in(""), *OVERRIDES}))
            self.wrong(root, f"must be a mapping of keys to values; valid are {valid}")
            return
        for name, at, node in self.leaves(root, "", set(OVERRIDES)):
            if name in OVERRIDES:
                self._read_overrides(name, at, node)
            elif (given := self._given(BY_NAME[name], at, node)) is not None:
                self.values[name] = given

    def _read_overrides(self, section: str, at: yaml.Node, node: yaml.Node) -> None:
        if not isinstance(node, yaml.MappingNode):
            self.wrong(at, f"{section} must be a mapping of names to keys and their values")
            return
        for key, inside in node.value:
            if not isinstance(key, yaml.ScalarNode) or not isinstance(inside, yaml.MappingNode):
                self.wrong(key, f"{section} must be a mapping of names to keys and their values")
                continue
            if (section, str(key.value)) in self.overrides:
                self.wrong(key, f"{section}.{key.value} stands here a second time; remove one")
                continue
            found: dict[str, Given] = {}
            inner = LeafReader(self.path, OVERRIDABLE)
            for name, where, value in inner.leaves(inside, "", set()):
                given = self._given(BY_NAME[name], where, value)
                if given is not None:
                    found[name] = given
            self.problems += inner.problems
            self.overrides[section, str(key.value)] = found

    def _given(self, key: SiteKey, at: yaml.Node, node: yaml.Node) -> Given | None:
        line = line_of(at)
        try:
            if node.tag == _UNKNOWN:
                return Given(key.default, line, _HOW.parse(node))
            if key.word and isinstance(node, yaml.ScalarNode) and node.value == key.word:
                return Given(None, line)
            return Given(key.kind.parse(node), line)
        except BadValue as error:
            alternative = f", or {key.word}" if key.word else ""
            self.wrong(at, f"{key.name}: {error}{alternative}")
            return None
