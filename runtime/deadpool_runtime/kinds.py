"""Kinds of tensors and optimizers that need care, and the plain tensors that they consist of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from deadpool_runtime.errors import UnsupportedState

#: The types of tensors that are what they seem to be: most of them, and asked about in every step.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of any kind."""
    return isinstance(value, torch.Tensor)


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor, of which this process has a part."""
    if type(tensor) in PLAIN_TYPES:
        return False
    # By name, since importing the class takes long where nobody uses it.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_zero(optimizer: object) -> bool:
    """Whether it is a ZeroRedundancyOptimizer: each rank trains some of the parameters with an
    optimizer inside it."""
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a DTensor, in the same memory; any other tensor itself."""
    if type(tensor) in PLAIN_TYPES:
        return tensor
    found: Any = tensor
    while is_dtensor(found):
        found = found._local_tensor
    assert isinstance(found, torch.Tensor)
    return found


def plain_parts(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with memory of their own that this one consists of here, with keys for them."""
    tensor = local_part(tensor)
    names = inner_names(tensor)
    if not names:
        yield key, tensor
    for name in names:
        yield from plain_parts(f"{key}//{name}", getattr(tensor, name))


def inner_names(tensor: torch.Tensor) -> list[str]:
    """The attributes that hold the memory of a subclass which wraps others; none of a plain one."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "__tensor_flatten__"):
        return []
    names: list[str] = tensor.__tensor_flatten__()[0]
    return names


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The part of an expanded tensor that owns memory, so that it can be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors that have no plain memory to copy."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_neg():
        raise UnsupportedState(
            f"{name} is not a plain dense tensor ({tensor.layout}), so it cannot be saved."
        )
