"""The core's decisions, event by event."""

from __future__ import annotations

import pytest

from deadpool_runtime.protocol import Address, Holder, Piece
from deadpool_runtime.replication import events as ev
from deadpool_runtime.replication import messages, wire
from deadpool_runtime.replication.arena import SLOTS
from deadpool_runtime.replication.carriers.base import MAX_TICKETS
from deadpool_runtime.replication.core import Core
from deadpool_runtime.replication.manifest import CHUNK_NBYTES, OWN, Manifest, Segment

THERE = Address("b", 1)
HOLDER = Holder("b", THERE, [(0,)])
RANK, LINK = 1, 10


def hashes(step: int, count: int) -> tuple[bytes, ...]:
    return tuple(f"{step}/{chunk}".encode() for chunk in range(count))


def manifest(step: int, chunks: int = 2, rank: int = 0, bare: bool = False) -> Manifest:
    """One segment that only the rank has."""
    done = () if bare else hashes(step, chunks)
    segment = Segment((rank,), (), chunks * CHUNK_NBYTES, done)
    return Manifest(rank, step, 0, (segment,), 0 if bare else 3, b"" if bare else b"own")


class Bench:
    """A core, and what it did in the last turn."""

    def __init__(self, link: bool = True, holder: Holder | None = HOLDER) -> None:
        self.core = Core("a")
        self.done: list[ev.Action] = []
        self.history: list[ev.Action] = []
        self.say(messages.RankHello(0, 0))
        self.say(messages.SetHolder(0, holder))
        if link and holder is not None:
            assert self.done == [ev.Dial(THERE)]
            self.do(ev.LinkUp(LINK, "b", THERE))

    def do(self, event: ev.Event) -> list[ev.Action]:
        self.done = self.core.step(event)
        self.history += self.done
        return self.done

    def say(self, message: messages.ToReplicator, client: int = RANK) -> list[ev.Action]:
        return self.do(ev.RankSaid(client, message))

    def hear(self, message: wire.OnLink, link: int = LINK) -> list[ev.Action]:
        return self.do(ev.Heard(link, message))

    def told(self) -> list[messages.FromReplicator]:
        return [a.message for a in self.done if isinstance(a, ev.TellRank)]

    def on_link(self) -> list[wire.OnLink]:
        return [a.message for a in self.done if isinstance(a, ev.TellLink)]

    def sends(self) -> list[tuple[int, int]]:
        return [(a.part.segment, a.part.chunk) for a in self.done if isinstance(a, ev.SendChunk)]

    def chunk_done(
        self, stream: int, part: tuple[int, int], verdict: wire.Verdict = wire.Verdict.TAKEN
    ) -> list[ev.Action]:
        return self.hear(wire.ChunkDone(stream, *part, verdict, "tcp", ""))


def test_chunks_go_out_as_they_are_copied_and_confirmation_follows_the_seal() -> None:
    b = Bench()
    b.say(messages.SnapshotBegun(manifest(0, bare=True), 0))
    assert b.on_link() == [wire.Put(1, 0, manifest(0, bare=True), (0, OWN), True)]
    b.say(messages.ChunksCopied(0, 0, 0, [hashes(0, 2)[0]]))
    assert b.sends() == []
    b.hear(wire.StreamReady(1))
    assert b.sends() == [(0, 0)]
    b.say(messages.ChunksCopied(0, 0, 1, [hashes(0, 2)[1]]))
    assert b.sends() == [(0, 1)]
    b.say(messages.SnapshotSealed(manifest(0), 0))
    assert b.sends() == [(OWN, 0)]
    b.chunk_done(1, (0, 0))
    b.chunk_done(1, (0, 1))
    assert b.on_link() == []
    b.chunk_done(1, (OWN, 0))
    assert b.on_link() == [wire.PutEnd(1, manifest(0))]
    assert b.told() == []
    b.hear(wire.PutSealed(1))
    assert b.told() == [messages.Confirmed(0, 0)]


