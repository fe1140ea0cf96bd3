"""What an agent is told: the job, and the orders of the launcher."""

from __future__ import annotations

import msgspec

from deadpool_runtime.protocol.base import Address, Message
from deadpool_runtime.protocol.to_rank import ToRank


class AdmissionCheck(msgspec.Struct, frozen=True):
    """A shell command that ends well, within ``timeout_s``, on a node that is fit for ranks."""

    command: str
    timeout_s: float


class JobSpec(Message, frozen=True):
    """First message to an agent: what does not change while the job lives.

    ``heartbeat_s``: interval of ``Heartbeat``. ``frozen_after_s``: a rank whose process is stopped
    for longer is reported. ``confirm_timeout_s``: how long a rank waits for a confirmation; longer
    than it takes to notice a lost node, else its peers run ahead of the last step that is whole.
    ``stop_grace_s``: time between SIGTERM and SIGKILL. ``env``: added to every rank's environment.
    ``fault_steps``: rehearsals only, rank -> step at whose start it reports ``FaultPoint`` and
    waits. ``checkpoint_dir``: where durable checkpoints go, after every ``checkpoint_every`` steps;
    empty for none. ``replication_interval``: every so manieth step is replicated.
    ``launcher_grace_s``: how long an agent without a launcher waits for another.
    ``collective_timeout_s``: the longest that a step may take. ``admission``: what a node must pass
    before it takes the ranks of another one. ``pace_s``: how often an agent tells how fast its
    ranks go; 0 for never. ``device_s``: the same for asking how the GPUs are. ``interfaces``:
    regular expressions for those that carry the traffic between nodes, the best first.
    """

    job_id: str
    run_dir: str
    script: str
    script_args: list[str]
    world_size: int
    nproc_per_node: int
    env: dict[str, str]
    heartbeat_s: float
    frozen_after_s: float
    confirm_timeout_s: float
    stop_grace_s: float
    record_final_state: bool
    fault_steps: dict[int, int]
    checkpoint_dir: str = ""
    checkpoint_every: int = 0
    launcher_grace_s: float = 60.0
    admission: list[AdmissionCheck] = msgspec.field(default_factory=list)
    collective_timeout_s: float = 600.0
    pace_s: float = 0.0
    device_s: float = 0.0
    interfaces: list[str] = msgspec.field(default_factory=list)
    replication_interval: int = 1


class TakeStandings(Message, frozen=True):
    """Say what every rank of this node is doing; answered by ``Standings`` with this number."""

    number: int


class TakeStacks(Message, frozen=True):
    """Have the stacks of these ranks' threads written into the run directory, before anything that
    is told later is done; ``StackNotTaken`` says for which that failed.
    """

    ranks: list[int]


class StartRanks(Message, frozen=True):
    """Start a process for each of ``ranks`` (global ranks, in order of local rank) on this node."""

    epoch: int
    node_index: int
    ranks: list[int]
    local_ranks: list[int]


class KillRanks(Message, frozen=True):
    """SIGKILL the processes (whole trees) of these ranks; their exits are reported as usual."""

    ranks: list[int]
    reason: str


class TellRanks(Message, frozen=True):
    """Pass ``body`` on to these ranks of this node."""

    ranks: list[int]
    body: ToRank


class TakeInventory(Message, frozen=True):
    """Let no copy of an older epoch be written any more, then report the copies on this node."""

    epoch: int


class TryPaths(Message, frozen=True):
    """Find out which of these nodes can be reached, by calling their replicators, each for at most
    ``timeout_s``; answered by ``PathsTried`` with this number.
    """

    number: int
    peers: dict[str, Address]
    timeout_s: float


class StopAgent(Message, frozen=True):
    """End every rank (SIGTERM, grace, SIGKILL), clean up, then leave."""

    reason: str


ToAgent = (
    StartRanks
    | KillRanks
    | TellRanks
    | TakeInventory
    | TakeStandings
    | TakeStacks
    | TryPaths
    | StopAgent
)
