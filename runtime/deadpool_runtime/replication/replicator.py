"""The replicator of a node: keeps copies of its ranks' states on other nodes, and theirs here.

``python -P -m deadpool_runtime.replication.replicator``, started by the agent. The decisions are
``core.py``'s. Here: the main loop that feeds it, the socket at which the node's ranks connect, the
control channel to the agent, and the end of the process.

The core runs in one thread, so nothing in that thread may wait: blocking calls are made by the
threads of the links (``link.py``), of the ranks' connections and of the control channel, which
communicate by events. Signals are received by the main thread, which does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, assert_never

from deadpool_runtime import parking, protocol
from deadpool_runtime.replication import messages, wire
from deadpool_runtime.replication.arena import Arena, SlotFile, held_in
from deadpool_runtime.replication.carriers.base import Kind
from deadpool_runtime.replication.carriers.choice import PREFERENCE
from deadpool_runtime.replication.carriers.files import Maps
from deadpool_runtime.replication.carriers.memory import MemoryKind
from deadpool_runtime.replication.carriers.mpi import MpiKind
from deadpool_runtime.replication.core import Core
from deadpool_runtime.replication.events import (
    Action,
    ClientGone,
    CloseLink,
    Dial,
    DropCarrier,
    DropClient,
    Event,
    FenceOverdue,
    FenceWanted,
    LinkDown,
    Noticed,
    PrepareSlot,
    RankSaid,
    ReadCopy,
    ReceiveChunk,
    SealSlot,
    SendChunk,
    SlotName,
    StopDialling,
    TellAgent,
    TellLink,
    TellRank,
    WatchFence,
    WipeCopy,
)
from deadpool_runtime.replication.link import Home
from deadpool_runtime.replication.links import Links
from deadpool_runtime.replication.sockets import connections, messages_on, short_path, shut

#: How long a fence waits for writes of an older epoch before their links are closed.
FENCE_PATIENCE_S = 0.25
#: How long the end of the agent is waited for after its channel closed.
AGENT_END_S = 2.0


class Clients:
    """The connections of the node's ranks."""

    def __init__(self, path: Path, post: SimpleQueue[Event]) -> None:
        self._post = post
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}
        path.unlink(missing_ok=True)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as short:
            self._server.bind(short)
        path.chmod(0o600)
        self._server.listen(64)

    def start(self) -> None:
        """Accept ranks from now on."""
        threading.Thread(target=self._accept, name="deadpool-ranks", daemon=True).start()

    def _accept(self) -> None:
        for sock in connections(self._server):
            number = next(self._numbers)
            with self._lock:
                self._open[number] = sock
            threading.Thread(
                target=self._read, args=(number, sock), name="deadpool-rank", daemon=True
            ).start()

    def _read(self, number: int, sock: socket.socket) -> None:
        try:
            for message in messages_on(sock, protocol.Codec(messages.ToReplicator)):
                self._post.put(RankSaid(number, message))
        except protocol.ProtocolError as error:
            _log(f"a rank sent what is no message: {error}")
        with self._lock:
            self._open.pop(number, None)
        sock.close()
        self._post.put(ClientGone(number))

    def tell(self, number: int, message: messages.FromReplicator) -> None:
        """Never waits: a rank that does not read its few answers is disconnected."""
        with self._lock:
            sock = self._open.get(number)
            if sock is None:
                return
            data = protocol.frame(message)
            try:
                sent = sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                sent = 0
            if sent < len(data):
                shut(sock)

    def drop(self, number: int) -> None:
        """End a connection."""
        with self._lock:
            sock = self._open.get(number)
        if sock is not None:
            shut(sock)


