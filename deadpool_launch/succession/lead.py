"""The launcher's part in its own succession: copies of its log on other nodes, and the question
whether it still leads. What follows from the answers is in ``rules.py``.

Nothing waits for a copy but what an event leads to: orders go out once every copy has the event, so
that whoever takes over knows of all that was ordered. That is one message there and back; a step of
training leads to nothing and waits for nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence

from deadpool_launch.succession import rules
from deadpool_runtime import protocol

#: How often a question is put again that is not answered.
_ASK_AGAIN_S = 0.5


class Superseded(Exception):
    """Another launcher leads the job; the text says on which node."""


class CutOff(Exception):
    """More than half of the nodes cannot be reached any more."""


class Lead:
    """``wanted``: how many nodes keep a copy. ``host``: the launcher's own node. ``nodes``: all of
    the job, always in the same order. ``send(node, message)``: tell a connected agent.
    ``linked()``: the nodes whose agents are connected. ``followed_by()``: the node of a launcher
    that took over, if that can be seen.
    """

    def __init__(
        self,
        *,
        wanted: int,
        host: str | None,
        nodes: Sequence[str],
        send: Callable[[str, protocol.Message], None],
        linked: Callable[[], Collection[str]],
        followed_by: Callable[[], str],
        heartbeat_timeout_s: float,
        give_up_s: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = wanted
        self._host = host
        self._slots = {node: slot for slot, node in enumerate(nodes)}
        self._send = send
        self._linked = linked
        self._followed_by = followed_by
        #: Silence after which an agent looks for another launcher: longer than one that is held up
        #: for a moment, or started again on its host, takes.
        self._take_over_s = 2 * heartbeat_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._give_up_s = give_up_s
        self._note = note
        self._clock = clock
        self._asked_at = -math.inf
        self._leadership = rules.Leadership()
        #: Parts of the log so far.
        self.index = 0
        self._unsent: list[bytes] = []
        self._fresh = False
        self._keepers: tuple[str, ...] = ()
        #: Keepers that have a beginning: the number of the newest part that each is known to have,
        #: negative for one that is not waited for.
        self._acked: dict[str, int] = {}
        self._addresses: dict[str, protocol.Address] = {}
        self._voters_sent: frozenset[str] = frozenset()
        self._fit: frozenset[str] = frozenset()
        self._told: tuple[protocol.Address, ...] = ()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ copies

    def record(self, data: bytes, fresh: bool) -> None:
        """A part of the log; ``fresh``: it takes the place of everything before."""
        if not self._wanted:
            return
        self.index += 1
        if fresh:
            self._unsent.clear()
            self._fresh = True
        self._unsent.append(data)
        if len(self._unsent) == 1:
            # What is recorded in one go goes out in one message.
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if not self._unsent:
            return
        data, fresh = b"".join(self._unsent), self._fresh
        self._unsent.clear()
        self._fresh = False
        voters, before = self._leadership.voters, self._voters_sent
        self._voters_sent = voters
        host = self._host or ""
        told = sorted(voters) if fresh or voters != before else None
        for node in self._keepers:
            if fresh:
                self._acked.setdefault(node, -1)
            if node in self._acked:
                self._send(
                    node, protocol.LogPart(self.index, fresh, data, self._slots[node], told, host)
                )

    def settle(self, fit: Sequence[str]) -> bool:
        """Have the log kept on some of these nodes; whether a beginning is to be recorded, for one
        that has none.
        """
        if not self._wanted:
            return False
        self._fit = frozenset(fit)
        if not rules.can_be_followed(self._leadership.voters, self._host):
            self._leadership.voters = self._fit
        possible = rules.can_be_followed(fit, self._host)
        there = [node for node in fit if node in self._linked()]
        chosen = rules.choose_keepers(self._keepers, there, self._host, self._wanted)
        chosen = chosen if possible else ()
        if chosen == self._keepers:
            return False
        before, self._keepers = self._keepers, chosen
        for node in set(before) - set(chosen):
            self._acked.pop(node, None)
            self._addresses.pop(node, None)
        self._tell_addresses()
        self._changed.set()
        if chosen and not before:
            self._note(f"standby launchers: {', '.join(chosen)}")
        elif before and not chosen:
            self._note("no standby launcher any more: too few nodes are left to agree on one")
        return bool(set(chosen) - set(before))

    def came(self, node: str) -> bool:
        """An agent connected; whether a beginning is to be recorded, as it keeps the log."""
        if self._told:
            self._send(node, protocol.Successors(list(self._told), self._take_over_s))
        self._acked.pop(node, None)
        return node in self._keepers

    def kept(self, node: str, index: int, address: protocol.Address) -> None:
        """A keeper has the parts up to this one, and can be reached at this address."""
        if node in self._acked:
            self._acked[node] = max(self._acked[node], index)
            self._changed.set()
            if self._addresses.get(node) != address:
                self._addresses[node] = address
                self._tell_addresses()

    @property
    def safe(self) -> bool:
        """Whether every keeper that is connected and waited for has everything."""
        linked = self._linked()
        return all(
            acked < 0 or acked >= self.index or node not in linked
            for node, acked in self._acked.items()
        )

    async def copied(self) -> None:
        """Wait until it is ``safe``. A keeper that takes longer than a lost node takes to be
        noticed is not waited for until it has caught up.
        """
        self._flush()
        wait_until = time.monotonic() + self._heartbeat_timeout_s
        while not self.safe:
            if time.monotonic() > wait_until:
                for node, acked in self._acked.items():
                    self._acked[node] = acked if acked >= self.index else -1
            await self._change(_ASK_AGAIN_S)

    def _tell_addresses(self) -> None:
        there = tuple(self._addresses[node] for node in self._keepers if node in self._addresses)
        if there != self._told:
            self._told = there
            for node in self._linked():
                self._send(node, protocol.Successors(list(there), self._take_over_s))

    # ------------------------------------------------------------ leadership

    def answered(self, node: str, number: int) -> None:
        """An agent answered a question."""
        self._leadership.answered(node, number)
        self._changed.set()

    async def count_anew(self) -> None:
        """Let the agents that serve be the voters; raises what ``confirmed`` does."""
        if self._wanted and self._fit != self._leadership.voters:
            await self.confirmed(self._clock())

    def link_ended(self) -> None:
        """An agent is not connected any more: nothing waits for it."""
        self._changed.set()

    async def confirmed(self, since: float) -> None:
        """Wait until enough agents have said that this launcher leads, asked not before ``since``.
        Raises ``Superseded`` or ``CutOff``.
        """
        if self._asked_at >= since or not self._wanted:
            return
        if not rules.can_be_followed(self._leadership.voters, self._host):
            return
        give_up_at = time.monotonic() + self._give_up_s
        while True:
            linked, asked_at = list(self._linked()), self._clock()
            number = self._leadership.ask(linked)
            for node in linked:
                self._send(node, protocol.Ping(number, self.index))
            ask_again_at = time.monotonic() + _ASK_AGAIN_S
            while (left_s := ask_again_at - time.monotonic()) > 0:
                if self._leadership.leads:
                    self._asked_at = asked_at
                    if self._leadership.count_anew():
                        self.record(b"", False)
                    return
                await self._change(left_s)
            if node_name := self._followed_by():
                raise Superseded(node_name)
            if time.monotonic() > give_up_at:
                raise CutOff

    async def _change(self, within_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            pass
