"""A rank's process or a node went away: open the incident, revoke the epoch, collect the siblings.

What is done about the losses is decided in ``recovery.py`` when the gather window ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deadpool_launch.controller.events import IncidentOpened
from deadpool_launch.controller.states import BEGUN, Incident, Loss, Phase, Stage
from deadpool_launch.controller.turn import Turn, fresh_process
from deadpool_launch.controller.wording import loss_text, plural, ranks_text
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol


def forget_processes(turn: Turn, ranks: Iterable[int]) -> None:
    """The processes of these ranks are gone."""
    table = list(turn.state.ranks)
    for rank in ranks:
        table[rank] = fresh_process(table[rank])
    turn.set(ranks=tuple(table))


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


def open_epoch(turn: Turn, reason: str) -> None:
    """Void the current epoch and tell every rank that runs the script.

    Ranks that failed by themselves join the losses: they left the script and cannot be unwound.
    Ranks that were not told ``Begin`` yet need no ``Revoke``: their ``Begin`` will carry the new
    epoch.
    """
    state = turn.state
    incident = state.incident
    if incident is None:
        incident = Incident(state.incidents + 1, turn.at, reason)
        turn.set(incident=incident, incidents=incident.number)
        turn.act(IncidentOpened(incident.number, turn.at, reason))
    if incident.attempts >= state.config.max_attempts:
        turn.finish(
            ExitCode.RECOVERY_FAILED,
            f"incident {incident.number} is not over after "
            f"{plural(incident.attempts, 'attempt')}; last: {reason}",
        )
        return
    epoch = state.epoch + 1
    turn.set(epoch=epoch, notice_at=None)
    turn.set_incident(
        attempts=incident.attempts + 1,
        losses=(),
        marked=frozenset(),
        step=None,
        resumed=False,
    )
    turn.mark("detected", reason)
    told = [rank for rank in state.ranks if rank.stage in BEGUN]
    turn.tell((rank.rank for rank in told), protocol.Revoke(epoch))
    turn.mark("revoked", f"epoch {epoch}" + _told_text([rank.rank for rank in told]))
    unwinding = [rank.rank for rank in told if rank.stage is not Stage.SCRIPT]
    turn.set_ranks(
        unwinding,
        stage=Stage.UNWINDING,
        deadline=turn.at + state.config.park_s,
        slots=(),
        rebuilt=False,
        restored=None,
        steps_ended=False,
        raised=None,
        raise_told=False,
    )


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
