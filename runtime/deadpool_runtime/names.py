"""Names of addresses, and how a thread does without.

torch looks up the name of each address that a store's client connects to or its server accepts, to
have it in its messages. The server does so in its only thread: at every rebuild, one rank's after
the other's. It stops for good in a process in which one such lookup has failed (torch 2.9 and
later), and a lookup fails at once in a thread that tries no name server.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Iterator


class _Resolver(ctypes.Structure):
    """The beginning of glibc's ``struct __res_state``. Every thread has its own."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int))


@contextlib.contextmanager
def without_name_servers() -> Iterator[None]:
    """What this thread looks up is found in files, by a daemon of this node or not at all. Other
    threads look up as ever, and so does this one afterwards.
    """
    resolver = _resolver()
    if resolver is None:
        yield
        return
    tries, resolver.retry = resolver.retry, 0
    try:
        yield
    finally:
        resolver.retry = tries


def _resolver() -> _Resolver | None:
    """This thread's, its settings read; None where the C library has no such thing."""
    libc = ctypes.CDLL(None)
    try:
        read, of_this_thread = libc["__res_init"], libc["__res_state"]
    except AttributeError:
        return None
    of_this_thread.restype = ctypes.POINTER(_Resolver)
    if read() != 0:
        return None
    found: _Resolver = of_this_thread().contents
    return found


def torch_asks(host: str) -> bool:
    """Whether ranks at this address ask for names all the same, as the lookup that should fail
    does not. Blocks.
    """
    flags = socket.AI_V4MAPPED | socket.AI_ALL
    place = socket.getaddrinfo(host, 0, socket.AF_INET6, socket.SOCK_STREAM, 0, flags)[0][4]
    with without_name_servers():
        try:
            socket.getnameinfo(place, socket.NI_NUMERICSERV)
        except OSError:
            return False
    return True