def test_no_more_than_the_allowed_chunks_are_on_their_way() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0, chunks=50), 0))
    b.hear(wire.StreamReady(1))
    assert len(b.sends()) == MAX_TICKETS
    first = b.sends()[0]
    b.chunk_done(1, first)
    assert len(b.sends()) == 1


def test_the_older_snapshot_is_finished_first() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.say(messages.SnapshotSealed(manifest(1), 1))
    assert b.on_link() == []
    b.hear(wire.StreamRefused(1, "no room"))
    assert b.told() == [messages.Unconfirmed(0, 0, "the holder refused it: no room")]
    assert b.on_link() == [wire.Put(2, 0, manifest(1), (0, OWN), True)]


def test_a_snapshot_whose_slot_is_overwritten_is_given_up() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.say(messages.SnapshotBegun(manifest(SLOTS, bare=True), 0))
    assert b.told() == [
        messages.Unconfirmed(0, 0, "its slot was overwritten before the holder had it all")
    ]
    assert [type(m) for m in b.on_link()] == [wire.StreamRefused, wire.Put]


def test_a_chunk_that_is_wanted_again_is_checked_at_its_source() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.hear(wire.StreamReady(1))
    b.chunk_done(1, (0, 0), wire.Verdict.WANTED)
    again = [a for a in b.done if isinstance(a, ev.SendChunk)]
    assert [(a.part, a.check) for a in again] == [((0, 0), True)]
    b.do(ev.SourceDamaged(ev.StreamKey(LINK, 1), ev.Part(0, 0)))
    assert ev.WipeCopy(ev.SlotName(False, 0, 0, 0)) in b.done
    assert [type(m) for m in b.told()] == [messages.Unconfirmed]


def test_a_chunk_that_a_carrier_lost_is_sent_by_another() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.hear(wire.StreamReady(1))
    b.hear(wire.ChunkDone(1, 0, 0, wire.Verdict.LOST, "mpi:1", "it died"))
    assert ev.DropCarrier(LINK, "mpi:1", "it died") in b.done
    assert b.sends() == [(0, 0)]


def test_a_lost_link_is_dialled_and_the_put_begins_anew() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.hear(wire.StreamReady(1))
    b.do(ev.LinkDown(LINK, "cut"))
    assert b.done == [ev.Dial(THERE)]
    b.do(ev.LinkUp(LINK + 1, "b", THERE))
    assert [type(m) for m in b.on_link()] == [wire.Put]
    b.hear(wire.StreamReady(1), LINK + 1)
    assert b.sends() == [(OWN, 0), (0, 0), (0, 1)]


def test_without_a_holder_the_seal_confirms_and_the_note_comes_once() -> None:
    b = Bench(holder=None)
    b.say(messages.SnapshotSealed(manifest(0), 0))
    assert [type(m) for m in b.told()] == [messages.Confirmed, messages.LinkNote]
    b.say(messages.SnapshotSealed(manifest(1), 1))
    assert b.told() == [messages.Confirmed(0, 1)]


def test_another_holder_gets_the_copies_and_the_old_link_ends() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    other = Address("c", 2)
    b.say(messages.SetHolder(0, Holder("c", other, [(0,)])))
    assert ev.Dial(other) in b.done
    assert ev.CloseLink(LINK, "not needed any more") in b.done
    b.do(ev.LinkUp(LINK + 1, "c", other))
    assert [type(m) for m in b.on_link()] == [wire.Put]


def test_a_newer_epoch_gives_older_copies_up_until_they_are_named_again() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.say(messages.SetHolder(1, HOLDER))
    assert b.told() == [messages.Unconfirmed(0, 0, "a newer epoch began")]
    b.say(messages.SetHolder(0, None))
    assert b.done == []
    b.say(messages.SnapshotSealed(manifest(0), 0))
    put = b.on_link()[0]
    assert isinstance(put, wire.Put)
    assert put.epoch == 1


