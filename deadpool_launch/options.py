"""The launcher's options as one frozen value, and the rules they must keep.

``cli.py`` makes it, everything else reads it. Pure: the environment and the clock are arguments.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import msgspec

from deadpool_launch.errors import NotInAllocation, UsageError
from deadpool_launch.faults import Fault
from deadpool_launch.sites.model import GENERIC, SiteConfig
from deadpool_launch.timeouts import IN_ORDER
from deadpool_runtime.protocol import AdmissionCheck

Site = Literal["slurm", "local"]
#: How the processes of the MPI library start: ``srun --mpi=KIND``, or MPICH's ``mpiexec``.
Mpi = Literal["none", "pmi2", "pmix", "cray_shasta", "mpiexec"]
SpareStart = Literal["at-start", "on-failure"]
SpareOrder = Literal["as-listed", "reversed"]
Reaction = Literal["ignore", "report", "swap"]
ExtraNodes = Literal["spares", "unused"]
BatchHost = Literal["last-spare", "active", "never"]
OnDrain = Literal["swap", "ignore"]
Resume = Literal["auto", "never"]

NOT_IN_ALLOCATION = (
    "not inside a Slurm allocation: submit a script that runs this with sbatch, name --nodes to "
    "have one written and submitted, or use --site local"
)


CHECKPOINTS = (
    "--checkpoint-dir and --checkpoint-every go together: name a folder that every node sees, and "
    "after how many steps (at least 1) a durable checkpoint is written to it"
)

#: The most active and the most spare nodes of one machine, of which each is an agent and more.
LOCAL_NODES = 256


CHAIN = (
    "--chain: each job goes on from the durable checkpoint of the one before: name "
    "--checkpoint-dir and --checkpoint-every"
)
#: How people say time-outs.
_SAID = {
    "heartbeat_timeout_s": "--heartbeat-timeout",
    "collective_timeout_s": "--collective-timeout",
    "confirm_timeout_s": "replication.confirm_timeout",
}
A_JOB_NAME = "a letter or digit, and then letters, digits and ._+-, 64 at most"
_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class SpareBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Least and most spares that the site's policy file ``path`` allows."""

    least: int | None
    most: int | None
    path: str


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of ``deadpool-launch`` was asked to do. Paths are absolute."""

    #: The user's training script.
    script: str
    #: What the script finds in ``sys.argv[1:]``.
    script_args: tuple[str, ...] = ()
    #: Where nodes come from.
    site: Site = "local"
    #: What is particular to the cluster.
    site_config: SiteConfig = GENERIC
    #: Active nodes; ``None``: all of the allocation but the spares.
    nodes: int | None = None
    #: Nodes held back to replace lost ones. 0 by default: holding one costs a node.
    spares: int = 0
    #: Ranks on each active node.
    nproc_per_node: int = 1
    #: Number of ranks the user counts on; only checked.
    world_size: int | None = None
    #: Instead of a number of spares: this share of all nodes used, rounded up.
    spare_fraction: float | None = None
    #: Instead of a number of spares: as many as are not used up within ``spare_hours`` with
    #: ``spare_probability``, when a node fails every ``node_mtbf_hours`` on average. Hours of None:
    #: those until the job's time limit.
    node_mtbf_hours: float | None = None
    spare_probability: float = 0.99
    spare_hours: float | None = None
    #: What the site allows, however the number was found.
    spare_bounds: SpareBounds | None = None
    #: ``at-start``: agents on spares wait from the start, so that a swap needs no new step.
    spare_start: SpareStart = "at-start"
    #: In which order of the allocation's nodes the spares are used.
    spare_order: SpareOrder = "as-listed"
    #: What the node that carries the launcher is used for besides.
    batch_host: BatchHost = "last-spare"
    #: Nodes that fail together, by node list; replicas go to another domain where there is one.
    failure_domains: tuple[tuple[str, str], ...] = ()
    #: What becomes of nodes beyond the active ones and the spares: ``spares``, used when no other
    #: is left; ``unused``.
    extra_nodes: ExtraNodes = "spares"
    #: What is done about a rank whose steps take so many times as long as those of its peers, for
    #: so many windows in a row.
    straggler: Reaction = "report"
    straggler_factor: float = 1.5
    straggler_windows: int = 6
    straggler_window_s: float = 5.0
    #: What is done when a GPU of an active node shows a fault of the hardware.
    device: Reaction = "report"
    #: What a node must pass before it gets ranks.
    admission: tuple[AdmissionCheck, ...] = ()
    #: Folder for logs, journal and the job's secret; every node must see it.
    run_dir: str = "deadpool-runs/run"
    #: Seconds without a heartbeat after which a node counts as lost. Slurm itself takes minutes.
    heartbeat_timeout_s: float = 3.0
    #: Nodes that keep a copy of the launcher's log, to take over if its host dies (Slurm only).
    standby_launchers: int = 2
    #: Seconds that a step may take at most; one that takes longer hangs, and is tried again.
    collective_timeout_s: float = 600.0
    #: Seconds an agent has to come up and connect; longer where Python starts slowly from a shared
    #: disk.
    agent_start_timeout_s: float = 60.0
    #: How often all ranks may be started again from the script's own checkpoints.
    max_restarts: int = 3
    #: How many epochs one incident may use before the job is given up.
    max_attempts: int = 8
    #: How often within the window processes may be restarted on one node before its next death
    #: counts as the node's; None: ever.
    local_restarts: int | None = None
    local_restarts_within_s: float = 3600.0
    #: How many incidents within the window the job survives; None: any number.
    incidents: int | None = None
    incidents_within_s: float = 3600.0
    #: What is done when a node is lost and no spare is left, the first that can be done.
    on_exhausted: tuple[str, ...] = ("stop",)
    #: After this time a node that was given up is tried again, and becomes a spare; None: never.
    readmit_after_s: float | None = 300.0
    #: One that was given up so often within the window stays out.
    quarantine_faults: int = 2
    quarantine_within_s: float = 86400.0
    #: Time for a process to come up, for a new one to build its model and come to its first step,
    #: for survivors to park, for copies to be restored, and for a durable checkpoint to be read.
    rank_start_timeout_s: float = 120.0
    first_step_timeout_s: float = 300.0
    park_timeout_s: float = 1800.0
    restore_timeout_s: float = 120.0
    load_timeout_s: float = 1800.0
    #: How long training waits for a replica to be confirmed; None: as long as it takes to notice a
    #: lost node, and 5 s more where a step has the time.
    confirm_timeout_s: float | None = None
    #: How many nodes may be lost at once, and after how many steps each replica is made.
    replication_factor: int = 1
    replication_interval: int = 1
    #: Folder for durable checkpoints, seen by every node, and after how many steps each is written;
    #: ``None`` and 0: none are.
    checkpoint_dir: str | None = None
    checkpoint_every: int = 0
    #: How many of them are kept.
    checkpoint_keep: int = 2
    #: Their own folder in it: who gives the same name goes on from what is there.
    checkpoint_name: str | None = None
    #: Whether training begins with the newest that an earlier launch left in the folder.
    resume: Resume = "auto"
    #: How often Slurm is asked for the states of its nodes; 0: never.
    slurm_poll_s: float = 60.0
    #: What is done about a node with ranks that Slurm drains.
    on_drain: OnDrain = "swap"
    #: How long before the job's time limit its end begins; 0: at a signal only.
    reserve_s: float = 0.0
    #: A job that was stopped before its time limit goes back to Slurm's queue.
    requeue: bool = False
    #: The name of a chain of jobs, of which this is one: it goes on from the checkpoint of another.
    chain: str | None = None
    #: Replicas go by MPI, where that can be had; else by TCP.
    mpi: Mpi = "none"
    #: The user vouches that the job was submitted with ``--no-kill``.
    assume_no_kill: bool = False
    #: Go on although a check failed.
    ignore_preflight: bool = False
    #: File of rules that tell kinds of faults apart, tried before the packaged ones.
    rules: str | None = None
    #: Write a digest of every rank's state after the last step.
    record_final_state: bool = False
    #: The job's comment in Slurm says how it stands.
    job_comment: bool = False
    #: Host and port at which figures for Prometheus are served; None: nowhere.
    metrics: tuple[str, int] | None = None
    #: Faults to bring about (rehearsals only).
    faults: tuple[Fault, ...] = ()
    #: Show what would be started, start nothing.
    dry_run: bool = False
    #: What policies changed, for people, and what they set: keys, values and origins, for the
    #: journal.
    remarks: tuple[str, ...] = ()
    policy: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    @property
    def admission_s(self) -> float:
        """The most time that a node's admission checks take."""
        return sum(check.timeout_s for check in self.admission)


