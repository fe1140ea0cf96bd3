"""The interface between the driver and the place where nodes come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

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

    def agent_command(self, node: str, argv: Sequence[str], log_path: Path) -> list[str]:
        """The command ``start_agent`` would run, for ``--dry-run``."""

    async def close(self) -> None:
        """End whatever is left of what was started."""
