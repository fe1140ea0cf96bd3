"""What Slurm's version, its configuration and the job itself mean for hot swap. Pure.

Text and facts in, ``Check`` values out. A rule of a name is in the table of ``deadpool preflight``
under that name; what is all right is told there by ``rules``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deadpool_launch.backends.base import Check
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight.facts import SlurmFacts
from deadpool_slurm import parse, versions, ways

#: What ``srun --network`` takes only where the cluster's configuration allows it.
_NETWORK_WORDS = ("job_vni", "single_node_vni")
#: A node that is only slow for so long is given up by Slurm where it waits no longer.
_SHORT_TIMEOUT_S = 30
_OK_BY_SEVERITY = {"refuse": False, "warn": None, "note": True}

NO_KILL_REMEDY = (
    "add the line '#SBATCH --no-kill' to the batch script and submit it again "
    "(if it was given on the sbatch or salloc command line: --assume-no-kill)"
)
_SLURM_REMEDY = (
    "make Slurm's commands, its configuration and munge's socket available where the launcher runs "
    "(in a container: bind them)"
)


def access_checks(way: ways.Choice | None, *, srun: bool) -> list[Check]:
    """Whether Slurm can be asked from here and steps be started, and how."""
    checks: list[Check] = []
    if not srun:
        text = "srun is not on the PATH, and every agent is started with it"
        checks.append(Check("Slurm access", False, text, _SLURM_REMEDY))
    if way is None:
        return checks
    if way.missing:
        text = f"Slurm cannot be asked: {way.missing}"
        remedy = f"{_SLURM_REMEDY}, or install deadpool-launch[pyslurm] for this Slurm"
        return [*checks, Check("Slurm access", False, text, remedy)]
    what = "its commands" if way.way == ways.COMMANDS else "pyslurm"
    return [*checks, Check("Slurm access", True, f"Slurm is asked by {what}, as {way.reason}")]


def no_access(slurm: SlurmFacts) -> list[Check]:
    """How Slurm can be asked, if it cannot; nothing else is worth a look then."""
    checks = access_checks(slurm.way, srun=slurm.has_srun)
    return checks if any(check.ok is False for check in checks) else []


def no_kill_check(evidence: str | None, assumed: bool, problem: str = "") -> Check:
    """Slurm ends a job with its first lost node unless it was submitted with ``--no-kill``."""
    if evidence is not None:
        return Check("--no-kill", True, f"the job outlives its nodes ({evidence})")
    if assumed:
        return Check(
            "--no-kill", True, "the job outlives its nodes (taken on trust: --assume-no-kill)"
        )
    if problem:
        return Check(
            "--no-kill",
            False,
            f"whether this job was submitted with --no-kill cannot be found out ({problem})",
            "if it was, say so with --assume-no-kill",
        )
    return Check(
        "--no-kill",
        False,
        "this job does not seem to be submitted with --no-kill, so Slurm would end it with the "
        "first lost node",
        NO_KILL_REMEDY,
    )


def version_checks(version: versions.Version | None, config: Mapping[str, str]) -> list[Check]:
    """Slurm's version and configuration (``scontrol show config``)."""
    return [
        Check(found.subject, _OK_BY_SEVERITY[found.severity], found.text, found.remedy)
        for found in versions.findings(version, config)
    ]


def job_checks(nodes: Sequence[str], job: parse.JobFacts) -> list[Check]:
    """What Slurm says of the job: how it makes steps, and which of its nodes it has lost."""
    checks = [
        Check("node state", None, f"{node} is no longer part of the job", leave_out=node)
        for node in nodes
        if node not in job.nodes
    ]
    if job.stepmgr:
        checks.append(
            Check(
                "stepmgr",
                False,
                "the job was submitted with --stepmgr: no step could be started once the batch "
                "host is lost",
                "submit it without --stepmgr",
            )
        )
    return checks


def requeue_checks(job: parse.JobFacts) -> list[Check]:
    """Whether Slurm would put the job back into its queue."""
    if job.can_requeue is not False:
        return []
    return [
        Check(
            "requeue",
            None,
            "the job will not be requeued before its time limit: Slurm says that it cannot be",
            "submit it with sbatch --requeue",
        )
    ]


