"""Rung 4: with no spare left, go on without the data-parallel replicas that lost members; and take
them back in when nodes are there again.

A replica is the ranks that keep one whole model together. Its ranks are set aside together: a rank
alone of a model that is spread over several is of no use. A rank that is set aside keeps its number
and its place, and what all ranks must have is not asked of it. Living nodes of ranks that are aside
take the places of lost ones, so they are spares in all but name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deadpool_launch.controller.losses import open_epoch
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.rank import LIVE, Rank, Stage, Trait
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import loss_text, nodes_text, ranks_text

#: Global ranks, ascending.
Ranks = tuple[int, ...]

#: Later than every step: a rank that comes back may take over a peer's copy of any.
ANY_STEP = 1 << 62


@dataclass(frozen=True, slots=True)
class Fit:
    """The ranks that nodes are there for. ``why``: unless empty, why that cannot be some of them.

    ``kept``: none if the job cannot go on at all.
    """

    kept: frozenset[int]
    why: str = ""


def replicas_in(ranks: Iterable[Rank]) -> list[Ranks]:
    """The replicas, from what each rank says of its own: those that share a rank are one."""
    found: list[set[int]] = []
    for rank in ranks:
        joined = {rank.rank, *rank.replica}
        apart = []
        for each in found:
            if each & joined:
                joined |= each
            else:
                apart.append(each)
        found = [*apart, joined]
    return sorted(tuple(sorted(each)) for each in found)


def fit(state: State, *, regain: bool = False) -> Fit:
    """Which replicas are kept, as many as there are nodes for.

    Those that need no node come first, then those that need few. ``regain``: ranks that are aside
    may come back, on nodes that are up.
    """
    present = state.present()
    fixed = next((rank.fixed for rank in present if rank.fixed), "")
    if fixed or not all(rank.replica for rank in present):
        return Fit(frozenset(), fixed or "not every rank has come to its first step")
    replicas = [
        replica
        for replica in replicas_in(state.ranks)
        if not state.ranks[replica[0]].aside or (regain and not _is_unfit(state, replica))
    ]
    replicas.sort(key=lambda each: (len(_vacant(state, each)), state.ranks[each[0]].aside, each))
    kept: set[int] = set()
    for replica in replicas:
        wanted = kept | set(replica)
        if len(_vacant(state, wanted)) <= _nodes_for(state, wanted, warm=regain):
            kept = wanted
    if not any(state.ranks[rank].holds for rank in kept):
        return Fit(frozenset(), "no replica is whole")
    return Fit(frozenset(kept))


def _seats(state: State, ranks: Iterable[int]) -> set[int]:
    return {rank // state.config.nproc_per_node for rank in ranks}


def _is_vacant(state: State, seat: int) -> bool:
    name = state.seats[seat]
    return state.nodes[name].stage is AgentStage.GONE or name in state.worn


def _vacant(state: State, ranks: Iterable[int]) -> set[int]:
    """The places of these ranks that have no node to run on."""
    return {seat for seat in _seats(state, ranks) if _is_vacant(state, seat)}


def _is_unfit(state: State, replica: Ranks) -> bool:
    """A node in its places did not do before, or has yet to come up."""
    names = [state.seats[seat] for seat in _seats(state, replica)]
    settled = (AgentStage.GONE, AgentStage.WARM)
    return any(name in state.unfit or state.nodes[name].stage not in settled for name in names)


def _nodes_for(state: State, ranks: Iterable[int], *, warm: bool) -> int:
    """How many nodes there are that could take the places of these ranks, besides their own."""
    taken = _seats(state, ranks)
    usable = [
        name
        for name in (*state.free, *idle_nodes(state))
        if name not in state.seats or state.seats.index(name) not in taken
    ]
    if warm:
        return sum(
            state.nodes[name].stage is AgentStage.WARM and name not in state.unfit
            for name in usable
        )
    back = sum(
        name not in state.seats and state.nodes[name].stage is AgentStage.WARM
        for name in {*state.worn, *state.drained}
    )
    return back + sum(state.nodes[name].stage is not AgentStage.GONE for name in usable)


def idle_nodes(state: State) -> list[str]:
    """Nodes that hold a place of ranks that are all aside, and that no process of them is left on.

    One with a process that is still to end is left out: its exit would be looked for elsewhere.
    """
    if not state.ranks.some(Trait.ASIDE):
        return []
    return [
        name
        for seat, name in enumerate(state.seats)
        if state.nodes[name].stage is AgentStage.WARM
        and name not in state.worn
        and all(
            state.ranks[rank].aside and state.ranks[rank].stage is Stage.ABSENT
            for rank in state.ranks_of_seat(seat)
        )
    ]


def is_left_empty(state: State, seat: int) -> bool:
    """Whether all ranks of this place are aside, so that it needs no node."""
    return all(state.ranks[rank].aside for rank in state.ranks_of_seat(seat))


def can_do_without(state: State, names: Iterable[str]) -> bool:
    """Whether the job may and could go on if these nodes were lost, with fewer ranks at need."""
    if not state.config.shrink:
        return False
    gone = [replace(state.nodes[name], stage=AgentStage.GONE) for name in names]
    return bool(fit(replace(state, nodes=state.nodes.with_nodes(gone))).kept)


# ---------------------------------------------------------------- fewer


def make_fit(turn: Turn) -> str:
    """Set aside what there are no nodes for, if that is allowed and needed; returns why it could
    not be done, if it is not allowed or was to no avail."""
    if not turn.state.begun:
        return ""
    _undo_regain(turn)
    state = turn.state
    present = frozenset(rank.rank for rank in state.present())
    lacking = len(_vacant(state, present)) > _nodes_for(state, present, warm=False)
    if not lacking or not state.config.shrink:
        return ""
    found = fit(state)
    if not found.kept:
        return f"the job cannot go on with fewer ranks ({found.why})"
    away = tuple(sorted(present - found.kept))
    _set_aside(turn, away, "no node is left for its replica")
    turn.set_incident(shed=tuple(sorted({*turn.incident.shed, *away})))
    _say_shrunk(turn, away)
    return ""


def _set_aside(turn: Turn, ranks: Sequence[int], reason: str) -> None:
    turn.kill([rank for rank in ranks if turn.state.ranks[rank].stage in LIVE], reason)
    turn.set_ranks(ranks, aside=True, holds=False)


def _say_shrunk(turn: Turn, away: Ranks) -> None:
    state = turn.state
    count = len(state.present())
    lost = "; ".join(loss_text(loss) for loss in turn.incident.losses)
    text = (
        f"{lost}{'; ' if lost else ''}no spare is left: {ranks_text(away)} are set aside and the "
        f"job goes on with {count} of {state.config.world_size} ranks; from here on the numbers "
        f"are not those of an undisturbed run: averages are over {count} ranks, and the samples of "
        f"{ranks_text(state.aside())} are skipped"
    )
    if len(away) == 1:
        text = text.replace("are set aside", "is set aside", 1)
    if state.config.checkpoint_dir:
        text += "; no durable checkpoints are written meanwhile"
    turn.say(text)
    turn.mark("shrunk", f"{ranks_text(away)} set aside, {count} ranks left")


# ---------------------------------------------------------------- more again


def regain(turn: Turn) -> bool:
    """Take ranks back in that are aside, if nodes are up for a whole replica of them; whether they
    are to be started.

    The current step is cut short and run again with all. A spare whose agent is not there yet is
    started first, beside the training.
    """
    state = turn.state
    if not state.ranks.some(Trait.ASIDE) or not _may_regain(state):
        return False
    for name in state.free:
        if state.nodes[name].stage is AgentStage.OFF and name not in state.unfit:
            turn.start_agent(name)
    found = fit(turn.state, regain=True)
    back = tuple(sorted(rank for rank in found.kept if state.ranks[rank].aside))
    if not back:
        return False
    reason = f"nodes are there for {ranks_text(back)} again"
    open_epoch(turn, reason, planned=True)
    turn.set_ranks(back, aside=False, adopts=ANY_STEP)
    turn.set_incident(regained=back)
    turn.say(f"{reason}: they come back in epoch {turn.state.epoch}, with the state of their peers")
    return True


def _may_regain(state: State) -> bool:
    """Nothing is amiss, and the job has steps to go."""
    return (
        state.phase is Phase.TRAINING
        and state.incident is None
        and state.look is None
        and state.halt is None
        and state.stop is None
        and not state.wishes
        and not state.steps_over
        and not any(rank.steps_ended or rank.raised is not None for rank in state.present())
        and all(rank.stage is Stage.ATTACHED for rank in state.present())
        and not any(rank.stage is Stage.DYING for rank in state.ranks.having(Trait.ASIDE))
    )


def _undo_regain(turn: Turn) -> None:
    """A loss came while ranks were being taken back in: go on without them again.

    Else a node that cannot carry them would cost the job its attempts.
    """
    incident = turn.incident
    if not incident.regained or not incident.losses:
        return
    state = turn.state
    if any(rank in incident.regained for loss in incident.losses for rank in loss.ranks):
        names = {state.node_of(rank) for rank in incident.regained}
        gone = {name for name in names if state.nodes[name].stage is AgentStage.GONE}
        turn.set(unfit=(*state.unfit, *sorted(names - gone - set(state.unfit))))
    _set_aside(turn, incident.regained, "its replica could not be taken back in")
    turn.say(
        f"{ranks_text(incident.regained)} could not be taken back in, on "
        f"{nodes_text(dict.fromkeys(state.node_of(rank) for rank in incident.regained))}"
    )
    turn.set_incident(regained=())


def verdict_of(turn: Turn) -> tuple[str, str]:
    """The incident's verdict, and what to add to its reason."""
    state, incident = turn.state, turn.incident
    count = len(state.present())
    if incident.shed:
        return "shrunk", f" with {count} of {state.config.world_size} ranks"
    if incident.regained:
        return "regrown", f" with {count} of {state.config.world_size} ranks"
    if incident.begins and incident.planned:
        return "begun", ""
    return "continued", ""
