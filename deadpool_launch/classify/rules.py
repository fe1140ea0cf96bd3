"""Rules from YAML files; every mistake is told with the file, the rule and the key.

A file is ``rules:`` with a list. Each rule has ``name``, ``kind`` (see ``model.Kind``), ``reason``
and, under ``when``, one condition or more::

    rules:
      - name: our-burst-buffer
        kind: transient
        reason: the burst buffer fails over now and then
        when: {error: 'DataWarp.*timed out'}

``defaults.yaml`` beside this module is such a file, and lists the conditions.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from deadpool_launch.classify.model import Kind, Rule
from deadpool_launch.errors import UsageError
from deadpool_launch.policy.files import text_of

DEFAULTS = "defaults.yaml"
#: No exit code, XID or number of times is larger.
_MOST = 1 << 31
_TOP_KEYS = ("rules",)
_RULE_KEYS = ("name", "kind", "reason", "when")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


class _Bad(Exception):
    """What is wrong with a value; continues a sentence after the place."""


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error: the first of them would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, once no key was found to stand twice."""
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key} stands twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a file, in order. Raises ``UsageError``."""
    return parse_rules(text_of(path, what="file of rules"), str(path))


def default_rules() -> tuple[Rule, ...]:
    """The rules that come with DEADPOOL."""
    packaged = resources.files("deadpool_launch.classify").joinpath(DEFAULTS)
    return parse_rules(packaged.read_text(encoding="utf-8"), DEFAULTS)


def all_rules(path: Path | None) -> tuple[Rule, ...]:
    """The rules of the user's file, if there is one, before the packaged ones."""
    return (*(load_rules(path) if path is not None else ()), *default_rules())


def parse_rules(text: str, where: str) -> tuple[Rule, ...]:
    """The rules in ``text``; ``where`` names it in errors. Raises ``UsageError``."""
    try:
        # The safe loader, but for its treatment of keys that stand twice.
        document = yaml.load(text, _StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{where}{line}: is not YAML ({error.problem})") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{where}: is not YAML ({error})") from error
    except RecursionError as error:
        raise UsageError(f"{where}: is nested too deeply for a file of rules") from error
    except ValueError as error:
        # What looks like a date or a number to YAML, and is none.
        raise UsageError(
            f"{where}: has a value that YAML cannot read ({error}); put it into quotes"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get("rules"), list):
        raise UsageError(f"{where}: must begin with rules: and a list of them")
    try:
        _check_keys(document, _TOP_KEYS)
    except _Bad as bad:
        raise UsageError(f"{where}: {bad}") from bad
    rules: list[Rule] = []
    for number, item in enumerate(document["rules"], start=1):
        name = item.get("name") if isinstance(item, dict) else None
        try:
            rule = _rule(item)
            if any(other.name == rule.name for other in rules):
                raise _Bad("an earlier rule has the same name")
        except _Bad as bad:
            raise UsageError(f"{where}: rule {name or number}: {bad}") from bad
        rules.append(rule)
    return tuple(rules)


def _rule(item: object) -> Rule:
    if not isinstance(item, dict):
        raise _Bad(f"is not a mapping with {', '.join(_RULE_KEYS)}")
    _check_keys(item, _RULE_KEYS)
    for key in _RULE_KEYS:
        if key not in item:
            raise _Bad(f"{key} is missing")
    name, reason, when = item["name"], item["reason"], item["when"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _Bad(f"name is {name!r}, must be of lower-case letters, digits and dashes")
    if not isinstance(reason, str) or not reason.strip():
        raise _Bad("reason must be a sentence")
    if item["kind"] not in list(Kind):
        raise _Bad(f"kind is {item['kind']!r}, must be {_or(list(Kind))}")
    if not isinstance(when, dict) or not when:
        raise _Bad(f"when must have at least one condition: {', '.join(_CONDITIONS)}")
    _check_keys(when, tuple(_CONDITIONS))
    found: dict[str, Any] = {}
    for key, value in when.items():
        field, read = _CONDITIONS[key]
        try:
            found[field] = read(value)
        except _Bad as bad:
            raise _Bad(f"{key}: {bad}") from bad
    return Rule(name, Kind(item["kind"]), " ".join(reason.split()).rstrip("."), **found)


def _check_keys(given: Mapping[Any, Any], valid: tuple[str, ...]) -> None:
    for key in given:
        if key not in valid:
            raise _Bad(f"{key} is not a key here; valid are {', '.join(valid)}")


def _pattern(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _Bad(f"{value!r} must be a regular expression in quotes")
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise _Bad(f"{value!r} is not a regular expression ({error})") from error
    return value


def _several(value: object, read: Callable[[object], Any]) -> frozenset[Any]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise _Bad("the list is empty")
    return frozenset(read(one) for one in values)


def _number(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise _Bad(f"{value!r} must be a whole number from 0 on")
    return value


def _signal(value: object) -> int:
    if isinstance(value, str) and value.startswith("SIG") and value in signal.Signals.__members__:
        return signal.Signals[value]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= signal.NSIG - 1:
        raise _Bad(f"{value!r} must be a signal by name (SIGKILL) or number (9)")
    return value


def _state(value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise _Bad(f"{value!r} must be a node state without marks (DOWN, DRAIN)")
    return value.upper()


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Bad(f"{value!r} must be true or false")
    return value


def _times(value: object) -> int:
    if _number(value) < 2:
        raise _Bad(f"{value!r} must be at least 2")
    return _number(value)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _Bad(f"{value!r} must be a number of seconds above 0")
    return float(value)


def _or(words: list[Any]) -> str:
    return f"{', '.join(map(str, words[:-1]))} or {words[-1]}"


#: Each condition in a file: its field of ``Rule``, and what reads its value.
_CONDITIONS: Mapping[str, tuple[str, Callable[[object], Any]]] = {
    "error": ("error", _pattern),
    "traceback": ("traceback", _pattern),
    "exit_code": ("exit_codes", lambda value: _several(value, _number)),
    "signal": ("signals", lambda value: _several(value, _signal)),
    "xid": ("xids", lambda value: _several(value, _number)),
    "node_state": ("node_states", lambda value: _several(value, _state)),
    "everywhere": ("everywhere", _truth),
    "repeats": ("repeats", _times),
    "time_left_s": ("time_left_s", _seconds),
}
