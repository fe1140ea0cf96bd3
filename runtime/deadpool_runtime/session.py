"""A protected job: what ``attach`` returns under ``deadpool-launch``.

The generator ``_run`` is the job's time line. Between two yields the script's body runs inside
``with step:``. When a body ends well, copying of the state begins; the generator then fetches the
next batch and completes the copy with the rank's own part. A body that a lost peer cut
short recovers inside ``__exit__``; the generator then yields the step after the restored state.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deadpool_runtime import protocol, rng, weights
from deadpool_runtime.beginning import brings_state
from deadpool_runtime.context import RankContext, current_context
from deadpool_runtime.control import Verdict
from deadpool_runtime.data import Batches, Fetched
from deadpool_runtime.encoding import check_round_trip, digest_of
from deadpool_runtime.errors import Interrupted, Misuse, UnsupportedState
from deadpool_runtime.generators import with_generators
from deadpool_runtime.groups.engines import Engines
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.guard import StepGuard
from deadpool_runtime.job import Job, Step
from deadpool_runtime.later import encode_own
from deadpool_runtime.offline import OfflineJob
from deadpool_runtime.recovery import Recovered, Recovery, clear_frames
from deadpool_runtime.replication import classes
from deadpool_runtime.replication.forecast import Forecast, forecast
from deadpool_runtime.replication.replicas import replica_of
from deadpool_runtime.replication.snapshots import Snapshots
from deadpool_runtime.sharing import SharedState
from deadpool_runtime.state import TrainingState
from deadpool_runtime.tensors import TensorMap
from deadpool_runtime.user_state import copied, require_plain

#: How long an exception waits for the launcher's word before it is taken for the script's own.
VERDICT_TIMEOUT_S = 120.0
#: How long an epoch that is being revoked may take to be published.
REVOKE_TIMEOUT_S = 60.0

_attached = False


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    *,
    extras: Mapping[str, Any] | None = None,
) -> Job:
    """Put a training run under protection; without a launcher, return a job that does nothing.

    Call it once, after the model is wrapped and everything is constructed, before any step.
    ``model``, ``optimizer`` and ``scheduler`` may be lists. ``extras``: by name, whatever else
    changes in a step and has ``state_dict`` and ``load_state_dict`` (a loss scaler, averaged
    weights). Modules among them are taken to be the same on every rank, others to be this rank's
    own. Raises ``UnsupportedLayout`` or ``UnsupportedState`` for what could not be recovered.
    """
    global _attached
    context = current_context()
    if context is None:
        return OfflineJob()
    if _attached:
        raise Misuse("attach was called a second time: give it lists of models and optimizers.")
    models, optimizers = _listed(model), _listed(optimizer)
    _require_kind(models, nn.Module, "a model")
    _require_kind(optimizers, torch.optim.Optimizer, "an optimizer")
    job = ProtectedJob(context, models, optimizers, _listed(scheduler), with_generators(extras))
    _attached = True
    context.registry.seal()
    return job


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _require_kind(values: list[Any], kind: type, spoken: str) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise Misuse(
                f"attach takes (model, optimizer, scheduler), each of them or a list of them: a "
                f"{type(value).__qualname__} was given for {spoken}."
            )


class GuardedStep(Step):
    """A step whose body is watched."""

    def __init__(self, number: int, job: ProtectedJob) -> None:
        super().__init__(number)
        self._job = job
        self.entered = False

    def __enter__(self) -> Step:
        if self.entered:
            raise Misuse(f"`with step:` was entered twice for step {self.number}.")
        self.entered = True
        self._job._enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is None:
            self._job._leave(self)
            return False
        return self._job._leave_by(self, error)


class ProtectedJob(Job):
    """The job of one rank under a launcher."""

    def __init__(
        self,
        context: RankContext,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        schedulers: list[Any],
        extras: dict[str, Any],
    ) -> None:
        super().__init__()
        modules = {name: item for name, item in extras.items() if isinstance(item, nn.Module)}
        every_module = [*models, *modules.values()]
        self._engines = Engines(every_module, optimizers)
        if context.world_size > 1 and not self._engines.layout:
            raise UnsupportedLayout(
                "attach was given a model that nothing keeps together over the "
                f"{context.world_size} ranks of the job: wrap it first, in "
                "DistributedDataParallel or with fully_shard."
            )
        self._context = context
        self._control = context.control
        self._link = context.link
        tensors = TensorMap(models, optimizers, modules)
        in_common: dict[str, tuple[int, ...]] = {}

        def ranks_of(key: str) -> tuple[int, ...]:
            if key not in in_common:  # optimizers make their state in their first step
                in_common.update(classes.ranks_in_common(tensors, every_module, context.rank))
            return in_common[key]

        self._ranks_of = ranks_of
        self._training = TrainingState(tensors, schedulers, extras, ranks_of)
        self._snapshots = Snapshots(context)
        context.at_end.append(self._snapshots.close)
        self._shared = SharedState(optimizers)
        self._recovery = Recovery(
            context,
            self._training,
            self._snapshots,
            self._engines,
            self._shared,
            self._adopt,
            lambda own_nbytes: self._forecast(own_nbytes).sizes,
        )
        #: Ranks that take no part at present.
        self._aside: frozenset[int] = frozenset()
        self._guard = StepGuard(
            context.control,
            context.link,
            self._training.tensors.parameters,
            optimizers,
            [*schedulers, *extras.values()],
            modules=self._training.tensors.modules,
            wait_copied=self._snapshots.wait_copied,
            newest_replicated=self._snapshots.newest_replicated,
            confirm_timeout_s=context.confirm_timeout_s,
        )
        self._guard.require_schedulers()
        for extra in extras.values():
            if isinstance(extra, torch.amp.GradScaler):
                self._guard.watch_scaler(extra)
        self._batches: Batches | None = None
        self._epoch = context.epoch
        #: The newest step whose state is in place.
        self._completed = 0
        self._recovered: Recovered | None = None
        self._fault_due = context.fault_step if not context.replacement else None
        self._started = 0.0
        self._duration_s = 0.0
        #: Seconds it took to begin the last copy.
        self._copying_s = 0.0
        #: The launcher said that the job can be protected.
        self._begun = False
        #: What optimizers and schedulers held besides tensors at the end of the last body.
        self._plain: dict[str, Any] = {}
        #: Types that were seen in ``job.state`` and came through a round trip.
        self._good_types: set[type] = set()

    @property
    def world_size(self) -> int:
        """See ``Job.world_size``."""
        return self._context.world_size - len(self._aside)

    # ------------------------------------------------------------ the time line

    def steps(
        self, loader: Iterable[Any], *, max_steps: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[Step, Any]]:
        """See ``Job.steps``."""
        most_steps, most_epochs = self._begin_steps(max_steps, epochs)
        self._batches = Batches(
            loader,
            max_steps=most_steps,
            epochs=most_epochs,
            remember=True,
            is_saved=lambda tensor: self._training.has_memory_of(tensor, self._state),
        )
        return self._run(self._batches)

    def _run(self, batches: Batches) -> Iterator[tuple[Step, Any]]:
        if self._context.replacement:
            weights.settle(self._training.tensors.everything().values())
            self._recover()
        else:
            self._copy(0)
        step: GuardedStep | None = None
        self._guard.install()
        try:
            while True:
                fetched = self._next(batches, step)
                if not self._may_begin():
                    self._recover_when_published()
                    continue
                if fetched.ended:
                    self._note_rest()
                    self._link.send(protocol.StepsEnded(self._epoch, self._completed))
                    if self._control.wait_end(self._epoch):
                        break
                    self._recover()
                    continue
                if self._control.disturbed(self._epoch):
                    self._recover_when_published()
                    continue
                if not self._wait_turn(self._completed + 1):
                    continue
                step = GuardedStep(self._completed + 1, self)
                self._note_step()
                try:
                    yield step, fetched.take()
                except GeneratorExit:
                    self._abandon(batches, step)
                    raise
                if not step.entered:
                    raise Misuse(
                        f"The body of step {step.number} ran outside of `with step:`, where it "
                        f"cannot be recovered: put the whole body, and any `continue`, inside it."
                    )
                if not step.completed and self._recovered is None:
                    raise Misuse(
                        f"An exception left the body of step {step.number} and was caught outside "
                        f"of `with step:`: catch it inside the body, or let it end the script."
                    )
        finally:
            self._note_rest()
            self._guard.remove()
        self._report_final_state()
        self._snapshots.close()

    def _next(self, batches: Batches, step: GuardedStep | None) -> Fetched:
        """The batch after the present state, with the random generators as they are after it."""
        recovered, self._recovered = self._recovered, None
        number = self._completed + 1
        if recovered is None:
            return self._finish(batches, number, step)
        # Once more: code between the body and here ran although its step was undone.
        self._put_state_back(recovered.own["user"])
        self._training.restore_modes(recovered.own["modes"])
        return batches.rewind(number, recovered.own["data"], recovered.own["rng"])

    def _finish(self, batches: Batches, number: int, step: GuardedStep | None) -> Fetched:
        """Fetch the next batch and seal the state before it, which was copied already."""
        fetched = batches.obtain(number, last=step is not None and step.is_last)
        started = time.monotonic()
        last = step is not None and step.is_last
        if self._plain:
            self._complete_copy(fetched, last)
        else:
            self._snapshots.leave_out(self._completed)
        sealing_s = time.monotonic() - started
        self._link.send(
            protocol.StepDone(
                epoch=self._epoch,
                step=self._completed,
                duration_s=self._duration_s + sealing_s,
                blocked_s=self._guard.blocked_s + self._copying_s + sealing_s,
                loss=step.loss if step is not None else None,
                unprotected=self._guard.unprotected,
                confirmed=self._control.confirmed,
            )
        )
        return fetched

    def _complete_copy(self, fetched: Fetched, last: bool) -> None:
        """Add to the copy of the present state what is no tensor."""
        types = require_plain(self._state)
        own = {
            "rank": self._context.rank,
            "step": self._completed,
            "rng": fetched.before,
            "data": fetched.position,
            "user": copied(self._state),
            **self._plain,
            **self._training.own_part(),
        }
        if not types <= self._good_types:
            check_round_trip(own["user"], "job.state")
            self._good_types |= types
        if not last:
            self._training.require_unchanged(self._completed, self._plain)
        if self._completed:
            self._snapshots.complete(self._completed, own)
            return
        data = encode_own(own)
        self._snapshots.complete(0, data)
        self._announce(len(data))

    def _announce(self, own_nbytes: int) -> None:
        """Tell that the first step is about to begin, and how large a copy of the state will be."""
        size = self._forecast(own_nbytes)
        if size.unknown:
            self._link.send(
                protocol.Note(
                    f"The memory that copies need is not known in advance: {size.unknown}"
                )
            )
        layout = self._engines.layout or "one process"
        saves = size.save_nbytes if self._context.checkpoint_dir else 0
        replica, fixed = replica_of(
            self._training.tensors, self._engines.layout, self._ranks_of, self._context.rank
        )
        if self._shared and not self._shared.everywhere(self._context.world_size):
            fixed = fixed or "a ZeroRedundancyOptimizer is not of all ranks"
        self._link.send(
            protocol.Attached(
                layout,
                size.sizes,
                own_nbytes,
                saves,
                list(replica),
                fixed,
                shares=bool(self._shared),
                brings_state=brings_state(
                    self._training.tensors.optimizers, self._training.schedulers()
                ),
            )
        )

    def _forecast(self, own_nbytes: int) -> Forecast:
        """How large the copies of the state will be; slots are made for that from now on."""
        size = forecast(
            self._training.tensors,
            self._training.items(),
            self._ranks_of,
            self._context.rank,
            own_nbytes,
        )
        self._snapshots.room_nbytes = size.room_nbytes
        return size

    def _adopt(self, theirs: dict[str, Any]) -> dict[str, Any]:
        """This rank's own part after the step of a peer's, which it took over: it reads its own
        share of the data, and draws random numbers of its own."""
        assert self._batches is not None
        return {
            **theirs,
            "rank": self._context.rank,
            "rng": rng.capture(),
            "data": self._batches.position_after(theirs["data"]),
        }

    def _may_begin(self) -> bool:
        """Wait, before the first step, for the word that the job can be protected. False when a
        peer was lost meanwhile."""
        if self._begun:
            return True
        self._begun = self._control.wait_protect(self._epoch)
        if self._begun:
            self._snapshots.make_room()
        return self._begun

    def _wait_turn(self, number: int) -> bool:
        """Wait while the launcher holds the ranks back, then note that step ``number`` begins.
        False when the state is another one now.
        """
        while not self._control.begin_step(number, self._epoch):
            if self._control.disturbed(self._epoch):
                self._recover_when_published()
                return False
            self._note_rest()
            halt = self._control.wait_boundary(number, self._epoch)
            if halt is None:
                continue
            if halt.save:
                self._snapshots.save(self._completed)
            self._link.send(protocol.AtBoundary(halt.epoch, halt.number, self._completed))
            self._control.wait_leave(halt)
        return True

    @property
    def stopping(self) -> bool:
        """See ``Job.stopping``."""
        return self._control.stopping

    def _copy(self, step: int) -> None:
        """Begin to copy the state of ``step``."""
        self._plain = {}
        if self._snapshots.paused:
            return
        self._plain = self._training.plain_part()
        self._snapshots.begin(step, self._epoch, self._training.items())

    def _abandon(self, batches: Batches, step: GuardedStep) -> None:
        """The script left the loop by ``break``, or by an exception outside of a body.

        Nothing waits here: in the second case the launcher hears of the exception next. In the
        first, a durable checkpoint under way is waited for at the script's end.
        """
        if step.completed and self._recovered is None:
            step.is_last = True
            self._finish(batches, self._completed + 1, step)
            self._link.send(protocol.StepsEnded(self._epoch, self._completed))
            self._report_final_state()

    def wait_confirmed(self, step: int, timeout_s: float) -> bool:
        """Wait until this rank's replica of ``step``, or of the newest step before it that has one,
        is confirmed; False if not in time. Training needs no such wait; tests do, which strike at a
        place that is to mean the same each time.
        """
        wanted = self._snapshots.newest_replicated(step)
        return self._control.wait_confirmed(wanted, self._epoch, timeout_s)

    def _report_final_state(self) -> None:
        if not self._context.record_final_state:
            return
        parts = self._training.part_digests()
        parts["rng"] = digest_of(rng.capture(), "the random generators")
        assert self._batches is not None
        parts["data"] = digest_of(self._batches.position(), "the data position")
        parts["user"] = digest_of(self._state, "job.state")
        self._link.send(protocol.FinalState(self._completed, parts))

    # ------------------------------------------------------------ the step's body

    def _enter(self, step: GuardedStep) -> None:
        if self._fault_due == step.number:
            self._fault_due = None
            # So that a rehearsal goes the same way each time.
            self.wait_confirmed(step.number - 1, self._context.confirm_timeout_s)
            self._link.send(protocol.FaultPoint(step.number))
            while True:
                time.sleep(3600)
        self._guard.begin(step.number, self._epoch)
        self._started = time.monotonic()

    def _leave(self, step: GuardedStep) -> None:
        """The body ended without an exception."""
        # That proves nothing once a peer is lost: the script may have caught the exception of a
        # broken collective or of the guard, and an aborted NCCL collective raises none. So the
        # state counts only if nothing was aborted until it was copied.
        if not self._is_void():
            try:
                self._guard.require_used_gradients()
                self._guard.check()
            except Misuse as error:
                # Half a backward pass leaves gradients too, if its exception was caught.
                if not self._is_explained(step, error):
                    raise
            except Interrupted:
                pass
        self._guard.end()
        started = time.monotonic()
        if not self._is_void():
            self._copy(step.number)
        if self._is_void():
            self._recover_when_published()
            return
        self._completed = step.number
        self._note_step()
        ended = time.monotonic()
        self._copying_s = ended - started
        self._duration_s = ended - self._started
        step.completed = True

    def _is_void(self) -> bool:
        """Whether the present body must be run again."""
        return self._guard.interrupted or self._control.disturbed(self._epoch)

    def _leave_by(self, step: GuardedStep, error: BaseException) -> bool:
        """An exception left the body. True if a lost peer explains it and all is well again."""
        self._guard.end()
        # Ctrl-C, sys.exit and misuse of this API need nobody's word.
        if not isinstance(error, Exception) or isinstance(error, Misuse | UnsupportedState):
            return False
        if not self._is_explained(step, error):
            return False
        clear_frames(error)
        self._recover_when_published()
        return True

    def _is_explained(self, step: GuardedStep, error: Exception) -> bool:
        """Whether a lost peer explains ``error``; the launcher has the last word on that."""
        if self._control.disturbed(self._epoch):
            return True
        text = f"{type(error).__name__}: {error}"
        text = text.encode(errors="backslashreplace").decode()  # messages are UTF-8
        self._note_rest()
        self._link.send(protocol.StepRaised(self._epoch, step.number, text))
        verdict = self._control.wait_verdict(step.number, self._epoch, VERDICT_TIMEOUT_S)
        return verdict is Verdict.REVOKED

    def _recover_when_published(self) -> None:
        """Recover from an epoch that is being revoked, once its successor is published."""
        if not self._control.wait_newer(self._epoch, REVOKE_TIMEOUT_S):
            raise RuntimeError("The groups were being aborted, but that did not come to an end.")
        self._recover()

    def _note_step(self) -> None:
        """Let the agent see that a step has ended or the next one begins: its clock starts."""
        if self._context.recorder is not None:
            blocked_s = self._guard.blocked_s
            self._context.recorder.stepping(self._epoch, self._completed, blocked_s)

    def _note_rest(self) -> None:
        """Let the agent see that no step is under way, however long the wait that follows."""
        if self._context.recorder is not None:
            self._context.recorder.resting()

    def _recover(self) -> None:
        self._note_rest()
        recovered = self._recovery.run()
        self._epoch, self._completed = recovered.epoch, recovered.step
        self._recovered, self._begun = recovered, True
        self._aside = recovered.aside
        self._put_state_back(recovered.own["user"])
