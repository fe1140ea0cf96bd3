"""A walk through a loader: its generators, its attributes, and what nobody can look into."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import pathlib
import re
import threading
import types
import uuid
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from deadpool_runtime.errors import Misuse
from deadpool_runtime.generators import is_generator
from deadpool_runtime.loader_values import (
    LARGE_NBYTES,
    is_array,
    mark_of,
    plain_nbytes,
    put_into,
)

MISSING = object()
#: Objects of a dataset that are looked into at most, and entries of a container in it.
_MOST_OBJECTS, _MOST_ENTRIES = 20_000, 1000
#: Tensors and arrays of datasets that are watched at most.
_MOST_WATCHED = 256
#: What has no part in the order of the data, or never changes.
_INERT: tuple[Any, ...] = (
    *(type, types.ModuleType, re.Pattern, logging.Logger, nn.Module, torch.optim.Optimizer),
    *(datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, pathlib.PurePath, enum.Enum, weakref.ref, torch.Stream, torch.Event),
    *(type(threading.Lock()), type(threading.RLock()), type(...), type(NotImplemented)),
    *((dist.ProcessGroup, dist.Store) if dist.is_available() else ()),
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
#: Packages whose objects are data.
_TABLES = frozenset({"pandas", "polars", "pyarrow", "datasets", "h5py", "zarr", "lmdb"})
#: Names under which samplers have the dataset.
_DATASET_NAMES = frozenset({"data_source", "dataset"})
_LOADER_NAMES = frozenset(vars(DataLoader(TensorDataset(torch.zeros(1))))) - {
    "generator",
    "sampler",
    "batch_sampler",
}


@dataclass(frozen=True)
class Held:
    """A value and where it is: attribute, key or index ``name`` of ``holder``."""

    holder: Any
    name: Any
    value: Any


class Walk:
    """What was found, each by its path, such as ``loader/batch_sampler/sampler/seed``.

    Paths are the same in every process that runs the same script. ``only_generators``: look for
    nothing else, anywhere.
    """

    def __init__(self, loader: Any, *, only_generators: bool = False) -> None:
        self.generators: dict[str, Any] = {}
        #: Attributes that can be saved.
        self.plain: dict[str, Held] = {}
        #: Attributes that are watched.
        self.opaque: dict[str, Held] = {}
        #: Tensors and arrays of datasets, which must not change.
        self.data: dict[str, Held] = {}
        #: What is saved by its ``state_dict``.
        self.objects: dict[str, Any] = {}
        #: What was looked into.
        self.holders: dict[str, Any] = {}
        self.has_workers = False
        self._unknown: dict[str, Any] = {}
        self._seen: dict[int, Any] = {}
        self._datasets: dict[int, Any] = {}
        self._of_dataset: list[str] = []
        of_data = isinstance(loader, list | tuple | torch.Tensor | Mapping | Dataset)
        if only_generators or of_data:
            self._read("loader", loader)
        else:
            self._look("loader", Held(None, "", loader))

    def require_known(self) -> None:
        """Raise ``Misuse`` for what cannot be brought back in another process."""
        for path, value in self._unknown.items():
            raise Misuse(
                f"job.steps cannot save {path.replace('/', '.')} (a "
                f"{type(value).__module__}.{type(value).__qualname__}), which may have a place of "
                f"its own, so the order of the data could be another after a recovery: make it "
                f"anew for each epoch, or give what it belongs to state_dict and load_state_dict."
            )
        if self.has_workers and self._of_dataset:
            path = self._of_dataset[0].replace("/", ".")
            raise Misuse(
                f"{path} is a random generator that runs on in the DataLoader's worker processes, "
                f"where it cannot be saved: use torch's, Python's or numpy's global one there, "
                f"num_workers=0, or a generator made anew for each item."
            )

    # ------------------------------------------------------------ what decides about the order

    def _look(self, path: str, held: Held) -> None:
        value = held.value
        if isinstance(value, _INERT) or _is_output(value) or id(value) in self._datasets:
            return
        if _is_data(held):
            self._read(path, value)
            return
        nbytes = plain_nbytes(value)
        if nbytes is not None:
            into = self.plain if nbytes <= LARGE_NBYTES else self.opaque
            into[path] = held
        elif id(value) in self._seen:
            return
        elif is_generator(value):
            self._seen[id(value)] = value
            self.generators[path] = value
        elif isinstance(value, _FUNCTIONS):
            self._read(path, value)
        else:
            self._seen[id(value)] = value
            self._look_into(path, held)

    def _look_into(self, path: str, held: Held) -> None:
        value = held.value
        children = children_of(value)
        if children is None:
            if isinstance(value, Iterator) or mark_of(value) is None:
                self._unknown[path] = value
            else:
                self.opaque[path] = held
            return
        before = dict(self._unknown)
        self.holders[path] = value
        if isinstance(value, DataLoader):
            self.has_workers |= value.num_workers > 0
            self._read(f"{path}/dataset", value.dataset)
            self._datasets[id(value.dataset)] = value.dataset  # samplers may have it under any name
            self._read(f"{path}/collate_fn", value.collate_fn)
        for name, child in children.items():
            if not (isinstance(value, DataLoader) and name in _LOADER_NAMES):
                self._look(f"{path}/{name}", Held(value, name, child))
        if len(self._unknown) > len(before) and _has_state_dict(value):
            self._unknown = before
            self._forget_under(path)
            self.objects[path] = value

    def _forget_under(self, path: str) -> None:
        for found in (self.plain, self.opaque, self.objects):
            for inner in [each for each in found if each.startswith(f"{path}/")]:
                del found[inner]

    # ------------------------------------------------------------ what is only read

    def _read(self, path: str, value: Any) -> None:
        """Look for generators in a dataset or a function."""
        pending = [(path, value, Held(None, "", value))]
        for _ in range(_MOST_OBJECTS):
            if not pending:
                return
            path, each, held = pending.pop()
            if is_generator(each):
                self._of_dataset.append(path)
                if id(each) not in map(id, self.generators.values()):
                    self.generators[path] = each
                continue
            if isinstance(each, torch.Tensor) or is_array(each):
                self._watch(path, held)
            if id(each) in self._seen or isinstance(each, (*_INERT, torch.Tensor, str, bytes)):
                continue
            self._seen[id(each)] = each
            if type(each).__module__.partition(".")[0] in _TABLES:
                continue
            pending += [
                (f"{path}/{name}", child, Held(each, name, child))
                for name, child in _read_children(each)
            ]

    def _watch(self, path: str, held: Held) -> None:
        """Have a tensor or array watched; parameters are the training's own matter."""
        there = child_of(held.holder, held.name) is held.value
        if there and len(self.data) < _MOST_WATCHED and not isinstance(held.value, nn.Parameter):
            self.data[path] = held


