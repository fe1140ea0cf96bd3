"""Which sockets a communicator opened, and shutting them down from another thread.

A peer that vanishes sends nothing, and torch cannot interrupt a thread that waits in Gloo for
such a peer. Shutting the communicator's own sockets down does: every waiter sees the end of its
stream and raises within milliseconds. torch does not tell which sockets those are, so they are
found as the difference of the process's open sockets around the constructor, plus whatever has
been accepted since on a listener that the constructor opened.

A socket that an unrelated thread opens during those few milliseconds is taken for the
communicator's, and is cut off when the communicator is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType

#: A descriptor and the inode behind it: numbers of descriptors are reused, the pair is not.
SocketId = tuple[int, int]
#: An address as the kernel writes it, and a port.
Address = tuple[bytes, int]

_SO_PROTOCOL = 38  # <asm-generic/socket.h>; the socket module has it from Python 3.12
_libc = ctypes.CDLL(None)

#: Held while sockets are being opened, so that two differences never see each other's.
_opening = threading.RLock()


class SocketWatch:
    """The sockets of one communicator or store client.

    Use it as a context manager around the constructor. ``shut`` may be given it at any time from
    any thread, also while the constructor is still running.
    """

    def __init__(self, *, follow_listeners: bool = True) -> None:
        # A group's listener only ever accepts the group's peers. A store's listener serves other
        # processes, whose connections are none of this process's business.
        self.follow_listeners = follow_listeners
        self._before: set[SocketId] | None = None
        self._sockets: set[SocketId] = set()
        self._listeners: set[Address] = set()

    def __enter__(self) -> SocketWatch:
        _opening.acquire()
        self._before = set(open_sockets())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._sockets, self._listeners = self._opened_since(self._before or set())
            self._before = None
        finally:
            _opening.release()

    def claims(self) -> tuple[set[SocketId], set[Address]]:
        """The sockets opened under this watch so far, and the listeners among them."""
        before = self._before
        if before is None:
            return self._sockets, self._listeners
        return self._opened_since(before)

    def _opened_since(self, before: set[SocketId]) -> tuple[set[SocketId], set[Address]]:
        opened = set(open_sockets()) - before
        listeners: set[Address] = set()
        for socket_id in opened:
            with _borrow(socket_id) as borrowed:
                if borrowed is not None and _is_listener(borrowed):
                    listeners.add(_address(borrowed))
        return opened, listeners


def shut(watches: Iterable[SocketWatch]) -> int:
    """Shut all connections of these watches down, sparing listeners; returns how many.

    Listeners must be spared because Gloo ends the whole process when its listener fails.
    """
    mine: set[SocketId] = set()
    followed: set[Address] = set()
    foreign: set[Address] = set()
    for watch in watches:
        sockets, listeners = watch.claims()
        mine |= sockets
        (followed if watch.follow_listeners else foreign).update(listeners)
    count = 0
    for socket_id in open_sockets():
        with _borrow(socket_id) as borrowed:
            if borrowed is None or _is_listener(borrowed):
                continue
            wanted = socket_id in mine and not _is_bound_to(borrowed, foreign)
            if wanted or _is_bound_to(borrowed, followed):
                # Fails only on a connection that has not been made yet or has ended.
                count += _libc.shutdown(borrowed, socket.SHUT_RDWR) == 0
    return count


def open_sockets() -> list[SocketId]:
    """Every socket of this process."""
    found: list[SocketId] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # closed since it was listed
            continue
        if target.startswith("socket:["):
            found.append((int(name), int(target[8:-1])))
    return found


@contextlib.contextmanager
def _borrow(socket_id: SocketId) -> Iterator[int | None]:
    """A duplicate of a TCP socket's descriptor, or None if it is not one or no longer there.

    The inode is compared after duplicating: another thread may have closed the descriptor and
    opened something else under its number at any moment before.
    """
    number, inode = socket_id
    try:
        duplicate = os.dup(number)
    except OSError:
        yield None
        return
    try:
        info = os.fstat(duplicate)
        same = stat.S_ISSOCK(info.st_mode) and info.st_ino == inode
        yield duplicate if same and _option(duplicate, _SO_PROTOCOL) == socket.IPPROTO_TCP else None
    finally:
        os.close(duplicate)


# Straight to libc, since making a Python socket object of somebody else's descriptor puts it into
# non-blocking mode for everybody when the program has called socket.setdefaulttimeout().


def _option(descriptor: int, option: int) -> int:
    value = ctypes.c_int(-1)
    size = ctypes.c_uint32(ctypes.sizeof(value))
    _libc.getsockopt(descriptor, socket.SOL_SOCKET, option, ctypes.byref(value), ctypes.byref(size))
    return value.value


def _is_listener(descriptor: int) -> bool:
    return _option(descriptor, socket.SO_ACCEPTCONN) == 1


def _address(descriptor: int) -> Address:
    raw = ctypes.create_string_buffer(128)  # struct sockaddr_storage
    size = ctypes.c_uint32(len(raw))
    _libc.getsockname(descriptor, raw, ctypes.byref(size))
    family, port = struct.unpack_from("=H", raw)[0], struct.unpack_from("!H", raw, 2)[0]
    host = raw.raw[4:8] if family == socket.AF_INET else raw.raw[8:24]
    return host, port


def _is_bound_to(descriptor: int, listeners: set[Address]) -> bool:
    """Whether this end of the connection was accepted by one of the listeners."""
    if not listeners:
        return False
    host, port = _address(descriptor)
    return any((any_host, port) in listeners for any_host in (host, bytes(4), bytes(16)))
