"""The training state: what of it goes into a copy, and back.

State ``k`` is what a rank has after the body of step ``k``. Tensors are copied to the arena by a
thread while the next step computes (``replication.snapshots``). What is no tensor is the *own
part*: random number generators, data position, the user's values, hyper-parameters, schedulers,
which modules train; and with it the buffers, which a forward pass may change while the copy is
being made. Buffers too large for that which never change are *constants* (``constants``): hashed at
the start, compared by their hashes, and copied like parameters.

Why three slots, and why the optimizer guard of step ``k`` waits until the replica of ``k-1`` is
confirmed. Let A copy state ``k``, overwriting ``k-3``:

1. A finished the backward pass of step ``k``, so every rank took part in its collectives, so every
   rank ended the body of ``k-1`` and passed the guard in it.
2. That guard let a rank through only after the replica of *its* state ``k-2`` was confirmed. So
   what nobody else has of ``k-2`` is outside the node for every rank, whoever is lost now.
3. A still holds ``k-2`` and ``k-1`` while it writes ``k``, and so does the holder of its replicas,
   since A's replica of ``k`` overwrites that of ``k-3``. No rank can end the backward pass of
   ``k+1`` before A has entered the body of ``k+1``, so none overwrites ``k-2`` yet; and a rank
   behind A, still in the body of ``k``, holds ``k-2`` and ``k-1`` as well.

So while A overwrites ``k-3``, state ``k-2`` is whole everywhere. With two slots A would overwrite
``k-2`` itself; with a guard that waits for ``k-2`` only, step 2 would speak of ``k-3``, which A no
longer has. State 0 is first overwritten at ``k = 3``; the guard of step 1 has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from deadpool_runtime import strangers
from deadpool_runtime.attributes import Attributes
from deadpool_runtime.constants import Constants
from deadpool_runtime.encoding import Digest, check_round_trip, detached_copy, digest_of
from deadpool_runtime.errors import Misuse, UnsupportedState
from deadpool_runtime.generators import generators_among
from deadpool_runtime.kinds import require_dense, without_repeats
from deadpool_runtime.later import OMITTED, is_remote, state_of_extra, tensors_in
from deadpool_runtime.modules import path_of
from deadpool_runtime.state_parts import (
    DENSE,
    NO_GRADIENT,
    first_of,
    has_more,
    kind_of_gradient,
    load,
    sparse_zeros,
)
from deadpool_runtime.tensors import PARTS, TensorMap


@dataclass(frozen=True)
class Item:
    """One tensor to copy: this rank's local part of it, and the ranks that have the same.

    ``on_cpu``: it lies on the CPU whatever its parameter's device.
    """

    key: str
    tensor: torch.Tensor
    ranks: tuple[int, ...]
    on_cpu: bool


class TrainingState:
    """Reads and writes the live state. Used by the training thread only."""

    def __init__(
        self,
        tensors: TensorMap,
        schedulers: Sequence[Any],
        extras: Mapping[str, Any],
        ranks_of: Callable[[str], tuple[int, ...]],
    ) -> None:
        """``ranks_of``: the global ranks that have the same bytes as this one under a key.
        Modules among ``extras`` are part of ``tensors``; what else their ``state_dict`` has is
        saved too."""
        self.tensors = tensors
        self._schedulers = list(schedulers)
        registered = list(tensors.everything().values())
        self._extras = {
            name: item
            for name, item in extras.items()
            if not isinstance(item, nn.Module) or has_more(item, registered)
        }
        self._ranks_of = ranks_of
        self._constants = Constants()
        given = [*self._schedulers, *self._extras.values()]
        given += generators_among(given)
        self._scalers = strangers.parts_of(torch.amp.GradScaler, given)
        self._attributes = Attributes(
            tensors.modules(), tensors.optimizers, lambda: tensors.everything().values(), given
        )
        self._attributes.begin()
        #: How many tensors the optimizers had when they were last looked at.
        self._optimizer_tensors = 0
        #: What ``items`` saw and gave last.
        self._seen: dict[str, torch.Tensor] = {}
        self._buffer_keys: list[str] = []
        self._left_out: set[str] = set()
        self._items: list[Item] = []
        self._check()

    def _check(self) -> None:
        """Refuse now what could not be brought back later."""
        for key, tensor in self.tensors.everything().items():
            require_dense(key, tensor)
        for key, value in self._module_states().items():
            check_round_trip(value, f"what get_extra_state of the module {path_of(key)} gives")
        for item in [*self._schedulers, *self._extras.values()]:
            if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
                raise UnsupportedState(
                    f"A {type(item).__qualname__} given to attach has no state_dict and "
                    f"load_state_dict, so it cannot be saved."
                )
        for index, scheduler in enumerate(self._schedulers):
            name = f"the state of scheduler {index} ({type(scheduler).__qualname__})"
            check_round_trip(detached_copy(scheduler.state_dict()), name)
        for name, extra in self._extras.items():
            check_round_trip(detached_copy(extra.state_dict()), f"the state of extra {name!r}")
        check_round_trip(self._hyper(), "an optimizer's param_groups")

    # ------------------------------------------------------------ into a copy

    def has_memory_of(self, tensor: torch.Tensor, *beside: Any) -> bool:
        """Whether a tensor is, or shares memory with, what is saved: here, in the extras' states,
        or in the plain values ``beside``."""
        states = [item.state_dict() for item in self._extras.values()]
        saved = chain(self.tensors.everything().values(), tensors_in([states, *beside]))
        return tensor.untyped_storage().data_ptr() in {
            each.untyped_storage().data_ptr() for each in saved
        }

    def items(self) -> list[Item]:
        """What a copy has of tensors now, in an order that is the same on every rank that has the
        same tensors. Buffers only if they are constants and unchanged. The same list as the last
        time if they are the same objects."""
        self._constants.begin(self.tensors.buffers())
        everything = self.tensors.everything()
        if everything is not self._seen:
            optimizer_tensors = sum(key[0] == "o" for key in everything)
            if optimizer_tensors != self._optimizer_tensors:
                self.tensors.require_own_memory()
                self._optimizer_tensors = optimizer_tensors
            self._seen, self._items = everything, []
            self._buffer_keys = [key for key in everything if key.startswith(("b/", "xb/"))]
        left_out = {
            key
            for key in self._buffer_keys
            if not self._constants.may_be_left(key, everything[key])
        }
        if left_out != self._left_out or not self._items:
            self._left_out = left_out
            self._items = [
                Item(key, tensor, self._ranks_of(key), key[0] == "o" and not is_remote(tensor))
                for key, tensor in everything.items()
                if key not in left_out
            ]
        return self._items

    def require_unchanged(self, step: int, then: dict[str, Any]) -> None:
        """Raise ``Misuse`` if what optimizers and schedulers hold besides tensors is no longer
        ``then``, which was ``plain_part`` after ``step``: a replacement would not have that
        change."""
        now = {"hyper": self._hyper(), "schedulers": self._scheduler_states()}
        for part, spoken in (("hyper", "an optimizer's options"), ("schedulers", "a scheduler")):
            if digest_of(then[part], spoken) != digest_of(now[part], spoken):
                raise Misuse(
                    f"Between the bodies of steps {step} and {step + 1} {spoken} changed, which "
                    f"a replaced rank would not see: move that into the body."
                )

        for scaler in self._scalers:
            if strangers.is_open(scaler):
                raise Misuse(
                    f"In the body of step {step} a GradScaler unscaled or stepped without a call "
                    f"of its update() behind it, which it does not save: call update() in the body."
                )

    def _module_states(self) -> dict[str, Any]:
        """What modules save by ``get_extra_state``."""
        return {
            key: detached_copy(module.get_extra_state())
            for key, module in self.tensors.modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def _hyper(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {name: detached_copy(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self.tensors.optimizers
        ]

    def schedulers(self) -> list[Any]:
        """Those that ``attach`` was given."""
        return self._schedulers

    def _scheduler_states(self) -> list[Any]:
        return [detached_copy(item.state_dict()) for item in self._schedulers]

    def plain_part(self) -> dict[str, Any]:
        """What optimizers and schedulers hold besides tensors, taken at the end of the body.

        Raises ``Misuse`` if what there is to save is no longer what attach was given."""
        self.tensors.require_structure()
        self.tensors.find_late_buffers()
        return {
            "hyper": self._hyper(),
            "plain": detached_copy(self.tensors.optimizer_plain()),
            "entries": detached_copy(self.tensors.optimizer_entries()),
            "wrapped": self.tensors.wrapped_state(),
            "schedulers": self._scheduler_states(),
            # Whether a gradient is None or merely zero decides whether optimizers skip it.
            "gradients": [kind_of_gradient(each.grad) for _, each in self.tensors.parameters()],
            "constants": self._constants.hashes(self.tensors.buffers()),
        }

    def own_part(self) -> dict[str, Any]:
        """What of models and extras only this rank has: all buffers but the constants (None where
        a buffer is missing), the extras' states, the modes. In the place of what lies on a device
        there may be a ``Later``."""
        self.tensors.find_late_buffers()
        live = dict(self.tensors.buffers())
        self._constants.hashes(live.items())
        values = {
            key: self._constants.own_value(key, live.get(key)) for key in self.tensors.buffer_keys()
        }
        self._constants.end()
        buffers = {key: value for key, value in values.items() if value is not OMITTED}
        extras = {name: state_of_extra(item) for name, item in self._extras.items()}
        return {
            "buffers": buffers,
            "extras": extras,
            "modes": self.tensors.modes(),
            "modules": self._module_states(),
            "attributes": self._attributes.changed(),
        }

    # ------------------------------------------------------------ out of a copy

    @torch.no_grad()
    def restore(
        self,
        saved: Mapping[str, torch.Tensor],
        own: dict[str, Any],
        on_cpu: Collection[str] = (),
    ) -> None:
        """Bring a state back, into the storage that is there.

        ``saved``: the tensors of the copy, as ``items`` gave them, now in host memory, and
        ``on_cpu`` the keys of those that belong there. ``own``: the decoded own part, which holds
        what ``plain_part`` and ``own_part`` gave.
        """
        self._constants = Constants(own["constants"])
        values = dict(saved)
        self._settle_buffers(values, own["buffers"])
        self._require_same(values, optimizer=False)
        self.tensors.forget_optimizer_state(set(values) | set(own["plain"]))
        self._create_optimizer_state(values, own, on_cpu)
        live = self._require_same(values, optimizer=True)
        if live:
            pairs = [(live[key], value) for key, value in values.items()]
            torch._foreach_copy_(
                [without_repeats(to) for to, _ in pairs],
                [
                    value if to.shape == without_repeats(to).shape else first_of(value, to)
                    for to, value in pairs
                ],
            )
        self._restore_plain(own)
        self.restore_modes(own["modes"])

    def restore_modes(self, modes: dict[str, bytes]) -> None:
        """Set which modules train and which parameters require gradients."""
        self.tensors.restore_modes(modes)

    def _settle_buffers(
        self, values: dict[str, torch.Tensor], own: dict[str, torch.Tensor | None]
    ) -> None:
        """Add the buffers of the own part to ``values``; make room for all in the modules."""
        self.tensors.find_late_buffers()
        for key, value in own.items():
            if value is not None:
                self.tensors.make_place(key)
        for key in self.tensors.buffer_keys():
            value = own[key] if key in own else values.get(key)
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
            self.tensors.fit_buffer(key, value)

    def _require_same(
        self, values: dict[str, torch.Tensor], *, optimizer: bool
    ) -> dict[str, torch.Tensor]:
        """The live tensors, which must be those of ``values`` in name, shape and type."""
        live = self.tensors.everything()
        names = {key for key in live.keys() | values.keys() if optimizer or key[0] != "o"}
        for key in sorted(names):
            here, there = live.get(key), values.get(key)
            if (
                here is None
                or there is None
                or (here.shape, here.dtype) != (there.shape, there.dtype)
            ):
                raise Misuse(
                    f"The model or optimizer of this process differs from the one that was saved, "
                    f"first at {key} ({PARTS[key.split('/')[0]]})."
                )
        return live

    def _create_optimizer_state(
        self, values: dict[str, torch.Tensor], own: dict[str, Any], on_cpu: Collection[str]
    ) -> None:
        """Make the entries a new process's optimizer does not have yet, in the order in which they
        were made in the process that is lost."""
        wrapped = set(own["wrapped"])
        for key, value in values.items():
            if key.startswith("o/"):
                self.tensors.make_state(key, value, wrapped=key in wrapped, on_cpu=key in on_cpu)
        for key, plain in own["plain"].items():
            state, _, name = self.tensors.parameter_of(key)
            state[name] = detached_copy(plain)

    def _restore_plain(self, own: dict[str, Any]) -> None:
        for optimizer, groups in zip(self.tensors.optimizers, own["hyper"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for name in set(group) - set(saved) - {"params"}:
                    del group[name]
                for name, value in saved.items():
                    present = group.get(name)
                    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                        present.copy_(value)  # compiled steps hold on to the tensor
                    else:
                        group[name] = detached_copy(value)
        self.tensors.restore_entries(own["entries"])
        for index, (scheduler, saved) in enumerate(
            zip(self._schedulers, own["schedulers"], strict=True)
        ):
            load(scheduler.load_state_dict, saved, f"scheduler {index}", scheduler)
        for name, item in self._extras.items():
            load(item.load_state_dict, own["extras"][name], f"extra {name!r}", item)
        for scaler in self._scalers:
            strangers.close(scaler)
        modules = dict(self.tensors.modules())
        for key, saved in own["modules"].items():
            module = modules[key]
            load(module.set_extra_state, saved, f"the module {path_of(key)}", module)
        self._attributes.restore(own["attributes"])
        parameters = [tensor for _, tensor in self.tensors.parameters()]
        for tensor, kind in zip(parameters, own["gradients"], strict=True):
            if kind == NO_GRADIENT:
                tensor.grad = None
            elif kind != DENSE:
                tensor.grad = sparse_zeros(tensor, kind)
            elif tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            else:
                tensor.grad.zero_()

    # ------------------------------------------------------------ hashes

    def part_digests(self) -> dict[str, str]:
        """Hash of each part of the live state, by its name."""
        digests = {name: Digest() for name in ("parameters", "buffers", "optimizer", "extras")}
        for key, tensor in self.tensors.everything().items():
            digest = digests[PARTS[key.split("/")[0]]]
            digest.add(key, key)
            digest.add_tensor(tensor)
        meta = self.plain_part()
        plain = [meta["hyper"], meta["plain"], *filter(None, meta["entries"])]
        digests["optimizer"].add(plain, "the optimizer's state")
        digests["scheduler"] = Digest()
        digests["scheduler"].add(meta["schedulers"], "the scheduler's state")
        for name, item in self._extras.items():
            digests["extras"].add([name, detached_copy(item.state_dict())], f"extra {name!r}")
        for values in (self._module_states(), self._attributes.changed()):
            if values:
                digests["extras"].add(values, "what modules and optimizers keep in attributes")
        return {name: digest.hexdigest() for name, digest in digests.items()}
