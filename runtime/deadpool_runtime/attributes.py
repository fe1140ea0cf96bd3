"""What classes of the script's own keep in plain attributes: a counter, a running mean.

torch saves what is registered with it: parameters, buffers, an optimizer's ``state`` and
``param_groups``. An attribute that differs from what it was when training began, which is what a
new process finds in it, is saved with the rank's own part if it consists of numbers, text, arrays
and tensors. If not, it is refused. Objects of the script's own classes that modules hold at the
start are looked into like modules; other objects in modules are not.

torch's own classes are known to keep nothing there that a step depends on, but for numbers that
scripts set (a dropout's probability, say).
"""

from __future__ import annotations

import enum
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deadpool_runtime.attribute_owners import MISSING, ObjectOwner, Owner, owners_of
from deadpool_runtime.encoding import digest_of, fill
from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.loader_values import put_into
from deadpool_runtime.loader_walk import children_of
from deadpool_runtime.values import (
    MOST_DEPTH,
    NOWHERE,
    SCALAR_TYPES,
    SCALARS,
    grows,
    holds_state,
    is_looked_into,
    is_plain,
    leaves,
    mark_of_array,
    mark_of_tensor,
    nbytes,
    packed,
    short_mark,
    storage_of,
    unpacked,
)

#: Tensors and arrays of an attribute that are larger than this together are not saved with the own
#: part.
LARGE_NBYTES = 1 << 20
#: In containers of more entries tensors are compared by torch's count of writes, and other objects
#: by identity; of those with more than the second number some entries are looked at.
_MANY_ENTRIES, _MOST_ENTRIES = 1000, 20_000
#: What is said of an object that is not looked into.
_UNKNOWN = "object"


@dataclass(frozen=True)
class _First:
    """An attribute at the start. ``mark``: what tells its value, ``loose_mark`` leaves out tensors
    that are registered. ``copy``: of its value, packed; None if that cannot be saved. ``kept``:
    what it consisted of, so that nothing else can have the same ``id``."""

    value: Any
    mark: Any
    loose_mark: Any
    copy: tuple[str, Any] | None
    kept: list[Any]


