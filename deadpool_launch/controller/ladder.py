"""The ladder: which rung an incident is on, and which one follows when that one does not help.

What is wrong decides the rung at first (``rungs.py``, ``planning.py``). An incident climbs when its
attempts on a rung are used up, or when a plan came to nothing ``STALLS`` times though nobody was
lost:

    retry, local restart, swap -> warm restart -> durable -> stop

A warm restart leaves nothing of the processes in which the repair failed: all are killed, and new
ones take the state from the copies on their nodes. ``advance`` does that once the phase is
``PARKING`` (``restart_all``). The durable rung does the same with the newest checkpoint that can be
read. Shrinking is for a want of spares and is climbed to from nowhere.
"""

from __future__ import annotations

from enum import IntEnum

from deadpool_launch.controller.checkpoints import newest_usable, why_none
from deadpool_launch.controller.incident import Incident
from deadpool_launch.controller.rank import LIVE, stage_traits
from deadpool_launch.controller.states import State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import plural
from deadpool_launch.exits import ExitCode


class Rung(IntEnum):
    """What is done about a fault, the cheapest first; the numbers stand in the journal."""

    #: All processes go on; their groups are rebuilt.
    RETRY = 0
    #: A process is started again on its node.
    LOCAL_RESTART = 1
    #: A spare takes the ranks of a node.
    SWAP = 2
    #: No process goes on: all start again, with the state that the nodes have of them.
    WARM_RESTART = 3
    #: The job goes on without the replicas that lost members.
    SHRINK = 4
    #: All ranks go back to a durable checkpoint, or begin again.
    DURABLE = 5
    #: The job ends.
    STOP = 6


#: So often a plan comes to nothing on one rung, though nobody was lost, before the next is taken.
STALLS = 2


def rung_text(rung: int) -> str:
    """``rung 3, warm restart``."""
    return f"rung {int(rung)}, {Rung(rung).name.lower().replace('_', ' ')}"


def note_rung(turn: Turn, rung: Rung) -> None:
    """The open incident takes this rung; it counts as the highest that it took."""
    turn.set_incident(rung=max(turn.incident.rung, rung))


def next_rung(state: State) -> Rung | None:
    """The rung above those that the open incident has climbed to; None if only the end is left.

    A script without the runtime, or that is not yet at its first step, has no state to restart
    from.
    """
    incident = state.incident
    if incident is None or not state.attached:
        return None
    if incident.climbed < Rung.WARM_RESTART:
        return Rung.WARM_RESTART
    if incident.climbed < Rung.DURABLE and state.newest >= 1 and newest_usable(state) is not None:
        return Rung.DURABLE
    return None


def climb(turn: Turn, reason: str) -> bool:
    """Go on with the next rung and with all attempts; False if there is none, which ends the job.

    ``reason``: what became of the last attempt.
    """
    incident = turn.incident
    rung = next_rung(turn.state)
    spent = _spent(incident)
    if rung is None:
        turn.finish(
            ExitCode.RECOVERY_FAILED,
            f"incident {incident.number} is not over after {spent}{_no_further(turn.state)}; "
            f"last: {reason}",
        )
        return False
    what = "restart from the copies on their nodes"
    if rung is Rung.DURABLE:
        what = f"go back to the durable checkpoint of step {newest_usable(turn.state)}"
    turn.say(f"{reason}; after {spent} all ranks {what} ({rung_text(rung)})")
    turn.set_incident(climbed=rung, attempts=0, stalls=0, anew=True)
    note_rung(turn, rung)
    return True


def _spent(incident: Incident) -> str:
    attempts = plural(incident.attempts, "attempt")
    return f"{attempts} on {rung_text(incident.climbed)}" if incident.climbed else attempts


def _no_further(state: State) -> str:
    """Why the last rung before the end was not taken, if it could have been."""
    assert state.incident is not None
    if state.incident.climbed != Rung.WARM_RESTART or state.newest < 1:
        return ""
    return f"; {why_none(state)}"


def restart_all(turn: Turn) -> None:
    """End every process if the rung that was climbed to asks for it; new ones follow."""
    if not turn.incident.anew:
        return
    turn.set_incident(anew=False)
    living = turn.state.ranks.having(stage_traits(*LIVE))
    turn.kill(
        (rank.rank for rank in living), f"all ranks restart ({rung_text(turn.incident.rung)})"
    )
