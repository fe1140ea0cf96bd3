"""What a job asks of Slurm: command line and site in, a script or a sentence out. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from deadpool_launch.errors import UsageError
from deadpool_launch.options import A_JOB_NAME, CHAIN, LaunchOptions, is_job_name
from deadpool_launch.policy.kinds import read_duration, show_duration
from deadpool_launch.sites.merge import Settled
from deadpool_launch.submit.script import BatchScript, time_limit

#: How long before the time limit the job's end begins, where no policy says so.
RESERVE_S = 120.0
#: Of a short time limit at most this share.
_MOST_OF_LIMIT = 0.25
#: Slurm's shortest time limit.
_LEAST_TIME_S = 60.0
_DAYS_HOURS = re.compile(r"(\d{1,4})-(\d{1,3})")
_MOST_CHAIN = 100
#: The one-letter options of ``sbatch`` that matter here.
_SHORT: Mapping[str, str] = {
    "-A": "--account",
    "-a": "--array",
    "-C": "--constraint",
    "-D": "--chdir",
    "-d": "--dependency",
    "-F": "--nodefile",
    "-G": "--gpus",
    "-J": "--job-name",
    "-k": "--no-kill",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
    "-W": "--wait",
    "-w": "--nodelist",
    "-x": "--exclude",
}
#: What is said otherwise, and how.
_INSTEAD: Mapping[str, str] = {
    "--account": "use --account",
    "--array": "submit one job; --chain N makes N that follow each other",
    "--job-name": "use --job-name",
    "--nodes": "use --nodes and --spares",
    "--no-kill": "every script has it",
    "--ntasks": "one launcher runs, and starts the ranks",
    "--ntasks-per-node": "one launcher runs, and starts the ranks",
    "--partition": "use --partition",
    "--qos": "use --qos",
    "--signal": "set time_limit.reserve in a policy",
    "--test-only": "--print-script shows the script",
    "--time": "use --time",
    "--wait": "deadpool status follows the job",
    "--wrap": "the script is written from the command line",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says of the submission alone."""

    time: str | None = None
    partition: str | None = None
    qos: str | None = None
    account: str | None = None
    job_name: str | None = None
    sbatch_args: tuple[str, ...] = ()
    #: How many jobs, one after the other.
    chain: int | None = None

    def named(self) -> list[str]:
        """The options that were given."""
        flags = {
            "--time": self.time,
            "--partition": self.partition,
            "--qos": self.qos,
            "--account": self.account,
            "--job-name": self.job_name,
            "--sbatch-arg": self.sbatch_args or None,
            "--chain": self.chain,
        }
        return [flag for flag, value in flags.items() if value is not None]


def read_time(text: str) -> float:
    """Seconds of a time limit, in which a bare number is minutes, as for ``sbatch``."""
    if text.isdecimal() and len(text) < 10:
        seconds: float | None = 60.0 * int(text)
    elif match := _DAYS_HOURS.fullmatch(text):
        seconds = 86400.0 * int(match[1]) + 3600 * int(match[2])
    else:
        seconds = read_duration(text)
    if seconds is None or seconds < _LEAST_TIME_S:
        raise UsageError(
            f"--time {text}: must be a time limit of at least a minute, such as 90 (minutes), "
            "24:00:00, 1-12 (days and hours) or 36h"
        )
    return seconds


def seconds_wanted(wanted: Wanted, settled: Settled) -> float | None:
    """The job's time limit; None for the partition's."""
    return read_time(wanted.time) if wanted.time is not None else settled.site.time_s


def job_name(wanted: Wanted, script: str, timestamp: str) -> str:
    """The job's name, by default that of the script; for a chain one that no other job has."""
    given = wanted.job_name
    if given is not None and not is_job_name(given):
        raise UsageError(f"--job-name {given}: must be {A_JOB_NAME}")
    stem = re.sub(r"[^A-Za-z0-9._+-]", "-", PurePath(script).stem).lstrip("._+-") or "job"
    name = given or stem[:40]
    return name if wanted.chain is None else f"{name}-{timestamp}"


def batch_script(
    wanted: Wanted,
    options: LaunchOptions,
    settled: Settled,
    name: str,
    command: Sequence[str],
) -> BatchScript:
    """The script of the job. ``command``: the launcher's, for inside the allocation.

    Raises ``UsageError`` for what the site does not allow.
    """
    site = settled.site
    _check_names(wanted)
    nodes = nodes_wanted(options)
    time_s = seconds_wanted(wanted, settled)
    _check_limits(wanted, options, settled, nodes, time_s)
    _check_chain(wanted, options)
    added = tuple(_checked(arg, wanted, settled) for arg in wanted.sbatch_args)
    optional = {
        "--account": wanted.account or site.account,
        "--partition": wanted.partition or site.partition,
        "--qos": wanted.qos or site.qos,
        "--constraint": site.constraint,
    }
    given = [
        f"--job-name={name}",
        *(f"{flag}={value}" for flag, value in optional.items() if value is not None),
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *site.gpu_options,
        *(("--exclusive",) if site.exclusive else ()),
        *((f"--mem={site.memory}",) if site.memory is not None else ()),
        *((f"--time={time_limit(time_s)}",) if time_s is not None else ()),
        "--no-kill",
        f"--signal=B:USR1@{_reserve_s(options, time_s)}",
        *((f"--network={site.network_request}",) if site.network_request is not None else ()),
        *_ending(wanted, options),
        *site.options,
    ]
    if not any(_long(arg) == "--output" for arg in added):
        given.append("--output=deadpool-%j.out")
    for option in given:
        if (rejected := _rejected(option, site.forbidden)) is not None:
            raise UsageError(
                f"{rejected} is needed for this job, and site {site.name} rejects it "
                f"({settled.origin('submit.forbidden')}): change the one or the other"
            )
    return BatchScript((*given, *added), _comment(options, site.name), site.setup, (*command,))


