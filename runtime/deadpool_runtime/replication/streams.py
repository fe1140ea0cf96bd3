"""Queued copies from a device into host memory: CUDA's, and those of a CPU, which are done at once.

A *mark* is a point in the training thread's queue of device work; a *token* a point in the queue of
copies. No other module of the replication has CUDA code, but for ``pinning``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.replication.captures import Beside
from deadpool_runtime.replication.pinning import CudaPinning, NoPinning, Pinning

_POLL_S = 0.0002
#: The bindings have no types.
_cuda: Any = torch.cuda


class CopyStream(Protocol):
    """Copies tensors in the order in which they were handed over."""

    def mark(self) -> Any:
        """Everything that the calling thread has queued on the device so far."""

    def start(self, after: Any) -> None:
        """Copies handed over from now on wait for what ``after`` marks."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue copies into host memory. Sources must stay alive until a later token is done."""

    def token(self) -> Any:
        """All copies handed over so far."""

    def wait(self, token: Any, timeout_s: float | None = None) -> bool:
        """Wait for these copies without Python's lock; whether they are done. From any thread."""

    def pinning(self) -> Pinning:
        """How memory is page-locked for this device."""

    def reads(self, device: torch.device) -> bool:
        """Whether ``fetching`` puts what is done with tensors of this device into order."""

    def fetching(self) -> AbstractContextManager[None]:
        """Within, this thread's own work with tensors of the device waits for what ``start`` named,
        and for nothing that the script queues later."""

    def beside_captures(self) -> AbstractContextManager[None]:
        """Within, no call of this thread breaks a graph that the script is capturing."""


class CpuStream:
    """Copies are done when ``copy`` returns."""

    def mark(self) -> None:
        """See ``CopyStream``."""

    def start(self, after: Any) -> None:
        """See ``CopyStream``."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See ``CopyStream``."""
        with torch.no_grad():
            copy_all(targets, sources)

    def token(self) -> None:
        """See ``CopyStream``."""

    def wait(self, token: Any, timeout_s: float | None = None) -> bool:
        """See ``CopyStream``."""
        return True

    def pinning(self) -> Pinning:
        """See ``CopyStream``."""
        return NoPinning()

    def reads(self, device: torch.device) -> bool:
        """See ``CopyStream``."""
        return device.type == "cpu"

    def fetching(self) -> AbstractContextManager[None]:
        """See ``CopyStream``."""
        return nullcontext()

    def beside_captures(self) -> AbstractContextManager[None]:
        """See ``CopyStream``."""
        return nullcontext()


class CudaStream:
    """A side stream of one GPU, so that copies run beside the next step's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device)
        self._beside = Beside()

    def mark(self) -> Any:
        """See ``CopyStream``."""
        event = _cuda.Event()
        event.record(_cuda.current_stream(self._device))
        return event

    def start(self, after: Any) -> None:
        """See ``CopyStream``."""
        self._stream.wait_event(after)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See ``CopyStream``."""
        with torch.no_grad(), _cuda.stream(self._stream):
            copy_all(targets, sources, non_blocking=True)

    def token(self) -> Any:
        """See ``CopyStream``."""
        # A blocking event lets the waiting thread sleep, where others keep a processor busy.
        event = _cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, token: Any, timeout_s: float | None = None) -> bool:
        """See ``CopyStream``."""
        # The training thread may itself be capturing a step of its optimizer when it comes here.
        with self._beside:
            if timeout_s is None:
                token.synchronize()
                return True
            deadline = time.monotonic() + timeout_s
            while not token.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
            return True

    def pinning(self) -> Pinning:
        """See ``CopyStream``."""
        return CudaPinning(self._device)

    def reads(self, device: torch.device) -> bool:
        """See ``CopyStream``."""
        return device.type == "cpu" or device == self._device

    def fetching(self) -> AbstractContextManager[None]:
        """See ``CopyStream``."""
        found: AbstractContextManager[None] = _cuda.stream(self._stream)
        return found

    def beside_captures(self) -> AbstractContextManager[None]:
        """See ``CopyStream``."""
        return self._beside


def stream_for(device: torch.device) -> CopyStream:
    """The stream that copies from ``device``; UnsupportedState if there is none."""
    if device.type == "cuda":
        return CudaStream(device)
    if device.type != "cpu":
        raise UnsupportedState(
            f"The state lies on a device of the kind {device.type!r}, and only the CPU and CUDA "
            f"are known to copy in the right order."
        )
    return CpuStream()


def copy_all(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    """Copy each source into its target, in one call for all that are plain memory."""
    plain: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for target, source in zip(targets, sources, strict=True):
        if _is_lazy(target) or _is_lazy(source):
            target.copy_(source, non_blocking=non_blocking)
        elif target.numel():
            plain[0].append(target)
            plain[1].append(source)
    if plain[0]:
        torch._foreach_copy_(*plain, non_blocking=non_blocking)


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is not its value: a pending conjugation or negation."""
    return tensor.is_conj() or tensor.is_neg()
