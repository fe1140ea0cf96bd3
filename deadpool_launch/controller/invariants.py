"""What holds between any two events. Checked after every event in all tests.

A broken rule is a defect of the controller, never of a script or a node.
"""

from __future__ import annotations

from deadpool_launch.controller.states import LIVE, AgentStage, Phase, Rank, Stage, State

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
    Phase.RESTORING: frozenset({Stage.RESTORING}),
    Phase.CLEARING: frozenset({Stage.ABSENT, Stage.STARTING, Stage.UP, Stage.DYING}),
}
#: Phases in which the job repairs itself; an incident is open in each.
_REPAIR = frozenset({Phase.GATHERING, Phase.PARKING, Phase.RESTORING, Phase.CLEARING})
#: Phases that end only by an event that may never come.
_UNTIMED = frozenset({Phase.NEW, Phase.TRAINING, Phase.ENDED})


class InvariantBroken(AssertionError):
    """The state contradicts itself; the text says where, and shows the state."""


def validate(state: State) -> None:
    """Raise ``InvariantBroken`` at the first rule that does not hold."""
    if state.phase is Phase.ENDED:
        _check(state, state.next_deadline() is None, "an ended job waits for nothing")
        return
    _check_job(state)
    for seat, name in enumerate(state.seats):
        for rank in state.ranks_of_seat(seat):
            _check_rank(state, state.ranks[rank], name)


def _check_job(state: State) -> None:
    names = set(state.nodes)
    _check(state, len(state.ranks) == state.config.world_size, "every logical rank has an entry")
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
        _check(state, gone == (node.name in state.lost), f"{node.name}: gone exactly if lost")
    _check(state, len(set(state.lost)) == len(state.lost), "a node is lost once")
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
    _check(state, state.restarts <= state.config.max_restarts, "restarts are within budget")
    _check(state, state.attempt <= state.restarts, "every attempt after the first is a restart")
    if state.phase not in _UNTIMED:
        _check(state, state.next_deadline() is not None, "a waiting job has a deadline")


def _check_rank(state: State, rank: Rank, node: str) -> None:
    who = f"rank {rank.rank}"
    stage = rank.stage
    _check(state, stage in _STAGES[state.phase], f"{who}: {stage} is possible while {state.phase}")
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
    _check(state, len(rank.own) <= 3, f"{who}: three own parts at most")
    _check(state, list(rank.own) == sorted(set(rank.own)), f"{who}: own parts ascend")
    _check(state, rank.completed <= state.newest, f"{who}: newest step is the newest")
    if stage in (Stage.ATTACHED, Stage.FAILED, Stage.ENDED):
        _check(state, not rank.replacement, f"{who}: who trains is no replacement any more")


def _check(state: State, holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantBroken(f"does not hold: {rule}\n{state}")
