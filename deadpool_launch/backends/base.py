"""The interface between the driver and the place where nodes come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deadpool_launch.options import LaunchOptions


@dataclass(frozen=True, slots=True)
class Allocation:
    """The nodes a job has, as found when the launcher starts."""

    job_id: str
    #: All nodes, active and spare, in the site's order.
    nodes: tuple[str, ...]
    #: The node the launcher runs on, if it is one of them.
    batch_host: str | None
    #: Address at which agents reach the launcher.
    launcher_host: str
    #: Added to the environment of every rank.
    env: Mapping[str, str] = field(default_factory=dict)
    #: How often the site has begun the job again.
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """One result of the preflight; ``ok`` is ``None`` for a warning, which stops nothing."""

    name: str
    ok: bool | None
    text: str
    #: What the user can do about it; empty if nothing need be done.
    remedy: str = ""
    #: The node that must be left out because of it, if it can be spared.
    leave_out: str | None = None
    #: A warning for want of knowledge: it could not be looked at.
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a site says of a node. ``health``: a word of ``deadpool_slurm.parse.Health``."""

    state: str
    health: str
    reason: str


@dataclass(frozen=True, slots=True)
class Sight:
    """What a site says of the job at one moment."""

    nodes: Mapping[str, Sighting]
    #: When its time is over, in seconds since 1970; None if it has no limit.
    ends_at: float | None


class SiteError(Exception):
    """The site did not answer, or cannot be understood; that says nothing of its nodes."""


class AgentHandle(Protocol):
    """One started agent."""

    async def wait(self) -> int:
        """The exit code, once the agent (or the step that carries it) has ended; repeatable."""

    async def stop(self, grace_s: float) -> None:
        """End everything the agent started on its node: SIGTERM if ``grace_s`` > 0, then SIGKILL.

        Never raises and may be called again. On a node that cannot be reached only the near end is
        closed.
        """

    def last_words(self) -> str:
        """What the site said about this agent's start or end, in one line; empty if nothing."""

    def saved(self) -> dict[str, Any]:
        """What ``Backend.adopt`` needs of it in another launcher."""


class Backend(Protocol):
    """A site: hands out nodes and runs one agent on each. ``discover`` is called first."""

    def discover(self, options: LaunchOptions) -> Allocation:
        """The nodes to use. Raises ``UsageError`` or ``UnsuitableError``; starts nothing."""

    async def preflight(self, options: LaunchOptions) -> list[Check]:
        """Whether this allocation can keep the job alive; starts short probes, never raises."""

    async def start_agent(self, node: str, argv: Sequence[str], log_path: Path) -> AgentHandle:
        """Start ``argv`` on ``node`` with its output in ``log_path``, without waiting for it.

        Raises ``StartFailed`` if it cannot even be tried.
        """

    def restore(self, allocation: Allocation, term: int) -> None:
        """Instead of ``discover``, in a launcher that was started again; ``term`` numbers it."""

    def adopt(self, node: str, saved: Mapping[str, Any]) -> AgentHandle:
        """An agent that an earlier launcher of the job started; it may have ended since."""

    def agent_command(self, node: str, argv: Sequence[str], log_path: Path) -> list[str]:
        """The command ``start_agent`` would run, for ``--dry-run``."""

    def ends_at(self) -> float | None:
        """When the job's time is over, as far as that is known without asking."""

    def look(self, nodes: Sequence[str]) -> Sight | None:
        """What the site says of these nodes and the job now; None where there is nobody to ask.

        Blocks. Raises ``SiteError``.
        """

    def requeue(self) -> None:
        """Have the job run again from its beginning, later; the site ends this run of it.

        Blocks. Raises ``SiteError``.
        """

    def cancel_waiting(self, name: str) -> None:
        """Take the user's jobs of this name that have not begun out of the queue, if there is one.

        Blocks. Raises ``SiteError``.
        """

    def comment(self, text: str) -> None:
        """Put a comment on the job, where the site shows it; nothing where there is no such place.

        Blocks. Raises ``SiteError``.
        """

    def leave(self) -> None:
        """Let what was started go on: another launcher has it."""

    async def close(self) -> None:
        """End whatever is left of what was started or adopted."""
