"""Tensors whose first values are made only if something reads them.

``Deferred`` watches what the process does with tensors, as a dispatch mode of torch's, from the
first skipped call until the process is restored. The memory of a skipped tensor holds NaN and
stands for a *recipe* (``recipes``): a drawing, or a copy (``clone``, ``to``, ``deepcopy``,
``copy_``) of what another recipe makes.

Before an operation reads or partly writes such memory, its recipe is carried out there; so the
operation finds what it finds in a process that skips nothing. Memory that is overwritten as a
whole only loses its recipe. Nothing is done for views, and for operations that look at shapes.

Known by their storage and not by the tensor: tied weights, ``.data`` and detached tensors share it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from deadpool_runtime.errors import Misuse
from deadpool_runtime.kinds import plain_parts
from deadpool_runtime.recipes import Copied, Drawn, Geometry, Recipe, is_plain, is_whole

_aten = torch.ops.aten
#: They look at their tensors' shapes and types only.
_SHAPE_ONLY = {
    _aten.empty_like,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.rand_like,
    _aten.randn_like,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
    _aten.set_,
}
#: They write every element of their first argument without reading it.
_OVERWRITING = {_aten.copy_, _aten.fill_, _aten.zero_, _aten.normal_, _aten.uniform_}
_COPYING = {_aten.clone, _aten._to_copy}

#: What a subclass has that does not carry out operations itself, ``nn.Parameter`` for one.
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__

#: Methods of ``torch.Tensor`` that read its memory without an operation that a mode sees.
_READING_METHODS = ("numpy", "tolist", "__reduce_ex__", "__dlpack__", "__repr__")


@dataclass(frozen=True)
class _Unmade:
    storage: StorageWeakRef
    nbytes: int
    recipe: Recipe


class Deferred(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The tensors of this process that are not made yet. It watches the thread it was installed in.

    The mode stays in place when the block of ``initial_weights`` ends, below whatever other modes
    the script enters later, so those can come and go as usual.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: By the address of the storage, which the weak reference keeps from being used again.
        self._unmade: dict[int, _Unmade] = {}
        self._ended = False
        self._paused = False
        self._put_back: list[Callable[[], None]] = []

    @classmethod
    def install(cls) -> Deferred | None:
        """Begin to watch; None inside another dispatch mode, which may end before this one."""
        if torch._C._len_torch_dispatch_stack() or _get_current_dispatch_mode_stack():
            return None
        deferred = cls()
        for name in _READING_METHODS:
            deferred._replace(torch.Tensor, name, deferred._reading)
        if torch.distributed.is_available():
            deferred._replace(torch.distributed, "_broadcast_coalesced", deferred._without_unmade)
        deferred.__enter__()  # type: ignore[no-untyped-call]
        return deferred

    def skip(self, tensor: torch.Tensor, recipe: Drawn) -> bool:
        """Put NaN in the place of what ``recipe`` would draw; false if it must be drawn."""
        if self._ended or not recipe.is_constant() or not is_whole(tensor):
            return False
        before = self._unmade.get(_key(tensor))
        if before is None or before.recipe.geometry.dtype != tensor.dtype:
            with self._pause(), torch.no_grad():
                tensor.fill_(float("nan"))
        self._note(tensor, recipe)
        return True

    def settle(self, restored: Iterable[torch.Tensor]) -> None:
        """Stop watching, and make what is alive and does not lie in ``restored``."""
        self._ended = True
        stack = _get_current_dispatch_mode_stack()
        if self in stack:
            above = [
                torch._C._pop_torch_dispatch_stack(None) for _ in stack[stack.index(self) + 1 :]
            ]
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for mode in reversed(above):
                torch._C._push_on_torch_dispatch_stack(mode)
        for put_back in self._put_back:
            put_back()
        for tensor in restored:
            for _, part in plain_parts("", tensor):
                if is_whole(part):
                    self._unmade.pop(part.untyped_storage()._cdata, None)
        for key in list(self._unmade):
            self._make(key)

    # ------------------------------------------------------------ what is watched

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not wrapped by torch for its compiler, which it would import for that: seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """See ``TorchDispatchMode``."""
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not _PLAIN_DISPATCH for kind in types):
            return NotImplemented  # a subclass; this sees the operations it consists of
        if self._paused or not self._unmade:
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._make_all()  # a higher-order operator: what it calls is not seen
            return func(*args, **kwargs)
        kind = func.overloadpacket
        if kind in _SHAPE_ONLY or _is_view(func):
            return func(*args, **kwargs)
        if kind in _COPYING and self._is_part(args[0]):
            return self._copy(func, args, kwargs)
        if kind in _OVERWRITING and is_whole(args[0]):
            return self._overwrite(func, args, kwargs)
        self._make_those_in((args, kwargs))
        return func(*args, **kwargs)

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that returns a copy of its first argument, which is not made yet."""
        source = self._unmade[_key(args[0])].recipe
        copy = func(*args, **kwargs)
        if not is_plain(copy) or not is_whole(copy):
            self._make_those_in(args)
            return func(*args, **kwargs)
        self._note(copy, Copied(source, Geometry.of(args[0]), Geometry.of(copy)))
        return copy

    def _overwrite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes the whole storage of its first argument."""
        target, others = args[0], args[1:]
        recipe: Recipe | None = None
        if func.overloadpacket is _aten.copy_ and is_plain(target) and self._is_part(others[0]):
            source = self._unmade[_key(others[0])].recipe
            recipe = Copied(source, Geometry.of(others[0]), Geometry.of(target))
        else:
            self._make_those_in((others, kwargs))
        result = func(*args, **kwargs)
        self._unmade.pop(_key(target), None)
        if recipe is not None:
            self._note(target, recipe)
        return result

    def _is_part(self, tensor: torch.Tensor) -> bool:
        """Whether it shows memory that is not made, as numbers of the type that will be there."""
        unmade = self._unmade.get(_key(tensor))
        return (
            unmade is not None
            and tensor.dtype == unmade.recipe.geometry.dtype
            and not tensor.is_neg()
        )

    # ------------------------------------------------------------ recipes

    def _note(self, tensor: torch.Tensor, recipe: Recipe) -> None:
        storage = tensor.untyped_storage()
        weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._unmade[storage._cdata] = _Unmade(weak, storage.nbytes(), recipe)

    def _make_those_in(self, tree: Any) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self._make(_key(leaf))

    def _make_all(self) -> None:
        for key in list(self._unmade):
            self._make(key)

    def _make(self, key: int) -> None:
        """Carry out the recipe for this storage, if there is one and its memory is still there."""
        unmade = self._unmade.pop(key, None)
        if unmade is None:
            return
        storage = torch.UntypedStorage._new_with_weak_ptr(unmade.storage.cdata)
        if storage is None or storage.nbytes() != unmade.nbytes:
            return
        with self._pause(), torch.no_grad():
            tensor = unmade.recipe.geometry.over(storage)
            if not tensor.isnan().all():
                raise Misuse(
                    f"A tensor of shape {tuple(tensor.shape)} that was initialised inside "
                    f"`initial_weights()` was written to in a way that torch does not see (another "
                    f"thread, `.numpy()`, a raw pointer): initialise it outside of that block."
                )
            unmade.recipe.fill(tensor)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        paused, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = paused

    # ------------------------------------------------------------ what no mode sees

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        if name in vars(owner):
            self._put_back.append(lambda: setattr(owner, name, original))
        else:
            self._put_back.append(lambda: delattr(owner, name))
        setattr(owner, name, wrap(original))

    def _reading(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._unmade and not self._paused:
                for _, part in plain_parts("", tensor):
                    self._make(_key(part))
            return method(tensor, *args, **kwargs)

        return call

    def _without_unmade(self, broadcast: Callable[..., Any]) -> Callable[..., Any]:
        """Leave out of the broadcast what is not made: the constructor of DistributedDataParallel
        sends every parameter around, and a replacement has no peers to send to or to hear from."""

        @functools.wraps(broadcast)
        def call(group: Any, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            made = [tensor for tensor in tensors if _key(tensor) not in self._unmade]
            return broadcast(group, made, *args, **kwargs) if made else None

        return call


def _is_view(func: torch._ops.OpOverload) -> bool:
    # A composite one, which is met under inference mode, may copy after all (``contiguous``).
    return func.is_view and not func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _key(tensor: torch.Tensor) -> int:
    """The address of its storage; 0 if it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
