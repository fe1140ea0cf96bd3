"""From a freshly forked process to the user's running script.

The script runs as ``python script.py args`` would run it: same ``sys.argv``, ``__main__``,
``sys.path[0]``, exit behaviour, and tracebacks that begin in the user's own code. Before it starts,
the environment says what every PyTorch script expects (RANK, WORLD_SIZE, MASTER_ADDR, …) and every
process group it makes is registered.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from deadpool_runtime import context, protocol, stacks
from deadpool_runtime.groups.progress import Recorder, record_path
from deadpool_runtime.link import RankLink

if TYPE_CHECKING:
    from deadpool_runtime.parking import ForkRequest


#: Where this package's own frames are.
_OURS = str(Path(__file__).parent) + os.sep


def prepare() -> None:
    """Load, in the parked process, what each rank needs before its script: the native parts."""
    from deadpool_runtime.groups import native
    from deadpool_runtime.replication import fused

    native.load()
    fused.load()


def rank_environment(request: ForkRequest, attempt: int, store: protocol.Address) -> dict[str, str]:
    """The variables ``torchrun`` documents for a worker, with this job's values."""
    return {
        "RANK": str(request.rank),
        "LOCAL_RANK": str(request.local_rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_WORLD_SIZE": str(request.nproc_per_node),
        "GROUP_RANK": str(request.node_index),
        "GROUP_WORLD_SIZE": str(request.world_size // request.nproc_per_node),
        "ROLE_RANK": str(request.rank),
        "ROLE_WORLD_SIZE": str(request.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": request.job_id,
        "DEADPOOL_RUN_DIR": request.run_dir,
    }


def users_traceback(error: BaseException, script: str) -> str:
    """The traceback as text, as if the script ran alone.

    Left out are the frames between the interpreter's start and the script, and those inside this
    package: where the script called it is what its reader can act on.
    """
    whole = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [whole]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        files = [frame.filename for frame in part.stack]
        start = files.index(script) if script in files else 0
        kept = [frame for frame in part.stack[start:] if not frame.filename.startswith(_OURS)]
        if script not in files:
            kept = [frame for frame in kept if not _is_start_up(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        pending += [part.__cause__, part.__context__]
    return "".join(whole.format())


def _is_start_up(filename: str) -> bool:
    return filename.startswith("<frozen ") or filename == runpy.__file__


def _one_line(error: BaseException) -> str:
    """The exception as the last line of its traceback says it, even if it cannot say it itself."""
    try:
        return traceback.format_exception_only(type(error), error)[-1].strip()
    except Exception:
        return type(error).__name__


def _exit_code(error: SystemExit) -> int:
    """The process exit code that Python would use for this ``SystemExit``."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _seed_by_rank(rank: int) -> None:
    """Make the generators that start unseeded the same in two runs, so that those can be compared.

    Only when final states are recorded; torch's generator starts from a constant anyway.
    """
    import random

    import numpy as np

    random.seed(rank)
    np.random.seed(rank)


def _run_script(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    # The parked process runs with -P, so nothing of the working directory is on the path yet.
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _finish_exit_work() -> None:
    """Do what the interpreter does at its exit for the script: threads, exit handlers, output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _set_up(request: ForkRequest, link: RankLink) -> object:
    """Meet the launcher, wait for its word to begin, and put the rank's context in place.

    Returns the store's server, which listens for as long as it is kept.
    """
    from deadpool_runtime.control import Control
    from deadpool_runtime.groups.registry import GroupRegistry
    from deadpool_runtime.stores import serve_store

    arena = Path(request.arena)
    stacks.answer_signal(stacks.stack_path(arena, request.rank, request.born))
    recorder = Recorder(record_path(arena, request.rank, request.born))
    registry = GroupRegistry(recorder)
    control = Control(link, registry)
    link.start(control.on_message)
    # Every rank's process hosts a store that costs one idle thread; each epoch uses that of a
    # living rank, so no single process's death can take the rendezvous with it.
    server = serve_store(request.host)
    link.send(protocol.RankUp(os.getpid(), server.port))
    begin = control.wait_begin()
    # A replacement builds without peers: its own store cannot die under the script's rendezvous.
    store = protocol.Address(request.host, server.port) if begin.replacement else begin.store
    os.environ.update(rank_environment(request, begin.attempt, store))
    registry.install(detached=begin.replacement, epoch=begin.epoch)
    context.install_context(
        context.RankContext(
            rank=request.rank,
            local_rank=request.local_rank,
            world_size=request.world_size,
            born=request.born,
            epoch=begin.epoch,
            replacement=begin.replacement,
            attempt=begin.attempt,
            link=link,
            control=control,
            registry=registry,
            store=store,
            record_final_state=request.record_final_state,
            fault_step=request.fault_step,
            run_dir=request.run_dir,
            confirm_timeout_s=request.confirm_timeout_s,
            job_id=request.job_id,
            checkpoint_dir=request.checkpoint_dir,
            checkpoint_every=request.checkpoint_every,
            replication_interval=request.replication_interval,
            arena=request.arena,
            recorder=recorder,
        )
    )
    return server


def run_rank(request: ForkRequest, channel: socket.socket) -> NoReturn:
    """Be rank ``request.rank`` until the script ends. Called in the forked process; never
    returns.
    """
    faulthandler.enable()
    link = RankLink(channel)
    try:
        _store_server = _set_up(request, link)
    except Exception as error:
        text = traceback.format_exc()
        sys.stderr.write(text)
        link.send(protocol.ScriptFailed(_one_line(error), text, 1))
        os._exit(1)
    if request.record_final_state:
        _seed_by_rank(request.rank)
    me = os.getpid()
    failed: protocol.ScriptFailed | None = None
    code = 0
    try:
        _run_script(request.script, list(request.script_args))
    except SystemExit as error:
        code = _exit_code(error)
        if code != 0:
            failed = protocol.ScriptFailed(f"SystemExit: {error.code}", "", code)
    except BaseException as error:
        code = 1
        text = users_traceback(error, request.script)
        sys.stderr.write(text)
        failed = protocol.ScriptFailed(_one_line(error), text, code)
    if failed is not None:
        link.send(failed)
    _finish_exit_work()
    # A process that the script forked may come here too; it ends, but the rank has not.
    if failed is None and os.getpid() == me:
        context.script_ended()
        link.send(protocol.ScriptEnded())
    # Not through the interpreter's exit: a thread inside a TCPStore call would end it in
    # std::terminate.
    os._exit(code)
