"""What the launcher has told this rank, and how the training thread waits for it.

``on_message`` runs on the link's reader thread. It owns the one ordering that recovery depends on:
the groups are aborted *before* the new epoch is published. The other way round the abort would
close sockets that the training thread, having seen the epoch, has just opened for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol, assert_never

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


class Superseded(RuntimeError):
    """A newer epoch was declared while the rank waited for something of an older one."""


class Control:
    """The newest epoch and everything the launcher said about it.

    Created before ``Begin`` arrives. All methods but ``on_message`` are the training thread's.
    """

    def __init__(self, link: Link, groups: Abortable) -> None:
        self._link = link
        self._groups = groups
        self._changed = threading.Condition()
        self._begin: protocol.Begin | None = None
        self._newest = 0
        self._revoking = 0
        self._aborted_s = 0.0
        self._plan: protocol.Plan | None = None
        self._resumed = 0
        self._confirmed = -1
        self._raise_step: int | None = None
        self._all_ended = False
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
            case protocol.Plan():
                with self._changed:
                    self._plan = message
                    self._changed.notify_all()
            case protocol.Resume(epoch=epoch):
                with self._changed:
                    self._resumed = max(self._resumed, epoch)
                    self._changed.notify_all()
            case protocol.Confirmed(step=step):
                with self._changed:
                    self._confirmed = max(self._confirmed, step)
                    self._changed.notify_all()
            case protocol.RaiseIt(step=step):
                with self._changed:
                    self._raise_step = step
                    self._changed.notify_all()
            case protocol.AllEnded():
                with self._changed:
                    self._all_ended = True
                    self._changed.notify_all()
            case _:
                assert_never(message)

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

    def wait_newer(self, epoch: int, timeout_s: float) -> bool:
        """Block until an epoch after ``epoch`` is published; False when none is in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest > epoch, timeout_s)

    def wait_plan(self, epoch: int) -> protocol.Plan:
        """Block until the plan of ``epoch`` is there; ``Superseded`` when a newer epoch comes."""
        with self._changed:
            self._wait_unless_newer(
                epoch, lambda: self._plan is not None and self._plan.epoch == epoch
            )
            assert self._plan is not None
            return self._plan

    def wait_resume(self, epoch: int, step: int) -> None:
        """Block until every rank has restored ``step``; ``Superseded`` when a newer epoch comes.

        Forgets what was said about the steps that are now run again.
        """
        with self._changed:
            self._wait_unless_newer(epoch, lambda: self._resumed >= epoch)
            self._confirmed = step
            self._raise_step = None
            self._all_ended = False

    def wait_confirmed(self, step: int, epoch: int, timeout_s: float) -> bool:
        """Block until ``step`` is confirmed or ``epoch`` is void; False when neither in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._confirmed >= step or self._revoking > epoch, timeout_s
            )

    @property
    def confirmed(self) -> int:
        """The newest confirmed step; -1 before the first."""
        with self._changed:
            return self._confirmed

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
