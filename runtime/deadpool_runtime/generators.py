"""Random generators of the script's own: torch's, numpy's and Python's, each as a plain value.

They are found in loaders and samplers (``loader_state``), and may be given to ``attach`` as extras.
The global generators are in ``rng``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deadpool_runtime.errors import UnsupportedState


def is_generator(value: Any) -> bool:
    """Whether this module can save ``value``."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    kinds = numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator
    return isinstance(value, kinds)


def state_of(generator: Any) -> dict[str, Any]:
    """The generator's present state, as numbers, text and tensors."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state().clone(), "device": str(generator.device)}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"python": (version, torch.tensor(words, dtype=torch.int64), gauss)}
    numpy = sys.modules["numpy"]
    if isinstance(generator, numpy.random.RandomState):
        return {"legacy": _to_plain(generator.get_state(legacy=False))}
    if isinstance(generator, numpy.random.Generator):
        return {"numpy": _to_plain(generator.bit_generator.state)}
    return {"bits": _to_plain(generator.state)}


def set_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Give the generator a state that ``state_of`` had from one of the same kind."""
    if "torch" in state:
        generator.set_state(state["torch"])
    elif "python" in state:
        version, words, gauss = state["python"]
        generator.setstate((version, tuple(words.tolist()), gauss))
    elif "legacy" in state:
        generator.set_state(_from_plain(state["legacy"]))
    elif "numpy" in state:
        generator.bit_generator.state = _from_plain(state["numpy"])
    else:
        generator.state = _from_plain(state["bits"])


def made_of(state: Mapping[str, Any]) -> Any:
    """A new generator in that state."""
    made: Any
    if "torch" in state:
        made = torch.Generator(state["device"])
    elif "python" in state:
        made = random.Random()
    else:
        import numpy

        ((kind, inner),) = state.items()
        bits = getattr(numpy.random, inner["bit_generator"])()
        makers = {"legacy": numpy.random.RandomState, "numpy": numpy.random.Generator}
        made = makers[kind](bits) if kind in makers else bits
    set_state(made, state)
    return made


class GeneratorExtra:
    """A generator with the ``state_dict`` and ``load_state_dict`` that extras have."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return state_of(self.generator)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_state(self.generator, state)


def with_generators(extras: Mapping[str, Any] | None) -> dict[str, Any]:
    """The extras of ``attach``, generators among them wrapped."""
    found = {}
    for name, extra in (extras or {}).items():
        if isinstance(extra, random.SystemRandom):
            raise UnsupportedState(
                f"The extra {name!r} is a SystemRandom, which has no state that could be saved: "
                f"use random.Random."
            )
        found[name] = GeneratorExtra(extra) if is_generator(extra) else extra
    return found


def generators_among(given: Iterable[Any]) -> list[Any]:
    """The generators that were given to ``attach``, of what ``with_generators`` made of them."""
    return [each.generator for each in given if isinstance(each, GeneratorExtra)]


def _to_plain(state: Any) -> Any:
    """What numpy gives, with tensors in place of arrays."""
    if isinstance(state, Mapping):
        return {key: _to_plain(value) for key, value in state.items()}
    if hasattr(state, "dtype"):
        words = bytearray(state.tobytes())
        return {"dtype": str(state.dtype), "words": torch.frombuffer(words, dtype=torch.uint8)}
    return state


def _from_plain(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"dtype", "words"}:
        return state["words"].numpy().view(state["dtype"]).copy()
    return {key: _from_plain(value) for key, value in state.items()}
