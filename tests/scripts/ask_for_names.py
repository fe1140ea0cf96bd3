"""Run in namespaces of its own: how often a name server is asked, which is one that never answers.

Prints how often for a store and its clients, and how often for a lookup of the script's own.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from deadpool_runtime.stores import serve_store

#: An address of this machine without a name.
HOST = "127.0.0.9"
FILES = {
    "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
    "nsswitch.conf": "hosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
}
_SIOCSIFFLAGS = 0x8914
_IFF_UP_RUNNING = 0x41


def main(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
        command = ["mount", "--bind", str(folder / name), os.path.realpath(f"/etc/{name}")]
        subprocess.run(command, check=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sH14x", b"lo", _IFF_UP_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, up)
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    store = serve_store(HOST)
    for number in range(3):
        client = dist.TCPStore(HOST, store.port, is_master=False, wait_for_workers=False)
        client.set(f"key {number}", "")
    of_stores = questions(server)
    try:
        socket.getnameinfo((HOST, 0), socket.NI_NUMERICSERV)
    except socket.gaierror:
        print(json.dumps({"stores": of_stores, "own": questions(server)}), flush=True)
    # Torch's thread would end an orderly exit in std::terminate.
    os._exit(0)


def questions(server: socket.socket) -> int:
    """That have come since the last time."""
    count = 0
    while True:
        try:
            server.recv(512, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return count
        count += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