def test_an_answer_is_given_again_to_a_rank_that_asks_again() -> None:
    b = Bench(holder=None)
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.say(messages.RankHello(0, 0), client=2)
    assert b.done == [ev.DropClient(RANK)]
    b.say(messages.SnapshotSealed(manifest(0), 0), client=2)
    assert b.told() == [messages.Confirmed(0, 0)]
    b.say(messages.RankHello(0, -1), client=3)
    assert b.done == [ev.DropClient(3)]


def test_a_rank_without_the_segments_that_its_holder_shall_have_is_not_confirmed() -> None:
    b = Bench(holder=Holder("b", THERE, [(5, 6)]))
    b.say(messages.SnapshotSealed(manifest(1), 1))
    assert [type(m) for m in b.told()] == [messages.Unconfirmed]


def test_a_segment_that_is_there_from_the_first_step_on_is_not_missed_before_it() -> None:
    b = Bench(holder=Holder("b", THERE, [(0,), (5, 6)]))
    b.say(messages.SnapshotBegun(manifest(0, bare=True), 0))
    assert b.on_link() == [wire.Put(1, 0, manifest(0, bare=True), (0, OWN), True)]


# ---------------------------------------------------------------- the holder


class Holding(Bench):
    """A core to which another node puts a replica of rank 5."""

    def __init__(self) -> None:
        super().__init__(holder=None)
        self.do(ev.LinkUp(LINK, "z", None))

    def put(self, stream: int, step: int = 0, epoch: int = 0, link: int = LINK) -> None:
        bare = manifest(step, rank=5, bare=True)
        self.hear(wire.Put(stream, epoch, bare, (0, OWN), True), link)

    def put_again(
        self, stream: int, present: tuple[int, ...] = (0, OWN), *, replaces: bool = False
    ) -> ev.StreamKey:
        """A sealed copy of step 0 is put, and its slot looked into."""
        self.hear(wire.Put(stream, 0, manifest(0, rank=5), present, replaces))
        key = ev.StreamKey(LINK, stream)
        assert self.done[-1] == ev.ReadCopy(key, True, 5, 0)
        return key

    def prepared(self, stream: int, link: int = LINK) -> None:
        self.do(ev.SlotPrepared(ev.StreamKey(link, stream), ""))

    def chunk(self, stream: int, chunk: int, step: int = 0, link: int = LINK) -> None:
        nbytes = CHUNK_NBYTES
        hash = hashes(step, 2)[chunk]
        self.hear(wire.Chunk(stream, 0, chunk, nbytes, hash, "tcp", b""), link)

    def received(
        self, stream: int, part: tuple[int, int], outcome: ev.Outcome, hash: bytes, link: int = LINK
    ) -> None:
        key = ev.StreamKey(link, stream)
        self.do(ev.ChunkReceived(key, ev.Part(*part), outcome, hash, "tcp", ""))

    def verdicts(self) -> list[wire.Verdict]:
        return [m.verdict for m in self.on_link() if isinstance(m, wire.ChunkDone)]


def filled() -> Holding:
    h = Holding()
    h.put(1)
    assert [type(a) for a in h.done] == [ev.PrepareSlot]
    h.prepared(1)
    assert h.on_link() == [wire.StreamReady(1)]
    for chunk in range(2):
        h.chunk(1, chunk)
        h.received(1, (0, chunk), ev.Outcome.RIGHT, hashes(0, 2)[chunk])
    h.hear(wire.Chunk(1, OWN, 0, 3, b"own", "tcp", b""))
    h.received(1, (OWN, 0), ev.Outcome.RIGHT, b"own")
    return h


def test_a_replica_is_sealed_when_all_its_chunks_are_those_of_the_manifest() -> None:
    h = filled()
    h.hear(wire.PutEnd(1, manifest(0, rank=5)))
    slot = ev.SlotName(True, 5, 0, 0)
    key = ev.StreamKey(LINK, 1)
    assert h.done == [ev.SealSlot(key, slot, manifest(0, rank=5), (0, OWN))]
    h.do(ev.SlotSealed(key, ""))
    assert h.on_link() == [wire.PutSealed(1)]


