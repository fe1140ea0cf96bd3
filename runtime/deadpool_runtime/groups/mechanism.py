"""How a living ProcessGroup gets a new communicator.

There are two ways. ``SwapMechanism`` puts a new Backend under the group through the native shim;
it works with every torch that has been tried. ``ReconfigureMechanism`` asks torch to reconnect
the Backend that is there, which torch can do from 2.14. Which one is used makes no difference to
anybody outside this file. Both need the shim for a process that starts detached, because torch
itself offers no way to give a group its first real Backend late.

Only Gloo is here. NCCL would take a second connector beside ``_connect_gloo`` (its constructor
wants an Options object with the group's ranks, name and stream priority), an abort that does not
wait for the group's time-out, and a machine to try both on.
"""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d_bindings
from torch.distributed import distributed_c10d as c10d

from deadpool_runtime.groups import native
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.groups.sockets import SocketWatch

_ENVIRONMENT = "DEADPOOL_GROUP_MECHANISM"
# Its arguments and options differ between versions of torch.
_GLOO: Any = dist.ProcessGroupGloo


@dataclass
class GroupRecord:
    """What is needed to connect one ProcessGroup again; the group itself is held weakly."""

    group: weakref.ref[dist.ProcessGroup]
    name: str
    group_rank: int
    group_size: int
    #: Global ranks as they were given; empty for the default group, as torch has it.
    global_ranks: list[int]
    timeout: timedelta
    #: As the program gave it, such as "gloo" or "cpu:gloo".
    backend: str
    #: Backend by device type.
    devices: dict[str, str]
    options: Any
    description: str
    watch: SocketWatch = field(default_factory=SocketWatch)
    #: What the mechanism keeps for this group.
    attachment: Any = None
    #: This process's place among the members that take part at present, and how many they are.
    #: Fewer than ``group_size`` while ranks are set aside.
    rank_now: int = -1
    size_now: int = -1

    def __post_init__(self) -> None:
        self.rank_now, self.size_now = self.group_rank, self.group_size

    def ranks(self) -> list[int]:
        """Global ranks of all members, those that are set aside included."""
        return self.global_ranks or list(range(self.group_size))

    def living(self) -> dist.ProcessGroup:
        """The group, which the caller knows to be alive."""
        group = self.group()
        assert group is not None
        return group


class Mechanism(Protocol):
    """One way to connect groups; stateless but for what it keeps in a record."""

    name: str

    def creation_arguments(self, store: dist.Store) -> dict[str, Any]:
        """What to change in torch's own construction of a group over ``store``."""

    def created(self, record: GroupRecord, arguments: dict[str, Any]) -> None:
        """Finish a group that torch has just constructed with those arguments."""

    def rebuild(
        self, record: GroupRecord, epoch: int, store: dist.Store, connect_timeout: timedelta
    ) -> None:
        """Connect the group to its peers of this epoch, who all do the same, and drop the old."""


class SwapMechanism:
    """A new Backend object under the same group. The old one is destroyed, its threads joined."""

    name = "swap"

    def creation_arguments(self, store: dist.Store) -> dict[str, Any]:
        return {}

    def created(self, record: GroupRecord, arguments: dict[str, Any]) -> None:
        pass

    def rebuild(
        self, record: GroupRecord, epoch: int, store: dist.Store, connect_timeout: timedelta
    ) -> None:
        backends: dict[str, Any] = {}
        for device, kind in record.devices.items():
            if kind not in backends:
                prefixed = dist.PrefixStore(f"{device}/", store)
                backends[kind] = _CONNECTORS[kind](record, prefixed, connect_timeout)
        _place(record, backends, store)


class ReconfigureMechanism:
    """torch's own reconfigure: the same Backend object, told of its new peers."""

    name = "reconfigure"

    def creation_arguments(self, store: dist.Store) -> dict[str, Any]:
        return {"store": _RedirectedStore(store), "enable_reconfigure": True}

    def created(self, record: GroupRecord, arguments: dict[str, Any]) -> None:
        record.attachment = arguments["store"]
        store = dist.PrefixStore(f"{record.name}/", arguments["store"].target)
        _reconfigure(record, 0, store, record.timeout)

    def rebuild(
        self, record: GroupRecord, epoch: int, store: dist.Store, connect_timeout: timedelta
    ) -> None:
        backend = None if record.attachment is None else _gloo_of(record)
        if backend is None or backend.size() != record.size_now:
            record.attachment = _RedirectedStore(store)
            device = next(iter(record.devices))
            own = dist.PrefixStore(f"{record.name}/", record.attachment)
            backend = _GLOO(
                dist.PrefixStore(f"{device}/", own),
                record.rank_now,
                record.size_now,
                timeout=record.timeout,
                enable_reconfigure=True,
            )
            backend.options.global_ranks_in_group = record.global_ranks
            backend.options.group_name = record.name
            _place(record, {"gloo": backend}, store)
        record.attachment.target = store
        _reconfigure(record, epoch, store, connect_timeout)
        _place_store(record, store)