class Attributes:
    """Used by the training thread: ``begin`` in every process at ``attach``, then ``changed`` for
    each state, and ``restore``.

    ``modules``: as ``TensorMap.modules`` gives them. ``registered``: every tensor that is saved
    otherwise; what shares its memory is a name for it. ``covered``: objects whose state is saved
    otherwise.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        optimizers: Iterable[Optimizer],
        registered: Callable[[], Iterable[torch.Tensor]],
        covered: Iterable[Any] = (),
    ) -> None:
        self._registered = registered
        self._storages: frozenset[int] | None = None
        self._covered = list(covered)
        self._owners = owners_of(modules, optimizers, self._covered)
        self._first: dict[str, dict[str, _First]] = {}

    def begin(self) -> None:
        """Note every attribute as it is at the start."""
        self._storages = None
        for owner in self._owners:
            first = {name: self._noted(owner, value) for name, value in owner.attributes().items()}
            self._first[owner.key] = first
            owner.note(name for name, each in first.items() if _is_fixed(each))

    def _noted(self, owner: Owner, value: Any) -> _First:
        mark = self._mark(value, owner, frozenset())
        has_tensors = any(isinstance(each, torch.Tensor) for each in leaves(value))
        return _First(
            value,
            mark,
            self._mark(value, owner, self._find_registered()) if has_tensors else mark,
            packed(value) if is_plain(value) and nbytes(value) <= LARGE_NBYTES else None,
            list(leaves(value)),
        )

    def _find_registered(self) -> frozenset[int]:
        """The addresses of all registered tensors; that takes a while, and is seldom asked for."""
        if self._storages is None:
            found = frozenset(map(storage_of, self._registered()))
            self._storages = found - {NOWHERE}
        return self._storages

    def changed(self) -> dict[str, dict[str, Any]]:
        """By owner and name, copies of the attributes that are not as they were at the start."""
        self._storages = None
        found: dict[str, dict[str, Any]] = {}
        for owner in self._owners:
            if isinstance(owner, ObjectOwner) and not self._is_in_place(owner):
                continue
            present, is_all = owner.suspects()
            first = self._first[owner.key]
            for name, value in present.items():
                if self._is_first(owner, name, value) or self._is_passing(owner, name, value):
                    continue
                found.setdefault(owner.key, {})[name] = self._saved(owner, name, value)
            gone = [name for name in first if name not in present] if is_all else []
            if gone and not owner.only_simple:
                raise UnsupportedState(
                    f"The attribute {gone[0]} of {owner.spoken} was deleted in a step, which a new "
                    f"process would not see: set it to None instead."
                )
        return found

    def _is_in_place(self, owner: ObjectOwner) -> bool:
        """Whether the object is where it was at the start. Raises ``UnsupportedState`` if one with
        other values has taken its place."""
        present = owner.present()
        if present is owner.thing:
            return True
        if not is_looked_into(present):
            return False
        others, first = children_of(present) or {}, self._first[owner.key]
        same = type(present) is type(owner.thing) and others.keys() == first.keys()
        if grows(list(others.values())) or (
            same and all(self._is_first(owner, name, each) for name, each in others.items())
        ):
            return False
        raise UnsupportedState(
            f"In the place of {owner.spoken} another object was put in a step, which a new process "
            f"would not have: change the attributes of the one that is there."
        )

    def restore(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what ``changed`` returned, here or in another process; all else as at the start."""
        self._storages = None
        for owner in self._owners:
            if isinstance(owner, ObjectOwner) and not self._put_in_place(owner):
                continue
            values, first = saved.get(owner.key, {}), self._first[owner.key]
            attributes = owner.attributes()
            for name, present in attributes.items():
                if name in values or self._is_first(owner, name, present):
                    continue
                if name in first:
                    self._reset(owner, name, present)
                elif not self._is_passing(owner, name, present) or grows(present):
                    owner.remove(name)
            for name in first.keys() - attributes.keys() - values.keys():
                owner.put(name, first[name].value)
                self._reset(owner, name, first[name].value)
            for name, (how, value) in values.items():
                self._put(owner, name, how, value)

    def _put_in_place(self, owner: ObjectOwner) -> bool:
        present = owner.present()
        return present is owner.thing or (
            present is not MISSING and is_looked_into(present) and owner.put_in_place()
        )

    # ------------------------------------------------------------ one attribute

    def _is_first(self, owner: Owner, name: str, value: Any) -> bool:
        first = self._first[owner.key].get(name)
        if first is None:
            return False
        if value is first.value and (type(value) in SCALAR_TYPES or first.mark == _UNKNOWN):
            return True
        if first.mark == self._mark(value, owner, frozenset()):
            return True
        return first.loose_mark is not first.mark and bool(
            first.loose_mark == self._mark(value, owner, self._find_registered())
        )

    def _is_passing(self, owner: Owner, name: str, value: Any) -> bool:
        """Whether a later step cannot depend on it, or it is an object that is not looked into.

        What an object got after the start and cannot be saved is taken for what it found out and
        keeps at hand.
        """
        if grows(value):
            return True
        if isinstance(owner, ObjectOwner) and name not in self._first[owner.key]:
            return not is_plain(value) or nbytes(value) > LARGE_NBYTES
        return not owner.strict and not holds_state(value)

    def _saved(self, owner: Owner, name: str, value: Any) -> tuple[str, Any]:
        first = self._first[owner.key].get(name)
        # They are made of the kind that is there.
        is_odd = type(value).__name__ == "defaultdict" or isinstance(value, enum.Enum)
        has_kind = first is not None and type(first.value) is type(value)
        if not is_plain(value) or (is_odd and not has_kind):
            raise UnsupportedState(
                f"The attribute {name} ({type(value).__qualname__}) of {owner.spoken} changed in a "
                f"step and cannot be saved: keep numbers or tensors there"
                + (", or in its state[parameter]." if owner.strict else ", or in extras.")
            )
        if nbytes(value) > LARGE_NBYTES:
            raise UnsupportedState(
                f"The attribute {name} of {owner.spoken} changed in a step, and its "
                f"{nbytes(value) / 1e6:.1f} MB are too large to be saved beside what is "
                f"registered: "
                + (
                    "keep it in its state[parameter]."
                    if owner.strict
                    else "register it as a buffer, or set it to None at the end of the body if no "
                    "later step needs it."
                )
            )
        return packed(value)

    def _reset(self, owner: Owner, name: str, present: Any) -> None:
        first = self._first[owner.key][name]
        if _is_fixed(first):
            owner.put(name, first.value)
            return
        if first.copy is not None:
            owner.put(name, first.value)
            self._put(owner, name, *first.copy)
            # A tensor that was written to has another mark, whatever its values are.
            self._first[owner.key][name] = self._noted(owner, owner.attributes()[name])
            return
        if present is not first.value and not holds_state(first.value):
            owner.put(name, first.value)
        if not self._is_first(owner, name, owner.attributes()[name]):
            raise UnsupportedState(
                f"The attribute {name} of {owner.spoken} changed in the interrupted step and "
                f"cannot be set back."
            )

    def _put(self, owner: Owner, name: str, how: str, saved: Any) -> None:
        """Give an attribute a value: in place where it is the very object of the start, which the
        script may know by other names too."""
        first = self._first[owner.key].get(name)
        first_value = None if first is None else first.value
        present = owner.attributes().get(name)
        value = unpacked(how, saved, first_value)
        in_place = first is not None and present is first_value
        if in_place and (fill(present, value) or put_into(present, value)):
            return
        owner.put(name, unpacked(*packed(value), first_value))

    # ------------------------------------------------------------ marks

    def _mark(self, value: Any, owner: Owner, known: frozenset[int], depth: int = 0) -> Any:
        """Something that is equal as long as the value is the same. ``known``: the addresses of
        tensors whose values do not matter."""
        if isinstance(value, enum.Enum):
            return type(value), value.name
        if isinstance(value, (*SCALARS, range, slice)):
            return type(value).__name__, repr(value)
        if isinstance(value, torch.Tensor):
            is_known = bool(known) and storage_of(value) in known
            return "known" if is_known else mark_of_tensor(value)
        if any(value is each for each in self._covered):
            return "covered"
        if isinstance(value, torch.Generator):
            return "generator", digest_of(value.get_state(), "a generator")
        if isinstance(value, random.Random):
            return "random", hash(value.getstate())
        if (numpy := sys.modules.get("numpy")) is not None:
            if isinstance(value, numpy.random.Generator):
                return "generator", repr(value.bit_generator.state)
            if isinstance(value, numpy.random.RandomState):
                return "generator", repr(value.get_state())
            if isinstance(value, numpy.ndarray | numpy.generic):
                return mark_of_array(value)
        if depth < 2 * MOST_DEPTH:  # a mapping's items count too
            if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
                return type(value).__name__, self._marks_in(value, owner, known, depth + 1)
            if owner.strict and is_looked_into(value):
                inside = (children_of(value) or {}).items()
                marks = {k: self._mark(v, owner, known, depth + 1) for k, v in inside}
                return "object", id(value), marks
        return ("object", id(value)) if owner.strict else _UNKNOWN

    def _marks_in(self, value: Any, owner: Owner, known: frozenset[int], depth: int) -> Any:
        if len(value) <= _MANY_ENTRIES:
            each = value.items() if isinstance(value, Mapping) else value
            parts = [self._mark(part, owner, known, depth) for part in each]
            return sorted(parts, key=repr) if isinstance(value, set | frozenset) else parts
        if isinstance(value, set | frozenset):
            return len(value), frozenset(value) if len(value) <= _MOST_ENTRIES else None
        return len(value), [_short(each, known) for each in _some(value)]


def _some(value: Any) -> Iterator[Any]:
    """The keys and values of a mapping and the entries of another container, if it is not too
    large, or some of its first and last."""
    ends = _MANY_ENTRIES // 2
    whole = len(value) <= _MOST_ENTRIES
    if whole or isinstance(value, list | tuple):
        entries = [*value] if whole else [*value[:ends], *value[-ends:]]
    else:
        entries = [*islice(value, ends), *islice(reversed(value), ends)]
    for each in entries:
        yield each
        if isinstance(value, Mapping):
            yield value[each]


def _short(value: Any, known: frozenset[int]) -> Any:
    if type(value) in SCALAR_TYPES:
        return value
    if isinstance(value, torch.Tensor):
        return "known" if known and storage_of(value) in known else short_mark(value)
    return id(value)


def _is_fixed(first: _First) -> bool:
    """Whether the value is the same as long as it is the same object."""
    value = first.value
    return (
        type(value) in SCALAR_TYPES
        or first.mark == _UNKNOWN
        or isinstance(value, enum.Enum)
        or (type(value) is tuple and set(map(type, value)) <= SCALAR_TYPES)
    )