def test_a_replica_whose_manifest_has_other_hashes_is_refused() -> None:
    h = filled()
    other = Manifest(5, 0, 0, (Segment((5,), (), 2 * CHUNK_NBYTES, hashes(1, 2)),), 3, b"own")
    h.hear(wire.PutEnd(1, other))
    assert [type(m) for m in h.on_link()] == [wire.StreamRefused]


def test_a_damaged_chunk_is_asked_for_once_more_and_then_the_put_is_refused() -> None:
    h = Holding()
    h.put(1)
    h.prepared(1)
    h.chunk(1, 0)
    h.received(1, (0, 0), ev.Outcome.WRONG, b"?")
    assert h.verdicts() == [wire.Verdict.WANTED]
    h.chunk(1, 0)
    h.received(1, (0, 0), ev.Outcome.WRONG, b"?")
    assert h.verdicts() == [wire.Verdict.DISCARDED]
    assert wire.StreamRefused(1, "chunk 0 arrived damaged twice") in h.on_link()
    h.chunk(1, 1)
    assert [a.slot for a in h.done if isinstance(a, ev.ReceiveChunk)] == [None]


def test_a_chunk_outside_the_put_is_never_written() -> None:
    h = Holding()
    h.put(1)
    h.prepared(1)
    h.hear(wire.Chunk(1, 0, 99, CHUNK_NBYTES, b"", "tcp", b""))
    assert [a.slot for a in h.done if isinstance(a, ev.ReceiveChunk)] == [None]
    assert [type(m) for m in h.on_link()] == [wire.StreamRefused]


def test_a_fence_is_answered_when_the_last_older_write_is_done() -> None:
    h = Holding()
    h.put(1)
    h.prepared(1)
    h.chunk(1, 0)
    h.do(ev.FenceWanted(1))
    assert h.done[-1] == ev.WatchFence(1)
    assert h.on_link() == [wire.StreamRefused(1, "epoch 0 is over")]
    h.do(ev.FenceOverdue(1))
    assert h.done == [ev.CloseLink(LINK, "a newer epoch was declared")]
    h.received(1, (0, 0), ev.Outcome.LOST, b"")
    assert ev.TellAgent(wire.Fenced(1)) in h.done
    h.put(2)
    assert h.on_link() == [wire.StreamRefused(2, "epoch 0 is over, epoch 1 runs")]
    h.put(3, epoch=1)
    assert [type(a) for a in h.done] == [ev.PrepareSlot]


def test_an_older_epoch_than_the_owners_last_is_refused_without_a_fence() -> None:
    h = Holding()
    h.put(1, epoch=4)
    h.put(2, epoch=3)
    assert h.on_link() == [wire.StreamRefused(2, "epoch 3 is over, epoch 4 runs")]


def test_a_slot_has_one_writer_at_a_time() -> None:
    h = Holding()
    h.put(1)
    h.prepared(1)
    h.chunk(1, 0)
    h.do(ev.LinkDown(LINK, "cut"))
    h.do(ev.LinkUp(LINK + 1, "z", None))
    h.put(1, link=LINK + 1)
    assert h.done == []
    h.received(1, (0, 0), ev.Outcome.RIGHT, hashes(0, 2)[0])
    assert [type(a) for a in h.done] == [ev.PrepareSlot]


def test_a_sealed_replica_of_the_same_copy_is_kept_and_confirmed_at_once() -> None:
    h = Holding()
    key = h.put_again(1)
    h.do(ev.CopyRead(key, 0, manifest(0, rank=5), (0, OWN)))
    assert h.done == [ev.TellLink(LINK, wire.PutSealed(1))]
    key = h.put_again(2, (OWN,))
    h.do(ev.CopyRead(key, 0, manifest(0, rank=5), (0, OWN)))
    assert h.done == [ev.TellLink(LINK, wire.PutSealed(2))]


