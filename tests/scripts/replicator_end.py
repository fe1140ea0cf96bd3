"""A replicator that has nothing but the MPI carrier, told what to do line by line; for tests.

``replicator_end.py JOB_ID NODE SECRET_FILE``. Each line of input is a JSON list, each of output
a JSON object with ``event``. The caller carries tickets from one end to the other.
"""

from __future__ import annotations

import hashlib
import json
import queue
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from deadpool_runtime.replication.arena import Arena, arena_path
from deadpool_runtime.replication.carriers.base import MAX_TICKETS, CarrierBroken, Range
from deadpool_runtime.replication.carriers.mpi import MpiKind
from deadpool_runtime.replication.manifest import CHUNK_NBYTES

TIMEOUT_S = 5.0
_lock = threading.Lock()


def say(event: str, **fields: Any) -> None:
    with _lock:
        print(json.dumps({"event": event, **fields}), flush=True)


class End:
    """One node's end: at most one stream in each direction."""

    def __init__(self, arena: Path, node: str, secret: bytes) -> None:
        self.arena = arena
        self.kind = MpiKind(arena, node, secret)
        self.kind.watch(self.tell_offer)
        self.taken: queue.Queue[None] = queue.Queue()
        self.tickets: queue.Queue[tuple[str, int] | None] = queue.Queue()
        self.tell_offer()

    def tell_offer(self) -> None:
        offer, mover = self.kind.offer(), self.kind.mover
        number = mover.hello.world_id if mover is not None else None
        say("offer", offer=offer.hex() if offer else None, world_id=number)

    def send(self, theirs: str, file: str, nbytes: int) -> None:
        path = self.arena / file
        with path.open("wb") as out:
            # No two pages are the same.
            for at in range(0, nbytes, 4096):
                out.write(hashlib.sha512(f"{file} {at}".encode()).digest() * 64)
        sender = self.kind.sender(bytes.fromhex(theirs))
        if sender is None:
            raise CarrierBroken("no way to that node")
        waiting: deque[bytes] = deque()
        for offset in range(0, nbytes, CHUNK_NBYTES):
            ticket = sender.send(Range(str(path), offset, CHUNK_NBYTES))
            waiting.append(ticket)
            say("ticket", ticket=ticket.hex(), offset=offset)
            if len(waiting) == MAX_TICKETS:
                sender.wait_sent(waiting.popleft(), TIMEOUT_S)
        for ticket in waiting:
            sender.wait_sent(ticket, TIMEOUT_S)
        say("sent", sha=hashlib.sha1(path.read_bytes()).hexdigest())

    def receive(self, theirs: str, file: str, nbytes: int) -> None:
        path = self.arena / file
        with path.open("wb") as out:
            out.truncate(nbytes)
        receiver = self.kind.receiver(bytes.fromhex(theirs))
        if receiver is None:
            raise CarrierBroken("no way to that node")
        began_at = 0.0
        for _ in range(0, nbytes, CHUNK_NBYTES):
            ticket, offset = self.tickets.get() or ("", 0)
            began_at = began_at or time.monotonic()
            receiver.receive(
                bytes.fromhex(ticket), Range(str(path), offset, CHUNK_NBYTES), TIMEOUT_S
            )
            say("chunk", offset=offset)
        took_s = time.monotonic() - began_at
        say("received", sha=hashlib.sha1(path.read_bytes()).hexdigest(), took_s=took_s)

    def guard(self, what: str, *arguments: Any) -> None:
        try:
            getattr(self, what)(*arguments)
        except CarrierBroken as error:
            say("broken", what=what, reason=str(error))


def main() -> None:
    job_id, node, secret = sys.argv[1:4]
    arena = Arena.create(arena_path(job_id, node, 0))
    end = End(arena.path, node, Path(secret).read_bytes())
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "ticket":
            end.tickets.put((arguments[0], arguments[1]))
        else:
            threading.Thread(target=end.guard, args=(what, *arguments), daemon=True).start()
    end.kind.close()
    arena.remove()


if __name__ == "__main__":
    main()
