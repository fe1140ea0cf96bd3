"""The parameters and buffers of a script's modules, by the places where they lie.

The modules' structure is taken as fixed, but the tensors in it may be exchanged, and buffers may be
registered later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deadpool_runtime.errors import Misuse, UnsupportedState
from deadpool_runtime.kinds import is_dtensor


@dataclass(frozen=True)
class _Place:
    """A dict of a module (``_parameters`` or ``_buffers``) and the entry in it."""

    key: str
    home: dict[str, Any]
    name: str
    #: What lay there at the start.
    first: Any = None
    #: The entry was made after the start, and is taken away with what lies there.
    late: bool = False

    def parameter(self) -> torch.Tensor:
        """The parameter that the optimizer trains.

        Something else may lie here at times: between an evaluation and the next backward pass
        FSDP has the whole parameter in the place of this rank's share, and DDP over DTensors
        takes the parameter away in the first forward pass.
        """
        present = self.home.get(self.name)
        if present is None or (is_dtensor(self.first) and not is_dtensor(present)):
            present = self.first
        assert isinstance(present, torch.Tensor)
        return present


class ModuleMap:
    """Keys are those of ``tensors``: ``p/…``, ``b/…``, and ``xp/…``, ``xb/…`` for extras."""

    def __init__(self, models: Sequence[nn.Module], extra_modules: Mapping[str, nn.Module]) -> None:
        self._parameters: list[_Place] = []
        self._buffers: list[_Place] = []
        self._known: set[int] = set()
        self._modules: dict[int, nn.Module] = {}
        #: Each module by the beginning of its buffers' keys.
        self._homes: dict[str, nn.Module] = {}
        #: By the module's id: how many parameters and modules it had at the start.
        self._sizes: dict[int, tuple[int, int]] = {}
        #: The id of the dict and the name of each buffer that was there at the start.
        self._entries: set[tuple[int, str]] = set()
        #: First and second names of buffers that have two.
        self._twins: list[tuple[_Place, _Place]] = []
        for index, model in enumerate(models):
            self._add_module("", str(index), model)
        for name, module in extra_modules.items():
            self._add_module("x", name, module)

    def _add_module(self, prefix: str, label: str, root: nn.Module) -> None:
        for path, module in root.named_modules():
            dot = f"{path}." if path else ""
            if id(module) not in self._modules:
                self._modules[id(module)] = module
                self._homes[f"{prefix}b/{label}/{dot}"] = module
                self._sizes[id(module)] = len(module._parameters), len(module._modules)
            for name, parameter in module._parameters.items():
                if isinstance(parameter, nn.UninitializedParameter):
                    raise UnsupportedState(
                        f"The parameter {dot}{name} has no shape yet: run the lazy module once "
                        f"before attach."
                    )
                if parameter is not None and id(parameter) not in self._known:
                    self._known.add(id(parameter))
                    key = f"{prefix}p/{label}/{dot}{name}"
                    self._parameters.append(_Place(key, module._parameters, name, parameter))
            for name, buffer in module._buffers.items():
                self._entries.add((id(module._buffers), name))
                if buffer is None or id(buffer) not in self._known:
                    self._known.add(id(buffer))
                    key = f"{prefix}b/{label}/{dot}{name}"
                    self._buffers.append(_Place(key, module._buffers, name))
                else:
                    self._note_twin(_Place(f"{prefix}b/{label}/{dot}{name}", module._buffers, name))

    def _note_twin(self, twin: _Place) -> None:
        for first in self._buffers:
            same = first.home is twin.home and first.name == twin.name
            if first.home.get(first.name) is twin.home[twin.name] and not same:
                self._twins.append((first, twin))

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every buffer that is there at present."""
        for place in self._buffers:
            buffer = place.home.get(place.name)
            if buffer is not None:
                yield place.key, buffer

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, with the beginning of its buffers' keys."""
        yield from self._homes.items()

    def find_late_buffers(self) -> None:
        """Take in the buffers that were registered after the start."""
        known = self._entries | {(id(each.home), each.name) for each in self._buffers if each.late}
        for home, module in self._homes.items():
            for name, buffer in module._buffers.items():
                if (id(module._buffers), name) not in known and buffer is not None:
                    self._buffers.append(_Place(home + name, module._buffers, name, late=True))

    def make_place(self, key: str) -> None:
        """Make the place for a buffer that another process registered after the start."""
        if key in self.buffer_keys():
            return
        homes = [home for home in self._homes if key.startswith(home)]
        home = max(homes, key=len, default="")
        if not home or "." in key[len(home) :]:
            raise Misuse(f"This process has no module for the buffer {key} that was saved.")
        module = self._homes[home]
        self._buffers.append(_Place(key, module._buffers, key[len(home) :], late=True))

    def buffer_keys(self) -> list[str]:
        """The keys of all places for buffers, whether one is there or not."""
        return [place.key for place in self._buffers]

    def fit_buffer(self, key: str, like: torch.Tensor | None) -> None:
        """Put a new tensor in the place of a buffer whose shape or type is not that of ``like``,
        or none at all if that is None."""
        place = next(place for place in self._buffers if place.key == key)
        present = place.home.get(place.name)
        if like is None and place.late:
            place.home.pop(place.name, None)
            self._buffers.remove(place)
        elif like is None:
            place.home[place.name] = None
        elif present is None or present.shape != like.shape or present.dtype != like.dtype:
            device = "cpu" if present is None else present.device
            place.home[place.name] = torch.empty_like(like, device=device)

    def require_structure(self) -> None:
        """Raise ``Misuse`` if modules are not built as they were at the start, as they are in a new
        process."""
        for home, module in self._homes.items():
            parameters, modules = self._sizes[id(module)]
            if len(module._parameters) > parameters or len(module._modules) > modules:
                raise Misuse(
                    f"The module {path_of(home)} ({type(module).__qualname__}) got a "
                    f"parameter or a module after attach, which a new process would not "
                    f"have: build the whole model before attach."
                )
        for first, twin in self._twins:
            if first.home.get(first.name) is not twin.home.get(twin.name):
                raise Misuse(
                    f"{first.key} and {twin.key} were one buffer at attach and are two now, and "
                    f"only the first is saved: register two buffers."
                )


def path_of(home: str) -> str:
    """A module's path for people, from the beginning of its buffers' keys."""
    return home.split("/", 1)[1].rstrip("./")