@pytest.mark.parametrize(
    ("found", "present"),
    [
        (manifest(0, rank=5), (OWN,)),
        (Manifest(5, 0, 0, manifest(1).segments, 3, b"own"), (0, OWN)),
    ],
)
def test_another_replica_of_the_step_stays_until_all_are_restored(
    found: Manifest, present: tuple[int, ...]
) -> None:
    h = Holding()
    h.do(ev.CopyRead(h.put_again(1), 0, found, present))
    reason = "another replica of this step stays until all ranks are restored"
    assert h.done == [ev.TellLink(LINK, wire.StreamRefused(1, reason))]
    h.do(ev.CopyRead(h.put_again(2, replaces=True), 0, found, present))
    assert [type(a) for a in h.done] == [ev.PrepareSlot]


def test_a_slot_that_holds_no_replica_of_the_step_is_filled_before_all_are_restored() -> None:
    h = Holding()
    h.do(ev.CopyRead(h.put_again(1), 0, None, ()))
    assert [type(a) for a in h.done] == [ev.PrepareSlot]


def test_a_put_whose_slot_is_being_looked_into_may_be_given_up() -> None:
    h = Holding()
    first, second = h.put_again(1), ev.StreamKey(LINK, 2)
    h.put(2)
    assert h.on_link() == [wire.StreamRefused(1, "a newer put of the same rank began")]
    h.do(ev.CopyRead(first, 0, manifest(0, rank=5), (0, OWN)))
    assert h.done == []
    h.do(ev.SlotPrepared(second, ""))
    third = h.put_again(3)
    h.hear(wire.StreamRefused(3, "the rank has another holder"))
    h.do(ev.CopyRead(third, 0, manifest(0, rank=5), (0, OWN)))
    assert h.done == []
    fourth = h.put_again(4)
    h.do(ev.FenceWanted(1))
    assert wire.StreamRefused(4, "epoch 1 runs") in h.on_link()
    h.do(ev.CopyRead(fourth, 0, None, ()))
    assert h.done == []


def test_what_a_holder_keeps_for_others_is_put_again_when_all_are_restored() -> None:
    b = Bench()
    b.say(messages.SetHolder(1, HOLDER, restoring=True))
    b.say(messages.SnapshotSealed(manifest(0), 0))
    assert b.on_link() == [wire.Put(1, 1, manifest(0), (0, OWN), False)]
    b.hear(wire.StreamRefused(1, "it stays"))
    assert b.done == []
    b.say(messages.SetHolder(1, HOLDER))
    assert b.on_link() == [wire.Put(2, 1, manifest(0), (0, OWN), True)]
    b.hear(wire.PutSealed(2))
    assert b.told() == [messages.Confirmed(1, 0)]


# ---------------------------------------------------------------- assembling


def test_an_assembly_that_is_fenced_fails_at_once() -> None:
    b = Bench(holder=None)
    b.say(messages.Assemble(0, 0, [Piece(THERE, 0, True, [(0,)], True)], 0))
    assert b.done == [ev.Dial(THERE)]
    b.do(ev.FenceWanted(1))
    assert b.told() == [messages.AssembleFailed(0, 0, "a newer epoch was declared")]
    assert ev.StopDialling(THERE) in b.done


def test_an_assembly_without_a_base_is_refused() -> None:
    b = Bench(holder=None)
    b.say(messages.Assemble(0, 0, [Piece(THERE, 0, True, [(0,)], False)], 0))
    assert [type(m) for m in b.told()] == [messages.AssembleFailed]
    b.say(messages.Assemble(0, 0, [], 0))
    assert [type(m) for m in b.told()] == [messages.AssembleFailed]


def test_a_source_that_sends_another_copy_is_refused() -> None:
    b = Bench(holder=None)
    b.say(messages.Assemble(0, 0, [Piece(THERE, 0, True, [(0,)], True)], 0))
    b.do(ev.LinkUp(LINK, "b", THERE))
    assert b.on_link() == [wire.Fetch(1, 0, 0, 0, True, [(0,)], True)]
    b.hear(wire.FetchBegun(1, manifest(1), (0, OWN)))
    assert "after step 1" in b.told()[0].reason  # type: ignore[union-attr]


