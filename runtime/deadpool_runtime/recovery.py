"""From a revoked epoch back to a running step, in the training thread.

    park -> plan -> rebuild the groups -> fetch what is missing -> restore -> resume

Before *restore*, what optimizers share out over the ranks is shared out anew if other ranks take
part than when the copies were made (``sharing``).

Each arrow may be cut by another loss, which shows as a newer epoch or as an exception from torch
that a newer epoch explains a moment later. Then everything starts again at *park*. That is safe
because nothing up to *resume* changes a whole copy, and restoring twice is restoring.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from deadpool_runtime import protocol
from deadpool_runtime.context import RankContext
from deadpool_runtime.control import Superseded
from deadpool_runtime.encoding import decode
from deadpool_runtime.errors import CorruptState, Misuse, UnsupportedState
from deadpool_runtime.groups.engines import Engines
from deadpool_runtime.later import encode_own
from deadpool_runtime.replication.loaded import CopyUnusable, Loaded
from deadpool_runtime.replication.naming import members
from deadpool_runtime.replication.snapshots import Snapshots
from deadpool_runtime.sharing import Shards, SharedState
from deadpool_runtime.state import TrainingState

#: How long an exception in here may stay unexplained by a newer epoch.
EXPLAIN_TIMEOUT_S = 60.0
STORE_TIMEOUT = timedelta(seconds=60)
#: One try to connect to a store.
STORE_TRY_TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True)
class Recovered:
    """Where training goes on: after ``step``, in ``epoch``. ``own`` is the decoded own part;
    ``aside`` are the ranks that take no part."""

    epoch: int
    step: int
    own: dict[str, Any]
    aside: frozenset[int] = frozenset()


class Recovery:
    """Runs one recovery after the other; keeps nothing between them but the store's client."""

    def __init__(
        self,
        context: RankContext,
        state: TrainingState,
        snapshots: Snapshots,
        engines: Engines,
        shared: SharedState,
        adopt: Callable[[dict[str, Any]], dict[str, Any]],
        sizes: Callable[[int], list[protocol.SegmentSize]],
    ) -> None:
        """``sizes``: how large the segments are, with an own part of so many bytes."""
        self._context = context
        self._control = context.control
        self._shared = shared
        self._sizes = sizes
        self._state = state
        self._snapshots = snapshots
        self._engines = engines
        #: Makes this rank's own part of that of a peer, whose copy it took over.
        self._adopt = adopt
        # Groups the script makes later meet in it, so it must outlive the recovery.
        self._store: dist.Store | None = None

    def run(self) -> Recovered:
        """Recover into the newest epoch, however often a newer one is declared meanwhile."""
        self._control.connecting()
        while True:
            epoch = self._control.newest
            try:
                return self._attempt(epoch)
            except Superseded:
                continue
            except (CorruptState, Misuse, UnsupportedState):
                raise
            except Exception as error:
                if not self._control.wait_newer(epoch, EXPLAIN_TIMEOUT_S):
                    raise
                clear_frames(error)

    def _attempt(self, epoch: int) -> Recovered:
        link, registry = self._context.link, self._context.registry
        self._engines.reset()
        self._snapshots.settle()
        link.send(protocol.Parked(epoch, self._control.aborted_s))
        plan = self._control.wait_plan(epoch)
        self._snapshots.may_save = not plan.aside
        try:
            self._store = self._open_store(plan)
            registry.rebuild(epoch, self._store, aside=plan.aside)
        except RuntimeError as error:
            self._not_connected(epoch, error)
        self._shared.settle()
        link.send(protocol.GroupsRebuilt(epoch, len(registry.groups)))
        try:
            own, copy = self._restore(plan)
        except CopyUnusable as error:
            link.send(protocol.RestoreFailed(epoch, plan.step, str(error)))
            self._control.wait_newer(epoch, None)
            raise Superseded(str(error)) from error
        sizes = self._sizes(len(copy.own)) if self._shared else []
        link.send(protocol.Restored(epoch, plan.step, copy.digests, sizes))
        self._snapshots.set_holder(epoch, plan.holder, plan.step)
        # With one for every step the replica of the plan's is given the time of the next one.
        every_step = self._context.replication_interval == 1
        self._control.wait_resume(epoch, plan.step if every_step else plan.step - 1)
        self._snapshots.resumed(epoch)
        return Recovered(epoch, plan.step, own, frozenset(plan.aside))

    def _not_connected(self, epoch: int, error: RuntimeError) -> NoReturn:
        """A peer is lost or cannot be reached, which the launcher finds out: wait for its word."""
        text = str(error)
        clear_frames(error)
        if not self._control.disturbed(epoch):
            self._context.link.send(protocol.NotConnected(epoch, text))
        self._control.wait_newer(epoch, None)
        raise Superseded(text) from None

    def _restore(self, plan: protocol.Plan) -> tuple[dict[str, Any], Loaded]:
        """Bring the plan's state back; returns the own part and the copy that it came from."""
        self._snapshots.go_back(plan.step, plan.keep)
        if plan.pieces:
            self._snapshots.assemble(plan.epoch, plan.step, plan.pieces)
            self._wait_assembled(plan.epoch)
        rank = self._context.rank
        if plan.checkpoint:
            copy = self._snapshots.load_checkpoint(plan.checkpoint, plan.step, rank)
        else:
            copy = self._snapshots.load(plan.step)
        own = _own_part(copy, plan.step)
        tensors, on_cpu = copy.tensors, copy.on_cpu
        adopted = own["rank"] != rank
        if plan.former:
            shards = self._shared_anew(plan, copy, own)
            kept = self._shared.without([*tensors, *own["plain"]])
            tensors = {key: each for key, each in tensors.items() if key in kept} | shards.tensors
            plain = {key: value for key, value in own["plain"].items() if key in kept}
            own = {**own, "plain": plain | shards.plain}
            on_cpu = (on_cpu & kept) | shards.on_cpu
        if adopted:
            own = self._adopt(own)
        self._state.restore(tensors, own, on_cpu)
        if plan.checkpoint or adopted:
            # What is shared out has another place than the checkpoint or the peer had it in.
            data = encode_own(own) if adopted or plan.former else copy.own
            self._snapshots.copy_again(plan.step, plan.epoch, self._state.items(), data)
        return own, copy

    def _wait_assembled(self, epoch: int) -> None:
        failure = self._control.wait_assembled(epoch)
        if failure:
            raise CopyUnusable(failure)

    def _shared_anew(self, plan: protocol.Plan, copy: Loaded, own: dict[str, Any]) -> Shards:
        """What falls to this rank of the state that was shared out over the plan's former ranks."""
        former, brought = members(plan.former), Shards()
        if self._context.rank in former:
            self._shared.parts_in(copy, own["plain"], self._context.rank, brought)
        for shard in plan.shards:
            if plan.checkpoint:
                theirs = self._snapshots.load_checkpoint(plan.checkpoint, plan.step, shard.rank)
            else:
                if shard.source is not None:
                    self._snapshots.hold(plan.epoch, plan.step, shard)
                    self._wait_assembled(plan.epoch)
                theirs = self._snapshots.load_shard(plan.step, shard)
            plain = _own_part(theirs, plan.step)["plain"]
            self._shared.parts_in(theirs, plain, shard.rank, brought)
        try:
            return self._shared.exchange(brought, former)
        except CorruptState:
            raise
        except RuntimeError as error:
            self._not_connected(plan.epoch, error)

    def _open_store(self, plan: protocol.Plan) -> dist.Store:
        """Connect to the plan's store. In short tries: torch cannot be interrupted while it calls
        for a host that has just died, and the next epoch need not wait for that."""
        deadline = time.monotonic() + STORE_TIMEOUT.total_seconds()
        host, port = plan.store.host, plan.store.port
        while True:
            try:
                store = self._context.registry.open_store(host, port, STORE_TRY_TIMEOUT)
            except RuntimeError:
                if self._control.disturbed(plan.epoch) or time.monotonic() > deadline:
                    raise
                continue
            store.set_timeout(STORE_TIMEOUT)
            return store


def _own_part(copy: Loaded, step: int) -> dict[str, Any]:
    own: dict[str, Any] = decode(copy.own)
    if own["step"] != step:
        raise CorruptState(f"The copy of step {step} has the own part of {own['step']}.")
    return own


def clear_frames(error: BaseException) -> None:
    """Empty the frames an exception passed through: they hold activations and old collectives."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if each.__traceback__ is not None:
            traceback.clear_frames(each.__traceback__)
            each.__traceback__ = None
        pending += [each.__cause__, each.__context__]
