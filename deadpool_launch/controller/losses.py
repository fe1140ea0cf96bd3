"""A rank's process or a node went away: open the incident, revoke the epoch, collect the siblings.

What is done about the losses is decided in ``rungs.py`` when the gather window ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deadpool_launch.controller import halts, stops
from deadpool_launch.controller.budgets import charge_job
from deadpool_launch.controller.events import IncidentOpened
from deadpool_launch.controller.incident import Incident, Loss
from deadpool_launch.controller.ladder import STALLS, climb
from deadpool_launch.controller.rank import BEGUN, Stage
from deadpool_launch.controller.states import Phase
from deadpool_launch.controller.tables import NodeTable
from deadpool_launch.controller.turn import Turn, fresh_process
from deadpool_launch.controller.wording import loss_text, ranks_text
from deadpool_runtime import protocol


def forget_processes(turn: Turn, ranks: Iterable[int]) -> None:
    """The processes of these ranks are gone."""
    table = turn.state.ranks
    turn.set(ranks=table.with_changes({rank: fresh_process(table[rank]) for rank in ranks}))


def lose(turn: Turn, losses: Iterable[Loss]) -> None:
    """Count ranks as lost. The caller has already made them ``ABSENT`` or ``DYING``.

    Within the gather window nothing was built in the new epoch yet, so a sibling joins it. In every
    other phase the epoch is spent: a plan, a replacement or a store of it may exist, and the next
    attempt needs a number that none of them carries.
    """
    losses = tuple(losses)
    if turn.state.phase is Phase.CLEARING:
        for loss in losses:
            turn.say(f"{loss_text(loss)}; started again with all ranks")
        return
    if turn.state.phase is Phase.GATHERING:
        _join(turn, losses)
        return
    open_epoch(turn, "; ".join(loss_text(loss) for loss in losses))
    if not turn.over:
        turn.set_incident(losses=())
        _join(turn, losses)
        turn.set(phase=Phase.GATHERING, gather_until=turn.at + turn.state.config.gather_s)
        failed_as_lost(turn)


def kill_as_lost(turn: Turn, ranks: Iterable[int], cause: str, reason: str) -> None:
    """Kill processes that live but cannot take part, and count them as lost."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(turn.state.node_of(rank), []).append(rank)
    turn.kill((rank for members in by_node.values() for rank in members), reason)
    lose(turn, [Loss(node, tuple(members), cause, False) for node, members in by_node.items()])


def _join(turn: Turn, losses: tuple[Loss, ...]) -> None:
    """Add losses to those of this epoch; a lost node explains the deaths of its ranks."""
    known = turn.incident.losses
    for loss in losses:
        if loss.whole_node:
            covered = [old for old in known if old.node == loss.node]
            known = tuple(old for old in known if old.node != loss.node)
            ranks = {rank for old in covered for rank in old.ranks} | set(loss.ranks)
            loss = replace(loss, ranks=tuple(sorted(ranks)))
        known = (*known, loss)
    turn.set_incident(losses=known)


