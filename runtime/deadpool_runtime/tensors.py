"""Where a training script's tensors are, found once and read anew at every step.

Keys say what a tensor is, the same on every rank: ``p/0/NAME`` a parameter of the first model,
``b/0/NAME`` a buffer, ``o/0/G/P/NAME`` state of the first optimizer for parameter P of group G,
``q/0/G/P`` a parameter only the optimizer knows, ``xp/…`` and ``xb/…`` those of modules among
the extras.

A tensor here is the object that the program has, a DTensor for instance. What is saved of it is
the memory that this rank has of it, which ``everything`` lists: the local part of a DTensor, and
the inner tensors of another subclass, whose keys end in ``//NAME``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from deadpool_runtime.encoding import detached_copy, fill
from deadpool_runtime.errors import Misuse, UnsupportedState
from deadpool_runtime.kinds import (
    PLAIN_TYPES,
    inner_names,
    is_dtensor,
    is_tensor,
    is_zero,
    local_part,
    plain_parts,
    require_dense,
)
from deadpool_runtime.modules import ModuleMap

_Each = TypeVar("_Each")

#: The first part of a key -> the name under which ``FinalState`` reports it.
PARTS = {
    "p": "parameters",
    "q": "parameters",
    "b": "buffers",
    "o": "optimizer",
    "xp": "extras",
    "xb": "extras",
}


class TensorMap(ModuleMap):
    """Finds every tensor that belongs to the training state."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        extra_modules: dict[str, nn.Module],
    ) -> None:
        super().__init__(models, extra_modules)
        self.optimizers = list(optimizers)
        #: How many parameters each group of each optimizer had at the start.
        self._groups = self._group_sizes()
        # What was found last. It is asked for several times a step, in models with thousands of
        # tensors; to see that they are still the same objects takes a small part of the time.
        self._lookups = [(place.home.get, place.name) for place in self._parameters]
        self._found_parameters = _Found[tuple[str, torch.Tensor]]()
        self._found_states = _Found[tuple[str, dict[str, Any]]]()
        self._found_entries = _Found[tuple[str, Any]]()
        self._state_entries: list[tuple[str, Any]] | None = None
        self._state_tensors: list[tuple[str, torch.Tensor]] = []
        self._state_plain: list[tuple[str, Any]] = []
        self._state_wrapped: list[str] = []
        self._everything: dict[str, torch.Tensor] = {}
        self._named: list[Any] = []
        #: Each of them is the very tensor that the program has.
        self._all_plain = False

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, those of the extras included."""
        return iter(self._parameter_list())

    def _parameter_list(self) -> list[tuple[str, torch.Tensor]]:
        present: list[Any] = [get(name) for get, name in self._lookups]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                present += group["params"]
        return self._found_parameters.get(present, self._find_parameters)

    def _find_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place in self._parameters:
            yield place.key, place.parameter()
        for oi, gi, pi, parameter in self.optimized():
            if id(parameter) not in self._known:
                yield f"q/{oi}/{gi}/{pi}", parameter

    def require_structure(self) -> None:
        """Raise ``Misuse`` if optimizers or modules are not built as they were at the start, as
        they are in a new process."""
        super().require_structure()
        for optimizer, before, now in zip(
            self.optimizers, self._groups, self._group_sizes(), strict=True
        ):
            if before != now:
                raise Misuse(
                    f"The parameter groups of {type(optimizer).__qualname__} are no longer those "
                    f"that attach was given ({before} parameters then, {now} now), so a new "
                    f"process could not take its state: call add_param_group before attach."
                )

    def _group_sizes(self) -> list[list[int]]:
        return [[len(group["params"]) for group in each.param_groups] for each in self.optimizers]

    def modes(self) -> dict[str, bytes]:
        """Each module's ``training`` and each parameter's ``requires_grad``, one byte a flag."""
        return {
            "training": bytes([module.training for module in self._modules.values()]),
            "requires_grad": bytes([tensor.requires_grad for _, tensor in self.parameters()]),
        }

    def restore_modes(self, modes: dict[str, bytes]) -> None:
        """Set what ``modes`` returned."""
        parameters = [tensor for _, tensor in self.parameters()]
        if [len(self._modules), len(parameters)] != [len(flags) for flags in modes.values()]:
            raise Misuse("The models of this process have other modules than those saved.")
        for module, flag in zip(self._modules.values(), modes["training"], strict=True):
            module.training = bool(flag)
        for tensor, flag in zip(parameters, modes["requires_grad"], strict=True):
            if tensor.requires_grad != bool(flag):
                tensor.requires_grad_(bool(flag))

    def optimized(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """Optimizer, group and index in the group of every optimized parameter."""
        for oi, optimizer in enumerate(self.optimizers):
            for gi, group in enumerate(optimizer.param_groups):
                for pi, parameter in enumerate(group["params"]):
                    yield oi, gi, pi, parameter

    def optimizer_state(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor of the optimizers' state. The same list as the last time if nothing in it
        is another object."""
        self._split_state()
        return self._state_tensors

    def optimizer_plain(self) -> dict[str, Any]:
        """The optimizers' state that is no tensor (step counts, lists), by the same keys."""
        self._split_state()
        return dict(self._state_plain)

    def wrapped_state(self) -> list[str]:
        """The keys of those entries of the optimizers' state that are DTensors."""
        self._split_state()
        return list(self._state_wrapped)

    def _split_state(self) -> None:
        entries = self._entries_of_state()
        if entries is self._state_entries:
            return
        self._state_entries = entries
        self._state_tensors = [pair for pair in entries if isinstance(pair[1], torch.Tensor)]
        self._state_plain = [pair for pair in entries if not isinstance(pair[1], torch.Tensor)]
        self._state_wrapped = [key for key, tensor in self._state_tensors if is_dtensor(tensor)]

    def _entries_of_state(self) -> list[tuple[str, Any]]:
        states = self._states()
        present = list(chain.from_iterable(state.values() for _, state in states))
        return self._found_entries.get(
            present,
            lambda: (
                (f"{prefix}{name}", value)
                for prefix, state in states
                for name, value in state.items()
            ),
        )

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        present: list[Any] = []
        for optimizer in self.optimizers:
            present += _state_of(optimizer).values()
            for group in optimizer.param_groups:
                present += group["params"]
        return self._found_states.get(present, self._find_states)

    def _find_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for oi, gi, pi, parameter in self.optimized():
            state = _state_of(self.optimizers[oi])
            # ``state`` is a defaultdict: asking it with [] would create the entry.
            if parameter in state:
                yield f"o/{oi}/{gi}/{pi}/", state[parameter]

    def optimizer_entries(self) -> list[dict[Any, Any]]:
        """For each optimizer what its state holds under keys that are no parameters."""
        found: list[dict[Any, Any]] = []
        for oi, optimizer in enumerate(self.optimizers):
            others = {k: v for k, v in _state_of(optimizer).items() if not is_tensor(k)}
            if not all(isinstance(key, str | int) for key in others):
                raise UnsupportedState(
                    f"The state of {type(optimizer).__qualname__} (optimizer {oi}) has keys that "
                    f"are neither parameters nor text, so it cannot be saved."
                )
            found.append(others)
        return found

    def restore_entries(self, saved: Sequence[dict[Any, Any]]) -> None:
        """Set what ``optimizer_entries`` returned."""
        for optimizer, values in zip(self.optimizers, saved, strict=True):
            state: dict[Any, Any] = _state_of(optimizer)
            for key in [key for key in state if not is_tensor(key) and key not in values]:
                del state[key]
            for key, value in values.items():
                if key not in state or not fill(state[key], value):
                    state[key] = detached_copy(value)

    def require_own_memory(self) -> None:
        """Refuse optimizer state that a new process could not make: a tensor that serves for two
        entries, or that has no plain memory."""
        seen = {each.data_ptr(): key for key, each in self._beside_state() if each.numel()}
        for key, tensor in self.optimizer_state():
            part = local_part(tensor)
            optimizer, _ = self.trained_by(key)
            require_dense(f"The state {key} of {type(optimizer).__qualname__}", part)
            if not part.numel():
                continue
            if part.data_ptr() in seen:
                raise UnsupportedState(
                    f"{type(optimizer).__qualname__} holds one tensor as {seen[part.data_ptr()]} "
                    f"and as {key}, which would be two in a new process: let each be its own."
                )
            seen[part.data_ptr()] = key

    def _beside_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in self.parameters():
            yield from plain_parts(key, tensor)
        for optimizer in self.optimizers:
            for gi, group in enumerate(optimizer.param_groups):
                for name, value in group.items():
                    if isinstance(value, torch.Tensor):
                        yield f"param_groups[{gi}][{name!r}]", value

    def everything(self) -> dict[str, torch.Tensor]:
        """The memory of all of the above that is tensors, in an order that is the same on every
        rank that has the same tensors. The same dict as the last time if they are the same."""
        parts = [self._parameter_list(), list(self.buffers()), self.optimizer_state()]
        tensors = [tensor for part in parts for _, tensor in part]
        named = [*tensors, *(key for key, _ in parts[1])]  # a buffer may go to another name
        if not (self._all_plain and same_objects(named, self._named)):
            self._named = named
            self._find_everything(parts)
            self._all_plain = all(type(tensor) in PLAIN_TYPES for tensor in tensors)
        return self._everything

    def _find_everything(self, parts: list[list[tuple[str, torch.Tensor]]]) -> None:
        *others, state = parts
        found: dict[str, torch.Tensor] = {}
        for key, tensor in chain.from_iterable(others):
            found.update(plain_parts(key, tensor))
        for key, tensor in state:
            found[key] = local_part(tensor)
            if inner_names(found[key]):
                raise UnsupportedState(
                    f"{key} is a {type(found[key]).__qualname__}, and optimizer state is saved "
                    f"only if it is plain tensors or DTensors."
                )
        known = self._everything
        if list(found) != list(known) or not same_objects(
            list(found.values()), list(known.values())
        ):
            self._everything = found

    def parameter_of(self, key: str) -> tuple[dict[str, Any], torch.Tensor, str]:
        """For a key of optimizer state: the state dict it lies in (made if need be), the
        parameter, and the entry's name."""
        optimizer, parameter, name = self._owner_of(key)
        return _state_of(optimizer)[parameter], parameter, name

    def trained_by(self, key: str) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        """For a key of optimizer state: the optimizer and the parameter."""
        optimizer, parameter, _ = self._owner_of(key)
        return optimizer, parameter

    def _owner_of(self, key: str) -> tuple[torch.optim.Optimizer, torch.Tensor, str]:
        _, oi, gi, pi, name = key.split("/", 4)
        optimizer = self.optimizers[int(oi)]
        return optimizer, optimizer.param_groups[int(gi)]["params"][int(pi)], name

    def make_state(self, key: str, like: torch.Tensor, *, wrapped: bool, on_cpu: bool) -> None:
        """Make the entry of the optimizers' state for ``key``, unless there is one, with room for
        ``like``: a DTensor as its parameter is if ``wrapped``, and else beside its parameter or
        ``on_cpu``."""
        state, parameter, name = self.parameter_of(key)
        if name in state and is_tensor(state[name]):
            present = local_part(state[name])
            if (present.shape, present.dtype) == (like.shape, like.dtype):
                return
        if wrapped:
            state[name] = torch.empty_like(parameter, dtype=like.dtype, requires_grad=False)
            return
        local = local_part(parameter)
        # Laid out in memory as the parameter, like torch's optimizers do it.
        model = local if local.shape == like.shape else like
        device = torch.device("cpu") if on_cpu else local.device
        state[name] = torch.empty_like(model, dtype=like.dtype, device=device, requires_grad=False)

    def forget_optimizer_state(self, keep: set[str]) -> None:
        """Delete every entry of the optimizers' state whose key is not in ``keep``."""
        for oi, gi, pi, parameter in self.optimized():
            state = _state_of(self.optimizers[oi])
            if parameter not in state:
                continue
            for name in list(state[parameter]):
                if f"o/{oi}/{gi}/{pi}/{name}" not in keep:
                    del state[parameter][name]
            if not state[parameter]:
                del state[parameter]


def same_objects(left: list[Any], right: list[Any]) -> bool:
    """Whether both lists have the very same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


class _Found(Generic[_Each]):
    """A list that is made anew when one of the objects it follows from has become another."""

    def __init__(self) -> None:
        self._present: list[Any] | None = None
        self._found: list[_Each] = []

    def get(self, present: list[Any], find: Callable[[], Iterable[_Each]]) -> list[_Each]:
        """What ``find`` gave for these very objects."""
        if self._present is None or not same_objects(self._present, present):
            self._found, self._present = list(find()), present
        return self._found


def _state_of(optimizer: Any) -> dict[torch.Tensor, dict[str, Any]]:
    """The optimizer's state by parameter; what a ZeroRedundancyOptimizer shows is empty."""
    state = optimizer.optim.state if is_zero(optimizer) else optimizer.state
    assert isinstance(state, dict)
    return state
