"""The mover: the process that has MPI loaded, so that no other process needs to.

``python -P -m deadpool_runtime.replication.mover``, one on each node, all of them one MPI world in
a job step of its own. It maps the arena's files and moves ranges of them when its node's replicator
asks (``carriers.mpi``). An MPI library may abort, crash or hang its process when a peer dies: that
costs the links this carrier and nothing else.

A world is whole or gone. Whatever goes wrong in a mover ends its process with an exit code other
than 0, the job step ends with it, and the launcher starts another one. That also keeps the promise
that nothing writes into an arena after a receive was given up: a dead process writes nothing.

No MPI call here waits for a peer once the world is up, and none is made while nothing is to be
moved; deadlines are the replicator's, which kills a mover that misses one. Two threads watch what
the main thread cannot while it is inside MPI: the start's deadline, and that the replicator lives.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import secrets
import select
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from deadpool_runtime import parking, protocol
from deadpool_runtime.replication import mover_messages as messages
from deadpool_runtime.replication.arena import SHM, arena_path
from deadpool_runtime.replication.mpi_leftovers import remove_leftovers
from deadpool_runtime.replication.sockets import HANDSHAKE_S, connect_handshake, short_path

if TYPE_CHECKING:
    from mpi4py import MPI

#: Says which node a mover runs on, where Slurm's own variable does not.
NODE_VARIABLE = "DEADPOOL_MOVER_NODE"
#: Exit codes; 0 only if the replicator said ``Leave``.
NOT_STARTED, REPLICATOR_GONE, MPI_FAILED = 3, 4, 5
#: Sleep between two looks at MPI: this part of the time since something happened, within limits.
SLEEP_SHARE, LEAST_SLEEP_S, MOST_SLEEP_S = 1 / 16, 5e-6, 2e-3
#: While something is under way the sleep is ``LEAST_SLEEP_S`` for this long after something
#: happened: a chunk of 4 MiB takes about 1 ms, and MPI moves its bytes only during looks.
EAGER_S = 2e-3
#: What the kernel may add to a sleep; its default of 50 us is longer than the least sleep.
TIMER_SLACK_NS = 1000
#: After its last request a mover looks at MPI for this long: its own last message may need that.
LINGER_S = 1.0
_RETRY_S = 0.1
#: Room for a node's name.
_NAME_NBYTES = 256
#: Sends that nobody waits for; with more of them the world is of no use.
_MOST_FORGOTTEN = 256
_MOST_MAPPED = 256


class NotAllowed(Exception):
    """The request names something that a mover does not touch."""


class ArenaFiles:
    """Parts of an arena's slot files as memory. Nothing else can be reached through it."""

    def __init__(self, arena: Path) -> None:
        self._fd = os.open(arena, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mapped: dict[str, tuple[int, memoryview]] = {}

    def part(self, name: str, offset: int, nbytes: int) -> memoryview:
        """The bytes of a file; they stay mapped while the view lives. Raises ``NotAllowed``."""
        if "/" in name or not name.startswith(messages.FILE_PREFIXES):
            raise NotAllowed(f"{name!r} is not a slot file of the arena")
        if offset < 0:
            raise NotAllowed(f"{name} has no offset {offset}")
        try:
            found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise NotAllowed(f"{name} is not a regular file")
            if offset + nbytes > found.st_size:
                raise NotAllowed(f"{name} ends before {offset + nbytes}")
            inode, view = self._mapped.get(name, (0, memoryview(b"")))
            if inode != found.st_ino or len(view) < offset + nbytes:
                view = self._map(name)
        except OSError as error:
            raise NotAllowed(f"{name} cannot be mapped: {error}") from error
        return view[offset : offset + nbytes]

    def _map(self, name: str) -> memoryview:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        try:
            view = memoryview(mmap.mmap(fd, 0))
            inode = os.fstat(fd).st_ino
        finally:
            os.close(fd)
        if len(self._mapped) >= _MOST_MAPPED:
            self._mapped.clear()
        self._mapped[name] = (inode, view)
        return view


class Engine:
    """Requests under way in one MPI world."""

    def __init__(self, comm: MPI.Comm, files: ArenaFiles) -> None:
        self._comm = comm
        self._files = files
        self._numbers: list[int] = []
        self._requests: list[MPI.Request] = []
        #: MPI uses a request's memory until it completes, so the memory must stay.
        self._memory: list[memoryview] = []
        self._forgotten: list[tuple[MPI.Request, memoryview]] = []

    @property
    def busy(self) -> bool:
        """Whether a request is under way that somebody waits for."""
        return bool(self._requests)

    def ask(self, message: messages.ToMover) -> messages.FromMover | None:
        """Begin what is asked for; an answer if it is refused."""
        match message:
            case messages.SendRange() | messages.ReceiveRange():
                try:
                    self._begin(message)
                except NotAllowed as error:
                    return messages.Refused(message.number, str(error))
            case messages.ForgetSend(number=number):
                self._forget(number)
            case messages.Leave():
                end(0)
        return None

    def _begin(self, message: messages.SendRange | messages.ReceiveRange) -> None:
        if not 0 <= message.rank < self._comm.size:
            raise NotAllowed(f"this world has no rank {message.rank}")
        if not 0 < message.nbytes <= messages.MAX_MOVE_NBYTES:
            raise NotAllowed(f"{message.nbytes} bytes cannot be moved at once")
        if isinstance(message, messages.SendRange):
            memory = self._files.part(message.file, message.offset, message.nbytes)
            # Synchronous: once complete, nothing of it waits in this process for a further look.
            request = self._comm.Issend(memory, message.rank, message.tag)
        else:
            if message.file:
                memory = self._files.part(message.file, message.offset, message.nbytes)
            else:
                memory = memoryview(bytearray(message.nbytes))
            request = self._comm.Irecv(memory, message.rank, message.tag)
        self._numbers.append(message.number)
        self._requests.append(request)
        self._memory.append(memory)

    def _forget(self, number: int) -> None:
        if number in self._numbers:
            at = self._numbers.index(number)
            del self._numbers[at]
            self._forgotten.append((self._requests.pop(at), self._memory.pop(at)))
            if len(self._forgotten) > _MOST_FORGOTTEN:
                raise RuntimeError(f"{_MOST_FORGOTTEN} sends did not come to an end")

    def look(self) -> list[messages.Moved]:
        """Let MPI work; what is complete since the last look."""
        if not self._requests:
            self._comm.Iprobe()
            return []
        complete = self._requests[0].Testsome(self._requests) or []
        answers = [messages.Moved(self._numbers[at]) for at in complete]
        for at in sorted(complete, reverse=True):
            del self._numbers[at], self._requests[at], self._memory[at]
        return answers


def serve(sock: socket.socket, engine: Engine) -> NoReturn:
    """Do what the replicator asks until it or MPI ends."""
    frames = protocol.Frames()
    codec = protocol.Codec(messages.ToMover)
    active_at = time.monotonic()
    while True:
        quiet_s = time.monotonic() - active_at
        idle = not engine.busy and quiet_s > LINGER_S
        pause_s = min(max(quiet_s * SLEEP_SHARE, LEAST_SLEEP_S), MOST_SLEEP_S)
        if engine.busy and quiet_s < EAGER_S:
            pause_s = LEAST_SLEEP_S
        readable, _, _ = select.select([sock], [], [], None if idle else pause_s)
        answers: list[messages.FromMover] = []
        if readable:
            data = sock.recv(1 << 16)
            if not data:
                end(REPLICATOR_GONE)
            for body in frames.feed(data):
                if refusal := engine.ask(codec.decode(body)):
                    answers.append(refusal)
        answers += engine.look()
        if answers:
            sock.sendall(b"".join(protocol.frame(answer) for answer in answers))
        if answers or readable:
            active_at = time.monotonic()


# ---------------------------------------------------------------- start


def begin(timeout_s: float) -> tuple[str, threading.Timer]:
    """The node's name, and what ends this process unless it is cancelled in time."""
    node = os.environ.get(NODE_VARIABLE) or os.environ.get("SLURMD_NODENAME")
    if not node:
        end(NOT_STARTED, "the environment does not say which node this is")
    late = f"{node}: the MPI world was not up within {timeout_s:g} s"
    watchdog = threading.Timer(timeout_s, end, (NOT_STARTED, late))
    watchdog.daemon = True
    watchdog.start()
    return node, watchdog


def start_world(node: str, world_id: int) -> tuple[MPI.Comm, messages.MoverHello]:
    """Join the world; this waits for all of its processes. Raises ``ImportError`` without mpi4py
    or without an MPI library.
    """
    import mpi4py

    remove_leftovers()
    mapped_before = _mapped_shared_memory()
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_FUNNELED)
    comm = MPI.COMM_WORLD
    for each in (comm, MPI.COMM_SELF):
        each.Set_errhandler(MPI.ERRORS_RETURN)
    nodes = _all_names(comm, node)
    nonce = bytearray(secrets.token_bytes(8))
    comm.Bcast(nonce)
    if len(set(nodes)) != len(nodes):
        raise RuntimeError(f"a node has more than one mover: {', '.join(nodes)}")
    # Everybody is here, so nobody looks for the library's shared memory by its name any more; and
    # this process does not live to take it away at its end.
    for path in _mapped_shared_memory() - mapped_before:
        with contextlib.suppress(OSError):
            os.unlink(path)
    tag_limit: int = comm.Get_attr(MPI.TAG_UB) or 32767
    library = " ".join(MPI.Get_library_version().split()[:3])
    return comm, messages.MoverHello(world_id, nonce.hex(), comm.rank, nodes, tag_limit, library)