def choose_site(kind: Site, environ: Mapping[str, str]) -> Site:
    """Where nodes come from; an error outside of an allocation that is needed."""
    if kind == "slurm" and "SLURM_JOB_ID" not in environ:
        raise NotInAllocation(NOT_IN_ALLOCATION)
    return kind


def check_mpi(asked: str, site: SiteConfig) -> None:
    """``UsageError`` if the site has not the MPI that was asked for."""
    kinds = site.mpi_kinds
    if kinds and asked not in ("none", *kinds):
        raise UsageError(f"--mpi {asked}: site {site.name} has {', '.join(kinds)}")


def is_job_name(text: str) -> bool:
    """Whether it can name a job, and a folder of it."""
    return _JOB_NAME.fullmatch(text) is not None


def choose_nproc(asked: str, gpus_on_node: int | None) -> int:
    """``--nproc-per-node`` as a number: ``auto`` is one per GPU of the job, or one."""
    if asked == "auto":
        return gpus_on_node or 1
    if asked == "gpu":
        if not gpus_on_node:
            raise UsageError(
                "--nproc-per-node gpu: the job has no GPUs on this node; "
                "request them from Slurm (--gpus-per-node) or give a number"
            )
        return gpus_on_node
    if not asked.isdecimal() or int(asked) < 1:
        raise UsageError(f"--nproc-per-node {asked}: must be auto, gpu or a number of at least 1")
    return int(asked)


