"""A rank's connection to its node's agent: an inherited socket pair, typed messages, one reader
thread.

The pair is made by the agent and handed to the rank's process when it is forked, so nobody else can
hold its other end and no address, file or secret is needed. When the agent goes away the rank has
nothing left to live for: its node counts as lost and another process carries its rank, so the
reader thread ends the process at once.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from deadpool_runtime import protocol, termination

#: Exit code of a rank whose agent went away.
ORPHANED_EXIT = 86
#: Room for unread messages towards the agent, so that the training thread does not wait for it.
SEND_BUFFER_NBYTES = 8 << 20


class RankLink:
    """Sends ``FromRank`` messages from any thread and hands ``ToRank`` messages to one callback."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._codec = protocol.Codec(protocol.ToRank | protocol.Leave)
        self._open = True
        # A process that the script forks is not the rank and must not speak for it.
        os.register_at_fork(after_in_child=self._forget)
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_NBYTES)

    def send(self, message: protocol.FromRank) -> None:
        """Pass ``message`` to the agent. Returns silently when the agent is gone (see the module's
        text).
        """
        if not self._open:
            return
        try:
            data = protocol.frame(message)
        except UnicodeEncodeError:
            data = protocol.frame(_printable(message))
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError:
                return

    def _forget(self) -> None:
        self._open = False
        self._sock.close()

    def start(self, on_message: Callable[[Any], None]) -> None:
        """Start the reader thread; ``on_message`` runs on it for each message, in order."""
        threading.Thread(
            target=self._read, args=(on_message,), name="deadpool-link", daemon=True
        ).start()

    def _read(self, on_message: Callable[[Any], None]) -> None:
        frames = protocol.Frames()
        while True:
            try:
                data = self._sock.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                os._exit(ORPHANED_EXIT)
            for body in frames.feed(data):
                message = self._codec.decode(body)
                if isinstance(message, protocol.Leave):
                    termination.end_unless_handled()
                else:
                    on_message(message)


def _printable(message: protocol.FromRank) -> protocol.FromRank:
    """The message with what is no valid text (names of files that are not UTF-8) spelt out."""
    changes = {
        name: value.encode("utf-8", "backslashreplace").decode()
        for name in message.__struct_fields__
        if isinstance(value := getattr(message, name), str)
    }
    return msgspec.structs.replace(message, **changes)
