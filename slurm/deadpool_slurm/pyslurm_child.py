"""Answers one question about Slurm through pyslurm: a program that is started for each question.

A process of its own, since Slurm's library ends the process that it is in where it finds no
configuration, and waits for minutes where the controller is away. Nothing of DEADPOOL is imported
here, so any Python that has pyslurm will do. The question is the first argument; the answer goes to
standard output. Both are JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

#: Settings by their names in slurm.conf, and in pyslurm.
_SETTINGS = {
    "SLURM_VERSION": "version",
    "ClusterName": "cluster_name",
    "KillOnBadExit": "kill_on_bad_exit",
    "MpiDefault": "mpi_default",
    "ReturnToService": "return_to_service",
    "SlurmctldParameters": "slurmctld_parameters",
    "SlurmdTimeout": "slurmd_timeout",
    "SwitchParameters": "switch_parameters",
}
#: What pyslurm says of a job that has no step: the library answers with an empty list.
_NO_STEPS = "Failed to load step info"
_OVER = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

#: pyslurm, as it is tried against stand-ins too.
Slurm = Any


def version(slurm: Slurm) -> dict[str, Any]:
    """That it can be imported here, and which it is."""
    return {"version": slurm.__version__}


def job(slurm: Slurm, job_id: int, submission: bool) -> dict[str, Any]:
    """What the launcher wants to know of a job."""
    found = slurm.Job.load(job_id)
    told = {
        "state": found.state,
        "nodes": found.allocated_nodes,
        "batch_host": found.batch_host,
        "submit_line": found.submit_line,
        "end_time": found.end_time,
        "time_limit": found.time_limit,
        "can_requeue": found.is_requeueable,
        "work_dir": found.working_directory,
        "comment": found.comment,
    }
    if submission:
        try:
            told["script"] = found.get_batch_script()
        except slurm.PyslurmError as error:
            told["problem"] = str(error)
    return told


def nodes(slurm: Slurm, names: list[str]) -> dict[str, Any]:
    """These nodes, as far as they are known; Slurm's own command loads all of them too."""
    return {
        node.name: {
            "address": node.address,
            "state": node.state,
            "reason": node.reason,
            "cpus": node.total_cpus,
        }
        for node in slurm.Nodes.load().values()
        if node.name in names
    }


def steps(slurm: Slurm, job_id: int) -> list[str]:
    """The names of the job's steps."""
    return [step.name for step in _steps(slurm, job_id)]


def config(slurm: Slurm) -> dict[str, str]:
    """The settings that are looked at anywhere."""
    loaded = slurm.slurmctld.Config.load()
    return {name: _setting(getattr(loaded, known)) for name, known in _SETTINGS.items()}


def end_step(slurm: Slurm, job_id: int, name: str, signal_name: str | None) -> bool:
    """End or signal the step; false if there is none of that name."""
    found = [step for step in _steps(slurm, job_id) if step.name == name]
    if not found:
        return False
    try:
        if signal_name is None:
            found[-1].cancel()
        else:
            found[-1].send_signal(_number(signal_name))
    except slurm.RPCError:
        # A step that heeds the signal at once is not to be found.
        if name in steps(slurm, job_id):
            raise
    return True


def end_job(slurm: Slurm, job_id: int) -> bool:
    """End the job."""
    try:
        slurm.Job(job_id).send_signal(int(signal.SIGKILL), steps="all")
    except slurm.RPCError:
        # It reports an error of an earlier call as one of this.
        if not str(slurm.Job.load(job_id).state).startswith(_OVER):
            raise
    return True


def end_waiting(slurm: Slurm, name: str) -> bool:
    """End the user's jobs of this name that are in the queue."""
    for each in slurm.Jobs.load().values():
        if each.name == name and each.user_id == os.getuid() and each.state == "PENDING":
            end_job(slurm, each.id)
    return True


def requeue(slurm: Slurm, job_id: int) -> bool:
    """Put the job back into the queue."""
    slurm.Job(job_id).requeue()
    return True


def comment(slurm: Slurm, job_id: int, text: str) -> bool:
    """Put a comment on the job."""
    return _modify(slurm, job_id, comment=text)


def keep_nodes(slurm: Slurm, job_id: int, names: list[str]) -> bool:
    """Give all other nodes back."""
    return _modify(slurm, job_id, required_nodes=names)


QUESTIONS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        version,
        job,
        nodes,
        steps,
        config,
        end_step,
        end_job,
        end_waiting,
        requeue,
        comment,
        keep_nodes,
    )
}


def answer(slurm: Slurm, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question: its ``value``, or Slurm's ``error``."""
    about = dict(question)
    try:
        return {"value": QUESTIONS[about.pop("ask")](slurm, **about)}
    except slurm.PyslurmError as error:
        return {"error": str(error)}


def _steps(slurm: Slurm, job_id: int) -> list[Any]:
    try:
        return list(slurm.JobSteps.load(job_id).values())
    except KeyError:  # It looks for the job of a waiting one among jobs with steps.
        return []
    except slurm.RPCError as error:
        if str(error).startswith(_NO_STEPS):
            return []
        raise


def _modify(slurm: Slurm, job_id: int, **changes: Any) -> bool:
    slurm.Job(job_id).modify(slurm.JobSubmitDescription(**changes))
    return True


def _setting(value: Any) -> str:
    """A value as slurm.conf has it."""
    if isinstance(value, Mapping):
        return ",".join(key if each is True else f"{key}={each}" for key, each in value.items())
    if isinstance(value, bool):
        return str(int(value))
    return "" if value is None else str(value)


def _number(name: str) -> int:
    return int(signal.Signals[f"SIG{name}"])


def main() -> None:
    """Answer the question in the first argument."""
    # What the library prints must not get into the answer.
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        import pyslurm
    except ImportError as error:
        told = {"error": str(error)}
    else:
        told = answer(pyslurm, json.loads(sys.argv[1]))
    with os.fdopen(out, "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main()