def choose() -> Mechanism:
    """The mechanism for the installed torch; DEADPOOL_GROUP_MECHANISM forces one."""
    possible: dict[str, Callable[[], Mechanism]] = {"swap": SwapMechanism}
    helper = inspect.signature(c10d._new_process_group_helper)
    if "enable_reconfigure" in helper.parameters:
        possible["reconfigure"] = ReconfigureMechanism
    wanted = os.environ.get(_ENVIRONMENT) or list(possible)[-1]
    if wanted not in possible:
        raise ValueError(
            f"{_ENVIRONMENT}={wanted} is not possible with torch {torch.__version__}; "
            f"possible: {', '.join(possible)}."
        )
    return possible[wanted]()


def require_supported(devices: dict[str, str]) -> None:
    """Refuse backends that cannot be connected again."""
    for device, kind in devices.items():
        if kind not in _CONNECTORS:
            raise UnsupportedLayout(
                f"A process group uses the backend {kind!r} for {device}, and only "
                f"{', '.join(_CONNECTORS)} can be rebuilt in place so far."
            )


def _connect_gloo(record: GroupRecord, store: dist.Store, connect_timeout: timedelta) -> Any:
    backend: Any = _GLOO(store, record.rank_now, record.size_now, timeout=connect_timeout)
    backend._set_default_timeout(record.timeout)
    backend.options.global_ranks_in_group = record.global_ranks
    backend.options.group_name = record.name
    return backend


_CONNECTORS: dict[str, Callable[[GroupRecord, dist.Store, timedelta], Any]] = {
    "gloo": _connect_gloo
}
#: The numbers by which the shim is told.
_TYPES: dict[str, int] = {"gloo": int(cast(Any, dist.ProcessGroup.BackendType.GLOO))}


def _place(record: GroupRecord, backends: dict[str, Any], store: dist.Store) -> None:
    """Put these backends under the group, and give it back what it loses by that."""
    group: Any = record.living()
    entries = [(device, _TYPES[kind], backends[kind]) for device, kind in record.devices.items()]
    native.load().set_backends(group, entries[0][1], entries, store)
    group._set_group_name(record.name)
    group._set_group_desc(record.description)
    _place_store(record, store)


def _place_store(record: GroupRecord, store: dist.Store) -> None:
    """Let groups that the program makes from now on meet in the new store."""
    group = record.living()
    backend, _ = c10d._world.pg_map[group]
    c10d._world.pg_map[group] = (backend, store)


def _reconfigure(
    record: GroupRecord, epoch: int, store: dist.Store, connect_timeout: timedelta
) -> None:
    """Exchange addresses through the store, then let torch connect."""
    backend = _gloo_of(record)
    store.set(f"handle/{record.rank_now}", backend.get_reconfigure_handle())
    options = cast(Any, _c10d_bindings).ReconfigureOptions()
    options.uuid = epoch
    options.handles = [store.get(f"handle/{rank}").decode() for rank in range(record.size_now)]
    options.timeout = connect_timeout
    backend.reconfigure(options).wait()


def _gloo_of(record: GroupRecord) -> Any:
    return record.living()._get_backend(torch.device(next(iter(record.devices))))


class _RedirectedStore(dist.Store):
    """A store whose traffic goes to whichever store it is pointed at.

    A reconfigured Backend keeps using the store that it was constructed over, and that one may
    have died with its connection.
    """

    def __init__(self, target: dist.Store) -> None:
        super().__init__()
        self.target = target

    def set(self, key: str, value: Any) -> None:
        self.target.set(key, value)

    def get(self, key: str) -> bytes:
        return self.target.get(key)

    def add(self, key: str, value: int) -> int:
        return self.target.add(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self.target.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        return self.target.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.target.wait(keys, *timeout)
