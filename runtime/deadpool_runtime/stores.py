"""Where the ranks of an epoch meet: a store that one of them serves."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator

import torch.distributed as dist

from deadpool_runtime.names import without_name_servers

#: torch's warning of a lookup that failed.
_WARNING = b"hostname of the client socket cannot be retrieved"


def serve_store(host: str) -> dist.TCPStore:
    """A store that listens at the address by which this node is reached, and at no other one: it
    knows no secret, and torch by itself would let it listen on every interface.
    """
    family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening, nameless():
        listening.bind(place)
        port = listening.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


@contextlib.contextmanager
def nameless() -> Iterator[None]:
    """The first store that is made or connected to inside of this is also the last for which torch
    asks a name server in this process, and in those that it forks (see ``names``).
    """
    with without_name_servers(), _without_line(_WARNING):
        yield


@contextlib.contextmanager
def _without_line(part: bytes) -> Iterator[None]:
    """Keep lines with ``part`` from this process's standard error meanwhile."""
    sys.stderr.flush()
    usual, said = os.dup(2), os.memfd_create("said")
    os.dup2(said, 2)
    try:
        yield
    finally:
        os.dup2(usual, 2)
        text = os.pread(said, os.fstat(said).st_size, 0)
        os.write(2, b"".join(line for line in text.splitlines(True) if part not in line))
        os.close(usual)
        os.close(said)
