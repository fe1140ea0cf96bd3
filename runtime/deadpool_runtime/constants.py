"""Which large buffers are as they were at the start of the job, and so need no copy of their own.

A state is looked at twice: at the end of the body, when copying of the tensors begins, and when the
own part is taken, after whatever the script does behind the body. A *constant* is left to the
tensors' copy if it has its first value at the second look. That is by value: batch normalisation,
``.data`` and numpy write without torch's counting, and DDP writes every buffer in every step.

The first look goes by what the last second one found, so that each constant is hashed once a step.
In the step in which a constant changes, the copy of the tensors has it in vain: what counts is the
value in the own part. If the change differs between ranks, so do the copies of that step, and a
recovery that comes just then goes back to the step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from deadpool_runtime import later
from deadpool_runtime.encoding import detached_copy, digest_of

#: Buffers up to this size (bytes) always travel with the rank's own part.
SMALL_NBYTES = 64 << 10
#: In the first states the first look is by value too: their copies are compared between ranks, and
#: must not differ where a module fills its buffers in the first step.
BY_VALUE = 2
#: So many bytes of constants may be copied on a device until they are looked at. Those that are
#: more are looked at while the training thread waits, since a device has little memory to spare.
CLONED_NBYTES = 256 << 20


class Constants:
    """Used by the training thread: for each state ``begin``, ``may_be_left`` for each buffer, later
    ``own_value`` for each, ``end``.

    ``hashes``: of a job that began earlier; else they are taken when they are first needed.
    """

    def __init__(self, hashes: Mapping[str, str] | None = None) -> None:
        self._known = hashes is not None
        self._first = dict(hashes or {})
        #: By key: the tensor that was hashed last, and whether it had its first value.
        self._looks: dict[str, tuple[TensorWeakRef, bool]] = {}
        #: What the copy of the tensors that was begun last does not have.
        self._missing: set[str] = set()
        self._states = 0
        self._cloned_nbytes = 0

    def hashes(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
        """The hash that each constant had at first, by key. ``buffers``: all that there are."""
        if not self._known:
            self._known = True
            self._first = {
                key: digest_of(tensor, key)
                for key, tensor in buffers
                if tensor.numel() * tensor.element_size() > SMALL_NBYTES
            }
        return self._first

    def begin(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A copy of the tensors is about to begin."""
        self.hashes(buffers)
        self._missing.clear()

    def may_be_left(self, key: str, tensor: torch.Tensor) -> bool:
        """Whether the copy of the tensors is to have the buffer: it may be as it was."""
        looked, left = self._looks.get(key, (None, False))
        if self._states < BY_VALUE or looked is None or looked() is not tensor:
            left = self._is_first(key, tensor, TensorWeakRef(tensor))
        if not left:
            self._missing.add(key)
        return left

    def own_value(self, key: str, tensor: torch.Tensor | None) -> Any:
        """What the own part has of a buffer: a copy of its present value, ``OMITTED`` if the copy
        of the tensors has that value, or a ``Later`` of these."""
        if tensor is None or key not in self._first:
            return detached_copy(tensor)
        settle = partial(self._own_value, key, TensorWeakRef(tensor), key not in self._missing)
        nbytes = tensor.numel() * tensor.element_size()
        if later.is_remote(tensor) and self._cloned_nbytes + nbytes <= CLONED_NBYTES:
            self._cloned_nbytes += nbytes
            return later.Later(detached_copy(tensor), settle)
        value = settle(tensor)
        return value if value is later.OMITTED else detached_copy(value)

    def end(self) -> None:
        """The own part is taken."""
        self._states += 1
        self._cloned_nbytes = 0

    def _own_value(
        self, key: str, looked_at: TensorWeakRef, is_copied: bool, value: torch.Tensor
    ) -> Any:
        """In the copier's thread if it is settled later: ``value``, or ``OMITTED``."""
        same = self._is_first(key, value, looked_at)
        return later.OMITTED if same and is_copied else value

    def _is_first(self, key: str, value: torch.Tensor, looked_at: TensorWeakRef) -> bool:
        same = key in self._first and digest_of(value, key) == self._first[key]
        self._looks[key] = looked_at, same
        return same
