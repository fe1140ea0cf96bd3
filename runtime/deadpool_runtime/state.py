"""The training state and the three slots that hold copies of it.

State ``k`` is what a rank has after the body of step ``k``. Its *replicated* part is the same on
every rank (parameters, optimizer state, hyper-parameters, schedulers) and comes from a living peer
when a rank is lost. Its *own* part (random number generators, data position, the user's values,
what buffers and extras hold on this rank, which modules train) no peer has, and travels to the
launcher with every step. Buffers too large for that which never change are *constants*: hashed at
the start, compared between the ranks by their hashes, and replicated.

Why three slots, and why the optimizer guard of step ``k`` waits for the confirmation of ``k-1``.
Let A copy state ``k``, overwriting ``k-3``:

1. A finished the backward pass of step ``k``, so every rank took part in its all-reduce, so every
   rank ended the body of ``k-1`` and passed the guard in it.
2. That guard let a rank through only after the own part of *its* state ``k-2`` was confirmed. So
   the own part of ``k-2`` is outside the node for every rank, whoever is lost now.
3. A still holds ``k-2`` and ``k-1`` while it writes ``k``. No rank can end the backward pass of
   ``k+1`` before A has entered the body of ``k+1``, so none overwrites ``k-2`` yet; and a rank
   behind A, still in the body of ``k``, holds ``k-2`` and ``k-1`` as well.

So while A overwrites ``k-3``, state ``k-2`` is whole everywhere. With two slots A would overwrite
``k-2`` itself; with a guard that waits for ``k-2`` only, step 2 would speak of ``k-3``, which A no
longer has. State 0 is first overwritten at ``k = 3``; the guard of step 1 has nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deadpool_runtime.encoding import Digest, check_round_trip, detached_copy, digest_of
from deadpool_runtime.errors import Misuse, UnsupportedState
from deadpool_runtime.tensors import PARTS, TensorMap, require_dense, without_repeats

SLOTS = 3
#: Elements of each parameter that are compared with a peer's at a recovery.
SAMPLED = 64
#: Buffers up to this size (bytes) always travel with the rank's own part.
SMALL_NBYTES = 64 << 10


class Slot:
    """Room for one state. ``step`` is None unless the copy is whole."""

    def __init__(self) -> None:
        self.step: int | None = None
        #: The replicated tensors, contiguous on the CPU. Storage is kept from use to use.
        self.tensors: dict[str, torch.Tensor] = {}
        #: The replicated plain values (see ``TrainingState._meta``).
        self.meta: dict[str, Any] = {}
        #: The own part, encoded.
        self.own = b""

    def reserve(self, key: str, like: torch.Tensor) -> torch.Tensor:
        """Storage for ``key``, shaped as ``like``; reused when it fits."""
        room = self.tensors.get(key)
        if room is None or room.shape != like.shape or room.dtype != like.dtype:
            room = torch.empty_like(like, device="cpu", requires_grad=False)
        return room


class TrainingState:
    """Copies the live state into slots and back. Used by the training thread only."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        extras: dict[str, Any],
    ) -> None:
        modules = {name: item for name, item in extras.items() if isinstance(item, nn.Module)}
        self._schedulers = list(schedulers)
        self._extras = {name: item for name, item in extras.items() if name not in modules}
        self.tensors = TensorMap(models, optimizers, modules)
        self.slots = [Slot() for _ in range(SLOTS)]
        #: Hashes of the large buffers at the start of the job; None until they are needed.
        self._constants: dict[str, str] | None = None
        self._check()

    def _check(self) -> None:
        """Refuse now what could not be brought back later."""
        for key, tensor in self.tensors.everything().items():
            require_dense(key, tensor)
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

    # ------------------------------------------------------------ into a slot

    def slot_for(self, step: int) -> Slot:
        """The slot whose turn it is at ``step``; what it held is gone."""
        slot = self.slots[step % SLOTS]
        slot.step = None
        return slot

    @torch.no_grad()
    def copy(self, step: int) -> Slot:
        """Copy the replicated part into the slot of ``step``; ``seal`` makes it count."""
        slot = self.slot_for(step)
        live = self.tensors.everything()
        slot.tensors = {key: slot.reserve(key, tensor) for key, tensor in live.items()}
        if live:
            torch._foreach_copy_(list(slot.tensors.values()), list(live.values()))
        slot.meta = self._meta()
        return slot

    def require_unchanged(self, step: int) -> None:
        """Raise ``Misuse`` if what optimizers and schedulers hold besides tensors is no longer
        what was copied for ``step``: a replacement would not have that change."""
        then, now = self.slots[step % SLOTS].meta, self._meta()
        for part, spoken in (("hyper", "an optimizer's options"), ("schedulers", "a scheduler")):
            if digest_of(then[part], spoken) != digest_of(now[part], spoken):
                raise Misuse(
                    f"Between the bodies of steps {step} and {step + 1} {spoken} changed, which "
                    f"a replaced rank would not see: move that into the body."
                )

    def seal(self, step: int, own: bytes) -> None:
        """Complete the slot of ``step`` with the own part."""
        slot = self.slots[step % SLOTS]
        slot.own = own
        slot.step = step

    def sealed(self) -> list[int]:
        """The steps whose state is whole here, ascending."""
        return sorted(slot.step for slot in self.slots if slot.step is not None)

    def slot_of(self, step: int) -> Slot:
        """The slot that holds ``step``."""
        for slot in self.slots:
            if slot.step == step:
                return slot
        raise Misuse(f"This process holds the states {self.sealed()}, not {step}.")

    def keep_only(self, step: int) -> None:
        """Forget every other state: what follows ``step`` is about to be run again."""
        for slot in self.slots:
            if slot.step != step:
                slot.step = None

    def on_cpu(self) -> set[str]:
        """Keys of the optimizer state that lies on the CPU, such as step counts."""
        return {k for k, t in self.tensors.optimizer_state() if t.device.type == "cpu"}

    def _hyper(self) -> list[list[dict[str, Any]]]:
        return [
            [
                {name: detached_copy(value) for name, value in group.items() if name != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self.tensors.optimizers
        ]

    def _meta(self) -> dict[str, Any]:
        return {
            "hyper": self._hyper(),
            "plain": detached_copy(self.tensors.optimizer_plain()),
            "schedulers": [detached_copy(item.state_dict()) for item in self._schedulers],
            # Whether a gradient is None or merely zero decides whether optimizers skip it.
            "gradients": [tensor.grad is not None for _, tensor in self.tensors.parameters()],
            "constants": self._known_constants(),
        }

    def _known_constants(self) -> dict[str, str]:
        if self._constants is None:
            self._constants = {
                key: digest_of(tensor, key)
                for key, tensor in self.tensors.buffers()
                if tensor.numel() * tensor.element_size() > SMALL_NBYTES
            }
        return self._constants

    def own_part(self) -> dict[str, Any]:
        """What of models and extras only this rank has: all buffers but the constants (None where
        a buffer is missing), the extras' states, the modes."""
        live, constants = dict(self.tensors.buffers()), self._known_constants()
        buffers = {}
        for key in self.tensors.buffer_keys():
            tensor, original = live.get(key), constants.get(key)
            # By value: batch normalisation, ``.data`` and numpy write without torch's counting.
            if tensor is None or original is None or digest_of(tensor, key) != original:
                buffers[key] = detached_copy(tensor)
        extras = {name: detached_copy(item.state_dict()) for name, item in self._extras.items()}
        return {"buffers": buffers, "extras": extras, "modes": self.tensors.modes()}

    # ------------------------------------------------------------ out of a slot

    @torch.no_grad()
    def restore(self, step: int, own: dict[str, Any]) -> None:
        """Bring the state of ``step`` back, into the storage that is there.

        ``own``: the decoded counterpart of ``own_part``.
        """
        slot = self.slot_of(step)
        self._constants = dict(slot.meta["constants"])
        self._settle_buffers(slot, own["buffers"])
        self._require_same(slot, optimizer=False)
        self.tensors.forget_optimizer_state(set(slot.tensors) | set(slot.meta["plain"]))
        self._create_optimizer_state(slot)
        live = self._require_same(slot, optimizer=True)
        if live:
            pairs = [(live[key], value) for key, value in slot.tensors.items()]
            torch._foreach_copy_(
                [without_repeats(to) for to, _ in pairs],
                [
                    value if to.shape == without_repeats(to).shape else _first(value, to)
                    for to, value in pairs
                ],
            )
        self._restore_plain(slot.meta, own["extras"])
        self.restore_modes(own["modes"])

    def restore_modes(self, modes: dict[str, bytes]) -> None:
        """Set which modules train and which parameters require gradients."""
        self.tensors.restore_modes(modes)

    def _settle_buffers(self, slot: Slot, own: dict[str, torch.Tensor | None]) -> None:
        """Put this rank's own buffers into the slot, which may hold a peer's, and make room for
        all of them in the modules."""
        live, constants = dict(self.tensors.buffers()), self._known_constants()
        for key in self.tensors.buffer_keys():
            value = slot.tensors.get(key)
            if key in own:
                value = own[key]
            elif value is not None and digest_of(value, key) != constants.get(key):
                # The peer changed what was still the same on this rank.
                value = live.get(key)
                if value is None or digest_of(value, key) != constants.get(key):
                    raise Misuse(
                        f"{key} ({PARTS[key.split('/')[0]]}) changed on some ranks only, and its "
                        f"first value is lost: buffers of more than {SMALL_NBYTES >> 10} KiB must "
                        f"change on all ranks or on none."
                    )
                value = detached_copy(value.to("cpu"))
            if value is None:
                slot.tensors.pop(key, None)
            else:
                slot.tensors[key] = value
            self.tensors.fit_buffer(key, value)

    def _require_same(self, slot: Slot, *, optimizer: bool) -> dict[str, torch.Tensor]:
        """The live tensors, which must be those of ``slot`` in name, shape and type."""
        live = self.tensors.everything()
        names = {key for key in live.keys() | slot.tensors.keys() if optimizer or key[0] != "o"}
        for key in sorted(names):
            here, there = live.get(key), slot.tensors.get(key)
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

    def _create_optimizer_state(self, slot: Slot) -> None:
        """Make the entries a new process's optimizer does not have yet, in the donor's order."""
        on_cpu = slot.meta.get("on_cpu", set())
        for key, value in slot.tensors.items():
            if not key.startswith("o/"):
                continue
            state, parameter, name = self.tensors.parameter_of(key)
            if name not in state:
                device = torch.device("cpu") if key in on_cpu else parameter.device
                like = parameter if parameter.shape == value.shape else value
                state[name] = torch.empty_like(
                    like, dtype=value.dtype, device=device, requires_grad=False
                )
        for key, plain in slot.meta["plain"].items():
            state, _, name = self.tensors.parameter_of(key)
            state[name] = detached_copy(plain)

    def _restore_plain(self, meta: dict[str, Any], extras: dict[str, Any]) -> None:
        for optimizer, groups in zip(self.tensors.optimizers, meta["hyper"], strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for name in set(group) - set(saved) - {"params"}:
                    del group[name]
                for name, value in saved.items():
                    present = group.get(name)
                    if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                        present.copy_(value)  # compiled steps hold on to the tensor
                    else:
                        group[name] = detached_copy(value)
        for scheduler, saved in zip(self._schedulers, meta["schedulers"], strict=True):
            scheduler.load_state_dict(detached_copy(saved))
        for name, item in self._extras.items():
            item.load_state_dict(detached_copy(extras[name]))
        parameters = [tensor for _, tensor in self.tensors.parameters()]
        for tensor, had_gradient in zip(parameters, meta["gradients"], strict=True):
            if not had_gradient:
                tensor.grad = None
            elif tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            else:
                tensor.grad.zero_()

    # ------------------------------------------------------------ hashes

    def sample(self, step: int) -> str:
        """Hash of a few elements of each parameter in the slot of ``step``, others at each step.
        Shows at next to no cost that a rank has other parameters than the peer it is restored
        from."""
        digest = Digest()
        for key, tensor in self.slots[step % SLOTS].tensors.items():
            if key.split("/")[0] not in ("p", "q", "xp"):
                continue
            stride = max(1, tensor.numel() // SAMPLED)
            digest.add(key, key)
            digest.add_tensor(tensor.reshape(-1)[step % stride :: stride])
        return digest.hexdigest()

    def replicated_digest(self) -> str:
        """Hash of what must be the same on every rank, from the live objects. Of the buffers only
        the constants, as they were at the start; extras that are no modules are left out."""
        digest = Digest()
        for key, tensor in self.tensors.parameters():
            digest.add(key, key)
            digest.add_tensor(tensor)
        for key, tensor in self.tensors.optimizer_state():
            digest.add(key, key)
            digest.add_tensor(tensor)
        meta = self._meta()
        parts = [meta["hyper"], meta["plain"], meta["schedulers"], meta["constants"]]
        digest.add(parts, "the optimizer's state")
        return digest.hexdigest()

    def part_digests(self) -> dict[str, str]:
        """Hash of each part of the live state, by its name."""
        digests = {name: Digest() for name in ("parameters", "buffers", "optimizer", "extras")}
        for key, tensor in self.tensors.everything().items():
            digest = digests[PARTS[key.split("/")[0]]]
            digest.add(key, key)
            digest.add_tensor(tensor)
        meta = self._meta()
        digests["optimizer"].add([meta["hyper"], meta["plain"]], "the optimizer's state")
        digests["scheduler"] = Digest()
        digests["scheduler"].add(meta["schedulers"], "the scheduler's state")
        for name, item in self._extras.items():
            digests["extras"].add([name, detached_copy(item.state_dict())], f"extra {name!r}")
        return {name: digest.hexdigest() for name, digest in digests.items()}


def types_in(value: Any) -> set[type]:
    """The types of a plain value and of everything in it."""
    found, pending = set(), [value]
    while pending:
        each = pending.pop()
        found.add(type(each))
        if isinstance(each, Mapping):
            pending += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set):
            pending += each
    return found


def _first(value: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """The elements of ``value`` that belong to the memory an expanded tensor really has."""
    for dim, (size, stride) in enumerate(zip(expanded.shape, expanded.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value
