"""Slurm by its commands: ``scontrol``, ``squeue``, ``sacct`` and ``scancel``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from deadpool_slurm import client, environ, parse, srun
from deadpool_slurm.calls import call
from deadpool_slurm.client import CALL_TIMEOUT_S, SlurmError
from deadpool_slurm.submission import SubmitText

#: Without these nothing can be asked; ``sacct`` is of use where a site keeps accounts.
PROGRAMS = ("scontrol", "squeue", "scancel")


class CommandFailed(SlurmError):
    """A command has ended with an exit code. ``printed``: what it wrote all the same."""

    def __init__(self, text: str, printed: str) -> None:
        super().__init__(text)
        self.printed = printed


def complaint(program: str, stderr: str) -> str:
    """What a command wrote about its failure, in one line, without its name before each part."""
    lines = (line.strip().removeprefix(f"{program}: ") for line in stderr.splitlines())
    said = (line.removeprefix("error: ").removeprefix("fatal: ") for line in lines)
    return "; ".join(line for line in said if line)


class CommandLineClient:
    """``SlurmClient`` by Slurm's commands."""

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._environ = environ.for_srun(os.environ if variables is None else variables)
        self._timeout_s = timeout_s

    def job(self, job_id: str, *, submission: bool = False) -> parse.JobFacts:
        """The job as it is now."""
        facts = parse.parse_job(self._run("scontrol", "-o", "show", "job", job_id))
        if facts is None or not facts.nodes:
            raise SlurmError(f"scontrol shows no job {job_id} with nodes")
        return self._with_submission(facts) if submission else facts

    def nodes(self, names: Sequence[str]) -> dict[str, parse.NodeFacts]:
        """The state of these nodes; one that Slurm does not know is missing."""
        if not names:
            return {}
        try:
            text = self._run("scontrol", "-o", "show", "node", parse.fold_nodes(names))
        except CommandFailed as error:
            # An exit code also says that one of several is not known.
            if "not found" not in error.printed:
                raise
            text = error.printed
        return parse.parse_nodes(text)

    def steps(self, job_id: str) -> list[str]:
        """The names of the job's steps."""
        return list(self._steps(job_id))

    def config(self) -> dict[str, str]:
        """The table of ``scontrol show config``."""
        return parse.parse_config(self._run("scontrol", "show", "config"))

    def do(self, change: client.Change) -> bool:
        """Make the change; false if there was nothing to change."""
        match change:
            case client.EndStep():
                return self._end_step(change)
            case client.EndJob():
                self._run(*srun.cancel_job(change.job_id))
            case client.Requeue():
                self._run("scontrol", "requeue", change.job_id)
            case client.EndWaiting():
                self._run(*srun.cancel_waiting(change.name, os.getuid()))
            case client.Comment():
                self._run(*srun.comment_job(change.job_id, change.text))
            case client.KeepNodes():
                self._run(*srun.keep_nodes(change.job_id, parse.fold_nodes(change.nodes)))
            case _:
                assert_never(change)
        return True

    def _end_step(self, change: client.EndStep) -> bool:
        step_id = self._steps(change.job_id).get(change.name)
        if step_id is None:
            return False
        try:
            self._run(*srun.cancel_step(step_id, change.signal))
        except CommandFailed:
            # Of a step that heeds the signal at once scancel says that there is none.
            if change.name in self._steps(change.job_id):
                raise
        return True

    def _steps(self, job_id: str) -> dict[str, str]:
        return parse.parse_steps(self._run("squeue", "-h", "--steps", "-j", job_id, "-o", "%i|%j"))

    def _with_submission(self, facts: parse.JobFacts) -> parse.JobFacts:
        job_id, line, comment = facts.job_id, facts.submit_line, facts.comment
        script, problem = None, ""
        try:
            script = self._run("scontrol", "write", "batch_script", job_id, "-") or None
        except SlurmError as error:
            problem = str(error)
        if line is None:
            # Only a site that keeps accounts has an answer; one without costs nothing here.
            with contextlib.suppress(SlurmError):
                told = self._run("sacct", "-n", "-X", "-P", "-j", job_id, "-o", "SubmitLine")
                line = told.strip() or None
        else:
            # A Slurm that was built without it refuses; then the text will do.
            with contextlib.suppress(SlurmError):
                whole = parse.parse_whole_values(
                    self._run("scontrol", "--json", "show", "job", job_id)
                )
                line, comment = whole[0] or line, whole[1] or comment
        submitted = SubmitText(script, line, problem)
        return replace(facts, submit_line=line, comment=comment, submission=submitted)

    def _run(self, *argv: str) -> str:
        done = call(argv, self._environ, self._timeout_s, argv[0])
        if done.returncode != 0:
            said = complaint(argv[0], done.stderr) or f"exit code {done.returncode}"
            raise CommandFailed(f"{argv[0]}: {said}", done.stdout)
        return done.stdout
