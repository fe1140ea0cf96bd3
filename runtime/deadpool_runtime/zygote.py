"""The parked process of a node: interpreter up, torch imported, ready to become a rank at once.

Importing torch is most of a cold start (seconds), forking the process that has done it takes
milliseconds. So every agent keeps one such process and has it fork all ranks of the node: the first
ones, local restarts, and the ranks a spare takes over. It never initialises CUDA, opens no socket
and starts no thread, which is what makes forking it safe.

A rank is forked twice, so that it becomes the child of the agent (a child subreaper): the agent
then sees its exit status first-hand, and the rank dies with the agent (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

import msgspec

from deadpool_runtime import termination
from deadpool_runtime.parking import (
    MAX_REQUEST_NBYTES,
    Forked,
    ForkRequest,
    Warm,
    die_with_parent,
)


def _import_everything() -> None:
    """Import what nearly every training script imports, so that no rank has to, and the modules
    that DEADPOOL_PRELOAD names."""
    users_cache = "TORCHINDUCTOR_CACHE_DIR" in os.environ
    import numpy.random  # noqa: F401
    import torch
    import torch.distributed
    import torch.nn.parallel
    import torch.optim.lr_scheduler
    import torch.utils.data.distributed

    import deadpool_runtime.bootstrap
    import deadpool_runtime.session

    # The first optimizer made in a process imports torch's compiler, most of a second of it.
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    for name in os.environ.get("DEADPOOL_PRELOAD", "").split():
        importlib.import_module(name)
    if not users_cache:
        _remove_empty_compiler_cache()
    torch.set_num_threads(_threads(os.environ.get("OMP_NUM_THREADS", "")))
    deadpool_runtime.bootstrap.prepare()


def _threads(text: str) -> int:
    """The number of threads that OMP_NUM_THREADS asks for at the outermost level, at least one."""
    first = text.split(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1


def _remove_empty_compiler_cache() -> None:
    """Importing torch's compiler makes its cache folder under /tmp; leave none behind unless used.

    A compilation makes the folder again.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    try:
        os.rmdir(default_cache_dir())
    except OSError:  # missing, or in use
        return


def _reset_random() -> None:
    """Give the forked process its own randomness, as a fresh interpreter would have (torch's seed
    is a constant).
    """
    import numpy as np

    np.random.seed()


def _renew_threads() -> None:
    """Give the forked process its own pool of threads while it has only one thread.

    torch replaces the pool that a fork made useless in the first call that needs it, and does so
    without a lock: the threads of a backward pass would get in each other's way ("Invalid thread
    pool!", seen with a CUDA build, which has one for each kind of device).
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _become_rank(request: ForkRequest, channel: socket.socket, parked: socket.socket) -> NoReturn:
    """In the forked process: take the rank's place in the process tree and run it. Never
    returns.
    """
    parked.close()
    os.setsid()
    deadline = time.monotonic() + 30
    while os.getppid() != request.agent_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    die_with_parent(request.agent_pid)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    termination.hold()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(request.env)
    _reset_random()
    _renew_threads()

    from deadpool_runtime import bootstrap

    bootstrap.run_rank(request, channel)


def _fork_rank(request: ForkRequest, channel: socket.socket, parked: socket.socket) -> int:
    """Fork twice; return the pid of the rank's process."""
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(reader)
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            try:
                _become_rank(request, channel, parked)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        os.write(writer, pid.to_bytes(8, "big"))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        pid = int.from_bytes(pipe.read(8), "big")
    os.waitpid(middle, 0)
    return pid


def main() -> None:
    """``python -m deadpool_runtime.zygote FD AGENT_PID``: serve fork requests on the socket FD
    until it closes.
    """
    parked = socket.socket(fileno=int(sys.argv[1]))
    parked.setblocking(True)
    die_with_parent(int(sys.argv[2]))
    # The agent decides when this process ends; a signal to the process group is not for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started = time.monotonic()
    _import_everything()
    gc.collect()
    gc.freeze()
    parked.send(msgspec.msgpack.encode(Warm(time.monotonic() - started)))
    decoder = msgspec.msgpack.Decoder(ForkRequest)
    while True:
        data, fds, _flags, _address = socket.recv_fds(parked, MAX_REQUEST_NBYTES, 1)
        if not data:
            return
        request = decoder.decode(data)
        channel = socket.socket(fileno=fds[0])
        pid = _fork_rank(request, channel, parked)
        channel.close()
        parked.send(msgspec.msgpack.encode(Forked(request.rank, request.born, pid)))


if __name__ == "__main__":
    main()