def srun_checks(nodes: int, options: LaunchOptions) -> list[Check]:
    """Whether the site takes as many ``srun`` as the job has agents."""
    most = options.site_config.most_srun
    used = nodes if options.nodes is None else min(nodes, options.nodes + options.spares)
    started = used - (options.spares if options.spare_start == "on-failure" else 0)
    if most is None or started <= most:
        return []
    return [
        Check(
            "srun",
            None,
            f"{started} srun run at once, one for each agent, and site {options.site_config.name} "
            f"advises {most} at most",
            "use fewer nodes, or --spare-start on-failure",
        )
    ]


def network_checks(request: str | None, config: Mapping[str, str]) -> list[Check]:
    """Whether this cluster takes what is asked for each step's network, of what it may forbid."""
    pairs = (part.partition("=") for part in config.get("SwitchParameters", "").split(","))
    allowed = {word for word, equals, value in pairs if not equals or value in ("all", "user")}
    asked = [word for word in (request or "").split(",") if word in _NETWORK_WORDS]
    missing = [word for word in asked if word not in allowed]
    if "SwitchParameters" not in config or not missing:
        return []
    return [
        Check(
            "network",
            None,
            f"steps that ask for --network={request} may not start: this cluster does not "
            f"allow {' and '.join(missing)} (SwitchParameters)",
            "set network.request: none in a site file of your own, or ask the site",
        )
    ]


def given_up_check(nodes: Sequence[str]) -> Check:
    """Nodes that were given back because Slurm would not make the job's first step with them."""
    return Check(
        "node state",
        None,
        f"{parse.fold_nodes(nodes)} given back to Slurm, which starts no step while one of the "
        "job's nodes is silent",
    )


def state_checks(nodes: Sequence[str], facts: Mapping[str, parse.NodeFacts]) -> list[Check]:
    """What Slurm says of the nodes; only those that are not plainly well."""
    checks = []
    for node in nodes:
        known = facts.get(node)
        if known is None:
            checks.append(Check("node state", None, f"Slurm says nothing about {node}"))
        elif known.health is not parse.Health.OK:
            because = f" ({known.reason})" if known.reason else ""
            text = f"{node} is {known.state}{because}"
            # Slurm starts no step on a node it does not hear from, so it is of no use now either.
            lost = known.health in (parse.Health.DEAD, parse.Health.SUSPECT)
            leave_out = node if lost else None
            checks.append(Check("node state", None, text, leave_out=leave_out))
    return checks


def timeout_check(config: Mapping[str, str], heartbeat_timeout_s: float) -> Check:
    """How long Slurm takes to take a dead node out of the job; nothing waits for it."""
    seconds = _leading_number(config.get("SlurmdTimeout"))
    own = f"DEADPOOL notices after {heartbeat_timeout_s:g} s by itself"
    if seconds is None:
        return _not_said("SlurmdTimeout")
    if seconds == 0:
        return Check(
            "SlurmdTimeout",
            None,
            f"0: Slurm never takes a silent node out of the job, and may refuse steps meanwhile; "
            f"{own}",
            "keep --spare-start at-start, so that no step is needed after a loss",
        )
    if seconds < _SHORT_TIMEOUT_S:
        return Check(
            "SlurmdTimeout",
            None,
            f"Slurm takes a node that is silent for {seconds} s out of the job, also one that "
            "would have come back",
            f"ask the site for {2 * _SHORT_TIMEOUT_S} s or more",
        )
    return Check(
        "SlurmdTimeout",
        True,
        f"Slurm marks a dead node DOWN after {seconds} to {seconds * 4 // 3} s; {own}",
    )


def return_check(
    config: Mapping[str, str], job: parse.JobFacts | None, options: LaunchOptions
) -> Check:
    """What becomes of a node that boots again before Slurm missed it."""
    value = _leading_number(config.get("ReturnToService"))
    if value is None:
        return _not_said("ReturnToService")
    if value < 2:
        return Check(
            "ReturnToService", True, f"{value}: a node that boots again is marked DOWN first"
        )
    ends = (
        "if the batch host boots again before Slurm has missed it, Slurm takes the job for "
        f"ended, with --no-kill too (ReturnToService={value})"
    )
    runs_again = options.chain is not None or (job is not None and job.can_requeue is True)
    missing = [
        *([] if runs_again else ["submit with sbatch --requeue"]),
        *([] if options.checkpoint_dir else ["have durable checkpoints (--checkpoint-dir)"]),
    ]
    if missing:
        return Check("ReturnToService", None, ends, ", and ".join(missing))
    return Check("ReturnToService", True, f"{ends}; it would go on from its durable checkpoint")


