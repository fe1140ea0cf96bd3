"""A batch that is the body's own, and what it was when it was read.

A step that is run again gets the batch as it was before the first try. Where a loader gives out
what it keeps (a list of tensors, a dataset's own items, views of one tensor), the body gets a copy.
Whether somebody else holds a part of a batch follows from Python's count of references to it and
torch's count of those to its memory.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader, default_collate

from deadpool_runtime.errors import Misuse

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
#: Tensors of more bytes are compared by samples.
_WHOLE_NBYTES = 64 << 10
_SAMPLES = 4096
_MOST_DEPTH = 8


def gives_new_batches(loader: Any) -> bool:
    """Whether batches of this loader are put together for the script alone, as far as is known."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and (loader.num_workers > 0 or loader.collate_fn is default_collate)
    )


# ---------------------------------------------------------------- the body's own


def own_batch(box: list[Any]) -> Any:
    """The batch in ``box``, or a copy of what in it is not the box's alone."""
    return _Separating().part(box, 0, shared=False)


def _references(container: Any, key: Any) -> int:
    return sys.getrefcount(container[key])


def _storage_references(tensor: torch.Tensor) -> int:
    count = getattr(torch._C, "_storage_Use_Count", None)
    return sys.maxsize if count is None else int(count(tensor.untyped_storage()._cdata))


#: The counts of what only a container holds.
_LONE = _references([object()], 0)
_LONE_STORAGE = _storage_references(torch.empty(1))


class _Separating:
    def __init__(self) -> None:
        #: By the id of an original: its copy, and the original to keep its id taken.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def part(self, container: Any, key: Any, *, shared: bool) -> Any:
        """What the body gets for ``container[key]``. ``shared``: others hold the container."""
        shared = shared or _references(container, key) > _LONE
        value = container[key]
        if isinstance(value, _IMMUTABLE):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)][0]
        made = self._made(value, shared)
        if shared:
            self._copies[id(value)] = made, value
        return made

    def _made(self, value: Any, shared: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return value if not shared and _owns_memory(value) else _copy_of(value)
        if _is_array(value):
            return value if not shared and value.flags.owndata else value.copy()
        if type(value) in (dict, list):
            keys = list(value) if isinstance(value, dict) else range(len(value))
            parts = {key: self.part(value, key, shared=shared) for key in keys}
            if shared:
                return parts if isinstance(value, dict) else list(parts.values())
            for key, part in parts.items():
                value[key] = part
            return value
        if isinstance(value, tuple):
            parts_of_it = [self.part(value, i, shared=shared) for i in range(len(value))]
            if all(map(lambda a, b: a is b, parts_of_it, value)):
                return value
            kind: Any = type(value)
            return kind(*parts_of_it) if hasattr(kind, "_fields") else kind(parts_of_it)
        if not shared and hasattr(value, "__dict__"):
            attributes = vars(value)
            for name in list(attributes):
                attributes[name] = self.part(attributes, name, shared=False)
            return value
        return value if not shared else _deep_copy_of(value)


def _owns_memory(tensor: torch.Tensor) -> bool:
    try:
        resizable = tensor.untyped_storage().resizable()  # not: numpy's, or shared by processes
        return resizable and _storage_references(tensor) <= _LONE_STORAGE
    except (RuntimeError, NotImplementedError):  # sparse ones have no storage
        return False


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.grad_fn is not None:
        return tensor.clone()
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _deep_copy_of(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise Misuse(
            f"The loader gives out a {type(value).__module__}.{type(value).__qualname__} that it "
            f"keeps, and it cannot be copied ({error}): a body that is run again could find it "
            f"changed, so let the loader make it anew for each batch."
        ) from error


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


# ---------------------------------------------------------------- what it was


def fingerprint(batch: Any) -> str:
    """The same for the same batch; of what is large, samples count, and on a device shapes only."""
    digest = xxhash.xxh3_128()
    _add(digest, batch, _MOST_DEPTH)
    return digest.hexdigest()


def _add(digest: Any, value: Any, depth: int) -> None:
    if _is_array(value):
        if value.dtype.kind not in "biufc":
            return
        value = torch.from_numpy(value.copy() if value.nbytes <= _WHOLE_NBYTES else _some(value))
    if isinstance(value, torch.Tensor):
        _add_tensor(digest, value)
        return
    digest.update(type(value).__name__.encode())
    if depth == 0 or isinstance(value, type):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            _add(digest, key, depth - 1)
            _add(digest, item, depth - 1)
    elif isinstance(value, list | tuple):
        digest.update(b"%d;" % len(value))
        for item in value:
            _add(digest, item, depth - 1)
    elif isinstance(value, bool | int | float | complex | str):
        digest.update(repr(value).encode(errors="surrogatepass"))
    elif isinstance(value, bytes):
        digest.update(value)
    elif hasattr(value, "__dict__"):
        _add(digest, vars(value), depth - 1)


def _some(array: Any) -> Any:
    return array.reshape(-1)[:: max(1, array.size // _SAMPLES)].copy()


def _add_tensor(digest: Any, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return
    if tensor.is_quantized or tensor.is_nested:
        return
    values = tensor.detach().as_subclass(torch.Tensor)
    if values.numel() * values.element_size() > _WHOLE_NBYTES:
        if not values.is_contiguous():
            return
        values = values.view(-1)[:: values.numel() // _SAMPLES]
    values = values.resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest.update(values.view(torch.uint8).numpy().data)