def nodes_wanted(options: LaunchOptions) -> int:
    """How many nodes the job asks for: active ones, spares, and one for the launcher alone."""
    assert options.nodes is not None
    return options.nodes + options.spares + (options.batch_host == "never")


def _check_names(wanted: Wanted) -> None:
    """What stands in the script as one word is one."""
    for flag in ("partition", "qos", "account"):
        name = getattr(wanted, flag)
        if name is not None and (not name.isprintable() or " " in name):
            raise UsageError(f"--{flag} {name}: must be a name, without blanks")


def _check_limits(
    wanted: Wanted, options: LaunchOptions, settled: Settled, nodes: int, time_s: float | None
) -> None:
    site = settled.site
    made = f"{nodes} nodes with {options.spares} spares among them"
    if site.most_nodes is not None and nodes > site.most_nodes:
        raise UsageError(
            f"--nodes {options.nodes}: makes {made}, and site {site.name} allows {site.most_nodes} "
            f"({settled.origin('limits.nodes')})"
        )
    started = nodes - (options.spares if options.spare_start == "on-failure" else 0)
    if site.most_srun is not None and started > site.most_srun:
        raise UsageError(
            f"--nodes {options.nodes}: {started} srun would run at once, one for each agent, and "
            f"site {site.name} allows {site.most_srun} ({settled.origin('limits.srun')})"
        )
    if site.most_time_s is not None and time_s is not None and time_s > site.most_time_s:
        raise UsageError(
            f"--time {wanted.time or time_limit(time_s)}: is longer than site {site.name} allows, "
            f"{time_limit(site.most_time_s)} ({settled.origin('limits.time')})"
        )


def _check_chain(wanted: Wanted, options: LaunchOptions) -> None:
    if wanted.chain is None:
        return
    if not 1 <= wanted.chain <= _MOST_CHAIN:
        raise UsageError(f"--chain {wanted.chain}: must be from 1 to {_MOST_CHAIN} jobs")
    if options.checkpoint_dir is None:
        raise UsageError(CHAIN)
    if options.resume == "never":
        raise UsageError(
            "--chain: each job goes on from the durable checkpoint of the one before, which "
            "checkpoint.resume: never rules out; set it to auto"
        )
    if options.requeue:
        raise UsageError(
            "--chain and --requeue-before-limit are two ways to go on after the time limit: keep "
            "one of them"
        )


def _checked(arg: str, wanted: Wanted, settled: Settled) -> str:
    """An option of ``--sbatch-arg``, if it may be added."""
    name = _long(arg)
    if not re.match(r"--?[A-Za-z]", arg) or "\n" in arg or " " in arg.partition("=")[0]:
        raise UsageError(
            f"--sbatch-arg {arg}: must be one option of sbatch as one word, such as "
            "--sbatch-arg=--mail-type=END"
        )
    instead = dict(_INSTEAD)
    if wanted.chain is not None:
        instead["--dependency"] = "the jobs of a chain wait for each other"
    # As sbatch takes them: also abbreviated.
    for option, how in instead.items():
        if option == name or (len(name) > 2 and option.startswith(name)):
            raise UsageError(f"--sbatch-arg {arg}: is set already; {how}")
    if _rejected(arg, settled.site.forbidden) is not None:
        raise UsageError(
            f"--sbatch-arg {arg}: site {settled.site.name} rejects {name} "
            f"({settled.origin('submit.forbidden')})"
        )
    return arg


def _long(arg: str) -> str:
    """The option's name as a long one."""
    if arg.startswith("--"):
        return arg.partition("=")[0].partition(" ")[0]
    return _SHORT.get(arg[:2], arg[:2])


def _rejected(arg: str, forbidden: Sequence[str]) -> str | None:
    """The forbidden option that this is, also if abbreviated."""
    name = _long(arg)
    return next((each for each in forbidden if each.startswith(name)), None)


def _reserve_s(options: LaunchOptions, time_s: float | None) -> int:
    """How long before the limit the signal comes: when the launcher begins the end by itself, if a
    policy says so.
    """
    if options.reserve_s:
        if time_s is not None and options.reserve_s >= time_s:
            raise UsageError(
                f"time_limit.reserve {show_duration(options.reserve_s)}: must be shorter than the "
                f"time limit, {time_limit(time_s)}"
            )
        return int(options.reserve_s)
    return int(min(RESERVE_S, RESERVE_S if time_s is None else time_s * _MOST_OF_LIMIT))


def _ending(wanted: Wanted, options: LaunchOptions) -> list[str]:
    """What becomes of the job after its end."""
    if wanted.chain is not None:
        return ["--dependency=singleton", "--no-requeue"]
    return ["--requeue", "--open-mode=append"] if options.requeue else []


def nodes_text(options: LaunchOptions) -> str:
    """``16 active nodes and 1 spare``."""
    active = "1 active node" if options.nodes == 1 else f"{options.nodes} active nodes"
    spares = "1 spare" if options.spares == 1 else f"{options.spares} spares"
    return f"{active} and {spares}"


def _comment(options: LaunchOptions, site: str) -> tuple[str, ...]:
    alone = options.batch_host == "never"
    beside = ", and one node for the launcher alone" if alone else ""
    return (
        f"Site {site}: {nodes_text(options)} in one allocation{beside}.",
        "exec, so that the signal before the time limit reaches the launcher.",
    )
