"""Every process group of this process: recorded as it is made, broken at once, rebuilt in place.

torch makes every group through one private function, ``_new_process_group_helper``, which is
replaced here by one that also writes down what the group was made of. That is enough to connect
it again later under the same object, which the user's model and optimizer keep holding.

Two threads use this. The training thread makes groups and calls ``rebuild``. Any other thread may
call ``abort``.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deadpool_runtime.groups import ddp, mechanism, members, native, pipelines
from deadpool_runtime.groups.counting import CollectiveCounter
from deadpool_runtime.groups.errors import GroupsAborted, RebuildFailed, UnsupportedLayout
from deadpool_runtime.groups.mechanism import GroupRecord
from deadpool_runtime.groups.progress import Recorder
from deadpool_runtime.groups.sockets import SocketWatch, open_sockets, shut

_Store = TypeVar("_Store")
# The package's attribute of this name is a function, hence not an import statement.
_rendezvous = importlib.import_module("torch.distributed.rendezvous")

#: What a group of a detached process is made of, by the name torch knows it by.
_DETACHED = "deadpool_detached"


class GroupRegistry:
    """The groups of this process in the order in which they were made.

    A process starts either attached, its groups connected as usual, or detached: groups have
    their names, ranks and sizes but no peers, and every collective on them succeeds at once
    without moving data. A replacement builds the user's program that way, beside peers that have
    long built theirs, and ``rebuild`` then connects it.

    ``recorder``: where the collectives of all groups are written down.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._records: list[GroupRecord] = []
        self._stores: list[SocketWatch] = []
        #: Groups and store clients whose constructors are running.
        self._opening: list[SocketWatch] = []
        self._lock = threading.Lock()
        self._detached = False
        self._rebuilding = False
        self._aborted = threading.Event()
        #: Rebuilds for an epoch before this one are refused.
        self._oldest_epoch = 0
        self._sealed = False
        self._mechanism = mechanism.choose()
        self._counter = CollectiveCounter(recorder)
        #: Epoch of the groups that the program makes.
        self._epoch = 0
        self._make_group: Callable[..., Any] | None = None
        self._make_store: Callable[..., Any] | None = None

    @property
    def detached(self) -> bool:
        """Whether this process's groups have no peers yet."""
        return self._detached

    @property
    def groups(self) -> list[GroupRecord]:
        """The living groups in creation order; those that the program destroyed are gone."""
        with self._lock:
            self._records = [record for record in self._records if _is_alive(record)]
            return list(self._records)

    def install(self, detached: bool, epoch: int = 0) -> None:
        """Start recording in ``epoch``. Call it before the program makes its first group."""
        if dist.is_initialized():
            raise UnsupportedLayout(
                "Process groups were made before DEADPOOL was installed, and those cannot be "
                "rebuilt in place."
            )
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("0", ""):
            raise UnsupportedLayout(
                "TORCH_GLOO_LAZY_INIT connects groups at a time when their sockets cannot be "
                "found, so it cannot be combined with recovery in place."
            )
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            raise UnsupportedLayout(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every group in another one, which cannot "
                "be rebuilt in place so far; INFO can."
            )
        assert self._make_group is None, "installed twice"
        # From here on Gloo's own waits can be ended; where they cannot be, some end only with the
        # group's time-out.
        native.load().guard_waits()
        self._counter.install()
        self._detached, self._epoch = detached, epoch
        self._make_group = c10d._new_process_group_helper
        self._make_store = _rendezvous._create_c10d_store
        c10d._new_process_group_helper = self._new_group
        _rendezvous._create_c10d_store = self._new_store  # type: ignore[attr-defined]
        pipelines.watch()
        ddp.watch()

    def uninstall(self) -> None:
        """Stop recording and forget all groups, which keep working as they are."""
        if self._make_group is None or self._make_store is None:
            return
        c10d._new_process_group_helper = self._make_group
        _rendezvous._create_c10d_store = self._make_store  # type: ignore[attr-defined]
        self._make_group = self._make_store = None
        with self._lock:
            self._records.clear()
            self._stores.clear()

    def seal(self) -> None:
        """Refuse groups, DDP and pipeline schedules from here on: a replacement, which joins at a
        step, would lack them."""
        self._sealed = True
        pipelines.seal()
        ddp.seal()

    def open_store(self, host: str, port: int, timeout: timedelta) -> dist.TCPStore:
        """Connect a store client in which ``abort`` can interrupt a waiting thread."""

        def connect() -> dist.TCPStore:
            return dist.TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timeout
            )

        return self.watch_store(connect)

    def watch_store(self, factory: Callable[[], _Store]) -> _Store:
        """Make a store client through ``factory`` so that ``abort`` can interrupt its users."""
        watch = SocketWatch(follow_listeners=False)
        with self._interruptible(watch):
            store = factory()
        alive = set(open_sockets())
        with self._lock:
            self._stores = [old for old in self._stores if old.claims()[0] & alive]
            self._stores.append(watch)
        return store

    def abort(self, epoch: int | None = None) -> int:
        """Break every collective of this process, under way or yet to come, from any thread.

        Whoever waits in one gets torch's own exception, and so does whoever waits in a watched
        store client. ``epoch`` is the one that begins: a rebuild for an earlier one, which
        another thread may be about to start, fails. Returns how many connections were cut.

        Waits are ended first, then connections are cut, which tells peers as well; cutting alone
        does not free one who waits for the rest of a message that was half received.

        A detached process waits for nobody, and the program goes on building what it needs
        whatever happens to the others; there only a rebuild that has begun is broken.
        """
        with self._lock:
            if epoch is not None:
                self._oldest_epoch = max(self._oldest_epoch, epoch)
            if self._detached and not self._rebuilding:
                return 0
            self._aborted.set()
            native.load().abort_waits()
            watches = [record.watch for record in self._records] + self._stores + self._opening
        return shut(watches)

    def rebuild(
        self,
        epoch: int,
        store: dist.Store,
        connect_timeout: timedelta = timedelta(seconds=30),
        aside: Collection[int] = (),
    ) -> None:
        """Connect all groups to their peers of this epoch; a detached process becomes attached.

        Called in the training thread, with no collective under way, by every member at about the
        same time and for the same groups. Afterwards groups that the program makes also meet in
        ``store``. If it fails, some groups may be connected and some not; an abort and a rebuild
        for a later epoch put that right.

        ``aside``: global ranks that take no part in this epoch. The groups are smaller by them.
        """
        self._begin(epoch)
        usual_timeout = store.timeout  # type: ignore[attr-defined]
        store.set_timeout(connect_timeout)
        try:
            groups = self.groups
            members.take_part(groups, aside)
            for record in groups:
                self._rebuild_one(record, epoch, store, connect_timeout)
            self._detached, self._epoch = False, epoch
        finally:
            store.set_timeout(usual_timeout)
            with self._lock:
                self._rebuilding = False
                # Only now: the threads of the old backends were joined on the way. If a newer
                # epoch was declared meanwhile, its abort stands.
                if self._oldest_epoch <= epoch:
                    native.load().allow_waits()

    def _begin(self, epoch: int) -> None:
        with self._lock:
            if epoch < self._oldest_epoch:
                raise RebuildFailed(
                    f"Epoch {epoch} is over: epoch {self._oldest_epoch} has been declared."
                )
            self._aborted.clear()
            self._rebuilding = True

    def _rebuild_one(
        self, record: GroupRecord, epoch: int, store: dist.Store, connect_timeout: timedelta
    ) -> None:
        watch = SocketWatch()
        with self._lock:
            # Peers that are still in the old epoch must not be left waiting for this process,
            # and neither must the threads of the old backend, which are about to be joined.
            previous, record.watch = record.watch, watch
        shut([previous])
        prefixed = dist.PrefixStore(f"deadpool/{epoch}/{record.name}", store)
        try:
            with watch:
                self._mechanism.rebuild(record, epoch, prefixed, connect_timeout)
                self._counter.watch(record, epoch)
        except RuntimeError as error:
            raise RebuildFailed(
                f"Group {record.name} could not be connected for epoch {epoch}: {error}"
            ) from error
        with self._lock:
            if self._aborted.is_set():
                raise RebuildFailed(f"Aborted while epoch {epoch} was being connected.")

    def _new_group(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Stands in for torch's function: makes the group as torch would, and records it."""
        assert self._make_group is not None
        call = inspect.signature(self._make_group).bind(*args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        config = c10d.BackendConfig(c10d.Backend(arguments["backend"]))
        devices = {device: str(kind) for device, kind in config.get_device_backend_map().items()}
        mechanism.require_supported(devices)
        if arguments["device_id"] is not None:
            raise UnsupportedLayout(
                "init_process_group(device_id=...) lets groups be split from others, and such "
                "groups cannot be rebuilt in place so far."
            )
        if self._sealed:
            raise UnsupportedLayout(
                "A process group was made after the first step, and a rank that is replaced later "
                "would not have it: make all groups before job.steps."
            )
        watch = SocketWatch()
        with self._interruptible(watch):
            if self._aborted.is_set():
                raise GroupsAborted("The groups of this process were aborted.")
            if self._detached:
                group, store = self._make_detached(arguments, devices)
            else:
                arguments.update(self._mechanism.creation_arguments(arguments["store"]))
                group, store = self._make_group(**arguments)
            if not isinstance(group, dist.ProcessGroup) or self._knows(group):
                return group, store
            record = GroupRecord(
                group=weakref.ref(group),
                name=arguments["group_name"],
                group_rank=arguments["group_rank"],
                group_size=arguments["group_size"],
                global_ranks=list(arguments["global_ranks_in_group"]),
                timeout=arguments["timeout"],
                backend=str(arguments["backend"]),
                devices=devices,
                options=arguments["backend_options"],
                description=group.group_desc,
                watch=watch,
            )
            if not self._detached:
                self._mechanism.created(record, arguments)
                self._counter.watch(record, self._epoch)
        with self._lock:
            self._records.append(record)
            too_late = self._aborted.is_set()
        if too_late:
            shut([watch])
        return group, store

    def _make_detached(self, arguments: dict[str, Any], devices: dict[str, str]) -> tuple[Any, Any]:
        assert self._make_group is not None
        with _detached_backend(list(devices)):
            changes = {"backend": c10d.Backend(_DETACHED), "backend_options": None}
            group, store = self._make_group(**arguments | changes)
        if isinstance(group, dist.ProcessGroup):
            # The program asks which backend it has. torch's own code must not be told, as it
            # takes whatever is called gloo for a ProcessGroupGloo; it asks the group itself.
            backend = c10d.Backend(arguments["backend"])
            c10d._world.pg_map[group] = (backend, store)
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
        return group, store

    def _new_store(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the function by which env:// and tcp:// open their store client."""
        make_store = self._make_store
        assert make_store is not None
        return self.watch_store(lambda: make_store(*args, **kwargs))

    def _knows(self, group: dist.ProcessGroup) -> bool:
        return any(record.group() is group for record in self._records)

    @contextlib.contextmanager
    def _interruptible(self, watch: SocketWatch) -> Iterator[None]:
        """Let ``abort`` reach sockets that are just being opened."""
        with watch:
            with self._lock:
                self._opening.append(watch)
            try:
                yield
            finally:
                with self._lock:
                    self._opening.remove(watch)


@contextlib.contextmanager
def _detached_backend(devices: list[str]) -> Iterator[None]:
    """Make the peerless backend known to torch for these devices while one group is made.

    Not for longer: torch chooses default backends differently while any extra one is known.
    """

    def create(options: Any, _: Any) -> Any:
        return native.load().detached_backend(options.group_rank, options.group_size)

    kinds = c10d.Backend
    kinds.register_backend(_DETACHED, create, extended_api=True, devices=devices)
    try:
        yield
    finally:
        kinds.backend_list.remove(_DETACHED)
        for table in (kinds.backend_type_map, kinds.backend_capability):
            del table[_DETACHED]
        del kinds._plugins[_DETACHED.upper()]
        delattr(kinds, _DETACHED.upper())


def _is_alive(record: GroupRecord) -> bool:
    group = record.group()
    return group is not None and group in c10d._world.pg_map
