"""What holds between any two events. Checked after every event in all tests.

A broken rule is a defect of the controller, never of a script or a node.
"""

from __future__ import annotations

from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.rank import LIVE, Rank, Stage, Trait
from deadpool_launch.controller.states import Phase, State

#: Stages a rank may be in, for each phase of the job that has a script.
_STAGES: dict[Phase, frozenset[Stage]] = {
    Phase.NEW: frozenset({Stage.ABSENT}),
    Phase.AGENTS: frozenset({Stage.ABSENT}),
    Phase.LAUNCHING: frozenset({Stage.ABSENT, Stage.STARTING, Stage.UP}),
    Phase.TRAINING: frozenset({Stage.SCRIPT, Stage.ATTACHED, Stage.FAILED, Stage.ENDED}),
    Phase.GATHERING: frozenset(Stage) - {Stage.FAILED, Stage.ATTACHED, Stage.RESTORING},
    Phase.PARKING: frozenset(
        {
            Stage.ABSENT,
            Stage.STARTING,
            Stage.UP,
            Stage.SCRIPT,
            Stage.UNWINDING,
            Stage.PARKED,
            Stage.DYING,
        }
    ),
    Phase.INVENTORY: frozenset({Stage.PARKED}),
    Phase.RESTORING: frozenset({Stage.RESTORING}),
    Phase.CLEARING: frozenset({Stage.ABSENT, Stage.STARTING, Stage.UP, Stage.DYING}),
}
#: The same for a rank that is set aside.
_ASIDE = frozenset({Stage.ABSENT, Stage.DYING})
#: Phases in which the job repairs itself; an incident is open in each.
_REPAIR = frozenset(
    {Phase.GATHERING, Phase.PARKING, Phase.INVENTORY, Phase.RESTORING, Phase.CLEARING}
)
#: Phases that end only by an event that may never come.
_UNTIMED = frozenset({Phase.NEW, Phase.TRAINING, Phase.ENDED})


class InvariantBroken(AssertionError):
    """The state contradicts itself; the text says where, and shows the state."""


def validate(state: State, before: State | None = None) -> None:
    """Raise ``InvariantBroken`` at the first rule that does not hold.

    ``before``: a state that was found good; what is the very same as in it is not looked at again.
    """
    if state.phase is Phase.ENDED:
        _check(state, state.next_deadline() is None, "an ended job waits for nothing")
        return
    _check_job(state)
    if before is None or not _same_around(state, before):
        _check_nodes(state)
        for rank in state.ranks:
            _check_rank(state, rank, state.node_of(rank.rank))
        return
    for rank, known in zip(state.ranks, before.ranks, strict=True):
        if rank is not known:
            _check_rank(state, rank, state.node_of(rank.rank))


def _same_around(state: State, before: State) -> bool:
    """Whether all that the rules for nodes and those for a rank look at besides it is the same."""
    return (
        state.nodes is before.nodes
        and state.seats is before.seats
        and state.free is before.free
        and state.lost is before.lost
        and (state.phase, state.epoch, state.newest) == (before.phase, before.epoch, before.newest)
    )


def _check_nodes(state: State) -> None:
    names = set(state.nodes)
    _check(state, len(state.seats) == len(state.config.active), "every logical node has a seat")
    _check(state, len(set(state.seats)) == len(state.seats), "no node has two seats")
    _check(state, not set(state.free) & set(state.seats), "a spare in use is not free")
    _check(state, set(state.seats) | set(state.free) <= names, "seats and spares are known nodes")
    for name in state.free:
        gone = state.nodes[name].stage is AgentStage.GONE
        _check(state, not gone, f"free spare {name} is usable")
    for node in state.nodes.values():
        waiting = node.stage in (AgentStage.STARTING, AgentStage.CONNECTED)
        _check(state, waiting == (node.deadline is not None), f"{node.name}: deadline fits stage")
        gone = node.stage is AgentStage.GONE
        lost, drained = node.name in state.lost, node.name in state.drained
        _check(state, gone or not lost, f"{node.name}: lost is gone")
        _check(state, not gone or lost or drained, f"{node.name}: gone is lost or drained")
        _check(state, gone or node.back_at is None, f"{node.name}: who comes back is gone")
        ordered = node.stage in (AgentStage.OFF, AgentStage.GONE) or node.born > 0
        _check(state, ordered, f"{node.name}: its agent was ordered")
        warm = node.stage is AgentStage.WARM
        _check(state, warm == (node.replicator is not None), f"{node.name}: warm has a replicator")
        if node.inventory_by is not None:
            asked = warm and state.phase is Phase.INVENTORY
            _check(state, asked, f"{node.name}: a living node is asked for its copies")
    _check(state, len(set(state.lost)) == len(state.lost), "a node is lost once")


