"""Values that loaders and samplers have as attributes: which are plain, and their marks."""

from __future__ import annotations

import pickle
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import xxhash

from deadpool_runtime.encoding import digest_of

#: Values of more bytes are not saved, only watched.
LARGE_NBYTES = 4 << 20
#: Objects that say they have more bytes than this are known by their identity only.
_HUGE_NBYTES = 64 << 20
_MOST_DEPTH = 12
_SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
_DICTS: tuple[Any, ...] = (dict, OrderedDict, Counter, defaultdict)
_LISTS = (list, tuple, set, frozenset, deque)
_CONTAINERS = frozenset({*_DICTS, *_LISTS})


def plain_nbytes(value: Any) -> int | None:
    """About how many bytes a value has that consists of nothing but numbers, text, tensors, arrays
    and containers of them; None for anything else."""
    nbytes, level = 0, [value]
    for _ in range(_MOST_DEPTH):
        types = set(map(type, level))
        inner = []
        if not types <= _SCALARS:
            rest = [each for each in level if type(each) not in _SCALARS]
            for each in rest:
                if type(each) in _CONTAINERS:
                    inner.append(each)
                elif isinstance(each, torch.Tensor):
                    nbytes += each.numel() * each.element_size()
                elif is_array(each):
                    nbytes += int(each.nbytes)
                elif not isinstance(each, range | slice):
                    return None
        nbytes += 8 * len(level)
        if not inner:
            return nbytes
        level = list(chain.from_iterable(map(_entries, inner)))
    return None


def _entries(container: Any) -> Iterable[Any]:
    if isinstance(container, Mapping):
        return chain(container.keys(), container.values())
    entries: Iterable[Any] = container
    return entries


def is_scalar(value: Any) -> bool:
    """Whether it is a number, text or the like, which never changes."""
    return type(value) in _SCALARS


def is_container(value: Any) -> bool:
    """Whether it is a container of which values may consist that are plain."""
    return type(value) in _CONTAINERS


def is_array(value: Any) -> bool:
    """Whether it is an array or a number of numpy's that consists of plain numbers or text."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
        and not value.dtype.hasobject
        and value.dtype.names is None
    )


def to_plain(value: Any) -> Any:
    """A plain value as numbers, text and tensors alone, sharing nothing with it."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if type(value) in _SCALARS:
        return value
    if is_array(value):
        words = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)
        kind = "array" if type(value) is sys.modules["numpy"].ndarray else "scalar"
        return {"as": kind, "dtype": value.dtype.str, "of": value.shape, "words": words}
    if isinstance(value, range | slice):
        return {"as": type(value).__name__, "of": (value.start, value.stop, value.step)}
    if isinstance(value, Mapping):
        items = [[to_plain(key), to_plain(item)] for key, item in value.items()]
        return {"as": type(value).__name__, "of": items}
    numbers = _as_integers(value)
    if numbers is not None:
        return {"as": type(value).__name__, "integers": numbers}
    entries = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    plain: dict[str, Any] = {"as": type(value).__name__, "of": [to_plain(each) for each in entries]}
    if isinstance(value, deque):
        plain["most"] = value.maxlen
    return plain


def _as_integers(value: Any) -> torch.Tensor | None:
    """A long list of small integers as a tensor: pickling and hashing it is much faster."""
    if type(value) not in (list, tuple) or len(value) < 16 or set(map(type, value)) != {int}:
        return None
    try:
        return torch.frombuffer(bytearray(array("q", value).tobytes()), dtype=torch.int64)
    except OverflowError:
        return None


def from_plain(plain: Any) -> Any:
    """The value that ``to_plain`` was given; a ``defaultdict`` comes back as a dict."""
    if isinstance(plain, torch.Tensor):
        return plain.clone()
    if not isinstance(plain, Mapping):
        return plain
    kind = plain["as"]
    if kind in ("array", "scalar"):
        import numpy

        dtype, shape = numpy.dtype(plain["dtype"]), tuple(plain["of"])
        count = int(numpy.prod(shape, dtype=numpy.int64))
        words = plain["words"].numpy().tobytes()
        made = numpy.frombuffer(words, dtype, count).reshape(shape).copy()
        return made if kind == "array" else made[()]
    if kind in ("range", "slice"):
        return (range if kind == "range" else slice)(*plain["of"])
    for known in _DICTS:
        if kind == known.__name__:
            items = {from_plain(key): from_plain(item) for key, item in plain["of"]}
            return items if kind in ("dict", "defaultdict") else known(items)
    whole = plain["integers"].tolist() if "integers" in plain else map(from_plain, plain["of"])
    if kind == "deque":
        return deque(whole, plain["most"])
    return next(known for known in _LISTS if kind == known.__name__)(whole)


def mark_of(value: Any) -> Any:
    """Something that is another when the value has changed; None if nothing tells."""
    nbytes = plain_nbytes(value)
    if nbytes is not None and nbytes <= LARGE_NBYTES:
        return digest_of(to_plain(value), "a loader's attribute")
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if is_array(value):
        step = max(1, value.size // 65536)
        return id(value), value.shape, xxhash.xxh3_64_hexdigest(value.reshape(-1)[::step].tobytes())
    if type(value) in (list, tuple):
        some = value[:: max(1, len(value) // 1024)]
        return id(value), len(value), tuple(map(_short_mark, some))
    if nbytes is not None or int(getattr(value, "nbytes", 0) or 0) > _HUGE_NBYTES:
        return id(value)
    try:
        return xxhash.xxh3_64_hexdigest(pickle.dumps(value))
    except Exception:  # whatever an unknown object raises, it cannot be compared
        return None


def _short_mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    return value if type(value) in _SCALARS else id(value)


def put_into(present: Any, value: Any) -> bool:
    """Give a container, tensor or array that is there the value; false if it is of another kind.
    Other parts of the script may hold it."""
    if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
        if (present.shape, present.dtype) != (value.shape, value.dtype):
            return False
        with torch.no_grad():
            present.copy_(value)
        return True
    if isinstance(present, defaultdict) and isinstance(value, dict):
        present.clear()
        present.update(value)
        return True
    if type(present) is not type(value):
        return False
    if isinstance(present, list):
        present[:] = value
    elif isinstance(present, dict | set):
        present.clear()
        present.update(value)
    elif isinstance(present, deque) and present.maxlen == value.maxlen:
        present.clear()
        present.extend(value)
    elif is_array(present) and present.ndim and present.flags.writeable:
        if (present.shape, present.dtype) != (value.shape, value.dtype):
            return False
        present[...] = value
    else:
        return False
    return True
