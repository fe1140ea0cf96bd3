"""Runs Slurm's commands. The only file of this package that starts processes.

Every call has a deadline of its own, shorter than Slurm's (its commands retry for minutes when the
controller is away). A command that fails, hangs or prints what cannot be read raises
``SlurmError``: no answer is never taken for "no node is down" or "the job is gone".

The calls block; in an event loop run them in a thread.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deadpool_slurm import environ, parse, srun

#: Deadline of one command, in seconds.
COMMAND_TIMEOUT_S = 10.0


class SlurmError(Exception):
    """A Slurm command failed or did not answer."""


@dataclass(frozen=True, slots=True)
class SubmitText:
    """How a job was submitted; what Slurm does not keep or show is ``None``."""

    batch_script: str | None
    submit_line: str | None
    #: Why the batch script is missing, in Slurm's words; empty if it is not.
    problem: str = ""

    def asks_no_kill(self) -> bool:
        """Whether script or submit line ask for ``--no-kill``; the line has the last word."""
        words: list[str] = []
        if self.batch_script is not None:
            words += parse.sbatch_options(self.batch_script)
        if self.submit_line is not None:
            words += parse.submit_line_options(self.submit_line)
        return parse.asks_no_kill(words)


class SlurmClient(Protocol):
    """What the launcher asks of Slurm."""

    def job(self, job_id: str) -> parse.JobFacts:
        """The job as it is now."""

    def nodes(self, names: Sequence[str]) -> dict[str, parse.NodeFacts]:
        """The state of these nodes; one that Slurm does not know is missing."""

    def config(self) -> dict[str, str]:
        """Slurm's configuration, its version included (``SLURM_VERSION``)."""

    def submission(self, job_id: str) -> SubmitText:
        """How the job was submitted, as far as Slurm tells; never raises."""

    def end_step(self, job_id: str, name: str, signal: str | None = None) -> bool:
        """End (or signal) the job's steps of this name; whether there were any."""

    def steps(self, job_id: str) -> list[str]:
        """The names of the job's steps."""

    def requeue(self, job_id: str) -> None:
        """Put the running job back into the queue, which ends its processes."""

    def end_job(self, job_id: str) -> None:
        """End the job with all its steps."""

    def cancel_waiting(self, name: str) -> None:
        """End the user's jobs of this name that have not begun."""

    def comment(self, job_id: str, text: str) -> None:
        """Put a comment on the job, where ``scontrol show job`` has it."""


class CommandLineClient:
    """``SlurmClient`` through ``scontrol``, ``squeue``, ``sacct`` and ``scancel``."""

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        self._environ = environ.for_srun(os.environ if variables is None else variables)
        self._timeout_s = timeout_s

    def job(self, job_id: str) -> parse.JobFacts:
        """The job as it is now."""
        facts = parse.parse_job(self._run("scontrol", "-o", "show", "job", job_id))
        if facts is None or not facts.nodes:
            raise SlurmError(f"scontrol shows no job {job_id} with nodes")
        return facts

    def nodes(self, names: Sequence[str]) -> dict[str, parse.NodeFacts]:
        """The state of these nodes; one that Slurm does not know is missing."""
        if not names:
            return {}
        return parse.parse_nodes(
            self._run("scontrol", "-o", "show", "node", parse.fold_nodes(names))
        )

    def config(self) -> dict[str, str]:
        """Slurm's configuration, its version included (``SLURM_VERSION``)."""
        return parse.parse_config(self._run("scontrol", "show", "config"))

    def submission(self, job_id: str) -> SubmitText:
        """How the job was submitted, as far as Slurm tells; never raises."""
        script, line, problem = None, None, ""
        try:
            script = self._run("scontrol", "write", "batch_script", job_id, "-") or None
        except SlurmError as error:
            problem = str(error)
        with contextlib.suppress(SlurmError):
            line = self.job(job_id).submit_line
        if line is None:
            # Only a site that keeps accounts has an answer; one without costs nothing here.
            with contextlib.suppress(SlurmError):
                line = self._run(
                    "sacct", "-n", "-X", "-P", "-j", job_id, "-o", "SubmitLine"
                ).strip()
        return SubmitText(script, line or None, problem)

    def end_step(self, job_id: str, name: str, signal: str | None = None) -> bool:
        """End (or signal) the job's steps of this name; whether there were any."""
        step_id = self._steps(job_id).get(name)
        if step_id is None:
            return False
        self._run(*srun.cancel_step(step_id, signal))
        return True

    def steps(self, job_id: str) -> list[str]:
        """The names of the job's steps."""
        return list(self._steps(job_id))

    def _steps(self, job_id: str) -> dict[str, str]:
        return parse.parse_steps(self._run("squeue", "-h", "--steps", "-j", job_id, "-o", "%i|%j"))

    def requeue(self, job_id: str) -> None:
        """Put the running job back into the queue, which ends its processes."""
        self._run("scontrol", "requeue", job_id)

    def end_job(self, job_id: str) -> None:
        """End the job with all its steps."""
        self._run(*srun.cancel_job(job_id))

    def cancel_waiting(self, name: str) -> None:
        """End the user's jobs of this name that have not begun."""
        self._run(*srun.cancel_waiting(name, os.getuid()))

    def comment(self, job_id: str, text: str) -> None:
        """Put a comment on the job, where ``scontrol show job`` has it."""
        self._run(*srun.comment_job(job_id, text))

    def _run(self, *argv: str) -> str:
        try:
            done = subprocess.run(
                argv,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{argv[0]} did not answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise SlurmError(f"{argv[0]} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise SlurmError(f"{argv[0]}: {said}")
        return done.stdout