def _all_names(comm: MPI.Comm, node: str) -> list[str]:
    """The names of the nodes by MPI rank."""
    own = node.encode()
    if len(own) > _NAME_NBYTES:
        raise RuntimeError(f"the name of the node is longer than {_NAME_NBYTES} bytes")
    room = bytearray(_NAME_NBYTES * comm.size)
    comm.Allgather(own.ljust(_NAME_NBYTES, b"\0"), room)
    parts = (room[at : at + _NAME_NBYTES] for at in range(0, len(room), _NAME_NBYTES))
    return [part.rstrip(b"\0").decode() for part in parts]


def _mapped_shared_memory() -> set[str]:
    """The files in /dev/shm itself that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    return {path for path in paths if os.path.dirname(path) == str(SHM)}


def arenas(job_id: str, node: str) -> list[Path]:
    """The arenas that the job has or had on the node, the newest first."""
    # The name ends with the epoch in which the agent was started.
    stem = arena_path(job_id, node, 0).name.removesuffix("0")
    found = {}
    for path in SHM.iterdir():
        epoch = path.name.removeprefix(stem)
        if path.name.startswith(stem) and epoch.isdecimal():
            found[int(epoch)] = path
    return [found[epoch] for epoch in sorted(found, reverse=True)]


def connect(job_id: str, node: str, secret: bytes) -> tuple[socket.socket, Path]:
    """Connect to the node's replicator once there is one; there is no deadline here."""
    while True:
        for arena in arenas(job_id, node):
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(HANDSHAKE_S)
                with short_path(arena / messages.SOCKET_NAME) as short:
                    sock.connect(short)
                connect_handshake(sock, secret)
            except (OSError, protocol.ProtocolError):
                sock.close()
                continue
            sock.settimeout(None)
            return sock, arena
        time.sleep(_RETRY_S)


