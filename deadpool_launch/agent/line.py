"""The agent's end of its connection to the launcher, which may break and be made again.

The launcher may end and be started again while the ranks train on: at the same address, or on
another node, where one that keeps its log is asked then (``keeper.py``). What the agent has to say
in the meantime is kept in order and goes to the next launcher; what it was told is obeyed once,
whichever launcher says it. Which messages these are, and what becomes of a node without a launcher,
is decided elsewhere; which launcher is obeyed, by ``succession.rules.Allegiance``.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from deadpool_launch.channel import BrokenOff, MessageStream, connect_handshake
from deadpool_launch.succession.rules import Allegiance
from deadpool_runtime import protocol
from deadpool_runtime.keepalive import set_dead_peer_limits

#: How long an agent tries to reach its launcher at first.
CONNECT_S = 30.0
#: A launcher that takes nothing for this long is gone, or this node is cut off from it. Generous:
#: it may be held up, and a node that is cut off takes no part in any later epoch anyway.
LAUNCHER_SILENT_S = 120.0
#: Pauses between tries to reach a launcher again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
#: Where there are others to ask: time for one to answer at all, for a keeper of the log to be asked
#: by enough agents, and for the launcher that it starts to come up.
_TRY_S, _GATHER_S, _START_S = 2.0, 5.0, 60.0
#: After a silence, time for what came in the meantime, if it was this process that stood still.
_LOOK_AGAIN_S = 0.1
#: Room for reports that no launcher has yet. A minute of steps of a node takes a hundredth of it.
MOST_KEPT_NBYTES = 64 << 20


class LauncherGone(Exception):
    """There is no launcher to obey any more; the text says why."""


class _Moved(Exception):
    """The launcher is at another address."""


@dataclass(slots=True)
class _KeptReport:
    number: int
    body: protocol.FromAgent
    nbytes: int


class Reports:
    """What an agent has said and no launcher is known to have in its log, in order."""

    def __init__(self, most_nbytes: int = MOST_KEPT_NBYTES) -> None:
        self._most_nbytes = most_nbytes
        self._kept: deque[_KeptReport] = deque()
        self._nbytes = 0
        self._number = 0
        self._untold = 0

    def add(self, body: protocol.FromAgent) -> protocol.Report:
        """Number a message and keep it.

        Where there is no more room, reports of completed steps make room for later ones of the same
        rank, which say all that is decided upon; how many is told to the launcher. Raises
        ``LauncherGone`` if that is not enough.
        """
        self._number += 1
        report = protocol.Report(self._number, body)
        nbytes = len(protocol.frame(report))
        self._kept.append(_KeptReport(self._number, body, nbytes))
        self._nbytes += nbytes
        if self._nbytes > self._most_nbytes:
            self._thin()
        return report

    def heard(self, number: int) -> None:
        """A launcher has all reports up to this one in its log."""
        while self._kept and self._kept[0].number <= number:
            self._nbytes -= self._kept.popleft().nbytes

    def again(self) -> list[protocol.Report]:
        """All that are kept, to be sent to a launcher that does not have them."""
        if self._untold:
            count, self._untold = self._untold, 0
            self.add(protocol.StepsUntold(count))
        return [protocol.Report(kept.number, kept.body) for kept in self._kept]

    def _thin(self) -> None:
        seen: set[tuple[int, int, int]] = set()
        left: deque[_KeptReport] = deque()
        for kept in reversed(self._kept):
            match kept.body:
                case protocol.RankSaid(rank=rank, born=born, body=protocol.StepDone(epoch=epoch)):
                    if (rank, born, epoch) in seen:
                        self._nbytes -= kept.nbytes
                        self._untold += 1
                        continue
                    seen.add((rank, born, epoch))
                case _:
                    pass
            left.appendleft(kept)
        self._kept = left
        if self._nbytes > self._most_nbytes:
            raise LauncherGone(f"more than {self._most_nbytes} bytes are to be told to no launcher")


class LauncherLine:
    """Messages to and from the launcher, through one connection after the other.

    ``hello``: the first message on a connection, from the address of this end of it, the number of
    the newest order, and what was obeyed so far. ``on_broken(reason)``: the connection broke, and
    is tried to be made again. ``on_gone(reason)``: it will not be. ``on_part``: a part of the
    launcher's log came, and is kept, with the launcher's term.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        hello: Callable[[str, int, Allegiance], protocol.AgentHello],
        on_broken: Callable[[str], None],
        on_gone: Callable[[str], None],
        on_part: Callable[[protocol.LogPart, int], protocol.LogKept],
    ) -> None:
        self._address = address
        self._on_part = on_part
        self._others: list[tuple[str, int]] = []
        self._moved = False
        self._silent_s = LAUNCHER_SILENT_S
        self._allegiance = Allegiance()
        #: Term of the launcher at the other end.
        self._term = 0
        self._word_at = time.monotonic()
        self._secret = secret
        self._hello = hello
        self._on_broken = on_broken
        self._on_gone = on_gone
        self._stream: MessageStream | None = None
        self._reports = Reports()
        self._heard = 0
        self._beats = 0
        self.host = ""

    async def connect(self) -> protocol.JobSpec:
        """Reach the launcher for the first time. Raises ``LauncherGone``, or ``ProtocolError`` if
        it is not the job's.
        """
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                reader, writer = await asyncio.open_connection(*self._address)
                spec = await self._greet(reader, writer, CONNECT_S)
                break
            except (OSError, BrokenOff, _Moved) as error:
                if time.monotonic() > deadline:
                    host, port = self._address
                    raise LauncherGone(
                        f"cannot reach the launcher at {host}:{port}: {error}"
                    ) from error
                await asyncio.sleep(0.2)
        if spec is None:
            raise protocol.ProtocolError("the launcher's welcome has no job")
        return spec

    def send(self, message: protocol.FromAgent) -> None:
        """Tell the launcher, or the next one if there is none at the moment."""
        try:
            report = self._reports.add(message)
        except LauncherGone as error:
            self._on_gone(str(error))
            return
        if self._stream is not None:
            self._stream.send(report)

    def beat(self) -> None:
        """Say that the agent runs; nothing if there is no launcher to say it to."""
        if self._stream is not None:
            self._stream.send(protocol.Heartbeat(self._beats, self._heard))
            self._beats += 1

    async def orders(self, grace_s: float) -> list[protocol.ToAgent]:
        """The next orders, at least one. A connection that breaks is made again within ``grace_s``;
        raises ``LauncherGone`` if it cannot be.
        """
        while True:
            stream = self._stream
            assert stream is not None, "connect comes first"
            messages = await self._next(stream)
            if not messages:
                await self._reconnect(grace_s)
                continue
            if orders := self._take(messages):
                return orders

    def lost_for_s(self) -> float | None:
        """How long there has been no word from a launcher; None while there is one."""
        return None if self._stream is not None else time.monotonic() - self._word_at

    async def _next(self, stream: MessageStream) -> list[protocol.Message]:
        """The next messages; none if the launcher is gone, or silent where another can be asked."""
        if not self._others:
            messages = await stream.receive()
        else:
            messages = await _within(self._silent_s, stream.receive())
            messages = messages or await _within(_LOOK_AGAIN_S, stream.receive())
            if not messages:
                stream.abort()
        if messages:
            self._word_at = time.monotonic()
        return messages

    async def hang_up(self) -> None:
        """Give what was sent a moment to arrive, then close the connection."""
        if self._stream is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._stream.drain()
        self._stream.close()

    def _take(self, messages: list[protocol.Message]) -> list[protocol.ToAgent]:
        orders = []
        for message in messages:
            match message:
                case protocol.Order(term=term, number=number, body=body, index=index):
                    if not self._allegiance.obeys(term):
                        raise protocol.ProtocolError(
                            f"an order of term {term} after one of term {self._allegiance.term}"
                        )
                    self._allegiance.saw((term, index))
                    if number > self._heard:
                        self._heard = number
                        orders.append(body)
                case protocol.Heard(number=number, index=index):
                    self._allegiance.saw((self._term, index))
                    self._reports.heard(number)
                case protocol.Ping(number=number, index=index):
                    self._allegiance.saw((self._term, index))
                    self._answer(protocol.Pong(number))
                case protocol.LogPart():
                    self._answer(self._on_part(message, self._term))
                case protocol.Successors(addresses=addresses, silent_s=silent_s):
                    self._others = [(one.host, one.port) for one in addresses]
                    self._silent_s = silent_s
                case _:
                    raise protocol.ProtocolError("a second answer to the hello")
        return orders

    def _answer(self, message: protocol.Message) -> None:
        if self._stream is not None:
            self._stream.send(message)

    async def _reconnect(self, grace_s: float) -> None:
        self._stream = None
        self._on_broken(f"training goes on; a launcher is waited for {grace_s:g} s")
        began_at, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while (left_s := began_at + grace_s - time.monotonic()) > 0:
            for address in self._whom_to_ask():
                try:
                    await self._try(address, left_s)
                    return
                except ConnectionRefusedError as error:
                    if not self._others:
                        # Whoever starts launchers again keeps the port; nobody does.
                        raise LauncherGone("the launcher is gone, and none is to follow") from error
                except _Moved:
                    # The launcher's address comes first in the next round.
                    pause_s = 0.0
                    break
                except (OSError, protocol.ProtocolError):
                    pass
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * max(pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        raise LauncherGone(f"the launcher is gone, and none followed within {grace_s:g} s")

    def _whom_to_ask(self) -> list[tuple[str, int]]:
        """The launcher alone at first, which may be started again; then those that keep its log."""
        if not self._others or (self.lost_for_s() or 0.0) < self._silent_s:
            return [self._address]
        others = [address for address in self._others if address != self._address]
        return [self._address, *others] if self._moved else [*others, self._address]

    async def _try(self, address: tuple[str, int], left_s: float) -> None:
        """Reach a launcher at this address, or one that keeps the launcher's log."""
        within_s = min(left_s, _TRY_S) if self._others else left_s
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection(*address)
            await self._greet(reader, writer, within_s)
        except _Moved as moved:
            self._address, self._moved = moved.args[0], True
            raise
        except (OSError, protocol.ProtocolError):
            self._moved = self._moved and address != self._address
            raise

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, within_s: float
    ) -> protocol.JobSpec | None:
        """Handshake, hello and welcome, then all that no launcher has yet."""
        stream = MessageStream(reader, writer, protocol.FromLauncher)
        try:
            await connect_handshake(reader, writer, self._secret, within_s)
            self.host = writer.get_extra_info("sockname")[0]
            stream.send(self._hello(self.host, self._heard, self._allegiance))
            within_s = max(within_s, _GATHER_S) if self._others else within_s
            while True:
                messages = await _within(within_s, stream.receive())
                match messages[:1]:
                    case [protocol.Claim(term=term, mark=mark)]:
                        if not self._allegiance.grants(term, mark):
                            raise BrokenOff(f"term {term} is not granted")
                        stream.send(protocol.Granted(term))
                        within_s = _START_S
                    case _:
                        break
            match messages[:1]:
                case [protocol.Refused(reason=reason)]:
                    raise LauncherGone(reason)
                case [protocol.LauncherAt(address=at)]:
                    raise _Moved((at.host, at.port))
                case [protocol.Welcome(term=term, heard=heard, spec=spec)]:
                    if not self._allegiance.obeys(term):
                        raise protocol.ProtocolError(
                            f"a launcher of term {term} after one of term {self._allegiance.term}"
                        )
                case _:
                    raise BrokenOff("the launcher did not answer the hello")
        except BaseException:
            stream.close()
            raise
        set_dead_peer_limits(writer.get_extra_info("socket"), LAUNCHER_SILENT_S)
        self._term, self._stream = term, stream
        self._word_at = time.monotonic()
        self._reports.heard(heard)
        for report in self._reports.again():
            stream.send(report)
        stream.put_back(messages[1:])
        return spec


async def _within(timeout_s: float, receiving: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """What is received; nothing if the time-out comes first."""
    try:
        async with asyncio.timeout(timeout_s):
            return await receiving
    except TimeoutError:
        return []
