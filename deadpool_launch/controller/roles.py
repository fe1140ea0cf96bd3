"""What each node is to the job: read from the state, never decided upon. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.quarantine import left_out
from deadpool_launch.controller.shrinking import is_left_empty
from deadpool_launch.controller.states import State
from deadpool_runtime.protocol import JobStanding


class NodeRole(StrEnum):
    """What a node is to the job at this moment."""

    #: It has ranks, or a place that ranks are about to start in.
    ACTIVE = "active"
    #: It waits to take the place of another one.
    SPARE = "spare"
    #: It is not used: it was lost, did not come up, or was given up.
    LOST = "lost"
    #: Its ranks were moved away because somebody asked for it.
    DRAINED = "drained"
    #: Its ranks were moved away because their processes died too often.
    WORN = "worn"
    #: Its ranks take no part for want of nodes.
    ASIDE = "aside"


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part in the job. ``why`` continues a sentence that starts with its name.

    ``lasting``: the next job should do without it.
    """

    role: NodeRole
    why: str = ""
    lasting: bool = False


def watched(state: State) -> tuple[object, ...]:
    """What parts depend on: as long as these are the same objects nobody's part changes."""
    return (
        *(state.seats, state.free, state.lost, state.drained, state.worn),
        *(state.incidents, state.incident is None, state.unfit),
    )


def parts(state: State) -> dict[str, Part]:
    """The part of every node that the job knows."""
    lasting = frozenset(left_out(state))
    seat_of = {name: seat for seat, name in enumerate(state.seats)}
    found = {}
    for name, node in state.nodes.items():
        seat = seat_of.get(name)
        why = ""
        if node.stage is AgentStage.GONE and node.gone == "was drained":
            role, why = NodeRole.DRAINED, node.gone
        elif node.stage is AgentStage.GONE:
            role, why = NodeRole.LOST, node.gone
        elif name in state.drained:
            role, why = NodeRole.DRAINED, "was drained"
        elif name in state.worn:
            role, why = NodeRole.WORN, "had too many processes that died"
        elif seat is None:
            role = NodeRole.SPARE
        elif is_left_empty(state, seat):
            role = NodeRole.ASIDE
        else:
            role = NodeRole.ACTIVE
        found[name] = Part(role, why, name in lasting)
    return found


def changed(before: Mapping[str, Part], now: Mapping[str, Part]) -> dict[str, Part]:
    """The nodes whose part is another one."""
    return {name: part for name, part in now.items() if before.get(name) != part}


def serving(state: State) -> list[str]:
    """The nodes whose agents serve, spares first."""
    config = state.config
    warm = [
        name
        for name in (*config.spares, *config.extras, *config.active)
        if state.nodes[name].stage is AgentStage.WARM
    ]
    trains = set(state.seats)
    return sorted(warm, key=trains.__contains__)


def standing(state: State, term: int) -> JobStanding:
    """How the job stands, for those who ask while it runs."""
    present = state.present()
    return JobStanding(
        phase=state.phase,
        term=term,
        epoch=state.epoch,
        step=min((rank.completed for rank in present), default=-1),
        nodes={name: part.role for name, part in parts(state).items()},
        ranks=len(present),
        bare=state.bare_since is not None,
        incident=None if state.incident is None else state.incident.number,
    )
