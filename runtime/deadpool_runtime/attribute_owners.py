"""Who has attributes that may be state: modules, optimizers, and objects that modules hold."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from deadpool_runtime.kinds import is_zero
from deadpool_runtime.modules import path_of
from deadpool_runtime.values import SCALAR_TYPES, is_looked_into, is_torchs

#: Objects that are looked into at most, entries of a container that are looked at for them, and
#: names on the way to one.
_MOST_OBJECTS, _MOST_ENTRIES, _MOST_NAMES = 2000, 1000, 6
_MODULE_NAMES = frozenset(vars(nn.Module()))
_OPTIMIZER_NAMES = frozenset(
    (*vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)), "step", "_opt_called", "_step_count")
)
#: In the place of what is not there.
MISSING: Any = object()


class Owner:
    """Something with attributes. ``names``: those that are not its own.

    ``strict``: objects in it are refused when they change. ``only_simple``: numbers and text in it
    count, and nothing else.
    """

    strict = False
    only_simple = False

    def __init__(self, key: str, thing: Any, spoken: str, names: frozenset[str]) -> None:
        self.key = key
        self.thing = thing
        self.spoken = spoken
        self._names = names
        self._slots = _slots_of(type(thing))
        self._get: Callable[[Any], Any] | None = None
        self._values: tuple[Any, ...] = ()
        self._count = 0
        self._loose: list[str] = []

    def attributes(self) -> dict[str, Any]:
        """All that it has at present."""
        found = {
            name: getattr(self.thing, name) for name in self._slots if hasattr(self.thing, name)
        }
        found |= getattr(self.thing, "__dict__", {})
        return {
            name: value
            for name, value in found.items()
            if name not in self._names and not (self.only_simple and not _is_simple(value))
        }

    def note(self, fixed: Iterable[str]) -> None:
        """``fixed``: the attributes whose present values cannot change inside."""
        names = list(fixed)
        inside = getattr(self.thing, "__dict__", None)
        if inside is None or self._slots or not set(names) <= inside.keys():
            return
        self._loose = [name for name in self.attributes() if name not in set(names)]
        # One name more than there are, or it would not return a tuple of one.
        self._get = operator.itemgetter(*names, *names[:1]) if names else lambda _: ()
        self._values = self._get(inside)
        self._count = len(inside)

    def suspects(self) -> tuple[dict[str, Any], bool]:
        """Those that may not be as they were when ``note`` was called, and whether these are all
        that there are."""
        inside = getattr(self.thing, "__dict__", {})
        if self._get is not None and len(inside) == self._count:
            try:
                if all(map(operator.is_, self._get(inside), self._values)):
                    return {name: inside[name] for name in self._loose}, False
            except KeyError:
                pass
        return self.attributes(), True

    def put(self, name: str, value: Any) -> None:
        """Set an attribute."""
        setattr(self.thing, name, value)

    def remove(self, name: str) -> None:
        """Take an attribute away."""
        delattr(self.thing, name)


class OptimizerOwner(Owner):
    """An optimizer of a class of the script's own."""

    strict = True


class TorchOwner(Owner):
    """A module of one of torch's own classes."""

    only_simple = True


class ObjectOwner(Owner):
    """An object of the script's own that a module holds, at ``path`` from its attributes on."""

    def __init__(self, holder: Owner, path: tuple[Any, ...], thing: Any) -> None:
        place = ".".join(map(str, path))
        kind = type(thing).__qualname__
        spoken = f"the object {place} ({kind}) of {holder.spoken}"
        super().__init__(f"{holder.key}@{place}", thing, spoken, frozenset())
        self._holder = holder
        self._path = path

    def present(self) -> Any:
        """What lies at its place."""
        return _at(self._holder.thing, self._path)

    def put_in_place(self) -> bool:
        """Put the object where it was; false if there is no such place any more."""
        place = _at(self._holder.thing, self._path[:-1])
        name = self._path[-1]
        if (isinstance(place, list) and len(place) > name) or isinstance(place, dict):
            place[name] = self.thing
        elif isinstance(place, tuple | list) or place is MISSING:
            return False
        else:
            object.__setattr__(place, name, self.thing)
        return True

    def put(self, name: str, value: Any) -> None:
        """Set an attribute, of a frozen object too."""
        object.__setattr__(self.thing, name, value)

    def remove(self, name: str) -> None:
        """Take an attribute away."""
        object.__delattr__(self.thing, name)


def owners_of(
    modules: Iterable[tuple[str, nn.Module]], optimizers: Iterable[Optimizer], covered: list[Any]
) -> list[Owner]:
    """All of them, each before what it holds. ``covered``: objects that are none."""
    found: list[Owner] = []
    for key, module in modules:
        kind = type(module)
        spoken = f"the module {path_of(key)} ({kind.__qualname__})"
        if not is_torchs(kind):
            found.append(Owner(key, module, spoken, _MODULE_NAMES))
        elif kind.__module__.startswith("torch.nn.modules."):
            found.append(TorchOwner(key, module, spoken, _MODULE_NAMES))
    holders = [each for each in found if not each.only_simple]
    for index, given in enumerate(optimizers):
        optimizer: Any = given.optim if is_zero(given) else given  # type: ignore[attr-defined]
        if not is_torchs(type(optimizer)):
            spoken = f"the optimizer {type(optimizer).__qualname__}"
            found.append(OptimizerOwner(f"o/{index}", optimizer, spoken, _OPTIMIZER_NAMES))
    seen = {id(each): each for each in (*covered, *(owner.thing for owner in found))}
    objects = (
        ObjectOwner(holder, path, thing)
        for holder in holders
        for path, thing in _objects_in(holder, seen)
    )
    return [*found, *itertools.islice(objects, _MOST_OBJECTS)]


def _objects_in(holder: Owner, seen: dict[int, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    pending: list[tuple[tuple[Any, ...], Any]] = [
        ((name,), value) for name, value in reversed(holder.attributes().items())
    ]
    while pending:
        path, value = pending.pop()
        if type(value) in SCALAR_TYPES or id(value) in seen or len(path) > _MOST_NAMES:
            continue
        children: list[tuple[Any, Any]] = []
        if type(value) in (dict, list, tuple) and len(value) <= _MOST_ENTRIES:
            seen[id(value)] = value
            children = list(value.items() if isinstance(value, dict) else enumerate(value))
        elif is_looked_into(value):
            seen[id(value)] = value
            yield path, value
            children = list(getattr(value, "__dict__", {}).items())
        pending += [((*path, name), child) for name, child in reversed(children)]


def _at(thing: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        try:
            inside = thing if isinstance(thing, dict | list | tuple) else vars(thing)
            thing = inside[name]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return thing


def _slots_of(kind: type) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _is_simple(value: Any) -> bool:
    if type(value) in (list, tuple, dict):
        values: Mapping[Any, Any] | list[Any] | tuple[Any, ...] = value
        inside = values.values() if isinstance(values, Mapping) else values
        return set(map(type, inside)) <= SCALAR_TYPES
    return type(value) in SCALAR_TYPES
