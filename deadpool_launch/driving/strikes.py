"""The faults of a rehearsal, brought about when a rank comes to the step that they are for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from deadpool_launch import faults
from deadpool_launch.backends.base import Backend
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.journal import Journal


class Strikes:
    """``plan``: the fault that comes when this rank says that it has come to its step."""

    def __init__(
        self,
        plan: Mapping[int, faults.Fault],
        backend: Backend,
        journal: Journal,
        spawn: Callable[[Any], object],
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._journal = journal
        self._spawn = spawn

    def strike(self, node: str, rank: int, step: int, pids: Mapping[int, int]) -> None:
        """Bring about what is planned for this rank. ``pids``: of every rank's process."""
        fault = self._plan.get(rank)
        if fault is None:
            return
        self._journal.write("fault", fault=str(fault), node=node, rank=rank, step=step)
        self._journal.say(
            f"rehearsal: {fault.kind} of {node if fault.node else f'rank {rank}'} at step {step}"
        )
        assert isinstance(self._backend, LocalBackend)
        match fault.kind:
            case faults.FaultKind.POWER_OFF:
                self._spawn(self._backend.power_off(node))
            case faults.FaultKind.VANISH:
                self._backend.vanish(node)
            case faults.FaultKind.FREEZE_NODE:
                self._backend.freeze(node)
            case faults.FaultKind.KILL:
                os.kill(pids[rank], signal.SIGKILL)
            case faults.FaultKind.FREEZE:
                os.kill(pids[rank], signal.SIGSTOP)
            case _:
                assert_never(fault.kind)
