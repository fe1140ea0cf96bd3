"""All links of a replicator: the server, the dialling, and the table of what is open.

A link is two TCP connections that the same end dialled, both authenticated: control, then data. The
control connection's first message names the link, the data connection's only one repeats it.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import threading
import time

from deadpool_runtime import protocol
from deadpool_runtime.keepalive import set_dead_peer_limits
from deadpool_runtime.replication import wire
from deadpool_runtime.replication.carriers import tcp
from deadpool_runtime.replication.events import DialFailed
from deadpool_runtime.replication.link import Home, Link
from deadpool_runtime.replication.sockets import (
    DEAD_PEER_S,
    HANDSHAKE_S,
    accept_handshake,
    connect_handshake,
    connections,
    first_message,
    shut,
)

#: Waits between two attempts to dial: the first, and the longest.
RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
#: Connections that may wait to be accepted, and that may be without a proof of the secret.
BACKLOG, MOST_GUESTS = 256, 128


class Links:
    """Safe to use from any thread; ``home.post`` hears what happens."""

    def __init__(self, home: Home, host: str, secret: bytes) -> None:
        self._home = home
        self._secret = secret
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[int, Link] = {}
        self._dials: dict[protocol.Address, threading.Event] = {}
        self._dialled_at: dict[protocol.Address, float] = {}
        #: Data connections by the link they wait for, and the control connections that wait.
        self._data: dict[str, socket.socket] = {}
        self._data_came = threading.Condition(self._lock)
        #: Connections that have not proved the secret, the oldest first.
        self._guests: dict[socket.socket, None] = {}
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._server = socket.socket(found[0], found[1])
        tcp.widen(self._server)
        self._server.bind(found[4])
        self._server.listen(BACKLOG)
        self.address = protocol.Address(host, self._server.getsockname()[1])

    def start(self) -> None:
        """Accept links from now on."""
        threading.Thread(target=self._accept, name="deadpool-accept", daemon=True).start()
        for kind in self._home.kinds:
            kind.watch(self._offers_changed)

    def get(self, number: int) -> Link | None:
        """The link, also for a while after it ended."""
        with self._lock:
            return self._open.get(number)

    def forget(self, number: int) -> None:
        """The core knows that the link ended and every job on it was answered or will be."""
        with self._lock:
            self._open.pop(number, None)

    def _offers_changed(self) -> None:
        with self._lock:
            links = list(self._open.values())
        for link in links:
            link.offers_changed()

    def _add(
        self,
        peer: str,
        address: protocol.Address | None,
        control: socket.socket,
        data: socket.socket,
    ) -> Link:
        with self._lock:
            link = Link(next(self._numbers), self._home, peer, address, control, data)
            self._open[link.number] = link
        return link

    # ------------------------------------------------------------ dialling

    def dial(self, address: protocol.Address) -> None:
        """Try until it works or ``stop_dialling``."""
        stop = threading.Event()
        with self._lock:
            self._dials[address] = stop
        threading.Thread(
            target=self._dial, args=(address, stop), name="deadpool-dial", daemon=True
        ).start()

    def stop_dialling(self, address: protocol.Address) -> None:
        """Nobody needs that link any more."""
        with self._lock:
            stop = self._dials.pop(address, None)
        if stop is not None:
            stop.set()

    def _dial(self, address: protocol.Address, stop: threading.Event) -> None:
        # A link that breaks as soon as it is up must not keep both nodes busy.
        soon = self._dialled_at.get(address, float("-inf")) + RETRY_S
        stop.wait(max(0.0, soon - time.monotonic()))
        wait_s = RETRY_S
        while not stop.is_set():
            self._dialled_at[address] = time.monotonic()
            try:
                link, theirs, ours = self._try(address)
            except (OSError, protocol.ProtocolError) as error:
                if not stop.is_set():
                    self._home.post(DialFailed(address, str(error)))
                stop.wait(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
                continue
            link.start(theirs, ours)
            return

    def _try(self, address: protocol.Address) -> tuple[Link, dict[str, bytes], dict[str, bytes]]:
        name = secrets.token_hex(16)
        offers = {
            kind.name: offer for kind in self._home.kinds if (offer := kind.offer()) is not None
        }
        control = self._connect(address)
        data: socket.socket | None = None
        try:
            control.sendall(protocol.frame(wire.LinkHello(self._home.node, name, offers)))
            data = self._connect(address)
            data.sendall(protocol.frame(wire.DataHello(name)))
            welcome = first_message(control, protocol.Codec(wire.LinkWelcome))
        except BaseException:
            control.close()
            if data is not None:
                data.close()
            raise
        return self._add(welcome.node, address, control, data), welcome.offers, offers

    def _connect(self, address: protocol.Address) -> socket.socket:
        error: OSError | None = None
        for family, kind, _, _, place in socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind)
            try:
                tcp.widen(sock)
                set_dead_peer_limits(sock, DEAD_PEER_S)
                sock.settimeout(HANDSHAKE_S)
                sock.connect(place)
                connect_handshake(sock, self._secret)
                return sock
            except OSError as failed:
                sock.close()
                error = failed
            except BaseException:
                sock.close()
                raise
        raise error if error is not None else OSError(f"{address.host} has no address")

    # ------------------------------------------------------------ accepting

    def _accept(self) -> None:
        for sock in connections(self._server):
            self._make_room(sock)
            threading.Thread(
                target=self._greet, args=(sock,), name="deadpool-greet", daemon=True
            ).start()

    def _greet(self, sock: socket.socket) -> None:
        """Thread: find out what a new connection is for."""
        try:
            set_dead_peer_limits(sock, DEAD_PEER_S)
            accept_handshake(sock, self._secret)
            self._guest_leaves(sock)
            hello = first_message(sock, protocol.Codec(wire.LinkHello | wire.DataHello))
            if isinstance(hello, wire.DataHello):
                self._data_arrived(hello.link, sock)
            else:
                self._control_arrived(hello, sock)
        except (OSError, protocol.ProtocolError):
            self._guest_leaves(sock)
            sock.close()

    def _make_room(self, sock: socket.socket) -> None:
        """A replicator's proof takes no time: what stays without one makes room for those that come
        later, so that strangers which say nothing take up neither threads nor descriptors.
        """
        with self._lock:
            self._guests[sock] = None
            oldest = next(iter(self._guests)) if len(self._guests) > MOST_GUESTS else None
            if oldest is not None:
                del self._guests[oldest]
                # Under the lock: its thread closes it only when it has left.
                shut(oldest)

    def _guest_leaves(self, sock: socket.socket) -> None:
        with self._lock:
            self._guests.pop(sock, None)

    def _data_arrived(self, name: str, sock: socket.socket) -> None:
        with self._data_came:
            self._data[name] = sock
            self._data_came.notify_all()
            # The control connection came first; without it nobody takes the socket.
            self._data_came.wait_for(lambda: self._data.get(name) is not sock, HANDSHAKE_S)
            unclaimed = self._data.get(name) is sock
            if unclaimed:
                del self._data[name]
        if unclaimed:
            sock.close()

    def _control_arrived(self, hello: wire.LinkHello, control: socket.socket) -> None:
        with self._data_came:
            if not self._data_came.wait_for(lambda: hello.link in self._data, HANDSHAKE_S):
                raise OSError("the data connection did not come")
            data = self._data.pop(hello.link)
            self._data_came.notify_all()
        link = self._add(hello.node, None, control, data)
        # Chosen before the welcome: the other end may use any of the offers at once.
        link.start(hello.offers, None)

    def close(self) -> None:
        """Accept nothing more."""
        shut(self._server)
        self._server.close()
