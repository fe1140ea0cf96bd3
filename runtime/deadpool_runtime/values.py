"""What kinds of values attributes have: which can be saved, and which a later step may need."""

from __future__ import annotations

import argparse
import enum
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from deadpool_runtime.encoding import detached_copy, digest_of
from deadpool_runtime.kinds import local_part
from deadpool_runtime.loader_values import from_plain, is_array, to_plain

#: Tensors on the CPU and arrays up to this size are compared by value; larger tensors by torch's
#: count of writes, larger arrays by samples.
BY_VALUE_NBYTES = 64 << 10
#: In the place of the address of memory that there is not.
NOWHERE = -1
SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
SCALAR_TYPES = frozenset(SCALARS)
#: Containers that ``detached_copy`` copies; the others are saved as ``to_plain`` makes them.
_SIMPLE = frozenset({list, tuple, dict, set})
_SEQUENCES = (list, tuple, set, frozenset, deque)
_DICTS: tuple[Any, ...] = (dict, OrderedDict, Counter, defaultdict)
#: Containers are followed to this depth.
MOST_DEPTH = 12
#: Objects of the standard library that are bundles of attributes.
_BUNDLES = (types.SimpleNamespace, argparse.Namespace)
#: Packages whose objects are no part of a model: the trainer that a LightningModule knows is saved
#: by its adapter.
_NOT_THE_SCRIPTS = frozenset(
    {"torch", "numpy", "deadpool_runtime", "lightning", "pytorch_lightning"}
)
#: How a value was packed, where it is not as it is: a kind of ``to_plain``, an enumeration's value.
_PLAIN, _ENUM = "plain", "enum"


def is_torchs(kind: type) -> bool:
    """Whether nothing but torch defines what its objects do."""
    return all(
        base.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing", "collections")
        for base in kind.__mro__
    )


def is_looked_into(value: Any) -> bool:
    """Whether it is an object of the script's own, whose attributes may be state."""
    module = type(value).__module__.partition(".")[0]
    return isinstance(value, _BUNDLES) or (
        (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))
        and not isinstance(value, type | nn.Module | Optimizer | torch.Tensor | enum.Enum | tuple)
        and module not in _NOT_THE_SCRIPTS
        and module not in sys.stdlib_module_names
    )


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory; of none at all where there is no such thing."""
    tensor = local_part(tensor)
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return NOWHERE
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a subclass without storage of its own
        return NOWHERE


def mark_of_tensor(tensor: torch.Tensor) -> Any:
    """Something that is equal as long as nobody writes to the tensor."""
    size = tensor.numel() * tensor.element_size()
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if plain and tensor.device.type == "cpu" and size <= BY_VALUE_NBYTES:
        return "tensor", digest_of(tensor, "a tensor")
    return short_mark(tensor)


def short_mark(tensor: torch.Tensor) -> Any:
    """The same without a look at the values."""
    return "tensor", id(tensor), 0 if tensor.is_inference() else tensor._version


def mark_of_array(array: Any) -> Any:
    """The same of numpy's arrays and numbers."""
    if array.dtype.hasobject:
        return "array", id(array)
    values = array.reshape(-1)
    whole = array.nbytes <= BY_VALUE_NBYTES
    some = values if whole else values[:: max(1, values.size // BY_VALUE_NBYTES)]
    digest = xxhash.xxh3_64_hexdigest(some.tobytes())
    return "array", array.dtype.str, array.shape, digest, None if whole else id(array)


def leaves(value: Any, depth: int = 0) -> Iterable[Any]:
    """What a value consists of that is no container, or a container too deep inside."""
    if isinstance(value, Mapping) and depth < MOST_DEPTH:
        for key, each in value.items():
            yield from leaves(key, depth + 1)
            yield from leaves(each, depth + 1)
    elif isinstance(value, _SEQUENCES) and depth < MOST_DEPTH:
        for each in value:
            yield from leaves(each, depth + 1)
    else:
        yield value


def grows(value: Any) -> bool:
    """Whether it holds an activation: the graph that made it is gone when the next step begins."""
    return any(
        isinstance(each, torch.Tensor) and each.grad_fn is not None for each in leaves(value)
    )


def holds_state(value: Any) -> bool:
    """Whether a module whose attribute this is depends on its value."""
    numpy = sys.modules.get("numpy")
    kinds: tuple[Any, ...] = (*SCALARS, torch.Tensor, torch.Generator, random.Random)
    kinds += (enum.Enum, range, slice)
    if numpy is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState, numpy.ndarray, numpy.generic)
    return all(isinstance(each, kinds) for each in leaves(value))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it can be saved with the own part; tensors in containers only on the CPU."""
    kind = type(value)
    if kind in SCALAR_TYPES or kind in (range, slice):
        return True
    if depth > MOST_DEPTH:
        return False
    if isinstance(value, torch.Tensor):
        return (
            kind is torch.Tensor
            and value.layout == torch.strided
            and not (value.is_meta or value.is_quantized)
            and not (depth and value.device.type != "cpu")
        )
    if kind in _SEQUENCES:
        return set(map(type, value)) <= SCALAR_TYPES or all(
            is_plain(each, depth + 1) for each in value
        )
    if kind in _DICTS:
        # What a defaultdict makes its entries with cannot be saved: it must be there already.
        return not (depth and kind is defaultdict) and all(
            type(key) in (*SCALARS, tuple)
            and is_plain(key, depth + 1)
            and is_plain(item, depth + 1)
            for key, item in value.items()
        )
    if isinstance(value, enum.Enum):
        return not depth and type(value.value) in SCALAR_TYPES
    return is_array(value)


def nbytes(value: Any) -> int:
    """Bytes of all tensors and arrays in it."""
    return sum(
        each.numel() * each.element_size() if isinstance(each, torch.Tensor) else int(each.nbytes)
        for each in leaves(value)
        if isinstance(each, torch.Tensor) or is_array(each)
    )


def _is_simple(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= SCALAR_TYPES and all(map(_is_simple, value.values()))
    if kind in _SIMPLE:
        return set(map(type, value)) <= SCALAR_TYPES or all(map(_is_simple, value))
    return kind in SCALAR_TYPES or isinstance(value, torch.Tensor)


def packed(value: Any) -> tuple[str, Any]:
    """A copy of a plain value, such that it can be encoded, and how it was made: for a tensor the
    type of its device."""
    if isinstance(value, enum.Enum):
        return _ENUM, value.value
    if not _is_simple(value):
        return _PLAIN, to_plain(value)
    return value.device.type if isinstance(value, torch.Tensor) else "", detached_copy(value)


def unpacked(how: str, saved: Any, first: Any) -> Any:
    """The value that ``packed`` was given. ``first``: what the attribute was at the start, of whose
    kind an enumeration's value is."""
    if how == _ENUM:
        return type(first)(saved)
    if how == _PLAIN:
        return from_plain(saved)
    return saved.to(how) if how else saved
