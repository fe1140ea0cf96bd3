"""The kinds of values that site files have besides those of policies. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from deadpool_launch.policy.kinds import BadValue, Value, bad, mapping, scalar

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_YES_NO: Mapping[str, bool] = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True, slots=True)
class Text:
    """Text on one line."""

    wanted: str = "text on one line"
    ordered: bool = False

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted).strip()
        if text and "\n" not in text:
            return text
        raise bad(text, self.wanted)

    def show(self, value: Value) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    wanted: str = "yes or no"
    ordered: bool = False

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        if text.lower() not in _YES_NO:
            raise bad(text, self.wanted)
        return _YES_NO[text.lower()]

    def show(self, value: Value) -> str:
        return "yes" if value else "no"


@dataclass(frozen=True, slots=True)
class Words:
    """A list of texts. ``start``: what each begins with; ``wanted`` says so to people."""

    wanted: str = "a list of texts, each on one line"
    start: str = ""
    ordered: bool = False

    def parse(self, node: yaml.Node) -> Value:
        if not isinstance(node, yaml.SequenceNode):
            raise BadValue(f"must be {self.wanted}")
        return tuple(self._word(entry) for entry in node.value)

    def _word(self, entry: yaml.Node) -> str:
        text = scalar(entry, self.wanted)
        # An option is one word, with its value behind a = if it has one.
        several = self.start and " " in text.partition("=")[0]
        if not text.startswith(self.start) or several or not text.strip() or "\n" in text:
            raise bad(text, self.wanted)
        return text

    def show(self, value: Value) -> str:
        return f"[{', '.join(value)}]"


@dataclass(frozen=True, slots=True)
class Patterns(Words):
    """Regular expressions, each for a whole name."""

    wanted: str = "a list of regular expressions, such as [ib0, eth.*]"

    def _word(self, entry: yaml.Node) -> str:
        text = Words._word(self, entry)
        _compiled(text, self.wanted)
        return text


@dataclass(frozen=True, slots=True)
class Pattern(Text):
    """A regular expression with one group."""

    wanted: str = r"a regular expression with one group in parentheses, such as (c\d+)-.*"

    def parse(self, node: yaml.Node) -> Value:
        text = scalar(node, self.wanted)
        if _compiled(text, self.wanted).groups != 1:
            raise bad(text, self.wanted)
        return text


@dataclass(frozen=True, slots=True)
class Variables:
    """Environment variables and their values."""

    wanted: str = "names of environment variables, each with a value, such as NCCL_NET: IB"
    ordered: bool = False

    def parse(self, node: yaml.Node) -> Value:
        found: dict[str, str] = {}
        for key, value in mapping(node, self.wanted):
            name, text = scalar(key, self.wanted), scalar(value, self.wanted)
            if not _VARIABLE.fullmatch(name):
                raise BadValue(f"{name!r} is no variable's name; must be {self.wanted}")
            if name in found:
                raise BadValue(f"{name} is there twice; remove one")
            if "\n" in text or "\0" in text:
                raise BadValue(f"{name} has more than one line; must be {self.wanted}")
            found[name] = text
        return tuple(found.items())

    def show(self, value: Value) -> str:
        return " ".join(f"{name}={text}" for name, text in value) or "{}"


def _compiled(text: str, wanted: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise BadValue(f"{text!r} is wrong ({error}); must be {wanted}") from None