def default_run_dir(
    job_id: str | None, timestamp: str, used: Callable[[str], bool] = lambda _: False
) -> str:
    """``deadpool-runs/<job id>``, or ``deadpool-runs/local-<timestamp>`` outside a job.

    A number is added where that is ``used``: the job was requeued, or launches twice.
    """
    first = f"deadpool-runs/{job_id}" if job_id else f"deadpool-runs/local-{timestamp}"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not used(name))


def _check(options: LaunchOptions) -> None:
    if options.site not in get_args(Site):
        raise UsageError(f"--site {options.site}: must be {' or '.join(get_args(Site))}")
    if options.spare_start not in get_args(SpareStart):
        raise UsageError(
            f"--spare-start {options.spare_start}: must be {' or '.join(get_args(SpareStart))}"
        )
    if options.mpi not in get_args(Mpi):
        raise UsageError(f"--mpi {options.mpi}: must be {', '.join(get_args(Mpi))}")
    if options.mpi != "none" and (options.mpi == "mpiexec") != (options.site == "local"):
        fitting = "mpiexec" if options.site == "local" else "pmi2, pmix or cray_shasta"
        raise UsageError(f"--mpi {options.mpi}: with --site {options.site} it is {fitting}")
    if options.chain is not None and not is_job_name(options.chain):
        raise UsageError(f"--chain-name {options.chain}: must be {A_JOB_NAME}")
    if options.chain is not None and options.checkpoint_dir is None:
        raise UsageError(CHAIN)
    _check_checkpoints(options)
    if options.requeue and options.site == "local":
        raise UsageError("--requeue-before-limit: there is no queue with --site local")
    if options.job_comment and options.site == "local":
        raise UsageError("--job-comment: there is no job in Slurm with --site local")
    _at_least("--nodes", options.nodes, 1)
    _at_least("--spares", options.spares, 0)
    if options.site == "local":
        _at_most_here("--nodes", options.nodes)
        _at_most_here("--spares", options.spares)
    _at_least("--nproc-per-node", options.nproc_per_node, 1)
    _at_least("--world-size", options.world_size, 1)
    _at_least("--max-restarts", options.max_restarts, 0)
    _at_least("--standby-launchers", options.standby_launchers, 0)
    _at_least("replication.factor", options.replication_factor, 1)
    _at_least("replication.interval", options.replication_interval, 1)
    if not 0.5 <= options.heartbeat_timeout_s <= 600:
        raise UsageError(
            f"--heartbeat-timeout {options.heartbeat_timeout_s:g}: must be from 0.5 to 600 s"
        )
    if not 1 <= options.collective_timeout_s <= 86400:
        raise UsageError(
            f"--collective-timeout {options.collective_timeout_s:g}: must be from 1 to 86400 s"
        )
    if not 1 <= options.agent_start_timeout_s <= 3600:
        raise UsageError(
            f"--agent-start-timeout {options.agent_start_timeout_s:g}: must be from 1 to 3600 s"
        )
    _check_orders(options)
    for fault in options.faults:
        if fault.node is not None and options.site != "local":
            raise UsageError(f"--fault {fault}: a node can be struck only with --site local")
        if (
            fault.rank is not None
            and options.world_size is not None
            and fault.rank >= options.world_size
        ):
            raise UsageError(f"--fault {fault}: ranks go from 0 to {options.world_size - 1}")


def _check_orders(options: LaunchOptions) -> None:
    for order in IN_ORDER:
        first_s, second_s = getattr(options, order.shorter), getattr(options, order.longer)
        if not order.holds(first_s, second_s):
            shorter, longer = _SAID[order.shorter], _SAID[order.longer]
            raise UsageError(
                f"{longer} {second_s:g} s: must be longer than {shorter}, {first_s:g} s{order.why}"
            )


def _check_checkpoints(options: LaunchOptions) -> None:
    if options.checkpoint_every < 0 or (options.checkpoint_every == 0) != (
        options.checkpoint_dir is None
    ):
        raise UsageError(CHECKPOINTS)
    name = options.checkpoint_name
    if name is None:
        return
    if options.checkpoint_dir is None:
        raise UsageError(f"--checkpoint-name {name}: goes with --checkpoint-dir and -every")
    if not name or name.startswith(".") or "/" in name:
        raise UsageError(
            f"--checkpoint-name {name}: is the name of one folder in --checkpoint-dir, without / "
            "and without a dot in front"
        )


def _at_least(flag: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise UsageError(f"{flag} {value}: must be at least {least}")


def _at_most_here(flag: str, value: int | None) -> None:
    if value is not None and value > LOCAL_NODES:
        raise UsageError(f"{flag} {value}: must be at most {LOCAL_NODES} with --site local")
