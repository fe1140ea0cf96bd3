"""Nodes of the deterministic simulation: real cores, real ``client.Memory``, imaginary bytes.

Everything that can happen next stands at the head of one of many queues; ``Sim.turn`` picks a queue
by the seed's random numbers and lets its head happen. There is no clock. What a chunk of a slot
holds is a *token* that says which bytes they are; the hash of a token is the token itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_runtime.protocol import Address
from deadpool_runtime.replication import events as ev
from deadpool_runtime.replication import messages, wire
from deadpool_runtime.replication.client import Memory
from deadpool_runtime.replication.core import Core
from deadpool_runtime.replication.manifest import Manifest
from deadpool_runtime.replication.slotting import MOST_SLOTS, slot_file

Job = Callable[[], None]
#: How many ranks there are.
RANKS = 3
#: How fast links are, against everything else.
PACES = (1.0, 1.0, 0.3, 0.1, 0.02)


@dataclass
class Slot:
    """A slot file: tokens by offset, and the seal."""

    tokens: dict[int, bytes] = field(default_factory=dict)
    sealed: tuple[Manifest, tuple[int, ...]] | None = None


class Line:
    """A queue of what happens one after the other; what stands at its head can happen next."""

    def __init__(self, sim: Sim, pace: float = 1.0) -> None:
        self._sim = sim
        self._jobs: deque[Job] = deque()
        #: The chance that its head happens when its turn has come.
        self.pace = pace
        #: Its place among the simulation's lines that are not empty.
        self.place = -1

    def append(self, job: Job) -> None:
        self._jobs.append(job)
        if self.place < 0:
            self._sim.enlist(self)

    def happen(self) -> None:
        """Let the head happen."""
        job = self._jobs.popleft()
        if not self._jobs:
            self._sim.delist(self)
        job()

    def clear(self) -> None:
        self._jobs.clear()
        if self.place >= 0:
            self._sim.delist(self)

    def drain(self) -> None:
        """Let all of it happen."""
        while self._jobs:
            self.happen()


class End:
    """One end of a link."""

    def __init__(self, number: int, node: Node, pace: float) -> None:
        self.number = number
        self.node = node
        self.peer: End
        self.open = True
        self.messages = Line(node.sim, pace)
        self.sends = Line(node.sim, pace)
        self.receives = Line(node.sim, pace)

    def tell(self, message: wire.OnLink) -> None:
        """Queue a message for the other end."""
        peer = self.peer
        self.messages.append(lambda: peer.hear(message))

    def hear(self, message: wire.OnLink) -> None:
        if self.open:
            self.node.post(ev.Heard(self.number, message))

    def close(self, reason: str) -> None:
        """The link broke: messages are lost, jobs will report."""
        for end in (self, self.peer):
            if end.open:
                end.open = False
                end.messages.clear()
                end.sends.clear()
                end.node.post(ev.LinkDown(end.number, reason))


class Node:
    """An arena, and a replicator that may be killed and started anew."""

    def __init__(self, sim: Sim, name: str) -> None:
        self.sim = sim
        self.name = name
        self.slots: dict[str, Slot] = {}
        self.alive = True
        self.incarnation = 0
        self.fenced = -1
        self.clients: dict[int, Client] = {}
        self._boot()

    def _boot(self) -> None:
        self.core = Core(self.name, {rank: self.steps(True, rank) for rank in range(RANKS)})
        self.incarnation += 1
        self.address = Address(self.name, self.incarnation)
        self.events = Line(self.sim)
        self.links: dict[int, End] = {}
        self.dials: dict[Address, Line] = {}
        self.timers = Line(self.sim)
        self.tickets: dict[bytes, bytes] = {}
        self.fence_wanted = -1

    def restart(self) -> None:
        """The replicator is killed; a new one starts; the agent repeats the fence."""
        self.silence("the replicator was killed")
        self._boot()
        if self.sim.epoch > 0:
            self.want_fence(self.sim.epoch)
        for client in list(self.clients.values()):
            client.connect()

    def silence(self, reason: str) -> None:
        """Nothing more comes from this replicator."""
        for end in list(self.links.values()):
            end.close(reason)
            # What the dead process was about to do does not happen.
            end.receives.clear()
        self.events.clear()
        self.timers.clear()
        for line in self.dials.values():
            line.clear()
        for client in self.clients.values():
            client.to_core.clear()
            client.to_rank.clear()

    def die(self) -> None:
        """The node is lost with all that is on it."""
        self.silence("the node is lost")
        self.alive = False
        self.slots = {}
        self.clients = {}

    def want_fence(self, epoch: int) -> None:
        """The agent says ``Fence``."""
        self.fence_wanted = epoch
        self.post(ev.FenceWanted(epoch))

    def post(self, event: ev.Event) -> None:
        if self.alive:
            self.events.append(lambda: self.step(event))

    def slot(self, name: ev.SlotName) -> Slot:
        return self.slots.setdefault(name.file, Slot())

    def copies(self, replica: bool, rank: int) -> dict[int, tuple[Manifest, tuple[int, ...]]]:
        """What is sealed in each slot of the rank, or of its replica."""
        names = {number: slot_file(replica, rank, number) for number in range(MOST_SLOTS)}
        return {
            number: sealed
            for number, name in names.items()
            if name in self.slots and (sealed := self.slots[name].sealed) is not None
        }

    def steps(self, replica: bool, rank: int) -> dict[int, int]:
        """The step in each of those slots."""
        return {slot: sealed[0].step for slot, sealed in self.copies(replica, rank).items()}

    def step(self, event: ev.Event) -> None:
        """The core handles one event."""
        for action in self.core.step(event):
            self.perform(action)

    def perform(self, action: ev.Action) -> None:
        match action:
            case ev.TellRank(client=rank, message=said):
                if (client := self.clients.get(rank)) is not None:
                    client.to_rank.append(lambda: client.hear(said))
            case ev.Dial(address=address):
                line = self.dials.setdefault(address, Line(self.sim))
                line.append(lambda: self.try_dial(address))
            case ev.StopDialling(address=address):
                if address in self.dials:
                    self.dials.pop(address).clear()
            case ev.TellLink(link=number, message=message):
                if (end := self.links.get(number)) is not None and end.open:
                    end.tell(message)
            case ev.CloseLink(link=number, reason=reason):
                if (end := self.links.get(number)) is not None:
                    end.close(reason)
            case ev.SendChunk() | ev.ReadCopy():
                sending = self.links[action.key.link]
                if sending.open:
                    sending.sends.append(lambda: self.send(sending, action))
            case ev.ReceiveChunk() | ev.PrepareSlot() | ev.SealSlot():
                receiving = self.links[action.key.link]
                receiving.receives.append(lambda: self.receive(receiving, action))
            case ev.WipeCopy(slot=name):
                slot = self.slot(name)
                if slot.sealed is not None and slot.sealed[0].step == name.step:
                    slot.sealed = None
            case ev.WatchFence(epoch=epoch):
                self.timers.append(lambda: self.post(ev.FenceOverdue(epoch)))
            case ev.TellAgent(message=answer):
                self.fenced = max(self.fenced, answer.epoch)
            case ev.DropClient() | ev.DropCarrier():
                raise AssertionError(f"nothing here leads to {action}")

    def try_dial(self, address: Address) -> None:
        there = self.sim.nodes.get(address.host)
        if there is None or not there.alive or there.address != address:
            self.post(ev.DialFailed(address, "refused"))
            self.dials[address].append(lambda: self.try_dial(address))
            return
        self.dials.pop(address, None)
        pace = self.sim.random.choice(PACES)
        ours, theirs = (End(self.sim.number(), node, pace) for node in (self, there))
        ours.peer, theirs.peer = theirs, ours
        self.links[ours.number], there.links[theirs.number] = ours, theirs
        self.post(ev.LinkUp(ours.number, there.name, address))
        there.post(ev.LinkUp(theirs.number, self.name, None))

    def send(self, end: End, job: ev.SendChunk | ev.ReadCopy) -> None:
        if isinstance(job, ev.ReadCopy):
            found = [
                (number, *sealed)
                for number, sealed in self.copies(job.replica, job.rank).items()
                if sealed[0].step == job.step
            ]
            newest = max(found, key=lambda each: each[1].epoch, default=(0, None, ()))
            self.post(ev.CopyRead(job.key, *newest))
            return
        slot = self.slot(job.slot)
        token = slot.tokens.get(job.offset, b"nothing")
        if job.check and token != job.hash:
            self.post(ev.SourceDamaged(job.key, job.part))
            return
        self.sim.reached("sent", job.slot.rank)
        ticket = str(self.sim.number()).encode()
        end.peer.node.tickets[ticket] = self.sim.in_flight(token)
        end.tell(
            wire.Chunk(
                stream=job.key.stream,
                segment=job.part.segment,
                chunk=job.part.chunk,
                nbytes=job.nbytes,
                hash=job.hash,
                carrier="tcp",
                ticket=ticket,
            )
        )

    def receive(self, end: End, job: ev.ReceiveChunk | ev.PrepareSlot | ev.SealSlot) -> None:
        gone = "" if end.open else "the link ended"
        match job:
            case ev.PrepareSlot():
                if not gone:
                    self.slot(job.slot).sealed = None
                self.post(ev.SlotPrepared(job.key, gone))
            case ev.SealSlot():
                if not gone:
                    self.sim.reached("held", job.slot.rank)
                    self.slot(job.slot).sealed = (job.manifest, job.present)
                    self.sim.check_sealed(self, job.slot)
                self.post(ev.SlotSealed(job.key, gone))
            case ev.ReceiveChunk():
                token = self.tickets.pop(job.ticket, b"nothing")
                if gone:
                    outcome = ev.Outcome.LOST if job.slot is not None else ev.Outcome.DISCARDED
                elif job.slot is None:
                    outcome = ev.Outcome.DISCARDED
                else:
                    slot = self.slot(job.slot)
                    assert slot.sealed is None, "written under a seal"
                    slot.tokens[job.offset] = token
                    self.sim.reached("received", job.slot.rank)
                    outcome = ev.Outcome.RIGHT if token == job.hash else ev.Outcome.WRONG
                self.post(ev.ChunkReceived(job.key, job.part, outcome, token, "tcp", gone))


class Client:
    """A rank's connection, as ``client.ReplicatorClient`` keeps it."""

    def __init__(
        self, node: Node, rank: int, born: int, hear: Callable[[messages.FromReplicator], None]
    ) -> None:
        self.node = node
        self.hello = messages.RankHello(rank, born)
        self.memory = Memory()
        self.to_core = Line(node.sim)
        self.to_rank = Line(node.sim)
        self._hear = hear
        self.number = -1
        self.connect()

    def connect(self) -> None:
        """Connect to the node's replicator, again if it is another one."""
        self.node.clients.pop(self.number, None)
        self.number = self.node.sim.number()
        self.node.clients[self.number] = self
        self._put(self.hello)
        for message in self.memory.repeat():
            self._put(message)

    def disconnect(self) -> None:
        """The rank's process ended."""
        self.node.clients.pop(self.number, None)
        # What it said before is read first.
        self.to_core.drain()
        self.to_rank.clear()
        self.node.post(ev.ClientGone(self.number))

    def _put(self, message: messages.ToReplicator) -> None:
        number = self.number
        self.to_core.append(lambda: self.node.post(ev.RankSaid(number, message)))

    def send(self, message: messages.ToReplicator) -> None:
        self.memory.keep(message)
        self._put(message)

    def hear(self, message: messages.FromReplicator) -> None:
        self.memory.heard(message)
        self._hear(message)


