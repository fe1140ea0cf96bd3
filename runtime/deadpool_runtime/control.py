"""What the launcher has told this rank, and how the training thread waits for it.

``on_message`` runs on the link's reader thread, ``confirm``, ``give_up`` and ``assembled`` on those
that copy the state and listen to the node's replicator. The first owns the one ordering that
recovery depends on: the groups are aborted *before* the new epoch is published. The other way round
the abort would close sockets that the training thread, having seen the epoch, has just opened for
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol, assert_never

import msgspec

from deadpool_runtime import protocol
from deadpool_runtime.context import Link


class Abortable(Protocol):
    """What can break the process's collectives (``groups.registry.GroupRegistry``)."""

    def abort(self, epoch: int | None = None) -> object:
        """Make every collective of this process fail, blocked or future, because ``epoch`` begins.
        Called on any thread."""


class Verdict(Enum):
    """The launcher's word on an exception in a step's body."""

    REVOKED = "a peer was lost: recover"
    RAISE = "the script's own error: raise it"
    SILENCE = "no word came in time"


class Halt(msgspec.Struct, frozen=True):
    """The launcher's word that no step after ``after`` may begin.

    ``final``: every rank waits there; else more is to follow once all have said where they are.
    """

    epoch: int
    number: int
    after: int
    final: bool = False
    last: bool = False
    save: bool = False


class Superseded(RuntimeError):
    """A newer epoch was declared while the rank waited for something of an older one."""


