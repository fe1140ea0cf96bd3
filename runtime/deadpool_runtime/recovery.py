"""From a revoked epoch back to a running step, in the training thread.

    park -> plan -> rebuild the groups -> fetch the state -> restore -> resume

Each arrow may be cut by another loss, which shows as a newer epoch or as an exception from torch
that a newer epoch explains a moment later. Then everything starts again at *park*. That is safe
because nothing up to *resume* changes a sealed slot, and restoring twice is restoring.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deadpool_runtime import protocol
from deadpool_runtime.context import RankContext
from deadpool_runtime.control import Superseded
from deadpool_runtime.encoding import decode
from deadpool_runtime.errors import CorruptState, Misuse, UnsupportedState
from deadpool_runtime.groups import engines
from deadpool_runtime.state import TrainingState
from deadpool_runtime.transfer import open_receiver, open_sender, receive_slot, send_slot

#: How long an exception in here may stay unexplained by a newer epoch.
EXPLAIN_TIMEOUT_S = 60.0
STORE_TIMEOUT = timedelta(seconds=60)
#: One try to connect to a store.
STORE_TRY_TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True)
class Recovered:
    """Where training goes on: after ``step``, in ``epoch``. ``own`` is the decoded own part."""

    epoch: int
    step: int
    own: dict[str, Any]


class Recovery:
    """Runs one recovery after the other; keeps nothing between them but the store's client."""

    def __init__(
        self,
        context: RankContext,
        state: TrainingState,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self._context = context
        self._control = context.control
        self._state = state
        self._models = list(models)
        self._optimizers = list(optimizers)
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
        engines.reset_engines(self._models, self._optimizers)
        link.send(protocol.Parked(epoch, self._state.sealed(), self._control.aborted_s))
        plan = self._control.wait_plan(epoch)
        self._store = self._open_store(plan)
        registry.rebuild(epoch, self._store)
        link.send(protocol.GroupsRebuilt(epoch, len(registry.groups)))
        self._exchange(plan, self._store)
        own: dict[str, Any] = decode(self._state.slot_of(plan.step).own)
        if own["sample"] != self._state.sample(plan.step):
            raise Misuse(
                f"The parameters of rank {self._context.rank} were not those of its peers after "
                f"step {plan.step}, so no peer has its state: DEADPOOL replaces ranks only while "
                f"all have the same parameters after every step."
            )
        self._state.restore(plan.step, own)
        digest = self._state.replicated_digest()
        link.send(protocol.Restored(epoch, plan.step, digest))
        self._control.wait_resume(epoch, plan.step)
        self._state.keep_only(plan.step)
        return Recovered(epoch, plan.step, own)

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

    def _exchange(self, plan: protocol.Plan, store: dist.Store) -> None:
        """Send the plan's state to those that lack it, or receive it."""
        me = self._context.rank
        for receiver, sender in sorted(plan.sources.items()):
            if me not in (receiver, sender):
                continue
            key = f"deadpool/{plan.epoch}/state/{receiver}"
            void = partial(self._control.disturbed, plan.epoch)
            if me == sender:
                with closing(open_sender(store, plan.store, key, void)) as stream:
                    send_slot(stream, self._state.slot_of(plan.step), self._state.on_cpu())
                continue
            with closing(open_receiver(store, key, void)) as stream:
                step = receive_slot(stream, self._state.slot_for(plan.step))
            if step != plan.step:
                raise CorruptState(
                    f"Rank {sender} sent the state of step {step}, not of step {plan.step}."
                )
            self._state.seal(step, plan.own)


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
