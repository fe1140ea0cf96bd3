"""Copying a rank's live state into a slot of the arena, beside the training thread.

``Copier`` has one thread. The training thread hands a state over with ``begin`` and ``finish``, and
before it overwrites the tensors again it asks ``wait_copied``. A tensor that was changed before its
copy was complete makes the whole copy worthless: it is dropped, never sealed. What is seen is what
torch counts as a change (``Tensor._version``). Writes through ``.data``, by fused optimizers and by
replayed CUDA graphs are not counted; the guard is there for the last two.
"""

from __future__ import annotations

import contextlib
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from deadpool_runtime.errors import UnsupportedState
from deadpool_runtime.replication.copy_jobs import CopyJob, Own, Room, versions_of
from deadpool_runtime.replication.fused import Fused
from deadpool_runtime.replication.hashers import Hashers, present_threads
from deadpool_runtime.replication.layout import layout_segments, read_into, views_of
from deadpool_runtime.replication.manifest import OWN, Manifest, Segment, chunk_hash
from deadpool_runtime.replication.passes import Pass, SegmentPlan, Sources
from deadpool_runtime.replication.pinning import PinnedSlots
from deadpool_runtime.replication.slots import ArenaFull, SlotFile
from deadpool_runtime.replication.streams import CopyStream, CpuStream, stream_for

__all__ = ["Copier", "CopyEvents", "layout_segments", "read_into", "views_of"]


@dataclass(frozen=True)
class CopyEvents:
    """What the copier's thread tells, in this order for each copy; none of them may take long.

    Every copy that was begun ends with exactly one of ``on_sealed`` and ``on_dropped``. A copy may
    be dropped before ``on_begun``.
    """

    #: The slot is ready and its sizes are final; hashes and own part are not in the manifest yet.
    on_begun: Callable[[Manifest], None]
    #: Step, segment, first chunk, hashes: these chunks are in the slot and will not change.
    on_chunks: Callable[[int, int, int, list[bytes]], None]
    on_sealed: Callable[[Manifest], None]
    #: Step and reason, in a sentence.
    on_dropped: Callable[[int, str], None]
    #: Something the user should read.
    on_note: Callable[[str], None]