class Control:
    """The newest epoch and everything the launcher said about it.

    Created before ``Begin`` arrives. All methods are the training thread's but ``on_message``,
    ``confirm``, ``give_up`` and ``assembled``.
    """

    def __init__(self, link: Link, groups: Abortable) -> None:
        self._link = link
        self._groups = groups
        self._changed = threading.Condition()
        self._begin: protocol.Begin | None = None
        self._newest = 0
        self._revoking = 0
        self._aborted_s = 0.0
        self._protect: protocol.Protect | None = None
        self._plan: protocol.Plan | None = None
        self._assembled: dict[int, str] = {}
        self._resumed = 0
        self._confirmed = -1
        #: Confirmations of an epoch before this one speak of steps that are run again.
        self._confirming = 0
        #: The newest epoch of which there was one, and the newest step in that.
        self._newest_confirmed = (0, -1)
        self._raise_step: int | None = None
        #: The newest step whose copy is known not to be confirmed.
        self._given_up = -1
        self._all_ended = False
        #: The newest step that the training thread has begun, and where it has to wait.
        self._begun = 0
        self._halt: Halt | None = None
        #: Called on the link's thread with each ``Protect``.
        self.on_protect: Callable[[protocol.Protect], None] = lambda _: None
        #: Whether there are groups that a lost peer could block.
        self._connected = False

    # ------------------------------------------------------------ the link's thread

    def on_message(self, message: protocol.ToRank) -> None:
        """Take one message in. Called by the link, in order."""
        match message:
            case protocol.Begin():
                with self._changed:
                    self._begin = message
                    self._connected = not message.replacement
                    self._newest = max(self._newest, message.epoch)
                    self._revoking = max(self._revoking, message.epoch)
                    self._changed.notify_all()
            case protocol.Revoke(epoch=epoch):
                self._revoke(epoch)
            case protocol.Protect():
                with self._changed:
                    self._protect = message
                    self._changed.notify_all()
                self.on_protect(message)
            case protocol.Plan():
                with self._changed:
                    self._plan = message
                    self._changed.notify_all()
            case protocol.Resume(epoch=epoch):
                with self._changed:
                    self._resumed = max(self._resumed, epoch)
                    # Here and not when the training thread wakes: a Hold may follow at once.
                    self._halt = None
                    if self._plan is not None and self._plan.epoch == epoch:
                        self._begun = self._plan.step
                    self._changed.notify_all()
            case protocol.RaiseIt(step=step):
                with self._changed:
                    self._raise_step = step
                    self._changed.notify_all()
            case protocol.AllEnded():
                with self._changed:
                    self._all_ended = True
                    self._changed.notify_all()
            case protocol.Hold() | protocol.HoldAfter() | protocol.GoOn():
                self._set_halt(message)
            case _:
                assert_never(message)

    def _set_halt(self, message: protocol.Hold | protocol.HoldAfter | protocol.GoOn) -> None:
        """Hold the training thread back, or let it go on. Answered under the lock: no step begins
        between the answer and what it says.
        """
        with self._changed:
            if message.epoch != self._newest or self._revoking > message.epoch:
                return
            held = self._halt is not None and self._halt.number == message.number
            match message:
                case protocol.Hold(epoch=epoch, number=number):
                    self._halt = Halt(epoch, number, self._begun)
                    self._link.send(protocol.Holding(epoch, number, self._begun))
                case protocol.HoldAfter(epoch=epoch, number=number, step=step) if held:
                    last, save = message.last, message.save
                    self._halt = Halt(epoch, number, step, True, last, save)
                case protocol.GoOn() if held:
                    self._halt = None
            self._changed.notify_all()

    def _revoke(self, epoch: int) -> None:
        with self._changed:
            if epoch <= self._newest:
                return
            if not self._connected:
                # A process without peers goes on building its program, in which an abort would
                # only be an error. Deciding and publishing under one lock: ``connecting`` either
                # comes after this and the new epoch is seen, or before it and there is an abort.
                self._newest = self._revoking = epoch
                self._changed.notify_all()
                return
        # Seen by the guard at once: an aborted NCCL collective returns without raising and leaves
        # garbage, which must not reach the weights before the epoch is published below.
        self._revoking = epoch
        started = time.monotonic()
        self._groups.abort(epoch)
        aborted_s = time.monotonic() - started
        with self._changed:
            self._newest = epoch
            self._aborted_s = aborted_s
            self._changed.notify_all()

    # ------------------------------------------------------------ the replicator's thread

    def confirm(self, epoch: int, step: int) -> None:
        """The copy of ``step`` is kept outside of this process."""
        with self._changed:
            self._newest_confirmed = max(self._newest_confirmed, (epoch, step))
            if epoch >= self._confirming:
                self._confirmed = max(self._confirmed, step)
            self._changed.notify_all()

    def give_up(self, step: int) -> None:
        """No replica of ``step`` will be confirmed: there is nothing to wait for."""
        with self._changed:
            self._given_up = max(self._given_up, step)
            self._changed.notify_all()

    def assembled(self, epoch: int, failure: str) -> None:
        """The pieces that the plan of ``epoch`` names are here; or ``failure`` says why not."""
        with self._changed:
            self._assembled[epoch] = failure
            self._changed.notify_all()

    # ------------------------------------------------------------ the training thread

    @property
    def newest(self) -> int:
        """The newest epoch whose predecessors' groups are aborted."""
        with self._changed:
            return self._newest

    @property
    def aborted_s(self) -> float:
        """Seconds the abort for the newest epoch took; 0 if there was none."""
        with self._changed:
            return self._aborted_s

    def disturbed(self, epoch: int) -> bool:
        """Whether the groups of ``epoch`` are void or being aborted right now."""
        return self._revoking > epoch

    def connecting(self) -> None:
        """Called before the first recovery: from here on the process's groups can have peers."""
        with self._changed:
            self._connected = True

    def wait_begin(self) -> protocol.Begin:
        """Block until the launcher says that the script may start."""
        with self._changed:
            while self._begin is None:
                self._changed.wait()
            return self._begin

    def wait_newer(self, epoch: int, timeout_s: float | None) -> bool:
        """Block until an epoch after ``epoch`` is published; False when none is in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest > epoch, timeout_s)

    def wait_protect(self, epoch: int) -> bool:
        """Block until every rank came to its first step; False when a newer epoch comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest > epoch or self._protect is not None)
            return self._newest <= epoch

    def must_wait(self, number: int) -> bool:
        """Whether step ``number`` may not begin right now."""
        halt = self._halt
        return halt is not None and number > halt.after

    @property
    def stopping(self) -> bool:
        """Whether the job is stopped at the end of the step that has begun, or was before."""
        halt = self._halt
        return halt is not None and halt.last and self._begun >= halt.after

    def begin_step(self, number: int, epoch: int) -> bool:
        """Note that step ``number`` begins; False if it may not, or when ``epoch`` is void."""
        with self._changed:
            if self._newest > epoch or self.must_wait(number):
                return False
            self._begun = number
            return True

    def wait_boundary(self, number: int, epoch: int) -> Halt | None:
        """Block while step ``number`` may not begin. Returns what to wait for at the boundary once
        that is known, None when the step may begin or ``epoch`` is void.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._newest > epoch
                    or not self.must_wait(number)
                    or (self._halt is not None and self._halt.final)
                )
            )
            if self._newest > epoch or not self.must_wait(number):
                return None
            return self._halt

    def wait_leave(self, halt: Halt) -> None:
        """Block at the boundary, which the rank has told of, until ``halt`` no longer holds."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest > halt.epoch or self._halt is not halt)

    def wait_assembled(self, epoch: int) -> str:
        """Block until the pieces of the plan of ``epoch`` are here. Returns why they cannot be
        had, or nothing; raises ``Superseded`` when a newer epoch comes."""
        with self._changed:
            self._wait_unless_newer(epoch, lambda: epoch in self._assembled)
            return self._assembled.pop(epoch)

    def wait_plan(self, epoch: int) -> protocol.Plan:
        """Block until the plan of ``epoch`` is there; ``Superseded`` when a newer epoch comes."""
        with self._changed:
            self._wait_unless_newer(
                epoch, lambda: self._plan is not None and self._plan.epoch == epoch
            )
            assert self._plan is not None
            return self._plan

    def wait_resume(self, epoch: int, confirmed: int) -> None:
        """Block until every rank has restored the plan's step; ``Superseded`` when a newer epoch
        comes.

        Forgets what was said about the steps that are now run again. ``confirmed``: the step up to
        which there is nothing to wait for, whatever was said in this epoch.
        """
        with self._changed:
            self._wait_unless_newer(epoch, lambda: self._resumed >= epoch)
            told_in, told = self._newest_confirmed
            self._confirmed = max(confirmed, told) if told_in == epoch else confirmed
            self._confirming, self._given_up = epoch, -1
            self._assembled.clear()
            self._raise_step = None
            self._all_ended = False

    def wait_confirmed(self, step: int, epoch: int, timeout_s: float) -> bool:
        """Block until ``step`` is confirmed or ``epoch`` is void; False when neither in time or
        when the step was given up."""
        with self._changed:
            self._changed.wait_for(
                lambda: max(self._confirmed, self._given_up) >= step or self._revoking > epoch,
                timeout_s,
            )
            return self._confirmed >= step or self._revoking > epoch

    @property
    def confirmed(self) -> int:
        """The newest confirmed step; -1 before the first."""
        with self._changed:
            return self._confirmed

    @property
    def given_up(self) -> int:
        """The newest step that is known not to be confirmed; -1 if there is none."""
        with self._changed:
            return self._given_up

    def wait_verdict(self, step: int, epoch: int, timeout_s: float) -> Verdict:
        """Block until the launcher says what an exception in the body of ``step`` was."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._newest > epoch or self._raise_step == step, timeout_s
            )
            if self._newest > epoch:
                return Verdict.REVOKED
            return Verdict.RAISE if self._raise_step == step else Verdict.SILENCE

    def wait_end(self, epoch: int) -> bool:
        """Block until every rank came to its end (True) or ``epoch`` is void (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._all_ended or self._newest > epoch)
            return self._all_ended

    def _wait_unless_newer(self, epoch: int, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._newest > epoch or ready())
        if self._newest > epoch:
            raise Superseded(f"epoch {self._newest} follows {epoch}")
