"""What the body of a step changes of a loader, seen from one fetch to the next.

The start of an epoch is saved by ``loader_state``. What the script changes later, such as the
weights of a sampler that follow from the losses, is another matter than what the loader itself
changes while it is read: that comes about again when the same batches are skipped, this does not.
So attributes are compared after each fetch and before the next one, and those that were changed in
between belong to the position from then on, until the epoch ends. What is too large for that, and
tensors and arrays of a dataset, are refused when they change.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any

import torch
import xxhash

from deadpool_runtime.errors import Misuse
from deadpool_runtime.loader_values import (
    LARGE_NBYTES,
    from_plain,
    is_array,
    is_container,
    is_scalar,
    plain_nbytes,
    to_plain,
)
from deadpool_runtime.loader_walk import MISSING, Held, Walk, child_of

#: Of containers and arrays with more entries some are compared.
_MOST_ENTRIES, _SAMPLES = 1 << 16, 1024


class BodyChanges:
    """Watches what ``walk`` found, and ``look`` finds when attributes came or went. ``is_saved``:
    whether a tensor is saved in another way."""

    def __init__(
        self, walk: Walk, look: Callable[[], Walk], is_saved: Callable[[torch.Tensor], bool]
    ) -> None:
        self._look = look
        self._is_saved = is_saved
        self._walk = walk
        #: Paths of what bodies have changed in this epoch.
        self._changed: set[str] = set()
        self._shape: list[int] = []
        self._plain: dict[str, _Mark] = {}
        self._fixed: dict[str, _Mark] = {}

    def begin(self, walk: Walk) -> None:
        """An epoch begins, or all is again as it was then."""
        self._walk = walk
        self._changed.clear()
        self.fetched()

    def fetched(self) -> None:
        """A batch was fetched: what changes from here on is the script's doing."""
        if _shape_of(self._walk) != self._shape:
            self._walk = self._look()
            self._shape = _shape_of(self._walk)
        self._plain = _marks_of(self._walk.plain, self._plain)
        fixed = {path: held for path, held in self._walk.opaque.items() if _is_marked(held.value)}
        self._fixed = _marks_of({**fixed, **self._walk.data}, self._fixed)

    def present(self) -> dict[str, Any]:
        """The present values of what bodies have changed in this epoch. Raises ``Misuse`` for a
        change that cannot be saved."""
        known = self._walk
        for path, mark in self._fixed.items():
            held = known.opaque.get(path) or known.data[path]
            if not mark.fits(_value(held)) and not self._is_known(path, held):
                raise _refused(path, held.value)
        self._changed |= {
            path for path, mark in self._plain.items() if not mark.fits(_value(known.plain[path]))
        }
        if _shape_of(known) != self._shape:
            self._walk = self._look()
            self._shape = _shape_of(self._walk)
            self._changed |= known.plain.keys() ^ self._walk.plain.keys()
            for path in self._walk.opaque.keys() - known.opaque.keys():
                raise _refused(path, self._walk.opaque[path].value)
        return self._values()

    def _is_known(self, path: str, held: Held) -> bool:
        value = _value(held)
        return path in self._walk.data and isinstance(value, torch.Tensor) and self._is_saved(value)

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        missing = []
        for path in sorted(self._changed):
            held = self._walk.plain.get(path)
            value = MISSING if held is None else _value(held)
            if value is MISSING:
                missing.append(path)
                continue
            nbytes = plain_nbytes(value)
            if nbytes is None or nbytes > LARGE_NBYTES:
                raise _refused(path, value)
            values[path] = to_plain(value)
        return {"values": values, "missing": missing}

    def restore(self, saved: Mapping[str, Any], put: Callable[[str, Any], None]) -> None:
        """Make what bodies had changed what it was; the loader is at the same place again."""
        for path, plain in saved["values"].items():
            put(path, from_plain(plain))
        for path in saved["missing"]:
            put(path, MISSING)
        self._changed = {*saved["values"], *saved["missing"]}


def _refused(path: str, value: Any) -> Misuse:
    return Misuse(
        f"{path.replace('/', '.')} (a {type(value).__qualname__}) was changed in the body of a "
        f"step and is not saved, so after a recovery the data would be read as if it had not been: "
        f"give attach an object in extras that has it, with state_dict and load_state_dict."
    )


def _value(held: Held) -> Any:
    return child_of(held.holder, held.name)


def _shape_of(walk: Walk) -> list[int]:
    """Another when attributes came or went."""
    holders = walk.holders.values()
    return [
        len(each if isinstance(each, list | tuple | dict) else vars_of(each)) for each in holders
    ]


def vars_of(value: Any) -> Mapping[str, Any]:
    """The attributes of an object that are in its ``__dict__``."""
    found: Mapping[str, Any] = getattr(value, "__dict__", {})
    return found


def _marks_of(where: Mapping[str, Held], known: Mapping[str, _Mark]) -> dict[str, _Mark]:
    """Of the present values, those that fit as they are."""
    marks = {}
    for path, held in where.items():
        if held.holder is not None:
            value, mark = _value(held), known.get(path)
            marks[path] = mark if mark is not None and mark.fits(value) else _Mark(value)
    return marks


def _is_marked(value: Any) -> bool:
    """Whether a change of the value can be seen at little cost."""
    return isinstance(value, torch.Tensor | list | tuple) or is_array(value)


class _Mark:
    """Tells whether a value is still the same. Of a short container it keeps a copy: comparing two
    with the same entries is what Python does fastest."""

    def __init__(self, value: Any) -> None:
        short = is_container(value) and len(value) <= _MOST_ENTRIES
        flat = short and all(map(is_scalar, value.values() if isinstance(value, dict) else value))
        self._type = type(value)
        self._copy = copy.copy(value) if flat else None
        self._mark = None if flat else _mark_of(value)

    def fits(self, value: Any) -> bool:
        if type(value) is not self._type:
            return False
        if self._copy is not None:
            return bool(value == self._copy)
        return bool(_mark_of(value) == self._mark)


def _mark_of(value: Any) -> Any:
    if is_scalar(value):
        return value
    if isinstance(value, torch.Tensor):
        version = 0 if value.is_inference() else value._version
        return id(value), value.data_ptr() if value.layout is torch.strided else 0, version
    if is_array(value):
        flat = value.reshape(-1)[:: max(1, value.size // _MOST_ENTRIES)]
        return value.shape, value.dtype.str, xxhash.xxh3_64_digest(flat.tobytes())
    if is_container(value):
        return len(value), list(map(_mark_of, _some_of(value)))
    return value if isinstance(value, range | slice) else id(value)


def _some_of(container: Any) -> Iterable[Any]:
    """The entries of a short container; of a list some from all over it, of others the first."""
    entries = chain.from_iterable(container.items()) if isinstance(container, dict) else container
    if len(container) <= _MOST_ENTRIES:
        return entries
    if isinstance(container, list | tuple):
        return container[:: len(container) // _SAMPLES]
    return islice(entries, _SAMPLES)