class Sim:
    """The cluster of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes: dict[str, Node] = {}
        self.epoch = 0
        self._numbers = 0
        self._ready: list[Line] = []
        #: How many of the next chunks on their way get a flipped bit.
        self.flips = 0
        #: Looks at every slot that a replicator seals.
        self.check_sealed: Callable[[Node, ev.SlotName], None] = lambda node, name: None
        #: Told of each point of the pipeline that a copy of a rank comes to.
        self.reached: Callable[[str, int], None] = lambda point, rank: None
        #: Other queues: (can it happen, let it happen).
        self.others: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def node(self) -> Node:
        """A new node."""
        node = Node(self, f"n{self.number()}")
        self.nodes[node.name] = node
        return node

    def in_flight(self, token: bytes) -> bytes:
        if self.flips > 0 and self.random.random() < 0.5:
            self.flips -= 1
            return token + b"^"
        return token

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def enlist(self, line: Line) -> None:
        """The line is not empty any more."""
        line.place = len(self._ready)
        self._ready.append(line)

    def delist(self, line: Line) -> None:
        """The line is empty."""
        last = self._ready.pop()
        if last is not line:
            self._ready[line.place] = last
            last.place = line.place
        line.place = -1

    def turn(self) -> bool:
        """Let one thing happen; False if nothing can."""
        for _ in range(20):
            at = self.random.randrange(len(self._ready) + len(self.others))
            if at >= len(self._ready):
                can, happen = self.others[at - len(self._ready)]
                if can():
                    happen()
                    return True
            elif self.random.random() < self._ready[at].pace:
                self._ready[at].happen()
                return True
        if self._ready:
            self._ready[0].happen()
            return True
        for can, happen in self.others:
            if can():
                happen()
                return True
        return False
