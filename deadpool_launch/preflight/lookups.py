"""How long a node takes to learn the names of addresses, where the ranks' stores ask for them."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time

import msgspec

from deadpool_runtime.names import torch_asks

#: The longest that a node is asked for, in seconds.
LONGEST_S = 5.0


class Lookups(msgspec.Struct, frozen=True):
    """What was found out. ``slowest_s``: of the lookups that torch would do, that of ``address``;
    ``done``: it did not take longer than was waited.
    """

    asked: bool
    slowest_s: float = 0.0
    address: str = ""
    done: bool = True


def look_up(launcher_host: str, longest_s: float = LONGEST_S) -> Lookups:
    """Look up this node's address, by which it is seen from the launcher's, and that one."""
    found: queue.SimpleQueue[Lookups] = queue.SimpleQueue()
    # Nothing ends a lookup; the process does not wait for this thread.
    threading.Thread(target=_look_up, args=(launcher_host, found), daemon=True).start()
    slowest = Lookups(asked=True, slowest_s=longest_s, done=False)
    with contextlib.suppress(queue.Empty):
        slowest = found.get(timeout=longest_s)
    return slowest


def _look_up(launcher_host: str, found: queue.SimpleQueue[Lookups]) -> None:
    try:
        theirs = socket.getaddrinfo(launcher_host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(theirs[0], theirs[1]) as sending:
            # Nothing is sent by that.
            sending.connect(theirs[4])
            ours = sending.getsockname()
        asked = torch_asks(ours[0])
    except OSError:
        asked = False
    if not asked:
        found.put(Lookups(asked=False))
        return
    slowest = Lookups(asked=True)
    for place in (ours, theirs[4]):
        began_at = time.monotonic()
        with contextlib.suppress(OSError):
            socket.getnameinfo(place, socket.NI_NUMERICSERV)
        took_s = time.monotonic() - began_at
        if took_s >= slowest.slowest_s:
            slowest = Lookups(asked=True, slowest_s=took_s, address=str(place[0]))
    found.put(slowest)
