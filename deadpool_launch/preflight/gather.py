"""Finds out what the rules judge: asks Slurm, and every node with one step.

The back ends call this before every start, and ``deadpool preflight`` has it look at more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from deadpool_launch import channel
from deadpool_launch.backends.slurm_steps import NodeProbe
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight import calls, node_rules
from deadpool_launch.preflight.facts import Answers, ProbeTask, SlurmFacts
from deadpool_launch.preflight.own import share, unshare
from deadpool_launch.preflight.probe import probe
from deadpool_launch.sites.model import SiteConfig
from deadpool_slurm import environ, mpi
from deadpool_slurm.client import CALL_TIMEOUT_S, SlurmClient, SlurmError
from deadpool_slurm.submission import SubmitText


def cluster_facts(
    client: SlurmClient, variables: Mapping[str, str], network: str | None, *, mpi_too: bool
) -> SlurmFacts:
    """What can be known outside of a job. Blocks."""
    kinds = mpi_kinds(variables) if mpi_too else None
    try:
        config = client.config()
    except SlurmError as error:
        return SlurmFacts(config_problem=str(error), network=network, mpi_kinds=kinds)
    return SlurmFacts(config=config, network=network, mpi_kinds=kinds)


def job_facts(
    client: SlurmClient,
    job: environ.JobEnviron,
    variables: Mapping[str, str],
    network: str | None,
    *,
    mpi_too: bool,
) -> SlurmFacts:
    """What Slurm says of the cluster and the job. Blocks."""
    facts = cluster_facts(client, variables, network, mpi_too=mpi_too)
    found, nodes, problem = None, {}, ""
    try:
        found = client.job(job.job_id, submission=True)
        nodes = client.nodes(found.nodes)
    except SlurmError as error:
        problem = str(error)
    submission = SubmitText(None, None, problem) if found is None else found.submission
    evidence = None
    if submission is not None and submission.asks_no_kill():
        evidence = "--no-kill was given at submission"
    elif job.no_kill_variable:
        evidence = "SBATCH_NO_KILL is set"
    return replace(
        facts,
        no_kill=evidence,
        submission_problem=submission.problem if submission is not None else "",
        job=found,
        nodes=nodes,
        job_problem=problem,
    )


def mpi_kinds(variables: Mapping[str, str]) -> tuple[str, ...] | None:
    """What ``srun --mpi=list`` names; None if it does not answer. Blocks."""
    try:
        said = subprocess.check_output(
            mpi.LIST_ARGV,
            # Older versions have it among their errors.
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environ.for_srun(variables),
            timeout=CALL_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return mpi.parse_kinds(said.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class Asked:
    """Whom to ask in which job."""

    job_id: str
    nodes: Sequence[str]
    #: All nodes of the job, also those that are known to be bad.
    all_nodes: Sequence[str]
    launcher_host: str


async def node_answers(
    client: SlurmClient,
    variables: Mapping[str, str],
    site: SiteConfig,
    asked: Asked,
    options: LaunchOptions,
    *,
    ports: bool,
) -> Answers:
    """Run the probe on these nodes at once. ``ports``: they call each other too.

    This is also the job's first step on purpose: Slurm makes a job's first step only when every
    node answers, and runs the site's prolog on each node then.
    """
    token = secrets.token_hex(8)
    try:
        shared, problems = share(options, token)
    except OSError as error:
        return Answers(problems=(node_rules.run_dir_problem(Path(options.run_dir), error),))
    task = ProbeTask(
        run_dir=options.run_dir,
        token=token,
        checkpoint_dir=shared.checkpoint_dir,
    )
    timeout_s = options.agent_start_timeout_s + options.admission_s
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(unshare, shared, token)
        launcher = None
        if ports:
            secret = channel.write_secret(Path(options.run_dir))
            exchange = calls.Exchange(asked.launcher_host, secret, len(asked.nodes))
            launcher = (await stack.enter_async_context(exchange)).address
            timeout_s += calls.ALL_S
        theirs = msgspec.structs.replace(
            task,
            admission=list(options.admission),
            launcher=launcher,
            launcher_host=asked.launcher_host,
        )
        probing = NodeProbe(client, asked.job_id, probe_argv(theirs), variables, site)
        own = await asyncio.to_thread(probe, task)
        await probing.ask(asked.nodes, asked.all_nodes, timeout_s)
    return Answers(
        own=own,
        asked=tuple(asked.nodes),
        said=probing.answers,
        silence=probing.silence,
        given_up=probing.given_up,
        directories=shared,
        problems=tuple(problems),
    )


def probe_argv(task: ProbeTask) -> list[str]:
    """Command line of the probe."""
    what = msgspec.json.encode(task).decode()
    return [sys.executable, "-m", "deadpool_launch.preflight.probe", what]
