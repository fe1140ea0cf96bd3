"""``deadpool preflight --self-test``: a small job loses a node and must go on on its spare.

It is an ordinary ``deadpool-launch`` on the same nodes; what it came to is read from its journal.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import deadpool_runtime
from deadpool_launch.backends.base import Check
from deadpool_launch.controller.wording import plural
from deadpool_launch.display import SilentDisplay
from deadpool_launch.errors import UnsuitableError, UsageError
from deadpool_launch.options import LaunchOptions
from deadpool_launch.rehearsal_run import Interrupts, Outcome, run_once
from deadpool_launch.view import IncidentView, RunView
from deadpool_slurm.client import EndStep, SlurmClient, SlurmError

#: Active nodes of the small job; it has one spare.
MOST_ACTIVE = 2
STRUCK_STEP = 5
#: All of it takes seconds; a job that takes so many times as long as an agent may does not go on.
_TIMES_AGENT_START = 10
#: Steps of a launcher, not those that look at the nodes.
_STEP = re.compile(r"deadpool-(?!preflight).+-\d+")


class TookTooLong(Exception):
    """The small job did not end in time; it has been ended."""


@dataclass(frozen=True, slots=True)
class Slurm:
    """Where the steps of the small job are."""

    client: SlurmClient
    job_id: str

    def steps(self) -> list[str]:
        """The job's steps that a launcher has started."""
        return [name for name in self.client.steps(self.job_id) if _STEP.fullmatch(name)]

    def kill_agent(self, node: str) -> None:
        """End the step that carries the node's agent, and all that it has started there."""
        own = re.compile(rf"deadpool-{re.escape(node)}-\d+")
        for name in self.steps():
            if own.fullmatch(name):
                self.client.do(EndStep(self.job_id, name, "KILL"))

    def end_all(self) -> None:
        """After a launcher that was killed."""
        with contextlib.suppress(SlurmError):
            for name in self.steps():
                self.client.do(EndStep(self.job_id, name, "KILL"))


def active_nodes(usable: int, *, site: str) -> int:
    """How many nodes the small job trains on. Raises ``UsageError`` if there is none to be lost."""
    if site == "local":
        return MOST_ACTIVE
    if usable < 2:
        raise UsageError(
            "--self-test: takes two nodes or more, one of them as a spare; allocate --nodes=3"
        )
    return min(MOST_ACTIVE, usable - 1)


def launch_argv(options: LaunchOptions, active: int, run_dir: Path) -> list[str]:
    """Command line of the small job; the last of its nodes with ranks is to be lost."""
    script = Path(deadpool_runtime.__file__).with_name("trial.py")
    victim = active - 1
    argv = [sys.executable, "-P", "-m", "deadpool_launch.cli", "--site", options.site_config.name]
    argv += ["--nodes", str(active), "--spares", "1", "--nproc-per-node", "1"]
    argv += ["--run-dir", str(run_dir), "--spare-start", "at-start"]
    argv += ["--agent-start-timeout", f"{options.agent_start_timeout_s:g}"]
    if options.assume_no_kill:
        argv.append("--assume-no-kill")
    if options.site == "local":
        return [*argv, "--fault", f"power-off:{victim}@{STRUCK_STEP}", str(script)]
    return [*argv, str(script), "--", "--hold", f"{victim}:{STRUCK_STEP}"]


class Strike(SilentDisplay):
    """Strikes once the rank that is to be lost stands still.

    ``kill``: ends all of a node's processes; None where the launcher itself does that.
    """

    def __init__(
        self,
        victim: int,
        run_dir: Path,
        kill: Callable[[str], None] | None,
        longest_s: float,
    ) -> None:
        self._victim = victim
        self._held = run_dir / "held"
        self._kill = kill
        self._until = time.monotonic() + longest_s
        #: When, and which node.
        self.struck_at: float | None = None
        self.node = ""

    def show(self, view: RunView) -> None:
        """Look whether it is time."""
        if time.monotonic() > self._until:
            raise TookTooLong
        if view.faults:
            self.struck_at, self.node = float(view.faults[0]["at"]), str(view.faults[0]["node"])
        if self._kill is None or self.struck_at is not None or not self._held.exists():
            return
        self.node = view.ranks[self._victim].node
        at = time.time()
        # Where Slurm does not answer it is tried again, as the rank stands still until then.
        with contextlib.suppress(SlurmError):
            self._kill(self.node)
            self.struck_at = at


def run(
    options: LaunchOptions, active: int, run_dir: Path, slurm: Slurm | None, interrupts: Interrupts
) -> Check:
    """Run the small job and say what became of it; nothing of it runs any more then.

    Raises ``UnsuitableError`` where there are agents of another job, and ``Interrupted``.
    """
    try:
        others = [] if slurm is None else slurm.steps()
    except SlurmError as error:
        return _failed(f"the job's steps cannot be listed: {error}", run_dir)
    if others:
        raise UnsuitableError(
            f"--self-test: a job of deadpool-launch runs in this allocation ({others[0]}); wait "
            "for its end, or test in another allocation"
        )
    longest_s = _TIMES_AGENT_START * options.agent_start_timeout_s
    kill = None if slurm is None else slurm.kill_agent
    strike = Strike(active - 1, run_dir, kill, longest_s)
    try:
        outcome = run_once(launch_argv(options, active, run_dir), run_dir, strike, interrupts)
    except TookTooLong:
        return _failed(f"the small job did not end within {longest_s:g} s", run_dir)
    finally:
        if slurm is not None:
            slurm.end_all()
    return judge(outcome, strike.node, strike.struck_at, active - 1, run_dir)


def judge(
    outcome: Outcome, node: str, struck_at: float | None, victim: int, run_dir: Path
) -> Check:
    """What its journal says. Pure."""
    view = outcome.view
    if outcome.exit_code != 0:
        end = view.end.reason if view.end is not None else ""
        why = end or next(iter(outcome.last_lines[-1:]), "")
        when = f"after {node} was struck" if struck_at is not None else "before it was struck"
        return _failed(
            f"the small job ended {when} with exit code {outcome.exit_code}: {why}", run_dir
        )
    incident: IncidentView | None = next(iter(view.incidents.values()), None)
    if struck_at is None or incident is None or incident.closed_at is None:
        return _failed("the small job ended before a node of it was struck", run_dir)
    heir = view.ranks[victim].node
    if heir == node:
        return _failed(f"no spare took the ranks of {node}: they run there again", run_dir)
    again = plural(incident.replayed_steps or 0, "completed step")
    took = f"{incident.closed_at - struck_at:.1f} s later with {again} run again"
    text = f"{node} was lost to a small job; {heir} took its rank, and training went on {took}"
    return Check("self-test", True, text)


def _failed(why: str, run_dir: Path) -> Check:
    remedy = f"its logs are in {run_dir}"
    return Check("self-test", False, why, remedy)
