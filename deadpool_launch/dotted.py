"""YAML files of keys with dots in their names: ``spares.count`` is ``count`` in the section
``spares``. Pure.

What a value means is the reader's matter (``policy.reading``, ``sites.reading``); here is what all
such files have in common: where keys stand, which are unknown, and that everything wrong is found
in one go, with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches

import yaml

#: Deeper than any key.
_MOST_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Names:
    """The names of all keys that a kind of file may have."""

    names: Collection[str]

    def is_section(self, name: str) -> bool:
        """Whether keys have names that begin so."""
        return any(each.startswith(f"{name}.") for each in self.names)

    def valid_in(self, section: str) -> list[str]:
        """The words that may stand in a section; the top one has no name."""
        prefix = f"{section}." if section else ""
        inside = [each[len(prefix) :] for each in self.names if each.startswith(prefix)]
        return sorted({each.split(".")[0] for each in inside})


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong in a file; ``text`` says what would be right."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.text}"


def line_of(node: yaml.Node) -> int:
    """The line on which a node begins."""
    return int(node.start_mark.line) + 1


def read(text: str, path: str, what: str, body: Callable[[yaml.Node], None]) -> list[Problem]:
    """Hand the file's content, if there is any, to ``body``; returns what keeps it from being read.

    ``what``: the kind of file, for people.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            body(root)
    except yaml.YAMLError as error:
        return [_syntax_problem(path, error)]
    except RecursionError:
        return [Problem(path, 1, f"is nested too deeply for a {what}")]
    return []


class LeafReader:
    """Goes through the keys of one file and collects its problems."""

    def __init__(self, path: str, names: Names) -> None:
        self.path = path
        self._names = names
        self.problems: list[Problem] = []

    def wrong(self, node: yaml.Node, text: str) -> None:
        """Note a problem at this place."""
        self.problems.append(Problem(self.path, line_of(node), text))

    def leaves(
        self,
        mapping: yaml.MappingNode,
        section: str,
        also: set[str],
        given: set[str] | None = None,
    ) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """The keys in a mapping: full name, where it stands, and its value.

        ``also``: names that are valid here besides. ``given``: those that the file has above it, in
        whichever of the two ways of writing.
        """
        given = set() if given is None else given
        seen: set[str] = set()
        for at, node in mapping.value:
            if not isinstance(at, yaml.ScalarNode):
                self.wrong(at, "a key must be a word")
                continue
            name = f"{section}.{at.value}" if section else str(at.value)
            if name in seen | given:
                self.wrong(at, f"{name} stands here a second time; remove one")
                continue
            seen.add(name)
            if name in self._names.names or name in also:
                given.add(name)
                yield name, at, node
            elif not self._names.is_section(name):
                self.wrong(at, self._unknown(name, section, also))
            elif not isinstance(node, yaml.MappingNode) or name.count(".") > _MOST_DEPTH:
                valid = ", ".join(self._names.valid_in(name))
                self.wrong(at, f"{name} is a section; its keys are {valid}")
            else:
                yield from self.leaves(node, name, set(), given)

    def _unknown(self, name: str, section: str, also: set[str]) -> str:
        before, _, word = name.rpartition(".")
        if before and self._names.is_section(before):
            # Written with dots, so that the section is not the one it stands in.
            section, also = before, set()
        words = sorted({*self._names.valid_in(section), *also})
        close = get_close_matches(word, words, n=1)
        if before and before != section and not close:
            # Its beginning is no section.
            close = get_close_matches(name, self._names.names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        return f"{name} is not a key{hint}; valid here are {', '.join(words)}"


def _syntax_problem(path: str, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "\\t" in what:
        what = "a tab stands where blanks must; indent with blanks"
    return Problem(path, mark.line + 1 if mark is not None else 1, f"is not YAML: {what}")
