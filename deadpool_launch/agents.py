"""The launcher's end of the agents' connections: one server, one ``AgentLink`` a node.

Turns what arrives into controller events and notices agents that fall silent. It decides nothing
about them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_launch import channel
from deadpool_launch.controller import events
from deadpool_runtime import protocol

Clock = Callable[[], float]


@dataclass
class AgentLink:
    """One connected agent."""

    node: str
    host: str
    stream: channel.MessageStream
    heard_at: float
    #: Set once the agent said that nothing of the job is left on its node.
    left: asyncio.Event = field(default_factory=asyncio.Event)
    leftovers: list[str] = field(default_factory=list)


class AgentServer:
    """Accepts agents of known nodes that prove the job's secret; ``emit`` gets the events.

    ``store_own(rank, step, data)`` receives the part of a step that only its rank holds, so that
    events stay small.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        spec: protocol.JobSpec,
        expected: set[str],
        heartbeat_timeout_s: float,
        emit: Callable[[events.Event], None],
        store_own: Callable[[int, int, bytes], None],
        note: Callable[[str], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._secret = secret
        self._spec = spec
        self._expected = expected
        self._timeout_s = heartbeat_timeout_s
        self._emit = emit
        self._store_own = store_own
        self._note = note
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self.links: dict[str, AgentLink] = {}

    async def listen(self, host: str) -> int:
        """Start to listen on a port of the system's choice; returns it."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self._watch = asyncio.create_task(self._watch_heartbeats())
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self.links.values()):
            link.stream.close()

    def send(self, node: str, message: protocol.Message) -> None:
        """Send to the agent of ``node``; dropped when it is not connected (its loss is reported
        anyway).
        """
        link = self.links.get(node)
        if link is not None:
            link.stream.send(message)

    def drop(self, node: str) -> None:
        """Cut the connection to this node's agent, without an event."""
        link = self.links.pop(node, None)
        if link is not None:
            link.stream.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        try:
            await channel.accept_handshake(reader, writer, self._secret)
            stream = channel.MessageStream(reader, writer, protocol.FromAgent)
            first = await stream.receive()
            link = self._admit(first, stream)
            channel.set_dead_peer_limits(writer.get_extra_info("socket"), self._timeout_s * 2)
        except protocol.ProtocolError as error:
            self._note(f"connection from {peer} refused: {error}")
            writer.close()
            return
        self._emit(events.AgentConnected(self._clock(), link.node, link.host))
        evidence = "agent connection closed"
        try:
            messages = first[1:]
            while True:
                link.heard_at = self._clock()
                for message in messages:
                    self._heard(link, message)
                messages = await stream.receive()
                if not messages:
                    break
        except protocol.ProtocolError as error:
            evidence = f"agent sent {error}"
        if self.links.get(link.node) is link:
            del self.links[link.node]
            stream.abort()
            if not link.left.is_set():
                self._emit(events.AgentLost(self._clock(), link.node, evidence, "seen"))
        link.left.set()

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
        if hello.node in self.links:
            raise protocol.ProtocolError(f"{hello.node} has an agent already")
        link = AgentLink(hello.node, hello.host, stream, self._clock())
        self.links[hello.node] = link
        stream.send(self._spec)
        return link

    def _heard(self, link: AgentLink, message: protocol.FromAgent) -> None:
        now = self._clock()
        match message:
            case protocol.Heartbeat() | protocol.AgentHello():
                pass
            case protocol.AgentReady():
                self._emit(events.AgentWarm(now, link.node))
            case protocol.AgentFailed(reason=reason):
                self._emit(events.AgentStartFailed(now, link.node, reason))
            case protocol.AgentLeaving(leftovers=leftovers):
                link.leftovers = leftovers
                link.left.set()
            case protocol.RankSaid(rank=rank, born=born, body=body):
                if isinstance(body, protocol.StepDone):
                    self._store_own(rank, body.step, body.own)
                    body = protocol.StepDone(
                        body.epoch,
                        body.step,
                        b"",
                        body.digest,
                        body.duration_s,
                        body.blocked_s,
                        body.loss,
                    )
                self._emit(events.RankSaid(now, link.node, rank, born, body))
            case protocol.RankExited(rank=rank, born=born, exit_code=code, signal=signum):
                self._emit(events.RankExited(now, link.node, rank, born, code, signum))
            case protocol.RankStopped(rank=rank, born=born, for_s=for_s):
                self._emit(events.RankStopped(now, link.node, rank, born, for_s))

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
            slept_at = now
            for link in list(self.links.values()):
                if held_up_s > self._timeout_s / 4:
                    link.heard_at += held_up_s
                silent_s = now - link.heard_at
                if silent_s > self._timeout_s and not link.left.is_set():
                    del self.links[link.node]
                    link.stream.abort()
                    evidence = f"no heartbeat for {silent_s:.1f} s"
                    self._emit(events.AgentLost(now, link.node, evidence, "inferred"))
