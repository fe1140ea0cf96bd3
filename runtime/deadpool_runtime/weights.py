"""``initial_weights()``: a replacement does not draw the weights that it gets from its peers.

Inside the block every call of a random function of ``torch.nn.init`` draws from a generator of its
own, seeded by the state of torch's generator at the block's entry and the call's number. So no
such call moves a generator that other code uses, and one that is left out changes nothing that is
drawn later. That is so in every process, under a launcher or not: all runs have the same weights.

A replacement ran the same script up to the block, so its entry state is that of the process it
stands in for. It leaves the calls out and notes them down (``deferred``). When its first step is
about to be restored, ``settle`` makes up for those whose tensors will not be overwritten.

Run as usual, in the original and in its replacement alike: calls with ``generator=``, functions
that were imported by name (``from torch.nn.init import normal_``, which ``nn.MultiheadAttention``
does), ``sparse_`` (it draws from torch's generator even if it is given another), and calls on what
is no plain floating-point tensor with memory: DTensors, meta tensors, integers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deadpool_runtime.context import current_context
from deadpool_runtime.deferred import Deferred
from deadpool_runtime.recipes import Drawn, Geometry, is_plain

#: Functions of ``torch.nn.init`` that draw from nothing but the generator they are given.
RANDOM = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
)

_open_block: Block | None = None
_deferred: Deferred | None = None
#: The process has been restored once; what it draws from now on nobody else has.
_settled = False


class Block:
    """One ``with initial_weights():``. ``drawn`` and ``skipped`` count the calls so far that were
    given a generator of their own, and those of them that were left out."""

    def __init__(self, entry: bytes, deferred: Deferred | None) -> None:
        self.drawn = 0
        self.skipped = 0
        self._entry = entry
        self._deferred = deferred

    def _wrap(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return original(*args, **kwargs)  # it says what is wrong
            options = dict(bound.arguments)
            tensor: torch.Tensor = options.pop("tensor")
            if options.pop("generator", None) is not None or not is_plain(tensor):
                return original(*args, **kwargs)
            self.drawn += 1
            drawn = Drawn(original, options, self._seed(self.drawn), Geometry.of(tensor))
            if self._deferred is not None and self._deferred.skip(tensor, drawn):
                self.skipped += 1
            else:
                drawn.fill(tensor)
            return tensor

        return call

    def _seed(self, number: int) -> int:
        """What the generator of call ``number`` starts from."""
        digest = hashlib.blake2b(self._entry, digest_size=8, salt=number.to_bytes(8, "little"))
        return int.from_bytes(digest.digest(), "little")


@contextmanager
def initial_weights() -> Iterator[Block]:
    """Wrap it around what builds or initialises models: a replacement then skips most of that.

        with deadpool.initial_weights():
            model = GPT(...)

    The weights drawn in it differ from those drawn without it, and depend like them on
    ``torch.manual_seed``. Until the first step a replacement may use them as everyone does: what
    reads a skipped weight through torch finds it made, with the bits that the original has. Code
    past torch's sight (other threads, raw pointers, other processes) finds NaN. A block inside
    another is part of it; the functions of ``torch.nn.init`` are put back at its end. Not to be
    used by two threads at once.
    """
    global _open_block
    if _open_block is not None:
        yield _open_block
        return
    block = Block(_entry_state(), _deferring())
    originals = {name: getattr(nn.init, name) for name in RANDOM}
    _open_block = block
    try:
        for name, original in originals.items():
            setattr(nn.init, name, block._wrap(original))
        yield block
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)
        _open_block = None


def settle(restored: Iterable[torch.Tensor]) -> None:
    """End all skipping: make for real what was skipped and is not in the memory of ``restored``,
    which are the tensors that are about to be overwritten as a whole."""
    global _deferred, _settled
    _settled = True
    deferred, _deferred = _deferred, None
    if deferred is not None:
        deferred.settle(restored)


def _entry_state() -> bytes:
    """The state of torch's generator; moves it on, so that the next block has another."""
    state = torch.default_generator.get_state().numpy().tobytes()
    torch.empty((), device="cpu").uniform_(generator=torch.default_generator)
    return state


def _deferring() -> Deferred | None:
    """Where this process notes what it skips; None if it is to skip nothing."""
    global _deferred
    context = current_context()
    if context is None or not context.replacement or _settled:
        return None
    if _deferred is None:
        _deferred = Deferred.install()
    return _deferred
