"""Plain values as bytes, and hashes of them that do not depend on how they were built.

``encode`` and ``decode`` are torch's own file format, read with ``weights_only=True``: no code of
the sender's runs in the receiver. ``Digest`` walks values itself, because two equal values may
pickle to different bytes (pickle notices which of their parts are one object).
"""

from __future__ import annotations

import copy
import io
import pickle
import struct
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from deadpool_runtime.errors import UnsupportedState


def encode(value: Any, what: str) -> bytes:
    """``value`` as bytes. ``what`` names it in the error when it cannot be brought back."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise UnsupportedState(f"{what} cannot be saved: {error}") from error
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The value that ``encode`` was given."""
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def check_round_trip(value: Any, what: str) -> None:
    """Raise ``UnsupportedState``, naming ``what``, unless ``value`` survives ``encode``."""
    data = encode(value, what)
    try:
        back = decode(data)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise UnsupportedState(
            f"{what} holds {_odd_one(value)}, which cannot be brought back in another process: "
            f"keep to numbers, text, bytes, tensors, and lists, tuples and dicts of them."
        ) from error
    if digest_of(value, what) != digest_of(back, what):
        raise UnsupportedState(f"{what} is not the same after it was saved and brought back.")


def detached_copy(value: Any) -> Any:
    """A copy of ``value`` that shares nothing with it, without any tensor's autograd history.

    A view is copied alone, not with the storage it looks into.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: detached_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(detached_copy(item) for item in value)
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    return copy.deepcopy(value)


@torch.no_grad()
def fill(present: Any, value: Any) -> bool:
    """Give a container or tensor that is there the value, and keep it and the tensors in it; false
    if it is of another kind."""
    if type(present) is not type(value):
        return False
    if isinstance(present, torch.Tensor):
        if (present.shape, present.dtype) != (value.shape, value.dtype) or present.is_inference():
            return False
        present.copy_(value)
        return True
    if type(present) is list:
        kept = [
            old if fill(old, new) else detached_copy(new)
            for old, new in zip(present, value, strict=False)
        ]
        present[:] = [*kept, *map(detached_copy, value[len(kept) :])]
        return True
    if type(present) is dict:
        kept_by_key = {
            key: present[key] if key in present and fill(present[key], new) else detached_copy(new)
            for key, new in value.items()
        }
        present.clear()
        present.update(kept_by_key)
        return True
    return False


def _odd_one(value: Any) -> str:
    """Where in ``value`` the first thing lies that does not survive, and its type."""
    if isinstance(value, Mapping):
        items: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return f"a {type(value).__module__}.{type(value).__qualname__}"
    for key, item in items:
        try:
            decode(encode(item, "item"))
        except (pickle.UnpicklingError, RuntimeError, UnsupportedState):
            return f"at {key!r} {_odd_one(item)}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in logical order as a flat uint8 CPU tensor; a view where memory allows it."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8)


class Digest:
    """An xxh3 of 128 bits over values and tensors, fed piece by piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Feed type, shape and elements; memory layout and device do not matter."""
        self._mark(f"T{tensor.dtype}{tuple(tensor.shape)}")
        if tensor.numel():
            self._hash.update(tensor_bytes(tensor).numpy().data)

    def add(self, value: Any, what: str) -> None:
        """Feed a plain value; dict order does not matter. ``what`` names it in an error."""
        if isinstance(value, torch.Tensor):
            self.add_tensor(value)
        elif isinstance(value, bool) or value is None:
            self._mark(f"C{value}")
        elif isinstance(value, int):
            self._mark(f"I{value};")
        elif isinstance(value, float):
            self._hash.update(b"F" + struct.pack("<d", value))
        elif isinstance(value, str | bytes | bytearray):
            data = value.encode() if isinstance(value, str) else bytes(value)
            self._mark(f"{'S' if isinstance(value, str) else 'B'}{len(data)};")
            self._hash.update(data)
        elif isinstance(value, Mapping):
            self._mark(f"M{len(value)};")
            for key in sorted(value, key=lambda key: (type(key).__name__, repr(key))):
                self.add(key, what)
                self.add(value[key], what)
        elif isinstance(value, list | tuple):
            self._mark(f"L{len(value)};")
            for item in value:
                self.add(item, what)
        elif isinstance(value, set | complex | torch.dtype | torch.device):
            self._mark(f"R{sorted(value, key=repr) if isinstance(value, set) else value!r};")
        else:
            raise UnsupportedState(
                f"{what} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot "
                f"be brought back in another process: keep to numbers, text, bytes, tensors, and "
                f"lists, tuples and dicts of them."
            )

    def _mark(self, text: str) -> None:
        self._hash.update(text.encode())

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()


def digest_of(value: Any, what: str) -> str:
    """The digest of one plain value."""
    digest = Digest()
    digest.add(value, what)
    return digest.hexdigest()
