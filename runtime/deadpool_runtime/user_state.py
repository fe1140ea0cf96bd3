"""``job.state``: what may be in it, its copy, and the way back into the containers that are there.

A script has names for the lists and dicts in it (``hist = job.state.setdefault("hist", [])``), and
one list may stand under two keys. Both stay true: a copy has one list where the original has one,
and what is restored is put into the containers and tensors that the script knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deadpool_runtime.encoding import detached_copy
from deadpool_runtime.errors import UnsupportedState

_NUMBERS = frozenset({int, float, bool, type(None)})
_KINDS = (dict, list, tuple, set)


def require_plain(state: dict[str, Any]) -> set[type]:
    """Raise ``UnsupportedState``, naming the key, for what a copy could not have or would have
    otherwise. Returns the types of all that is in it."""
    found: set[type] = {dict}
    for key, value in state.items():
        _look_at_key(key, f"{key!r}", found)
        _look(value, f"{key!r}", found, (id(state),))
    return found


def _look_at_key(key: Any, where: str, found: set[type]) -> None:
    if isinstance(key, float) and key != key:
        _refuse(where, "a value under the key nan, which no look-up finds again")
    _look(key, where, found, ())


def _look(value: Any, where: str, found: set[type], outer: tuple[int, ...]) -> None:
    found.add(type(value))
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= each <= "\udfff" for each in value):
            _refuse(where, f"the text {value!r}, which is no Unicode (a lone surrogate)")
    elif isinstance(value, torch.Tensor):
        kind = _odd_kind(value)
        if kind:
            _refuse(where, f"a {kind} tensor, of which no copy can be made: keep a dense one")
    elif isinstance(value, Mapping):
        _require_no_cycle(value, where, outer)
        for key, item in value.items():
            _look_at_key(key, where, found)
            _look(item, f"{where} at {key!r}", found, (*outer, id(value)))
    elif isinstance(value, list | tuple | set):
        types = set(map(type, value))
        if types <= _NUMBERS:
            found |= types
            return
        _require_no_cycle(value, where, outer)
        for index, item in enumerate(value):
            _look(item, f"{where} at {index}", found, (*outer, id(value)))


def _require_no_cycle(value: Any, where: str, outer: tuple[int, ...]) -> None:
    if id(value) in outer:
        _refuse(where, f"a {type(value).__qualname__} that contains itself")


def _refuse(where: str, what: str) -> None:
    raise UnsupportedState(f"job.state holds at {where} {what}.")


def _odd_kind(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return "sparse"
    if tensor.device.type == "meta":
        return "meta"
    return "quantized" if tensor.is_quantized else ""


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing with ``state`` and has one object where ``state`` has one."""
    copy: dict[str, Any] = _copy(state, {})
    return copy


def _copy(value: Any, known: dict[int, Any]) -> Any:
    """``known``: what was copied already, by the original's id."""
    if id(value) in known:
        return known[id(value)]
    made: Any
    if type(value) is dict:
        made = {key: _copy(item, known) for key, item in value.items()}
    elif type(value) in (list, tuple):
        if set(map(type, value)) <= _NUMBERS:
            made = type(value)(value)
        else:
            made = type(value)(_copy(item, known) for item in value)
    else:
        made = detached_copy(value)
        if made is value:
            return made
    known[id(value)] = made
    return made


def put_back(present: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Make ``present`` equal to ``saved``, in the containers and tensors that it has."""
    _Restoring().settle(present, saved)


class _Restoring:
    def __init__(self) -> None:
        #: By the id of a saved object, what it became; and the ids of what is used up by that.
        self._became: dict[int, Any] = {}
        self._used: set[int] = set()

    def settle(self, present: Any, saved: Any) -> Any:
        """What stands for ``saved``: ``present`` with its value, or something of its own."""
        if id(saved) in self._became:
            return self._became[id(saved)]
        fits = type(present) is type(saved) and id(present) not in self._used
        known = type(saved) in _KINDS or (isinstance(saved, dict) and fits)
        if not known and not isinstance(saved, torch.Tensor):
            return detached_copy(saved)
        result: Any
        if isinstance(saved, torch.Tensor):
            result = self._tensor(present if fits else None, saved)
        elif isinstance(saved, tuple):
            old = present if fits and len(present) == len(saved) else (None,) * len(saved)
            result = tuple(map(self.settle, old, saved))
        else:
            result = present if fits else type(saved)()
            self._became[id(saved)] = result
            self._used.add(id(result))
            self._fill(result, saved)
        self._became[id(saved)] = result
        self._used.add(id(result))
        return result

    def _tensor(self, present: torch.Tensor | None, saved: torch.Tensor) -> torch.Tensor:
        if (
            present is None
            or (present.shape, present.dtype) != (saved.shape, saved.dtype)
            or present.is_inference()
            or _odd_kind(present)
        ):
            return saved.detach().clone()
        with torch.no_grad():
            try:
                present.copy_(saved)
            except RuntimeError:  # an expanded one has one element for many
                return saved.detach().clone()
        return present

    def _fill(self, result: Any, saved: Any) -> None:
        if isinstance(result, list):
            old = [*result, *[None] * (len(saved) - len(result))]
            result[:] = [self.settle(a, b) for a, b in zip(old, saved, strict=False)]
        elif isinstance(result, dict):
            old_items = dict(result)
            new = {key: self.settle(old_items.get(key), item) for key, item in saved.items()}
            result.clear()
            result.update(new)
        else:
            result.clear()
            result.update(saved)
