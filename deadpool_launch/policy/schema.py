"""Every key of ``policy.yaml``: what it takes, what it does, and which option it becomes. Pure.

Defaults are those of ``LaunchOptions``. A key stands here only if something acts on its option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from deadpool_launch.options import (
    BatchHost,
    ExtraNodes,
    LaunchOptions,
    Mpi,
    OnDrain,
    Reaction,
    Resume,
    SpareOrder,
    SpareStart,
)
from deadpool_launch.policy.kinds import (
    Checks,
    Choice,
    Count,
    Domains,
    Duration,
    FilePath,
    Kind,
    Number,
    Order,
    Value,
)


@dataclass(frozen=True, slots=True)
class Key:
    """One key."""

    #: With dots: ``spares.count`` is ``count`` in the section ``spares``.
    name: str
    #: The field of ``LaunchOptions`` that gets its value.
    field: str
    kind: Kind
    doc: str
    #: The command line's way to say the same; empty if there is none.
    flag: str = ""
    #: How the value ``None`` is written; empty if the key cannot have it.
    word: str = ""
    #: ``None`` is more than every number, for the site's limits.
    word_is_most: bool = False
    #: Part of the choice how many spares are held: naming one of them undoes what earlier levels
    #: said with another. Keys with the same name here go together.
    way: str = ""

    @property
    def default(self) -> Value:
        """The value without any policy."""
        value = _DEFAULTS[self.field]
        # Of the options with a word for "none" some are 0 then.
        return None if self.word and not value else value

    def show(self, value: Value) -> str:
        """The value as it would stand in a file."""
        return self.word if value is None else self.kind.show(value)

    @property
    def wanted(self) -> str:
        """What is right, in words."""
        return f"{self.kind.wanted}, or {self.word}" if self.word else self.kind.wanted


def _defaults() -> Mapping[str, Value]:
    options = LaunchOptions(script="")
    return {field: getattr(options, field) for field in options.__struct_fields__}


_DEFAULTS = _defaults()

SPARES = "spares.count"
#: What the site's file says of its own nodes; a rehearsal on another machine leaves it out.
OF_THE_SITES_NODES = ("admission", "failure_domains")
#: Means something only where Slurm starts the processes.
ON_SLURM_ONLY = (
    "replication.mpi",
    "standby_launchers",
    "on_drain",
    "slurm.poll",
    "time_limit.reserve",
)

KEYS: tuple[Key, ...] = (
    Key(
        SPARES,
        "spares",
        Count(),
        "Nodes held back to replace lost ones. A site's limits on this key also bound what "
        "spares.fraction and spares.auto come to.",
        flag="--spares",
        way="count",
    ),
    Key(
        "spares.fraction",
        "spare_fraction",
        Number(0.0, 1.0),
        "Instead of a count: this share of all nodes used, rounded up.",
        word="none",
        way="fraction",
    ),
    Key(
        "spares.auto.node_mtbf_hours",
        "node_mtbf_hours",
        Number(),
        "Instead of a count: as few spares as are not used up before the hours are over with the "
        "probability named beside it, when a node runs this long between two failures on average. "
        "Failures are taken to be independent and spares to fail like active nodes (a Poisson "
        "process).",
        word="none",
        way="auto",
    ),
    Key(
        "spares.auto.probability",
        "spare_probability",
        Number(0.0, 1.0),
        "How sure it must be that spares do not run out.",
        way="auto",
    ),
    Key(
        "spares.auto.hours",
        "spare_hours",
        Number(),
        "How long they must last.",
        word="time-limit",
        way="auto",
    ),
    Key(
        "spares.start",
        "spare_start",
        Choice(get_args(SpareStart)),
        "When the agents on spares start: at-start makes a swap faster, on-failure leaves the "
        "spares idle until they are needed.",
        flag="--spare-start",
    ),
    Key(
        "spares.order",
        "spare_order",
        Choice(get_args(SpareOrder)),
        "Order of use, by the allocation's node list.",
    ),
    Key(
        "batch_host",
        "batch_host",
        Choice(get_args(BatchHost)),
        "What the node with the batch script, which carries the launcher, does besides: "
        "last-spare, the last node to be given ranks; active, ranks from the start; never, "
        "neither ranks nor spare.",
    ),
    Key(
        "on_exhausted",
        "on_exhausted",
        Order(("shrink", "stop")),
        "What is done when a node is lost and no spare is left. stop ends the job (exit code 30). "
        "shrink goes on with the data-parallel replicas that are whole (DistributedDataParallel, "
        "also with ZeroRedundancyOptimizer; fully_shard over a mesh with a replicated dimension), "
        "in place, until nodes for the others are there again: averages are over the ranks that "
        "are left, batches and learning rate of each rank stay as they are, and the samples of "
        "the missing ranks are skipped. The results are then not those of an undisturbed run, "
        "which is why it must be asked for. Where it is not possible the job stops and says why. "
        "A durable checkpoint is no third way, as reading one takes as many nodes as were lost.",
        flag="--on-exhausted",
    ),
    Key(
        "extra_nodes",
        "extra_nodes",
        Choice(get_args(ExtraNodes)),
        "Nodes of the allocation beyond the active ones and the spares, where --nodes asks for "
        "fewer than there are: spares, they take ranks when no spare is left, and nothing runs on "
        "them before; unused, they are left alone.",
    ),
    Key(
        "standby_launchers",
        "standby_launchers",
        Count(),
        "On how many nodes besides the launcher's own a copy of its log is kept, so that one of "
        "them takes over when that node dies; spares come first. 0: the job ends with that node. "
        "It needs agents on two other nodes.",
        flag="--standby-launchers",
    ),
    Key(
        "failure_domains",
        "failure_domains",
        Domains(),
        "Nodes that fail together (blade, rack, power line): replicas go to a node of another "
        "domain where there is one. A node that is not named is a domain of its own.",
    ),
    Key(
        "admission",
        "admission",
        Checks(),
        "Shell commands that a node must pass within their timeouts: every node before the job "
        "starts, and a spare again before it takes ranks, which then waits for them. A node that "
        "fails is passed over. DEADPOOL_NODE names the node.",
    ),
    Key(
        "heartbeat_timeout",
        "heartbeat_timeout_s",
        Duration(0.5, 600.0),
        "Silence after which a node counts as lost.",
        flag="--heartbeat-timeout",
    ),
    Key(
        "collective_timeout",
        "collective_timeout_s",
        Duration(1.0, 86400.0),
        "The longest that a step may take, evaluation and checkpoints in its body included; one "
        "that takes longer hangs and is tried again. Must be longer than heartbeat_timeout.",
        flag="--collective-timeout",
    ),
    Key(
        "agent_start_timeout",
        "agent_start_timeout_s",
        Duration(1.0, 3600.0),
        "Time for an agent to come up on a node; more where Python starts slowly from a shared "
        "disk.",
        flag="--agent-start-timeout",
    ),
    Key(
        "max_restarts",
        "max_restarts",
        Count(),
        "Restarts of all ranks from the script's own checkpoints.",
        flag="--max-restarts",
    ),
    Key(
        "node.local_restarts",
        "local_restarts",
        Count(),
        "How many incidents that a node's processes begin are mended by new processes on that "
        "node; with the next one in the window a spare takes its ranks. It stays where no spare "
        "is left. While its copies may be the only ones the move waits until every rank has a "
        "replica elsewhere, and is made at the end of a step then.",
        word="unlimited",
        word_is_most=True,
    ),
    Key(
        "node.local_restarts_within",
        "local_restarts_within_s",
        Duration(1.0, 30 * 86400.0),
        "The window for node.local_restarts.",
    ),
    Key(
        "job.incidents",
        "incidents",
        Count(),
        "How many incidents in the window the job survives; the next one ends it (exit code 32).",
        word="unlimited",
        word_is_most=True,
    ),
    Key(
        "job.incidents_within",
        "incidents_within_s",
        Duration(1.0, 30 * 86400.0),
        "The window for job.incidents.",
    ),
    Key(
        "readmit.after",
        "readmit_after_s",
        Duration(1.0, 30 * 86400.0),
        "A node that was given up is tried again after this time, twice as long after each try "
        "that fails. If it comes up and passes the admission checks it is the last of the spares. "
        "Not a node whose fault lasts (docs/classification.md).",
        word="never",
        word_is_most=True,
    ),
    Key(
        "quarantine.faults",
        "quarantine_faults",
        Count(1),
        "A node that was given up so often in the window stays out. With 1 none comes back but one "
        "that an admin resumes.",
    ),
    Key(
        "quarantine.window",
        "quarantine_within_s",
        Duration(1.0, 30 * 86400.0),
        "The window for quarantine.faults.",
    ),
    Key(
        "straggler.action",
        "straggler",
        Choice(get_args(Reaction)),
        "A rank that is slower than its peers (those with the same part of the model) for long: "
        "report names it in the log, once; swap also moves its node's ranks to a spare at the end "
        "of a step. Slow is what its own time in a step is, without the "
        "time in which it waits for others. That is not seen where collectives end on the GPU "
        "(NCCL).",
    ),
    Key(
        "straggler.factor",
        "straggler_factor",
        Number(1.0),
        "How many times the median of its peers three quarters of its steps take; the difference "
        "must be 20 ms or more too, and stand out from how much the peers differ.",
    ),
    Key(
        "straggler.windows",
        "straggler_windows",
        Count(1),
        "For how many windows in a row.",
    ),
    Key(
        "straggler.window",
        "straggler_window_s",
        Duration(0.5, 3600.0),
        "The length of a window: each has the median of the steps in it, of which it waits for "
        "five at least.",
    ),
    Key(
        "device.action",
        "device",
        Choice(get_args(Reaction)),
        "What is done about GPUs, by the kernel's XID lines (where agents can read /dev/kmsg) and "
        "NVIDIA's library (where pynvml is installed): report says what is seen, gives up a spare "
        "with a fault that lasts, and takes the next fault of a process on such a node for the "
        "node's; swap also moves the node's ranks to a spare at the end of the step. Without "
        "effect with --site local.",
    ),
    Key(
        "recovery.max_attempts",
        "max_attempts",
        Count(1),
        "How many attempts one incident may take (a fault during a recovery begins the next one) "
        "before all ranks restart from the copies on their nodes, which is rung 3; and as many "
        "again on that rung.",
    ),
    Key(
        "recovery.rank_start_timeout",
        "rank_start_timeout_s",
        Duration(1.0, 3600.0),
        "Time for the process of a rank to come up.",
    ),
    Key(
        "recovery.first_step_timeout",
        "first_step_timeout_s",
        Duration(1.0, 86400.0),
        "Time for the script in a replacement to build its model and come to its first step.",
    ),
    Key(
        "recovery.park_timeout",
        "park_timeout_s",
        Duration(1.0, 86400.0),
        "Time for a survivor to come to its next collective or the end of its step, which may be "
        "the end of an evaluation; one that does not is killed and restarted. Never much longer "
        "than collective_timeout, as no step may last longer.",
    ),
    Key(
        "recovery.restore_timeout",
        "restore_timeout_s",
        Duration(1.0, 86400.0),
        "Time to restore the state from copies.",
    ),
    Key(
        "recovery.load_timeout",
        "load_timeout_s",
        Duration(1.0, 86400.0),
        "Time to restore the state from a durable checkpoint.",
    ),
    Key(
        "on_drain",
        "on_drain",
        Choice(get_args(OnDrain)),
        "When Slurm drains a node that has ranks (or has it as failing, or to be rebooted): swap "
        "moves them to a spare at the end of a step, ignore leaves them there.",
    ),
    Key(
        "slurm.poll",
        "slurm_poll_s",
        Duration(5.0, 86400.0),
        "How often Slurm is asked for the states of the job's nodes and its time limit; less often "
        "while it does not answer, which is taken for no state.",
        word="never",
    ),
    Key(
        "time_limit.reserve",
        "reserve_s",
        Duration(20.0, 86400.0),
        "How long before the job's time limit it is stopped at the end of a step, with a durable "
        "checkpoint if there is a place for them. Must cover two steps, the checkpoint and 10 s; "
        "none: at SIGUSR1 only.",
        word="none",
    ),
    Key(
        "rules",
        "rules",
        FilePath(),
        "File of rules that tell kinds of faults apart, tried before the packaged ones "
        "(docs/classification.md).",
        flag="--rules",
        word="none",
    ),
    Key(
        "replication.confirm_timeout",
        "confirm_timeout_s",
        Duration(0.5, 3600.0),
        "How long training waits for a replica to be confirmed before a step goes on without; "
        "auto: heartbeat_timeout and 5 s, less with a short collective_timeout. Must be between "
        "these two.",
        word="auto",
    ),
    Key(
        "replication.interval",
        "replication_interval",
        Count(1),
        "After how many steps each replica is made, for less traffic. Copies on a rank's own node "
        "are made after every step all the same. A process that dies, a drained node or a hang "
        "costs what it does with 1; a node that is lost costs up to so many completed steps and "
        "the one under way, as all go back to the newest step whose replicas are whole. Training "
        "waits for replicas in the step behind the one that has them. A rank takes memory for 4 "
        "copies on its own node with 2, and for 5 with more, instead of 3.",
    ),
    Key(
        "replication.factor",
        "replication_factor",
        Count(1),
        "How many nodes may be lost at once, with their copies, without going back to a durable "
        "checkpoint: what is on fewer nodes than that and one more is kept by so many neighbours, "
        "in different failure domains where there are so many. Each of them takes memory for "
        "three replicas, and training waits for all. There must be more nodes than that, spares "
        "with spares.start: at-start among them. With 1, RNG, data position and the like go to two "
        "nodes all the same.",
    ),
    Key(
        "replication.mpi",
        "mpi",
        Choice(tuple(kind for kind in get_args(Mpi) if kind != "mpiexec")),
        "Send replicas by MPI: the kind that srun starts it with.",
        flag="--mpi",
    ),
    Key(
        "checkpoint.dir",
        "checkpoint_dir",
        FilePath(),
        "Folder for durable checkpoints, seen by every node; none are written unless "
        "checkpoint.every is given too.",
        flag="--checkpoint-dir",
        word="none",
    ),
    Key(
        "checkpoint.every",
        "checkpoint_every",
        Count(1),
        "Steps from one durable checkpoint to the next.",
        flag="--checkpoint-every",
        word="none",
    ),
    Key(
        "checkpoint.keep",
        "checkpoint_keep",
        Count(1),
        "How many durable checkpoints are kept. With 1 there is none to go back to when the newest "
        "is damaged.",
    ),
    Key(
        "checkpoint.resume",
        "resume",
        Choice(get_args(Resume)),
        "Whether a job that was requeued, or that has a --checkpoint-name, begins with the newest "
        "durable checkpoint of its earlier launch: auto, unless the script loads a state of its "
        "own (an optimizer or a scheduler has made steps before the first one); never, that "
        "checkpoint is used only if all copies are lost.",
    ),
)

BY_NAME: Mapping[str, Key] = {key.name: key for key in KEYS}
#: The names of keys by the fields that get their values.
NAME_OF: Mapping[str, str] = {key.field: key.name for key in KEYS}
