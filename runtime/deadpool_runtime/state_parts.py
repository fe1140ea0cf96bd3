"""Pieces of ``state`` that need nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from deadpool_runtime.attributes import LARGE_NBYTES
from deadpool_runtime.encoding import detached_copy
from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.values import storage_of

#: In the place of a gradient: there was none, or one that is not sparse.
NO_GRADIENT, DENSE = -1, 0


def load(give: Callable[[Any], Any], saved: Any, name: str, item: Any) -> None:
    """Call the script's own ``load_state_dict`` or the like."""
    try:
        give(detached_copy(saved))
    except Exception as error:
        # The next try would end the same way, so this must not pass for a lost peer's echo.
        raise UnsupportedState(
            f"The state of {name} ({type(item).__qualname__}) was saved and cannot be brought "
            f"back: its {give.__name__} raised {type(error).__name__}: {error}"
        ) from error


def kind_of_gradient(gradient: torch.Tensor | None) -> int:
    """What kind of zero takes the gradient's place; for a sparse one, its sparse dimensions."""
    if gradient is None:
        return NO_GRADIENT
    return gradient.sparse_dim() if gradient.is_sparse else DENSE


def sparse_zeros(like: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    """What ``zero_`` leaves of a sparse gradient."""
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=like.device)
    values = like.new_empty((0, *like.shape[sparse_dim:]))
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=True, check_invariants=False
    )


def has_more(module: nn.Module, registered: Iterable[torch.Tensor]) -> bool:
    """Whether a module's own ``state_dict`` has more than the tensors that are registered.

    Then it is saved like that of any other object. Raises ``UnsupportedState`` if that is much.
    """
    if _defines(type(module), "state_dict").startswith("torch."):
        return False
    known = {storage_of(tensor) for tensor in registered}
    more = {
        key: value
        for key, value in module.state_dict().items()
        if not isinstance(value, torch.Tensor) or storage_of(value) not in known
    }
    tensors = [each for each in more.values() if isinstance(each, torch.Tensor)]
    nbytes = sum(each.numel() * each.element_size() for each in tensors)
    if nbytes > LARGE_NBYTES:
        raise UnsupportedState(
            f"The state_dict of {type(module).__qualname__} has {nbytes / 1e6:.1f} MB that are "
            f"neither parameters nor buffers, first {next(iter(more))}: register them as buffers."
        )
    return bool(more)


def _defines(kind: type, name: str) -> str:
    """The module of the class that defines a method."""
    return next(base.__module__ for base in kind.__mro__ if name in vars(base))


def first_of(value: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """The elements of ``value`` that belong to the memory an expanded tensor really has."""
    for dim, (size, stride) in enumerate(zip(expanded.shape, expanded.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value
