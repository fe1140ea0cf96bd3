"""Real processes in which groups are tried: forked, so that only one process imports torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from deadpool_runtime.stores import nameless, serve_store

#: Far above what anything takes, since the machine is shared.
PATIENCE_S = 60.0
_fork = multiprocessing.get_context("fork")


class Worker:
    """One forked process, and what its function returned or raised."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._results: Connection
        self._results, answers = _fork.Pipe(duplex=False)
        self.process: BaseProcess = _fork.Process(target=_run, args=(answers, function, arguments))
        self.process.start()
        answers.close()

    @property
    def pid(self) -> int:
        pid = self.process.pid
        assert pid is not None
        return pid

    def result(self) -> Any:
        """Wait for the function's return value; its exception fails the caller."""
        assert self._results.poll(PATIENCE_S), "the worker hangs"
        try:
            outcome, value = self._results.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"the worker died with {self.process.exitcode}") from None
        assert outcome == "returned", value
        return value

    def wait_until_dead(self) -> None:
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None, "the worker lives on"


class Crew:
    """Workers and the store in which they meet."""

    def __init__(self) -> None:
        # In a process of its own, since its thread may hold some lock of the C library at the
        # moment of a fork, and in the new process nobody would ever release that.
        ports, answers = _fork.Pipe(duplex=False)
        self._server = _fork.Process(target=_serve, args=(answers,))
        self._server.start()
        self.port: int = ports.recv()
        with nameless():
            self.store = self.client()
        self._workers: list[Worker] = []

    def start(self, function: Callable[..., Any], *arguments: Any) -> Worker:
        worker = Worker(function, arguments)
        self._workers.append(worker)
        return worker

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run the function in that many processes, each told its rank, and return all results."""
        workers = [self.start(function, rank, *arguments) for rank in range(count)]
        return [worker.result() for worker in workers]

    def client(self) -> dist.TCPStore:
        """A connection of a worker's own, which no abort touches."""
        return dist.TCPStore(
            "127.0.0.1",
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE_S),
        )

    def meet(self, client: dist.Store, place: str, rank: int, size: int) -> None:
        """Wait in the store until all have come here."""
        client.set(f"meet/{place}/{rank}", "")
        client.wait([f"meet/{place}/{other}" for other in range(size)])

    def close(self) -> None:
        for worker in self._workers:
            if worker.process.exitcode is None:
                os.kill(worker.pid, signal.SIGKILL)
            worker.process.join()
        self._server.kill()
        self._server.join()


def _serve(answers: Connection) -> None:
    store = serve_store("127.0.0.1")
    answers.send(store.port)
    signal.pause()


def _run(answers: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    try:
        answers.send(("returned", function(*arguments)))
    except BaseException:
        answers.send(("raised", traceback.format_exc()))
    # A thread that waits in a store client does not survive an orderly exit.
    os._exit(0)