def switch_check(request: str | None, config: Mapping[str, str]) -> Check:
    """What steps get of the network's own isolation, where ``network_checks`` has no objection."""
    kind = config.get("SwitchType")
    if kind is None and "SwitchParameters" not in config:
        return _not_said("SwitchParameters")
    if request:
        return Check("network", True, f"steps ask for --network={request}, which is allowed")
    if "slingshot" not in (kind or ""):
        return Check("network", True, f"steps need no network of their own ({kind or 'no switch'})")
    words = ",".join(_NETWORK_WORDS)
    allowed = not network_checks(words, config)
    return Check(
        "network",
        None,
        "Slingshot: agents' steps, on one node each, ask for no virtual network. TCP needs none, "
        "NCCL's plugin does",
        f"set network.request: {words} in a site file of your own"
        if allowed
        else f"ask the site to allow {' and '.join(_NETWORK_WORDS)} (SwitchParameters)",
    )


def mpi_check(
    asked: str, of_the_site: Sequence[str], listed: Sequence[str] | None, *, warn_only: bool = False
) -> list[Check]:
    """Whether ``srun`` can start the MPI that was asked for, or that the site has.

    ``warn_only``: what is all right is not told.
    """
    wanted = [asked] if asked != "none" else list(of_the_site)
    if listed is None:
        text = "srun --mpi=list names no kinds, so it is not known which MPI srun can start"
        return (
            [] if warn_only and asked == "none" else [Check("MPI kind", None, text, unknown=True)]
        )
    found = [kind for kind in wanted if kind in listed]
    there = f"srun has {', '.join(listed) or 'none'}"
    if wanted and not found:
        who = f"--mpi {asked}" if asked != "none" else f"the site file's {', '.join(wanted)}"
        return [
            Check(
                "MPI kind",
                None,
                f"{who} cannot be started ({there}): replicas go over TCP",
                "name one of those with --mpi, if mpi4py is built for it",
            )
        ]
    if warn_only:
        return []
    if asked != "none":
        return [Check("MPI kind", True, f"srun can start {asked}: replicas go by MPI")]
    return [Check("MPI kind", True, f"replicas go over TCP; {there}, --mpi KIND sends them by MPI")]


def mpi_kind(asked: str, of_the_site: Sequence[str], listed: Sequence[str] | None) -> str | None:
    """The kind with which a world is worth a try; None if nobody named one that there is."""
    wanted = [asked] if asked != "none" else list(of_the_site)
    return next((kind for kind in wanted if listed is None or kind in listed), None)


def slurm_checks(nodes: Sequence[str], slurm: SlurmFacts, options: LaunchOptions) -> list[Check]:
    """Everything that speaks against a start, or for it, of what Slurm says of job and cluster."""
    checks = [
        *access_checks(slurm.way, srun=slurm.has_srun),
        no_kill_check(slurm.no_kill, options.assume_no_kill, slurm.submission_problem),
        *srun_checks(len(nodes), options),
        *config_checks(slurm, options),
    ]
    if slurm.mpi_kinds is not None:
        checks += mpi_check(options.mpi, (), slurm.mpi_kinds, warn_only=True)
    if slurm.job is not None:
        checks += job_checks(nodes, slurm.job)
        if options.requeue:
            checks += requeue_checks(slurm.job)
    if slurm.job_problem:
        text = f"the nodes' states cannot be read: {slurm.job_problem}"
        checks.append(Check("node state", None, text, unknown=True))
    elif slurm.job is not None:
        checks += state_checks(slurm.job.nodes, slurm.nodes)
    return checks


def config_checks(slurm: SlurmFacts, options: LaunchOptions) -> list[Check]:
    """What is wrong with the cluster, job or not."""
    config = slurm.config
    if config is None:
        text = f"Slurm's configuration cannot be read: {slurm.config_problem}"
        return [Check("Slurm version", None, text, unknown=True)]
    settings = (
        timeout_check(config, options.heartbeat_timeout_s),
        return_check(config, slurm.job, options),
    )
    return [
        *version_checks(version_of(config), config),
        *network_checks(slurm.network, config),
        *(check for check in settings if check.ok is None and not check.unknown),
    ]


def version_of(config: Mapping[str, str]) -> versions.Version | None:
    """Slurm's version by its configuration."""
    return versions.parse_version(config.get("SLURM_VERSION", ""))


def _leading_number(text: str | None) -> int | None:
    match = re.match(r"\s*(\d{1,9})\b", text or "")
    return int(match[1]) if match else None


def _not_said(name: str) -> Check:
    return Check(name, None, "scontrol show config does not show it", unknown=True)
