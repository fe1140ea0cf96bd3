"""The launcher's end of the agents' connections: one server, one ``AgentLink`` a node.

Turns what arrives into controller events and notices agents that fall silent. It decides nothing
about them. What is sent to an agent, and what it sends, has numbers (``controller.mail``), so that
the next launcher can go on where this one ended.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deadpool_launch import channel
from deadpool_launch.controller import events
from deadpool_launch.controller.mail import Mailbox
from deadpool_launch.refusals import Refusals
from deadpool_launch.succession.lead import Lead
from deadpool_runtime import protocol
from deadpool_runtime.keepalive import set_dead_peer_limits

Clock = Callable[[], float]
#: Agents that may wait to be accepted; all of them come at once to a launcher that was started
#: again.
BACKLOG = 4096
_RETURN_POLL_S = 0.01
#: Connections beyond one for each node that may be without a proof of the secret at a time.
SPARE_GUESTS = 64


@dataclass
class AgentLink:
    """One connected agent."""

    node: str
    host: str
    stream: channel.MessageStream
    heard_at: float
    #: Number of the newest report that arrived.
    newest: int
    #: Processes of ranks that the agent had when it connected, as rank and birth.
    ranks: frozenset[tuple[int, int]] = frozenset()
    #: Number of its newest report that every copy of the log has too.
    safe: int = 0
    #: Set once the agent said that nothing of the job is left on its node.
    left: asyncio.Event = field(default_factory=asyncio.Event)
    leftovers: list[str] = field(default_factory=list)


class _NotWanted(protocol.ProtocolError):
    """The agent takes no part in the job."""


class AgentServer:
    """Accepts agents of known nodes that prove the job's secret.

    ``emit`` gets the events, each with the number of the report it came with, 0 for none. ``mail``
    has a box for every node whose agent belongs to the job; others are turned away. ``answer`` is
    asked what operators ask, who prove the secret too.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        spec: protocol.JobSpec,
        expected: set[str],
        heartbeat_timeout_s: float,
        emit: Callable[[events.Event, int], None],
        note: Callable[[str], None],
        mail: Mapping[str, Mailbox],
        answer: Callable[[protocol.Question], Awaitable[protocol.Answer]],
        term: int = 1,
        clock: Clock = time.monotonic,
        lead: Lead | None = None,
        on_admitted: Callable[[str], None] = lambda node: None,
    ) -> None:
        self._secret = secret
        self._spec = spec
        self._expected = expected
        self._timeout_s = heartbeat_timeout_s
        self._emit = emit
        self._note = note
        self._mail = mail
        self._answer = answer
        self._term = term
        self._clock = clock
        self._refusals = Refusals()
        self._guests = channel.Guests(secret, len(expected) + SPARE_GUESTS)
        self._lead = lead
        self._on_admitted = on_admitted
        #: When this process was last known not to stand still.
        self.awake_at = clock()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self.links: dict[str, AgentLink] = {}

    async def listen(self, sock: socket.socket) -> None:
        """Start to listen on a bound socket; a second call changes nothing."""
        if self._server is not None:
            return
        self._server = await asyncio.start_server(self._serve, sock=sock, backlog=BACKLOG)
        self._watch = asyncio.create_task(self._watch_heartbeats())

    async def returned(self, nodes: Iterable[str], within_s: float) -> set[str]:
        """Wait until the agents of these nodes are connected; returns those that do not come."""
        missing = set(nodes) - set(self.links)
        deadline = self._clock() + within_s
        while missing and self._clock() < deadline:
            await asyncio.sleep(_RETURN_POLL_S)
            missing -= set(self.links)
        return missing

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self.links.values()):
            link.stream.close()

    def send(self, node: str, number: int, message: protocol.ToAgent) -> None:
        """Send an order to the agent of ``node``. One that is not connected gets it if it comes
        back to the next launcher; for this one it is lost.
        """
        link = self.links.get(node)
        if link is not None:
            link.stream.send(protocol.Order(self._term, number, message, self._index))

    def tell(self, node: str, message: protocol.Message) -> None:
        """Send a message that need not arrive."""
        link = self.links.get(node)
        if link is not None:
            link.stream.send(message)

    @property
    def _index(self) -> int:
        return 0 if self._lead is None else self._lead.index

    def drop(self, node: str) -> None:
        """Cut the connection to this node's agent, without an event."""
        link = self.links.pop(node, None)
        if link is not None:
            link.stream.abort()
            self._link_ended()

    def _link_ended(self) -> None:
        if self._lead is not None:
            self._lead.link_ended()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # One that is gone already has no name any more.
        peer = (writer.get_extra_info("peername") or ("a stranger",))[0]
        stream = channel.MessageStream(reader, writer, protocol.ToLauncher)
        try:
            await self._guests.prove(reader, writer)
            first = await stream.receive()
            if first and isinstance(first[0], protocol.Request):
                await self._reply(first[0], stream)
                return
            link = self._admit(first, stream)
            set_dead_peer_limits(writer.get_extra_info("socket"), self._timeout_s * 2)
        except _NotWanted as error:
            # An agent that was given up and lives learns it here; that it comes is no news.
            stream.send(protocol.Refused(str(error)))
            writer.close()
            return
        except protocol.ProtocolError as error:
            if (text := self._refusals.text(peer, str(error))) is not None:
                self._note(text)
            # Nothing that is unsent is waited for: a stranger may never read it.
            stream.abort()
            return
        self._emit(events.AgentConnected(self._clock(), link.node, link.host), 0)
        evidence = "agent connection closed"
        try:
            messages = first[1:]
            while True:
                link.heard_at = self._clock()
                for message in messages:
                    self._heard(link, message)
                if self.links.get(link.node) is not link:
                    break
                messages = await stream.receive()
                if not messages:
                    break
        except protocol.ProtocolError as error:
            evidence = f"agent sent {error}"
        if self.links.get(link.node) is link:
            del self.links[link.node]
            stream.abort()
            self._link_ended()
            if not link.left.is_set():
                self._emit(events.AgentLost(self._clock(), link.node, evidence, "seen"), 0)
        link.left.set()

    async def _reply(self, request: protocol.Request, stream: channel.MessageStream) -> None:
        """An operator's question: one answer, and the connection has served."""
        if request.protocol == protocol.PROTOCOL_VERSION:
            answer = await self._answer(request.body)
        else:
            answer = protocol.Denied(
                f"the job runs another version of DEADPOOL (protocol {protocol.PROTOCOL_VERSION}, "
                f"asked in {request.protocol}): use the command of the job's own environment"
            )
        stream.send(protocol.Reply(answer))
        await stream.drain()
        stream.close()

    def _admit(self, first: list[protocol.Message], stream: channel.MessageStream) -> AgentLink:
        if not first or not isinstance(first[0], protocol.AgentHello):
            raise protocol.ProtocolError("the first message is not an agent's hello")
        hello = first[0]
        if hello.protocol != protocol.PROTOCOL_VERSION:
            raise protocol.ProtocolError(
                f"{hello.node} speaks protocol {hello.protocol} (deadpool {hello.version}), "
                f"this launcher {protocol.PROTOCOL_VERSION}: install one version on all nodes"
            )
        if hello.node not in self._expected:
            raise protocol.ProtocolError(f"no agent is expected on {hello.node}")
        box = self._mail.get(hello.node)
        if box is None or box.born != hello.born:
            raise _NotWanted(f"{hello.node} was given up")
        if hello.node in self.links:
            raise protocol.ProtocolError(f"{hello.node} has an agent already")
        if hello.term > self._term:
            raise protocol.ProtocolError(
                f"{hello.node} obeys a launcher of term {hello.term}, this is term {self._term}"
            )
        if hello.heard > box.sent:
            # Of a launcher whose log nobody has; what its ranks are doing is not known.
            raise _NotWanted(f"{hello.node} was told what is in no log")
        ranks = frozenset(hello.ranks)
        link = AgentLink(hello.node, hello.host, stream, self._clock(), box.heard, ranks, box.heard)
        self.links[hello.node] = link
        stream.send(protocol.Welcome(self._term, box.heard, None if hello.term else self._spec))
        box.received(hello.heard)
        for number, body in box.unheard:
            stream.send(protocol.Order(self._term, number, body, self._index))
        self._on_admitted(hello.node)
        return link

    def _heard(self, link: AgentLink, message: protocol.Message) -> None:
        match message:
            case protocol.Heartbeat(heard=heard):
                box = self._mail.get(link.node)
                if box is not None:
                    box.received(heard)
                    if self._lead is None or self._lead.safe:
                        link.safe = box.heard
                    link.stream.send(protocol.Heard(link.safe, self._index))
            case protocol.Pong(number=number) if self._lead is not None:
                self._lead.answered(link.node, number)
            case protocol.LogKept(index=index, address=address) if self._lead is not None:
                self._lead.kept(link.node, index, address)
            case protocol.Report(number=number, body=body):
                if number > link.newest:
                    link.newest = number
                    self._reported(link, number, body)
            case _:
                raise protocol.ProtocolError("a second hello")

    def _reported(self, link: AgentLink, number: int, message: protocol.FromAgent) -> None:
        now, node = self._clock(), link.node
        for rank in _ranks_of(message):
            if not 0 <= rank < self._spec.world_size:
                raise protocol.ProtocolError(f"word of rank {rank}, which the job does not have")
        event: events.Event
        match message:
            case protocol.AgentReady(replicator=at, memory_nbytes=nbytes, memory_limit=limit):
                event = events.AgentWarm(now, node, at, nbytes, limit)
            case protocol.ReplicatorUp(replicator=at, reason=reason):
                event = events.ReplicatorUp(now, node, at, reason)
            case protocol.Inventory(epoch=epoch, copies=copies):
                event = events.InventoryTaken(now, node, epoch, tuple(copies))
            case protocol.AgentFailed(reason=reason):
                event = events.AgentStartFailed(now, node, reason)
            case protocol.RankSaid(rank=rank, born=born, body=body):
                event = events.RankSaid(now, node, rank, born, body)
            case protocol.RankExited(rank=rank, born=born, exit_code=code, signal=signum):
                event = events.RankExited(now, node, rank, born, code, signum)
            case protocol.Standings(standings=standings, moved=moved, asked=asked):
                event = events.StandingsTold(now, node, tuple(standings), tuple(moved), asked)
            case protocol.Paces(paces=paces):
                event = events.PacesTold(now, node, tuple(paces))
            case protocol.DeviceLines(lines=lines):
                event = events.DeviceLines(now, node, tuple(lines))
            case protocol.StackNotTaken(rank=rank, born=born, reason=reason):
                event = events.StackNotTaken(now, node, rank, born, reason)
            case protocol.PathsTried(number=asked, unreached=unreached):
                event = events.PathsTried(now, node, asked, tuple(unreached))
            case protocol.RankStopped(rank=rank, born=born, for_s=for_s):
                event = events.RankStopped(now, node, rank, born, for_s)
            case protocol.StepsUntold(count=count):
                self._note(f"{node} had no room for {count} reports of completed steps")
                return
            case protocol.AgentLeaving(leftovers=leftovers):
                link.leftovers = leftovers
                link.left.set()
                return
        self._emit(event, number)

    async def _watch_heartbeats(self) -> None:
        """Report agents that were not heard for the time-out. The kernel's own time-outs are far
        longer.
        """
        interval_s = min(0.1, self._timeout_s / 10)
        slept_at = self._clock()
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            # If this process itself was held up, the silence says nothing about the agents: give
            # them that time.
            held_up_s = now - slept_at - interval_s
            slept_at = self.awake_at = now
            for link in list(self.links.values()):
                if held_up_s > self._timeout_s / 4:
                    link.heard_at += held_up_s
                silent_s = now - link.heard_at
                if silent_s > self._timeout_s and not link.left.is_set():
                    del self.links[link.node]
                    link.stream.abort()
                    self._link_ended()
                    evidence = f"no heartbeat for {silent_s:.1f} s"
                    self._emit(events.AgentLost(now, link.node, evidence, "inferred"), 0)


def _ranks_of(message: protocol.FromAgent) -> list[int]:
    """The ranks that a report is about."""
    match message:
        case (
            protocol.RankSaid(rank=rank)
            | protocol.RankExited(rank=rank)
            | protocol.RankStopped(rank=rank)
            | protocol.StackNotTaken(rank=rank)
        ):
            return [rank]
        case protocol.Standings(standings=standings, moved=moved):
            return [*(standing.rank for standing in standings), *(rank for rank, _ in moved)]
        case protocol.Paces(paces=paces):
            return [pace.rank for pace in paces]
        case _:
            return []
