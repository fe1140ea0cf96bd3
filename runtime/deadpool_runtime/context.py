"""What a rank's process knows about itself, put in place before the user's script starts.

``bootstrap`` fills it in; ``attach`` reads it. A process without a context runs under plain Python
or ``torchrun``, and there the runtime does nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from deadpool_runtime.protocol import Address, FromRank

if TYPE_CHECKING:
    from deadpool_runtime.control import Control
    from deadpool_runtime.groups.progress import Recorder
    from deadpool_runtime.groups.registry import GroupRegistry


class Link(Protocol):
    """The rank's connection to its agent."""

    def send(self, message: FromRank) -> None:
        """Pass ``message`` on; callable from any thread, and silent when the agent is gone."""

    def start(self, on_message: Callable[[Any], None]) -> None:
        """Call ``on_message`` for every ``ToRank`` message, in order, on one thread of the link."""


@dataclass(frozen=True)
class RankContext:
    """One process's place in the job, fixed for the life of the process.

    ``born``: the epoch in which the process was started. ``epoch``: the epoch of ``Begin``.
    ``replacement``: the other ranks already train, so groups stay peerless until the first plan.
    ``attempt``: how often the script was started anew for all ranks. ``store``: the rendezvous of
    ``epoch``. ``fault_step``: rehearsals only, the step at whose start the rank waits for a fault.
    ``confirm_timeout_s`` and ``replication_interval``: see ``protocol.JobSpec``.
    ``arena``: directory of the node's arena. ``job_id``: names the job in durable checkpoints;
    ``checkpoint_dir`` and ``checkpoint_every``: see ``protocol.JobSpec``.
    """

    rank: int
    local_rank: int
    world_size: int
    born: int
    epoch: int
    replacement: bool
    attempt: int
    link: Link
    control: Control
    registry: GroupRegistry
    store: Address
    record_final_state: bool
    fault_step: int | None
    run_dir: str
    confirm_timeout_s: float
    arena: str
    job_id: str = ""
    checkpoint_dir: str = ""
    checkpoint_every: int = 0
    replication_interval: int = 1
    #: Where the step that the script is in is written down for the agent.
    recorder: Recorder | None = None
    #: Called when the script has come to its end without an error, before the launcher is told.
    at_end: list[Callable[[], None]] = field(default_factory=list)


_current: RankContext | None = None


def install_context(context: RankContext) -> None:
    """Make ``context`` the process's own; called once, before the user's script."""
    global _current
    _current = context


def script_ended() -> None:
    """Do what is to be done at the end of a script that ended well, which it has whatever happens
    in here."""
    for finish in _current.at_end if _current is not None else ():
        try:
            finish()
        except Exception:
            traceback.print_exc()


def current_context() -> RankContext | None:
    """The process's context, or None when no launcher started it."""
    return _current