class Replicator:
    """Performs what the core decides."""

    def __init__(
        self,
        arena: Arena,
        host: str,
        node: str,
        secret: bytes,
        control: socket.socket,
        carriers: Sequence[str],
    ) -> None:
        self._core = Core(node, held_in(arena.path))
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._control = control
        self._control_lock = threading.Lock()
        maps = Maps()
        self._kinds: list[Kind] = []
        if "memory" in carriers:
            self._kinds.append(MemoryKind(arena.path, maps))
        if "mpi" in carriers:
            self._kinds.append(MpiKind(arena.path, node, secret))
        self._home = Home(node, arena.path, self._kinds, maps, self._events.put)
        self._links = Links(self._home, host, secret)
        self._clients = Clients(arena.socket_path, self._events)

    def start(self) -> None:
        """Open for business, and say so to the agent."""
        threading.Thread(target=self._run, name="deadpool-core", daemon=True).start()
        self._links.start()
        self._clients.start()
        self.tell_agent(wire.Up(self._links.address))

    def close(self) -> None:
        """Let carriers that have a process of their own end it."""
        for kind in self._kinds:
            kind.close()

    def fence(self, epoch: int) -> None:
        """The agent declared a newer epoch."""
        self._events.put(FenceWanted(epoch))

    def tell_agent(self, message: wire.ToAgent) -> None:
        """Send on the control channel; its end is noticed where it is read."""
        with self._control_lock, contextlib.suppress(OSError):
            self._control.sendall(protocol.frame(message))

    def _run(self) -> None:
        """Thread: the core. A defect in it must end the process, not leave it deaf."""
        try:
            while True:
                event = self._events.get()
                if isinstance(event, Noticed):
                    _log(event.text)
                for action in self._core.step(event):
                    self._perform(action)
                if isinstance(event, LinkDown):
                    self._links.forget(event.link)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(70)

    def _perform(self, action: Action) -> None:
        match action:
            case TellRank(client=client, message=said):
                self._clients.tell(client, said)
            case DropClient(client=client):
                self._clients.drop(client)
            case Dial(address=address):
                self._links.dial(address)
            case StopDialling(address=address):
                self._links.stop_dialling(address)
            case TellLink(link=number, message=message):
                if (link := self._links.get(number)) is not None:
                    link.tell(message)
            case CloseLink(link=number, reason=reason):
                if (link := self._links.get(number)) is not None:
                    link.end(reason)
            case DropCarrier(link=number, carrier=label, reason=reason):
                if (link := self._links.get(number)) is not None:
                    link.drop_carrier(label, reason)
            case SendChunk() | ReadCopy():
                if (link := self._links.get(action.key.link)) is not None:
                    link.do_send(action)
            case ReceiveChunk() | PrepareSlot() | SealSlot():
                if (link := self._links.get(action.key.link)) is not None:
                    link.do_receive(action)
            case WipeCopy(slot=slot):
                self._wipe(slot)
            case WatchFence(epoch=epoch):
                timer = threading.Timer(
                    FENCE_PATIENCE_S, self._events.put, args=(FenceOverdue(epoch),)
                )
                timer.daemon = True
                timer.start()
            case TellAgent(message=answer):
                self.tell_agent(answer)
            case _:
                assert_never(action)

    def _wipe(self, name: SlotName) -> None:
        """The slot may have been overwritten since: then it is left alone."""
        with contextlib.suppress(OSError), SlotFile.open(self._home.path_of(name)) as slot:
            found = slot.read()
            if found is not None and (found[0].rank, found[0].step) == (name.rank, name.step):
                slot.invalidate()
                _log(f"the copy of rank {name.rank} after step {name.step} here is damaged")


def _log(text: str) -> None:
    # The agent has this process's stderr; one write, so that lines stay whole.
    with contextlib.suppress(OSError):
        os.write(2, f"replicator: {text}\n".encode())


def _watch_agent(control: socket.socket, replicator: Replicator, closed: threading.Event) -> None:
    """Thread: what the agent says. The end of its channel ends this process."""
    try:
        for message in messages_on(control, protocol.Codec(wire.FromAgent)):
            replicator.fence(message.epoch)
    except protocol.ProtocolError as error:
        _log(f"the agent sent what is no message: {error}")
    closed.set()
    os.kill(os.getpid(), parking.END_SIGNAL)


def _agent_gone(agent: int, timeout_s: float) -> bool:
    """Whether the process behind the descriptor ended, or ends in that time."""
    return bool(select.select([agent], [], [], timeout_s)[0])


def main() -> NoReturn:
    """Run until the agent ends this process or is gone."""
    parser = argparse.ArgumentParser(prog="replicator", allow_abbrev=False)
    parser.add_argument("--arena", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--secret", type=Path, required=True)
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--carriers", default=",".join(PREFERENCE))
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Blocked before any thread starts, so that all of them inherit it: sigwait below takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {parking.END_SIGNAL})
    arena = Arena.open(options.arena)
    agent = -1
    closed = threading.Event()
    if os.getppid() == options.parent:
        agent = os.pidfd_open(options.parent)
        parking.prctl(parking.PR_SET_PDEATHSIG, parking.END_SIGNAL)
    # The agent may have ended before the signal was asked for.
    if agent >= 0 and os.getppid() == options.parent:
        control = socket.socket(fileno=options.control)
        replicator = Replicator(
            arena,
            options.host,
            options.node,
            options.secret.read_bytes(),
            control,
            [name for name in options.carriers.split(",") if name],
        )
        replicator.start()
        threading.Thread(
            target=_watch_agent,
            args=(control, replicator, closed),
            name="deadpool-agent",
            daemon=True,
        ).start()
        signal.sigwait({parking.END_SIGNAL})
        replicator.close()
    # The channel closes, and the signal comes, shortly before the agent is quite gone.
    dying = closed.is_set() or os.getppid() != options.parent
    if agent < 0 or _agent_gone(agent, AGENT_END_S if dying else 0.0):
        shutil.rmtree(arena.path, ignore_errors=True)
    # Threads wait in calls that nothing interrupts.
    os._exit(0)


if __name__ == "__main__":
    main()