def _read_children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return [("self", value.__self__)]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("arguments", [value.args, value.keywords])]
    if isinstance(value, types.FunctionType):
        found = [("defaults", [value.__defaults__, value.__kwdefaults__])]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                found.append((name, cell.cell_contents))
            except ValueError:  # not bound yet
                continue
        return found
    if isinstance(value, list | tuple) and len(value) > _MOST_ENTRIES:
        value = value[:_MOST_ENTRIES]
    children = children_of(value) or {}
    simple = (bool, int, float, str, bytes, type(None))
    return [
        (name, child)
        for name, child in children.items()
        if not isinstance(child, simple) and name != "_iterator"
    ]


def children_of(value: Any) -> dict[Any, Any] | None:
    """The parts of an object or container by name, key or index; None if nobody can tell."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return dict(value)
    names = [
        name
        for kind in type(value).__mro__
        for name in _as_tuple(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    if not hasattr(value, "__dict__") and not names:
        return None
    return {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}


def child_of(holder: Any, name: Any) -> Any:
    """One of ``children_of`` an object or container, or ``MISSING``."""
    if isinstance(holder, list | tuple):
        return holder[name] if isinstance(name, int) and name < len(holder) else MISSING
    if isinstance(holder, dict):
        return holder.get(name, MISSING)
    attributes = getattr(holder, "__dict__", {})
    if name in attributes:
        return attributes[name]
    return getattr(holder, name, MISSING) if isinstance(name, str) and name else MISSING


def put_child(holder: Any, name: Any, value: Any) -> None:
    """Set a part of a container or an object, in place if it is a container itself; remove it if
    ``value`` is ``MISSING``."""
    present = (children_of(holder) or {}).get(name, MISSING)
    if value is MISSING:
        if present is MISSING or isinstance(holder, list | tuple):
            return
        if isinstance(holder, dict):
            del holder[name]
        else:
            delattr(holder, name)
    elif present is not MISSING and put_into(present, value):
        return
    elif isinstance(holder, dict | list):
        holder[name] = value
    elif not isinstance(holder, tuple):
        object.__setattr__(holder, name, value)


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_output(value: Any) -> bool:
    """Whether it is a file that is only written to."""
    try:
        return isinstance(value, io.IOBase) and not value.readable()
    except ValueError:  # closed
        return True


def _is_data(held: Held) -> bool:
    value = held.value
    return (
        isinstance(value, Dataset)
        or (held.name in _DATASET_NAMES and not isinstance(value, DataLoader))
        or type(value).__module__.partition(".")[0] in _TABLES
    )


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
