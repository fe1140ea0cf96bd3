"""Slurm by pyslurm, where its commands are not to be had: in a container, for one.

Every question is put to a child process (``pyslurm_child.py``), which has a deadline.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, assert_never

from deadpool_slurm import client, environ, parse
from deadpool_slurm.calls import call
from deadpool_slurm.client import CALL_TIMEOUT_S, SlurmError
from deadpool_slurm.submission import SubmitText

#: The Python that has pyslurm, if it is another than this one.
PYTHON_VARIABLE = "DEADPOOL_PYSLURM_PYTHON"
_CHILD = Path(__file__).with_name("pyslurm_child.py")


class PyslurmClient:
    """``SlurmClient`` by pyslurm."""

    def __init__(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        child: Path = _CHILD,
    ) -> None:
        given = os.environ if variables is None else variables
        self._environ = environ.for_srun(given)
        self._timeout_s = timeout_s
        # Without the folder of the program among those that modules are found in.
        self._argv = [given.get(PYTHON_VARIABLE) or sys.executable, "-P", str(child)]

    def version(self) -> str:
        """Which pyslurm this is; ``SlurmError`` where it cannot be used."""
        return str(self._ask("version")["version"])

    def job(self, job_id: str, *, submission: bool = False) -> parse.JobFacts:
        """The job as it is now."""
        told = self._ask("job", job_id=_number(job_id), submission=submission)
        facts = job_facts(job_id, told)
        if not facts.nodes:
            raise SlurmError(f"pyslurm: job {job_id} has no nodes")
        if not submission:
            return facts
        submitted = SubmitText(told.get("script"), facts.submit_line, told.get("problem") or "")
        return replace(facts, submission=submitted)

    def nodes(self, names: Sequence[str]) -> dict[str, parse.NodeFacts]:
        """The state of these nodes; one that Slurm does not know is missing."""
        if not names:
            return {}
        told = self._ask("nodes", names=list(names))
        return {name: node_facts(name, node) for name, node in told.items()}

    def steps(self, job_id: str) -> list[str]:
        """The names of the job's steps."""
        return list(self._ask("steps", job_id=_number(job_id)))

    def config(self) -> dict[str, str]:
        """What the launcher looks at of Slurm's configuration."""
        return dict(self._ask("config"))

    def do(self, change: client.Change) -> bool:
        """Make the change; false if there was nothing to change."""
        match change:
            case client.EndStep():
                which = {"name": change.name, "signal_name": change.signal}
                done = self._ask("end_step", job_id=_number(change.job_id), **which)
            case client.EndJob():
                done = self._ask("end_job", job_id=_number(change.job_id))
            case client.Requeue():
                done = self._ask("requeue", job_id=_number(change.job_id))
            case client.EndWaiting():
                done = self._ask("end_waiting", name=change.name)
            case client.Comment():
                done = self._ask("comment", job_id=_number(change.job_id), text=change.text)
            case client.KeepNodes():
                names = list(change.nodes)
                done = self._ask("keep_nodes", job_id=_number(change.job_id), names=names)
            case _:
                assert_never(change)
        return bool(done)

    def _ask(self, what: str, **about: Any) -> Any:
        argv = [*self._argv, json.dumps({"ask": what, **about})]
        done = call(argv, self._environ, self._timeout_s, "pyslurm")
        try:
            told = json.loads(done.stdout)
        except ValueError:
            # Slurm's library has ended the child, or Python has.
            said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise SlurmError(f"pyslurm: {said[0]}") from None
        if "error" in told:
            raise SlurmError(f"pyslurm: {told['error']}")
        return told["value"]


def job_facts(job_id: str, told: Mapping[str, Any]) -> parse.JobFacts:
    """The job in the child's words."""
    end = told.get("end_time") if told.get("time_limit") else None
    return parse.JobFacts(
        job_id=job_id,
        state=str(told["state"]),
        nodes=parse.expand_nodes(told.get("nodes") or ""),
        batch_host=told.get("batch_host") or None,
        submit_line=told.get("submit_line") or None,
        # It does not tell; what the cluster does by itself is in its configuration.
        stepmgr=False,
        end_time=datetime.fromtimestamp(end) if end else None,
        can_requeue=told.get("can_requeue"),
        work_dir=told.get("work_dir") or None,
        comment=told.get("comment") or None,
    )


def node_facts(name: str, told: Mapping[str, Any]) -> parse.NodeFacts:
    """A node in the child's words."""
    state = str(told["state"])
    return parse.NodeFacts(
        name=name,
        address=told.get("address") or name,
        state=state,
        reason=told.get("reason") or "",
        cpus=told.get("cpus") or None,
        health=parse.health_of(state),
    )


def _number(job_id: str) -> int:
    if not job_id.isdecimal():
        raise SlurmError(f"{job_id} is no number of a job")
    return int(job_id)