def test_an_assembly_survives_one_loss_of_its_link() -> None:
    b = Bench(holder=None)
    b.say(messages.Assemble(0, 0, [Piece(THERE, 0, True, [(0,)], True)], 0))
    b.do(ev.LinkUp(LINK, "b", THERE))
    b.do(ev.LinkDown(LINK, "cut"))
    assert b.done == [ev.Dial(THERE)]
    b.do(ev.LinkUp(LINK + 1, "b", THERE))
    assert [type(m) for m in b.on_link()] == [wire.Fetch]


def put_whole(b: Bench, link: int, step: int = 0) -> list[messages.FromReplicator]:
    """The holder at that link takes and seals everything; what the rank hears of it."""
    *_, stream = (
        action.message.stream
        for action in b.history
        if isinstance(action, ev.TellLink)
        and action.link == link
        and isinstance(action.message, wire.Put)
        and action.message.manifest.step == step
    )
    b.hear(wire.StreamReady(stream), link)
    for part in ((0, 0), (0, 1), (OWN, 0)):
        b.hear(wire.ChunkDone(stream, *part, wire.Verdict.TAKEN, "tcp", ""), link)
    b.hear(wire.PutSealed(stream), link)
    return b.told()


def two_holders() -> Bench:
    elsewhere = Address("c", 2)
    holder = Holder("b", THERE, [(0,)], more=[Holder("c", elsewhere, [(0,)])])
    b = Bench(link=False, holder=holder)
    assert b.done == [ev.Dial(THERE), ev.Dial(elsewhere)]
    b.do(ev.LinkUp(LINK, "b", THERE))
    b.do(ev.LinkUp(20, "c", elsewhere))
    return b


@pytest.mark.parametrize("order", [(LINK, 20), (20, LINK)])
def test_a_step_is_confirmed_once_every_holder_has_it(order: tuple[int, int]) -> None:
    b = two_holders()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    assert put_whole(b, order[0]) == []
    assert put_whole(b, order[1]) == [messages.Confirmed(0, 0)]
    b.say(messages.SnapshotSealed(manifest(0), 0))
    assert set(b.told()) == {messages.Confirmed(0, 0)}


@pytest.mark.parametrize("order", [(LINK, 20), (20, LINK)])
def test_one_holder_that_refuses_is_enough_for_a_step_to_be_unconfirmed(
    order: tuple[int, int],
) -> None:
    b = two_holders()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.hear(wire.StreamRefused(1, "no room"), order[0])
    refused = messages.Unconfirmed(0, 0, "the holder refused it: no room")
    assert b.told() == [refused]
    assert put_whole(b, order[1]) == []
    b.say(messages.SnapshotSealed(manifest(1), 1))
    assert put_whole(b, order[1], 1) == []
    assert put_whole(b, order[0], 1) == [messages.Confirmed(0, 1)]


def test_a_second_holder_that_comes_later_gets_what_is_there() -> None:
    b = Bench()
    b.say(messages.SnapshotSealed(manifest(0), 0))
    assert put_whole(b, LINK) == [messages.Confirmed(0, 0)]
    elsewhere = Address("c", 2)
    b.say(messages.SetHolder(0, Holder("b", THERE, [(0,)], more=[Holder("c", elsewhere, [(0,)])])))
    b.do(ev.LinkUp(20, "c", elsewhere))
    puts = [m for m in b.on_link() if isinstance(m, wire.Put)]
    assert [put.manifest.step for put in puts] == [0]
    b.say(messages.SetHolder(0, HOLDER))
    assert b.on_link() == [wire.StreamRefused(1, "the rank has another holder")]
    b.say(messages.SnapshotSealed(manifest(1), 1))
    assert put_whole(b, LINK, 1) == [messages.Confirmed(0, 1)]