class Copier:
    """Copies states of ``rank`` into slots. All methods but the events are the training thread's.

    ``fused``: the library that copies and hashes in one pass, if there is one (``fused.load``).
    ``stream``: copies everything, whatever its device; if None, CPU memory is read by the copier's
    thread, and the rest by a stream of its device. ``threads``: so many hash; 0 for as many as
    this process has processors to spare.
    """

    def __init__(
        self,
        rank: int,
        events: CopyEvents,
        fused: Fused | None,
        stream: CopyStream | None = None,
        threads: int = 0,
    ) -> None:
        self._threads = threads
        self._hashing: Hashers | None = None
        self._rank, self._events, self._fused = rank, events, fused
        self._only_stream = stream
        self._cpu = CpuStream()
        self._streams: dict[torch.device, CopyStream] = {}
        self._pinned: PinnedSlots | None = None
        #: The last tensors begun with, their addresses, and aliases that keep their memory alive.
        self._live: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._aliases: list[Sequence[torch.Tensor]] = []
        self._aliased: tuple[Segment, ...] | None = None
        self._stream: CopyStream = self._cpu
        self._plans: list[SegmentPlan] = []
        self._planned: tuple[Segment, ...] | None = None
        self._sources: list[Sources] = []
        self._sources_of: list[Sequence[torch.Tensor]] | None = None
        self._jobs: queue.SimpleQueue[CopyJob | Room | None] = queue.SimpleQueue()
        #: Guards ``_open`` and the jobs' ``own`` and ``reason``, and tells of their changes.
        self._changed = threading.Condition()
        self._open: dict[int, CopyJob] = {}
        self._thread = threading.Thread(target=self._run, name="deadpool-copier", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ the training thread

    def begin(
        self,
        step: int,
        epoch: int,
        segments: tuple[Segment, ...],
        tensors: Sequence[Sequence[torch.Tensor]],
        slot: SlotFile,
    ) -> None:
        """Copy ``tensors`` (as ``layout_segments`` gave them) as the state after ``step``.

        An earlier copy that still lacks its own part is dropped. It is cheapest to give the same
        ``segments`` object, and tensors whose memory did not move, as the time before.
        """
        live = [tensor for each in tensors for tensor in each]
        self._alias(live, segments, tensors)
        job = CopyJob(
            *(step, epoch, segments, self._aliases, versions_of(live), slot),
            *(self._stream.mark(), self._stream),
        )
        with self._changed:
            for older in self._open.values():
                if older.own is None or older.step == step:
                    older.reason = older.reason or f"State {older.step} was not completed."
            self._open[step] = job
            self._changed.notify_all()
        self._jobs.put(job)

    def finish(self, step: int, own: Own) -> None:
        """The own part of the copy that was begun for ``step``; it is sealed as soon as it can.

        ``own``: the bytes, or what makes them in the copier's thread, of tensors that nobody else
        uses and that the copier ``can_fetch``.
        """
        with self._changed:
            job = self._open.get(step)
            if job is not None:
                job.own_mark = None if isinstance(own, bytes) else job.stream.mark()
                job.own = own
                self._changed.notify_all()

    def can_fetch(self, devices: Iterable[torch.device]) -> bool:
        """Whether values on these devices may be left for the copier's thread to look at. Those in
        CPU memory alone may not: the training thread has them already."""
        return self._stream is not self._cpu and all(map(self._stream.reads, devices))

    def wait_copied(self, step: int, timeout_s: float) -> bool:
        """Wait until the tensors begun with for ``step`` may be overwritten: copied, or the copy
        given up. False if that was not so in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            job = self._open.get(step)
        if job is None:
            return True
        if not job.queued.wait(timeout_s):
            return False
        if not job.stream.wait(job.token, max(deadline - time.monotonic(), 0.0)):
            return False
        job.settle()
        return True

    def make_room(self, slots: Sequence[SlotFile], nbytes: int, timeout_s: float) -> None:
        """Let each slot have this size, and page-lock it, if anything is copied from a device; else
        the first copies would do it, in the midst of training. A slot for which there is no room
        stays as it is. Waits at most so long."""
        if self._stream is self._cpu:
            return
        room = Room(slots, nbytes, self._stream)
        self._jobs.put(room)
        room.made.wait(timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every copy is sealed or dropped; those that lack their own part are not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def cancel(self, reason: str, step: int | None = None) -> None:
        """Give up the copy of ``step`` if it is not sealed, or every one that is not;
        ``wait_idle`` tells when that is done.
        """
        with self._changed:
            for job in self._open.values():
                if step is None or job.step == step:
                    job.reason = job.reason or reason
            self._changed.notify_all()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Give everything up and end the thread, which unlocks page-locked memory; False if it did
        not end in time, as happens when a device hangs.
        """
        self.cancel("The process ends.")
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _alias(
        self,
        live: list[torch.Tensor],
        segments: tuple[Segment, ...],
        tensors: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        """Have tensors that share memory and version with ``live``, but keep that memory if the
        script puts another one in its place. Those of the last time will do if nothing moved.
        """
        addresses = list(map(torch.Tensor.data_ptr, live))
        if (
            segments is self._aliased
            and addresses == self._addresses
            and all(map(operator.is_, live, self._live))
            and all(map(torch.Tensor.is_contiguous, live))
        ):
            return
        self._stream = self._stream_of(live)
        self._aliases = [[tensor.detach() for tensor in each] for each in tensors]
        self._live, self._addresses, self._aliased = live, addresses, segments

    def _stream_of(self, live: list[torch.Tensor]) -> CopyStream:
        if self._only_stream is not None:
            return self._only_stream
        devices = {tensor.device for tensor in live} - {_CPU}
        if not devices:
            return self._cpu
        if len(devices) > 1:
            raise UnsupportedState(
                f"The state lies on several devices ({', '.join(sorted(map(str, devices)))}); a "
                f"rank has one."
            )
        (device,) = devices
        if device not in self._streams:
            self._streams[device] = stream_for(device)
        return self._streams[device]

    # ------------------------------------------------------------ the copier's thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with job.stream.beside_captures():
                if isinstance(job, Room):
                    self._make(job)
                else:
                    self._do(job)
        if self._hashing is not None:
            self._hashing.close()
        if self._pinned is not None:
            self._pinned.release()

    def _make(self, room: Room) -> None:
        try:
            for slot in room.slots:
                slot.ensure(room.nbytes)
                self._hold(slot, room.stream)
        except ArenaFull:
            pass  # The first copies try again, and say what is missing.
        except Exception as error:
            self._note(f"Slots could not be made ready: {error!r}")
        room.made.set()

    def _hold(self, slot: SlotFile, stream: CopyStream) -> None:
        if self._pinned is None:
            self._pinned = PinnedSlots(stream.pinning(), self._events.on_note)
        self._pinned.hold(slot)

    def _do(self, job: CopyJob) -> None:
        try:
            self._copy(job)
        except Exception as error:
            # Nobody else would see it, and a copy that is missing has to be told of.
            if job.sealed:
                self._note(f"The copier could not tell of a copy: {error!r}")
            job.reason = job.reason or f"{type(error).__name__}: {error}"
        self._end(job)

    def _copy(self, job: CopyJob) -> None:
        if job.reason:
            return
        everything = (*range(len(job.segments)), OWN)
        job.prepared = True
        try:
            job.slot.prepare(job.segments, everything)
        except ArenaFull as error:
            job.reason = str(error)
            return
        manifest = Manifest(
            rank=self._rank,
            step=job.step,
            epoch=job.epoch,
            segments=job.segments,
            own_nbytes=0,
            own_hash=b"",
        )
        passes = self._passes(job)
        self._events.on_begun(manifest)
        if job.stream is not self._cpu:
            self._queue(job, passes)
        sealed = []
        hashers = self._hashers(job.stream)
        for index, (segment, each) in enumerate(zip(job.segments, passes, strict=True)):

            def tell(first: int, hashes: list[bytes], index: int = index) -> bool:
                if not job.reason:
                    self._events.on_chunks(job.step, index, first, hashes)
                return not job.reason

            hashes = each.run(self._fused, job.stream, tell, hashers)
            if hashes is None:
                return
            sealed.append(msgspec.structs.replace(segment, hashes=tuple(hashes)))
        job.stream.wait(job.token)
        job.settle()
        job.done_with()
        job.queued.set()
        own = self._own(job)
        if own is None:
            return
        manifest = msgspec.structs.replace(
            manifest, segments=tuple(sealed), own_nbytes=len(own), own_hash=chunk_hash(own)
        )
        job.slot.seal(manifest, everything, own)
        job.sealed = True
        self._events.on_sealed(manifest)

    def _hashers(self, stream: CopyStream) -> Hashers:
        threads = self._threads or present_threads(stream is not self._cpu)
        if self._hashing is None or self._hashing.threads != threads:
            if self._hashing is not None:
                self._hashing.close()
            self._hashing = Hashers(threads)
        return self._hashing

    def _passes(self, job: CopyJob) -> list[Pass]:
        if job.segments is not self._planned:
            self._plans = [SegmentPlan(job.segments, i) for i in range(len(job.segments))]
            self._planned, self._sources_of = job.segments, None
        if job.tensors is not self._sources_of:
            self._sources = [
                Sources(plan, each, self._only_stream is not None)
                for plan, each in zip(self._plans, job.tensors, strict=True)
            ]
            self._sources_of = job.tensors
        for plan, sources in zip(self._plans, self._sources, strict=True):
            sources.require_memory(plan)
        return [
            Pass(plan, sources, job.slot)
            for plan, sources in zip(self._plans, self._sources, strict=True)
        ]

    def _queue(self, job: CopyJob, passes: list[Pass]) -> None:
        """Hand the device all its copies at once, so that it never waits for a hash."""
        self._hold(job.slot, job.stream)
        job.stream.start(job.mark)
        try:
            for each in passes:
                each.queue(job.stream)
            for each in passes:
                each.copy_cpu()
        finally:
            # What is queued already must be waited for, whatever happened to the rest.
            job.token = job.stream.token()
        job.queued.set()

    def _own(self, job: CopyJob) -> bytes | None:
        """The own part when it is there; None if the copy is given up instead."""
        with self._changed:
            self._changed.wait_for(lambda: job.own is not None or job.reason)
            # Nothing of it is kept: it may hold memory of a device.
            own, job.own = job.own, b""
            if job.reason or own is None:
                return None
        if isinstance(own, bytes):
            return own
        job.stream.start(job.own_mark)
        with job.stream.fetching():
            return own()

    def _end(self, job: CopyJob) -> None:
        if job.token is not None:
            # Copies that are queued on a device still read the tensors and write the slot.
            job.stream.wait(job.token)
        if not job.sealed:
            try:
                if job.prepared:
                    job.slot.invalidate()
                self._events.on_dropped(job.step, job.reason)
            except Exception as error:
                self._note(f"The copier could not tell of a copy: {error!r}")
        job.done_with()
        job.queued.set()
        with self._changed:
            if self._open.get(job.step) is job:
                del self._open[job.step]
            self._changed.notify_all()

    def _note(self, text: str) -> None:
        with contextlib.suppress(Exception):  # the thread must outlive its listeners
            self._events.on_note(text)


_CPU = torch.device("cpu")