# ---------------------------------------------------------------- end


def end(code: int, text: str = "") -> NoReturn:
    """End at once: MPI's own way out would wait for processes that may be dead."""
    with contextlib.suppress(OSError, ValueError):
        if text:
            print(f"mover: {text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _end_with_replicator(sock: socket.socket) -> None:
    """Thread: end when the connection is closed, even while the main thread is stuck in MPI."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    # What was sent before the end may be a farewell; leave it to the main thread if it can.
    time.sleep(LINGER_S)
    end(REPLICATOR_GONE)


def main() -> NoReturn:
    """The process."""
    parser = argparse.ArgumentParser(description="Moves ranges of arena files by MPI.")
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--world-id", type=int, required=True)
    parser.add_argument("--secret", type=Path, required=True)
    parser.add_argument("--start-timeout", type=float, default=60.0)
    options = parser.parse_args()
    node, watchdog = begin(options.start_timeout)
    parking.prctl(parking.PR_SET_TIMERSLACK, TIMER_SLACK_NS)
    try:
        secret = options.secret.read_bytes()
        comm, hello = start_world(node, options.world_id)
        if hello.rank == 0:
            count = len(hello.nodes)
            print(f"world {hello.world_id} is up: {count} nodes, {hello.library}", flush=True)
        sock, arena = connect(options.job_id, node, secret)
        sock.sendall(protocol.frame(hello))
        watchdog.cancel()
        threading.Thread(target=_end_with_replicator, args=(sock,), daemon=True).start()
    except ImportError as error:
        end(messages.NO_MPI_EXIT, f"mpi4py cannot be used: {error}")
    except Exception as error:  # Whatever it is, this process ends and says why.
        end(NOT_STARTED, f"{node}: {type(error).__name__}: {error}")
    try:
        serve(sock, Engine(comm, ArenaFiles(arena)))
    except Exception as error:  # As above: most are MPI's.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError):
            sock.sendall(protocol.frame(messages.Broken(reason)))
        end(MPI_FAILED, f"{node}: {reason}")


if __name__ == "__main__":
    main()