def open_epoch(
    turn: Turn,
    reason: str,
    *,
    counted: bool = True,
    next_rung: bool = False,
    planned: bool = False,
) -> None:
    """Void the current epoch and tell every rank that runs the script.

    ``counted``: it uses up one of the incident's attempts. ``next_rung``: the present rung is not
    tried any more, however many attempts are left. ``planned``: it is no fault, and not counted
    against the job.

    Ranks that failed by themselves join the losses: they left the script and cannot be unwound.
    Ranks that were not told ``Begin`` yet need no ``Revoke``: their ``Begin`` will carry the new
    epoch.
    """
    state = turn.state
    incident = state.incident
    if stops.is_ending(state):
        stops.when_struck(turn, reason)
        return
    if incident is None:
        incident = Incident(state.incidents + 1, turn.at, reason, planned=planned)
        turn.set(incident=incident, incidents=incident.number)
        turn.act(IncidentOpened(incident.number, turn.at, reason))
        if not planned:
            charge_job(turn, reason)
        if turn.over:
            return
    if next_rung or (counted and incident.attempts >= state.config.max_attempts):
        if not climb(turn, reason):
            return
        incident = turn.incident
    restoring_s = restore_limit_s(turn)
    epoch = state.epoch + 1
    turn.set(epoch=epoch, notice_at=None, look=None, paths=None, connect_by=None, leaving="")
    halts.forget(turn)
    late = [rank.rank for rank in state.ranks if rank.overdue_at is not None]
    turn.set_ranks(late, overdue_at=None)
    bare = state.bare_since is not None
    if state.protecting and not bare:
        turn.set(bare_since=turn.at)
    asked = {
        name: replace(node, inventory_by=None, copies=()) for name, node in state.nodes.items()
    }
    turn.set(nodes=NodeTable(asked))
    turn.set_incident(
        attempts=incident.attempts + counted,
        losses=(),
        marked=frozenset(),
        step=None,
        reading=False,
        resumed=False,
        bare_s=None,
        bare=bare,
    )
    turn.mark("detected", reason)
    told = [rank for rank in state.ranks if rank.stage in BEGUN]
    turn.tell((rank.rank for rank in told), protocol.Revoke(epoch))
    turn.mark("revoked", f"epoch {epoch}" + _told_text([rank.rank for rank in told]))
    unwind_s = state.config.unwind_s
    # Nothing of the script runs in a rank that is parked or restores its state.
    mended = [rank.rank for rank in told if rank.stage in (Stage.PARKED, Stage.RESTORING)]
    _unwind(turn, mended, min(unwind_s, restoring_s))
    in_step = [rank.rank for rank in told if rank.stage in (Stage.ATTACHED, Stage.UNWINDING)]
    _unwind(turn, in_step, unwind_s)


def _unwind(turn: Turn, ranks: list[int], patience_s: float) -> None:
    turn.set_ranks(
        ranks,
        stage=Stage.UNWINDING,
        deadline=turn.at + patience_s,
        patience_s=patience_s,
        rebuilt=False,
        restored=None,
        steps_ended=False,
        raised=None,
        raise_told=False,
    )


def restore_limit_s(turn: Turn) -> float:
    """How long the present plan may take."""
    config = turn.state.config
    return config.load_s if turn.incident.reading else config.restore_s


def stall(turn: Turn, text: str) -> None:
    """The plan came to nothing though nobody was lost: make another one, on the next rung if it was
    not the first.
    """
    stalls = turn.incident.stalls + 1
    turn.set_incident(stalls=stalls)
    again = stalls < STALLS
    if again:
        turn.say(f"{text}; trying again")
    open_epoch(turn, text, next_rung=not again)
    if not turn.over:
        turn.set(phase=Phase.PARKING)


def _told_text(ranks: list[int]) -> str:
    return f" told to {ranks_text(ranks)}" if ranks else "; no rank runs the script"


def failed_as_lost(turn: Turn) -> None:
    """Ranks whose script failed within the verdict window of a loss: the loss explains them.

    1. Node n2 dies; the collectives of its peers break within milliseconds.
    2. Rank 0 is outside a step (or never attached), so the exception ends its script:
       ``ScriptFailed``.
    3. The silence of n2's agent is noticed seconds later.
    Blaming rank 0's script at 2 would be wrong, and after 3 its process cannot be unwound any more.
    """
    for rank in turn.staged(Stage.FAILED):
        node = turn.state.node_of(rank.rank)
        cause = f"failed ({rank.error}, seen) and cannot be unwound"
        if rank.exited:
            forget_processes(turn, (rank.rank,))
        else:
            turn.kill((rank.rank,), "its script failed during a fault")
        lose(turn, [Loss(node, (rank.rank,), cause, False)])