def _check_job(state: State) -> None:
    _check(state, len(state.ranks) == state.config.world_size, "every logical rank has an entry")
    gathering = state.phase is Phase.GATHERING
    _check(state, gathering == (state.gather_until is not None), "gather window fits phase")
    if state.phase in _REPAIR:
        _check(state, state.incident is not None, "a repair belongs to an incident")
    if state.incident is not None:
        attempts = state.incident.attempts
        _check(state, 1 <= attempts <= state.config.max_attempts, "attempts are within budget")
        _check(state, attempts < state.epoch, "every attempt had its epoch")
    if state.phase is Phase.RESTORING:
        _check(
            state,
            state.incident is not None and state.incident.step is not None,
            "a plan has a step",
        )
    held = state.phase is Phase.TRAINING and state.incident is None
    _check(state, state.halt is None or held, "who trains undisturbed is held back")
    _check(state, not state.leaving or state.phase is Phase.PARKING, "who leaves is parked first")
    wanted = {wish.node for wish in state.wishes}
    _check(state, wanted <= set(state.seats), "nodes with ranks are to be drained")
    _check(state, not state.leaving or state.leaving in wanted, "who leaves was asked to")
    idle = set(state.seats) | set(state.free)
    _check(state, not idle & set(state.drained), "a drained node has no ranks and gets none")
    _check(state, state.look is None or state.phase is Phase.TRAINING, "who trains is looked at")
    mending = state.phase is Phase.RESTORING
    _check(state, state.paths is None or mending, "paths are tried while groups are connected")
    awaited = mending and not state.ranks.every(Trait.REBUILT)
    _check(
        state, state.connect_by is None or awaited, "connections are awaited until all are there"
    )
    _check_protection(state)
    _check(state, state.restarts <= state.config.max_restarts, "restarts are within budget")
    _check(state, state.attempt <= state.restarts, "every attempt after the first is a restart")
    if state.phase not in _UNTIMED:
        _check(state, state.next_deadline() is not None, "a waiting job has a deadline")


def _check_protection(state: State) -> None:
    epochs = [epoch for epoch, _ in state.history]
    _check(state, epochs == sorted(set(epochs)), "resumes are in the order of their epochs")
    _check(state, max(epochs, default=0) <= state.epoch, "resumes are in the past")
    for step, epoch in state.checkpoints.items():
        done = epoch == 0 or (step <= state.newest and epoch <= state.epoch)
        _check(state, done, f"checkpoint {step} is of a step that was completed")
    if state.bare_since is not None:
        _check(state, state.protecting, "redundancy is missed only after it was there")
    if state.phase is not Phase.TRAINING or not state.protecting or state.steps_over:
        return
    for rank, first in state.holders.items():
        all_of_it = () if first is None else (first, *first.more)
        names = {holder.node for holder in all_of_it}
        for holder in all_of_it:
            node = state.nodes[holder.node]
            _check(state, holder.address == node.replicator, f"rank {rank}: its holder serves")
        _check(state, state.node_of(rank) not in names, f"rank {rank}: its holder is another")
        _check(state, len(names) == len(all_of_it), f"rank {rank}: its holders are different nodes")


def _check_rank(state: State, rank: Rank, node: str) -> None:
    who = f"rank {rank.rank}"
    stage = rank.stage
    possible = _ASIDE if rank.aside else _STAGES[state.phase]
    _check(state, stage in possible, f"{who}: {stage} is possible while {state.phase}")
    _check(state, rank.born <= state.epoch, f"{who}: born in the past")
    _check(state, stage is Stage.ABSENT or rank.born >= 1, f"{who}: a process has a birth")
    if stage in LIVE or stage is Stage.DYING:
        warm = state.nodes[node].stage is AgentStage.WARM
        _check(state, warm, f"{who}: its process has a serving agent on {node}")
    match stage:
        case Stage.SCRIPT:
            timed = rank.replacement
        case Stage.ATTACHED:
            timed = rank.raised is not None and not rank.raise_told
        case Stage.RESTORING:
            timed = rank.restored is None
        case Stage.STARTING | Stage.UNWINDING | Stage.DYING | Stage.FAILED:
            timed = True
        case _:
            timed = False
    _check(state, timed == (rank.deadline is not None), f"{who}: deadline fits {stage}")
    _check(state, rank.protected <= state.epoch, f"{who}: protected in the past")
    _check(state, rank.completed <= state.newest, f"{who}: newest step is the newest")
    if stage in (Stage.ATTACHED, Stage.FAILED, Stage.ENDED):
        _check(state, not rank.replacement, f"{who}: who trains is no replacement any more")


def _check(state: State, holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantBroken(f"does not hold: {rule}\n{state}")