def slot_of_put(b: Bench, step: int, epoch: int = 0) -> int:
    """Where a replica of rank 5 after that step goes; it is sealed there."""
    stream = len(b.history) + 1
    there = manifest(step, rank=5)
    b.hear(wire.Put(stream, epoch, manifest(step, rank=5, bare=True), (0, OWN), True))
    (prepare,) = [a for a in b.done if isinstance(a, ev.PrepareSlot)]
    b.do(ev.SlotPrepared(prepare.key, ""))
    for part, hash in (
        (ev.Part(0, 0), hashes(step, 2)[0]),
        (ev.Part(0, 1), hashes(step, 2)[1]),
        (ev.Part(OWN, 0), b"own"),
    ):
        nbytes = 3 if part.segment == OWN else CHUNK_NBYTES
        b.hear(wire.Chunk(stream, *part, nbytes, hash, "tcp", b""))
        b.do(ev.ChunkReceived(prepare.key, part, ev.Outcome.RIGHT, hash, "tcp", ""))
    b.hear(wire.PutEnd(stream, there))
    b.do(ev.SlotSealed(prepare.key, ""))
    assert b.on_link() == [wire.PutSealed(stream)]
    return prepare.slot.slot


def test_a_replica_overwrites_none_of_the_two_newest_before_it() -> None:
    b = Bench()
    assert [slot_of_put(b, step) for step in (0, 4, 8, 12, 16)] == [0, 1, 2, 0, 1]
    # All went back to step 13; those of 16 are of a past that does not count any more.
    assert [slot_of_put(b, step) for step in (13, 17)] == [1, 2]
    assert slot_of_put(b, 17) == 2


def test_what_is_newer_than_the_step_that_all_went_back_to_is_not_kept() -> None:
    b = Bench()
    assert [slot_of_put(b, step) for step in (12, 14, 15)] == [0, 2, 1]
    assert [slot_of_put(b, step, epoch=1) for step in (12, 16)] == [0, 1]


def test_a_replica_that_a_put_finds_is_known_from_then_on() -> None:
    h = Holding()
    h.do(ev.CopyRead(h.put_again(1), 2, manifest(0, rank=5), (0, OWN)))
    h.hear(wire.Put(2, 0, manifest(5, rank=5, bare=True), (OWN,), True))
    (prepare,) = [a for a in h.done if isinstance(a, ev.PrepareSlot)]
    assert prepare.slot.slot != 2


def test_a_new_replicator_knows_the_replicas_that_are_there() -> None:
    b = Bench()
    b.core = Core("a", {5: {0: 9, 1: 3, 2: 6}})
    b.do(ev.LinkUp(LINK, "b", None))
    assert slot_of_put(b, 12) == 1
    assert slot_of_put(b, 15) == 2


def test_the_own_part_goes_to_a_deputy_who_has_no_say() -> None:
    elsewhere = Address("c", 2)
    b = Bench(link=False, holder=Holder("b", THERE, [(0,)], elsewhere))
    assert b.done == [ev.Dial(THERE), ev.Dial(elsewhere)]
    b.do(ev.LinkUp(LINK, "b", THERE))
    b.do(ev.LinkUp(20, "c", elsewhere))
    b.say(messages.SnapshotBegun(manifest(0, bare=True), 0))
    puts = {a.link: a.message for a in b.done if isinstance(a, ev.TellLink)}
    assert puts[LINK] == wire.Put(1, 0, manifest(0, bare=True), (0, OWN), True)
    assert puts[20] == wire.Put(1, 0, manifest(0, bare=True), (OWN,), True)
    b.say(messages.SnapshotSealed(manifest(0), 0))
    b.hear(wire.StreamReady(1), link=20)
    assert [(a.key.link, a.part.segment) for a in b.done if isinstance(a, ev.SendChunk)] == [
        (20, OWN)
    ]
    b.hear(wire.ChunkDone(1, OWN, 0, wire.Verdict.TAKEN, "tcp", ""), link=20)
    b.hear(wire.PutSealed(1), link=20)
    assert b.told() == []
    b.do(ev.LinkDown(20, "gone"))
    assert b.told() == []
    b.hear(wire.StreamReady(1))
    for part in ((0, 0), (0, 1), (OWN, 0)):
        b.chunk_done(1, part)
    b.hear(wire.PutSealed(1))
    assert b.told() == [messages.Confirmed(0, 0)]
