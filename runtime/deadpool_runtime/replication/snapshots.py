"""A rank's own copies: made after every step, offered to the holder, loaded in a recovery.

What lives here is the rank's side: slots in the node's arena, the thread that fills them, and what
is said to the node's replicator. What a copy consists of is ``state``'s matter, how bytes are
copied ``copying``'s, how they reach another node the replicator's.

Three threads meet here. The training thread begins copies and loads them. The copier fills them
and tells the replicator as it goes. The client's thread hears from the replicator.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_runtime import protocol
from deadpool_runtime.context import RankContext
from deadpool_runtime.durable import saving
from deadpool_runtime.durable.saving import Saver, Target
from deadpool_runtime.later import devices_in, encode_own
from deadpool_runtime.replication import fused, messages
from deadpool_runtime.replication.arena import Arena, copy_in
from deadpool_runtime.replication.arranging import Arrangement
from deadpool_runtime.replication.client import ReplicatorClient
from deadpool_runtime.replication.copying import Copier, CopyEvents
from deadpool_runtime.replication.loaded import (
    CopyUnusable,
    Loaded,
    digests_of,
    keys_on_cpu,
    verified,
    views_by_key,
)
from deadpool_runtime.replication.manifest import Manifest
from deadpool_runtime.replication.notes import Notes
from deadpool_runtime.replication.own_slots import OwnSlots
from deadpool_runtime.replication.slots import SlotFile
from deadpool_runtime.replication.slotting import slot_file
from deadpool_runtime.state import Item

#: Steps after which the digests of what ranks have in common are compared.
COMPARED_STEPS = (0, 1)
#: Longest time for a copy under way to be sealed or given up when a recovery begins.
SETTLE_S = 60.0
#: An own part larger than this (bytes) is worth a note: it travels with every step.
LARGE_OWN_NBYTES = 8 << 20
#: How often a wait for the copier looks for a newer epoch.
LOOK_S = 0.5


class Snapshots:
    """The copies of this rank. Used by the training thread but where said otherwise."""

    def __init__(self, context: RankContext) -> None:
        self._rank = context.rank
        self._control = context.control
        self._link = context.link
        self._arena = Arena(Path(context.arena))
        self._slots = OwnSlots(self._arena, context.rank, context.replication_interval)
        #: Guards what follows; three threads use it.
        self._lock = threading.Lock()
        self._epoch = context.epoch
        #: No copies are made while this is true. Measurements set it between two steps.
        self.paused = False
        #: No durable checkpoints are written while this is false: ranks are set aside, and what
        #: the others write would never be whole.
        self.may_save = True
        #: ``holder`` means something only once the launcher has chosen.
        self._chosen = False
        self._holder: protocol.Holder | None = None
        #: The newest copy that is sealed here, and the newest of which there are to be replicas.
        self._sealed: Manifest | None = None
        self._offered: Manifest | None = None
        self._confirmed_in = -1
        self._notes = Notes(lambda text: self._link.send(protocol.Note(text)))
        self._closed = False
        #: Size of a slot that copies will fit into, once it is known.
        self.room_nbytes = 0
        #: The step whose copy still lacks its own part.
        self._incomplete: int | None = None
        self._arrangement = Arrangement()
        library, reason = fused.load()
        if reason:
            self._notes.say(reason)
        self._client = ReplicatorClient(
            Path(context.arena), context.rank, context.born, self._on_message
        )
        events = CopyEvents(
            on_begun=self._on_begun,
            on_chunks=self._on_chunks,
            on_sealed=self._on_sealed,
            on_dropped=self._on_dropped,
            on_note=self._notes.say,
        )
        self._copier = Copier(context.rank, events, library)
        self._checkpoint_dir = context.checkpoint_dir
        self._checkpoint_every = context.checkpoint_every
        self._saver: Saver | None = None
        #: Epoch and step of the newest copy of what came from a durable checkpoint.
        self._from_disk: tuple[int, int] | None = None
        if context.checkpoint_dir:
            target = Target(Path(context.checkpoint_dir), context.job_id, context.world_size)
            self._saver = Saver(target, self._on_saved, self._on_save_failed)
        self._control.on_protect = self._on_protect

    # ------------------------------------------------------------ making copies

    def begin(self, step: int, epoch: int, items: Sequence[Item]) -> None:
        """Begin to copy the state after ``step``; ``complete`` is to follow. It is cheapest to give
        the same ``items`` object as the time before, if that is still true."""
        self._arrangement.update(items)
        self._incomplete = step
        segments, tensors = self._arrangement.segments, self._arrangement.tensors
        self._copier.begin(step, epoch, segments, tensors, self._slots.take(step))

    def complete(self, step: int, own: bytes | dict[str, Any]) -> None:
        """Give the own part of the copy that was begun for ``step``: its bytes, or a value that
        shares nothing with the script."""
        self._incomplete = None
        if isinstance(own, bytes):
            self._copier.finish(step, own)
        elif self._copier.can_fetch(devices_in(own)):
            self._copier.finish(step, partial(encode_own, own))
        else:
            self._copier.finish(step, encode_own(own))

    def leave_out(self, step: int) -> None:
        """There will be no copy of ``step``, on purpose, and nobody is to wait for one."""
        self._control.confirm(self._epoch, step)

    def make_room(self) -> None:
        """Let the slots have their final size before the first step, where that matters."""
        self._copier.make_room(self._slots.every(), self.room_nbytes, SETTLE_S)

    def segments_nbytes(self) -> dict[tuple[int, ...], int]:
        """How large each segment of the newest copy is."""
        return {segment.ranks: segment.nbytes for segment in self._arrangement.segments}

    def wait_copied(self, step: int) -> None:
        """Return when the tensors of ``step`` may change, or a peer was lost."""
        while not self._copier.wait_copied(step, LOOK_S):
            if self._control.disturbed(self._epoch):
                return

    def settle(self) -> None:
        """Let no copy be under way: what lacks its own part is given up."""
        if self._incomplete is not None:
            self._copier.cancel("The step was cut short.", step=self._incomplete)
            self._incomplete = None
        self._wait_idle()

    def _wait_idle(self) -> None:
        if not self._copier.wait_idle(SETTLE_S):
            raise RuntimeError(f"A copy of the state was not complete after {SETTLE_S:g} s.")

    def close(self) -> None:
        """The job's steps are over: end the threads, when a checkpoint under way is on disk or its
        disk answers nothing. Sealed copies stay in the arena. Only the first call does anything."""
        if self._closed:
            return
        self._closed = True
        if self._incomplete is not None:
            self._copier.cancel("The steps are over.", step=self._incomplete)
        self._copier.wait_idle(SETTLE_S)
        self._copier.close()
        if self._saver is not None:
            given_up = self._saver.close(wait=True, stall_s=saving.STALL_S)
            if given_up is not None:
                self._notes.say(
                    f"The durable checkpoint of step {given_up} was given up at the end of the "
                    f"steps: nothing of it could be written to {self._checkpoint_dir} for "
                    f"{saving.STALL_S:g} s."
                )
        self._client.close()

    # ------------------------------------------------------------ replicas

    def newest_replicated(self, step: int) -> int:
        """The newest step up to this one of which there are replicas."""
        return self._slots.newest_replicated(step)

    def go_back(self, step: int, keep: list[int]) -> None:
        """All ranks go on from ``step``, which is replicated now as those in ``keep`` are. No copy
        is under way."""
        with self._lock:
            self._sealed = self._offered = None
        self._slots.go_back(step, keep)

    def set_holder(self, epoch: int, holder: protocol.Holder | None, step: int) -> None:
        """From now on replicas go to ``holder``, first that of the copy of ``step``, which other
        ranks may still need as it is wherever it lies; ``resumed`` is to follow."""
        slot = self._slots.holding(step)
        found = slot.read() if slot is not None else None
        with self._lock:
            self._sealed = found[0] if found is not None and found[0].step == step else None
            self._offered = self._sealed
            # The link's thread may have heard of another choice, made since all are restored.
            chosen = self._chosen and self._epoch == epoch
            holder = self._holder if chosen else holder
        self._choose(epoch, holder, restoring=not chosen)

    def resumed(self, epoch: int) -> None:
        """All ranks are restored."""
        with self._lock:
            if epoch == self._epoch:
                self._client.send(messages.SetHolder(epoch, self._holder))

    def _on_protect(self, message: protocol.Protect) -> None:
        """On the link's thread: the first choice, or a replicator that listens elsewhere."""
        self._choose(message.epoch, message.holder)

    def _choose(
        self, epoch: int, holder: protocol.Holder | None, *, restoring: bool = False
    ) -> None:
        with self._lock:
            if epoch < self._epoch:
                return
            self._epoch, self._holder, self._chosen = epoch, holder, True
            offered = self._offered
            self._client.send(messages.SetHolder(epoch, holder, restoring))
            if offered is not None:
                self._offer(offered)
        self._notes.begin()
        if offered is not None and holder is None:
            self._confirmed(epoch, offered.step)

    def _offer(self, manifest: Manifest) -> None:
        """Let the holder have a replica of a copy that is sealed."""
        slot = self._slots.find(manifest.step)
        if slot is not None:
            self._client.send(messages.SnapshotSealed(manifest, slot))

    # ------------------------------------------------------------ getting copies

    def assemble(self, epoch: int, step: int, pieces: list[protocol.Piece]) -> None:
        """Fetch the copy of ``step``; the control hears when it is there."""
        self._client.send(messages.Assemble(epoch, step, pieces, self._slots.number(step)))

    def load(self, step: int) -> Loaded:
        """The copy of ``step`` in this node's arena, verified. ``CopyUnusable`` if it is damaged,
        which is marked in the arena, or not there."""
        slot = self._slots.holding(step)
        if slot is None:
            raise CopyUnusable(f"There is no copy of step {step} of rank {self._rank} here.")
        return verified(slot, step, self._rank)

    def hold(self, epoch: int, step: int, shard: protocol.Shard) -> None:
        """Fetch a replica of another rank's copy; the control hears when it is there."""
        assert shard.source is not None
        piece = protocol.Piece(shard.source, shard.rank, shard.replica, shard.segments, base=True)
        self._client.send(messages.Assemble(epoch, step, [piece], -1, held=True))

    def load_shard(self, step: int, shard: protocol.Shard) -> Loaded:
        """What this node has of another rank's copy of ``step``; see ``load``."""
        held = shard.replica or shard.source is not None
        found = copy_in(self._arena.path, held, shard.rank, step)
        if found is None:
            raise CopyUnusable(f"There is no copy of step {step} of rank {shard.rank} here.")
        path = self._arena.path / slot_file(held, shard.rank, found[0])
        with SlotFile.open(path) as slot:  # views of it stay valid
            return verified(slot, step, shard.rank)

    def load_checkpoint(self, directory: str, step: int, rank: int) -> Loaded:
        """The state of ``rank`` from the durable checkpoint of ``step``; ``CopyUnusable`` if that
        is damaged."""
        from deadpool_runtime.durable.index import CheckpointDamaged
        from deadpool_runtime.durable.loading import load

        try:
            found = load(Path(directory), step, rank)
        except (CheckpointDamaged, OSError) as error:
            raise CopyUnusable(str(error)) from error
        manifest = found.manifest
        return Loaded(found.tensors, keys_on_cpu(manifest), found.own, digests_of(manifest))

    def copy_again(self, step: int, epoch: int, items: Sequence[Item], own: bytes) -> None:
        """Make a copy of a state that came from a checkpoint or from a peer's copy, and wait until
        it is sealed."""
        self._from_disk = epoch, step
        self.begin(step, epoch, items)
        self.complete(step, own)
        self._wait_idle()

    # ------------------------------------------------------------ the copier's thread

    def _on_begun(self, manifest: Manifest) -> None:
        step = manifest.step
        before, slot = self._slots.overwritten(step), self._slots.find(step)
        with self._lock:
            if self._sealed is not None and self._sealed.step == before:
                self._sealed = None
            if self._offered is not None and self._offered.step == before:
                self._offered = None
        if self._slots.replicates(step) and slot is not None:
            self._client.send(messages.SnapshotBegun(manifest, slot))
        elif before is not None:
            self._client.send(messages.SnapshotDropped(before))

    def _on_chunks(self, step: int, segment: int, first: int, hashes: list[bytes]) -> None:
        if self._slots.replicates(step):
            self._client.send(messages.ChunksCopied(step, segment, first, hashes))

    def _on_sealed(self, manifest: Manifest) -> None:
        replicated = self._slots.replicates(manifest.step)
        with self._lock:
            self._sealed = manifest
            if replicated:
                self._offered = manifest
                # Under the lock: ``_choose`` either tells of this copy or comes before it.
                self._offer(manifest)
            alone = replicated and self._chosen and self._holder is None
            epoch = self._epoch
        if manifest.own_nbytes > LARGE_OWN_NBYTES:
            self._notes.say(
                f"{manifest.own_nbytes >> 20} MiB of this rank's state (job.state, extras, changed "
                f"buffers) are copied by value after every step, slower than parameters are."
            )
        if manifest.step in COMPARED_STEPS:
            self._link.send(
                protocol.Snapshotted(manifest.epoch, manifest.step, digests_of(manifest))
            )
        if alone:
            self._confirmed(epoch, manifest.step)
        self._save(manifest)

    def _is_due(self, step: int) -> bool:
        return step > 0 and step % self._checkpoint_every == 0

    def _on_dropped(self, step: int, reason: str) -> None:
        if self._slots.replicates(step):
            self._client.send(messages.SnapshotDropped(step))
            self._control.give_up(step)
        if not self._closed and not self._control.disturbed(self._epoch):
            self._notes.say_of_copies(f"No copy of step {step} was made: {reason}")

    def _save(self, manifest: Manifest) -> None:
        """Begin to write the copy that was just sealed to disk, if it is its step's turn."""
        if self._saver is None or not self.may_save or not self._is_due(manifest.step):
            return
        if (manifest.epoch, manifest.step) == self._from_disk:
            # It is on disk, where other ranks may still be reading what this would replace.
            return
        self._save_from_slot(self._saver, manifest)

    def _save_from_slot(self, saver: Saver, manifest: Manifest, wait: bool = False) -> None:
        slot = self._slots.holding(manifest.step)
        if slot is not None:
            saver.begin(manifest, views_by_key(slot, manifest), slot.own_bytes(), wait=wait)

    def save(self, step: int) -> None:
        """Begin to write the copy of ``step`` to disk, unless that has begun; the training thread
        waits meanwhile, so that the copy stays as it is.
        """
        if self._saver is None or step < 1:
            return
        self._wait_idle()
        with self._lock:
            manifest = self._sealed
        if manifest is None or manifest.step != step or self._is_due(step):
            return
        if (manifest.epoch, step) == self._from_disk:
            return
        self._save_from_slot(self._saver, manifest, wait=True)

    # ------------------------------------------------------------ the saver's thread

    def _on_saved(self, epoch: int, step: int, nbytes: int, duration_s: float) -> None:
        self._link.send(protocol.Saved(epoch, step, nbytes, duration_s))

    def _on_save_failed(self, step: int, reason: str) -> None:
        self._notes.say(reason)

    # ------------------------------------------------------------ the client's thread

    def _on_message(self, message: Any) -> None:
        match message:
            case messages.Confirmed(epoch=epoch, step=step):
                self._confirmed(epoch, step)
            case messages.Unconfirmed(epoch=epoch, step=step, reason=reason):
                if epoch == self._epoch:
                    self._control.give_up(step)
                    self._notes.say(f"The replica of step {step} was not made: {reason}")
            case messages.Assembled(epoch=epoch):
                self._control.assembled(epoch, "")
            case messages.AssembleFailed(epoch=epoch, reason=reason):
                self._control.assembled(epoch, reason or "A copy could not be fetched.")
            case messages.LinkNote(text=text):
                self._notes.say(text)

    def _confirmed(self, epoch: int, step: int) -> None:
        self._control.confirm(epoch, step)
        with self._lock:
            first = epoch == self._epoch and self._confirmed_in < epoch
            if first:
                self._confirmed_in = epoch
        if first:
            self._link.send(protocol.Protected(epoch, step))
