"""The random number generators a training script draws from, as one plain value.

torch's CPU generator, this process's CUDA generator if CUDA is in use, Python's ``random``, and
numpy's global generator if numpy is imported. Those that the script makes itself are in
``generators``: it gives them to ``attach`` as extras, but for those of its loader and samplers.
"""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import torch

RngState = dict[str, Any]


def capture() -> RngState:
    """The present state of every generator."""
    version, words, gauss = random.getstate()
    state: RngState = {
        "torch": torch.get_rng_state(),
        # As tensors: pickling hundreds of Python integers costs more than all the rest.
        "python": (version, _as_tensor(array("I", words)), gauss),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        state["numpy"] = (
            str(name),
            _as_tensor(keys),
            int(position),
            int(has_gauss),
            float(cached),
        )
    return state


def restore(state: RngState) -> None:
    """Set every generator that ``state`` knows."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array("I", words.numpy().tobytes())), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, keys.numpy().view(numpy.uint32), position, has_gauss, cached))


def _as_tensor(words: Any) -> torch.Tensor:
    """The bytes of a buffer of 32-bit words as a uint8 tensor of its own."""
    return torch.frombuffer(bytearray(memoryview(words).cast("B")), dtype=torch.uint8)
