"""What is done about a set of losses: repair in place, start every rank anew, or give up.

Called when the gather window ends. The work that follows a choice is in ``recovery.py``.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_launch.controller.budgets import back_in_use, worn_out
from deadpool_launch.controller.checkpoints import still_valid
from deadpool_launch.controller.incident import Loss
from deadpool_launch.controller.ladder import Rung, note_rung
from deadpool_launch.controller.losses import forget_processes, kill_as_lost, lose
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.placement import choose_spare
from deadpool_launch.controller.rank import LIVE, Stage
from deadpool_launch.controller.shrinking import idle_nodes, is_left_empty, make_fit
from deadpool_launch.controller.states import Phase
from deadpool_launch.controller.tables import RankTable
from deadpool_launch.controller.turn import Turn, fresh_process
from deadpool_launch.controller.wording import loss_text, plural, ranks_text
from deadpool_launch.exits import ExitCode


def choose_rung(turn: Turn) -> None:
    """Decide once, with all losses of the epoch known."""
    if (worn := worn_out(turn)) is not None:
        _clear_node(turn, worn)
    turn.set(gather_until=None)
    state = turn.state
    why = "; ".join(loss_text(loss) for loss in turn.incident.losses) or turn.incident.reason
    may_restart = state.newest < 1
    if not state.begun:
        start_anew(turn, why, "no script has begun")
        return
    gone_past = turn.staged(Stage.ENDED)
    if gone_past or state.steps_over:
        if may_restart:
            start_anew(turn, why, "the script has already ended on other ranks")
            return
        past = f"{ranks_text(rank.rank for rank in gone_past)} ended" if gone_past else "all steps"
        turn.finish(
            ExitCode.STATE_LOST,
            f"{why}; the last step is over ({past}) and ranks that have left their steps cannot "
            "be unwound to make it whole again",
        )
        return
    live = [rank for rank in state.ranks if rank.stage in LIVE]
    holders = [rank for rank in live if rank.holds]
    stuck = [rank for rank in live if rank.stage is Stage.SCRIPT and not rank.replacement]
    if may_restart and (stuck or not holders):
        start_anew(turn, why, _why_not_in_place([rank.rank for rank in stuck]))
        return
    if stuck:
        # Work exists, in copies on the nodes: ranks that cannot be unwound count as lost too.
        kill_as_lost(
            turn,
            [rank.rank for rank in stuck],
            "cannot be unwound (not at a step, seen)",
            "not at a step while there are completed steps",
        )
    repair_in_place(turn)


def _why_not_in_place(stuck: list[int]) -> str:
    if stuck:
        return f"{ranks_text(stuck)} had not come to a first step and cannot be unwound"
    return "no living rank has completed a step"


def _clear_node(turn: Turn, worn: Loss) -> None:
    """End what runs on a node that is to have no ranks. Its agent stays, for the copies there."""
    running = [rank for rank in worn.ranks if turn.state.ranks[rank].stage in LIVE]
    turn.kill(running, "a spare takes the place of its node")
    forget_processes(turn, worn.ranks)
    lose(turn, [worn])
    turn.set(
        worn=(*turn.state.worn, worn.node),
        wishes=tuple(wish for wish in turn.state.wishes if wish.node != worn.node),
    )


def take_seats(turn: Turn, not_shrunk: str = "") -> dict[str, str]:
    """Give the place of every gone or worn node to a spare; return old -> new. May end the job.

    ``not_shrunk``: why it does not go on with fewer ranks instead.
    """
    taken: dict[str, str] = {}
    for seat, old in enumerate(turn.state.seats):
        if turn.state.nodes[old].stage is not AgentStage.GONE and old not in turn.state.worn:
            continue
        if is_left_empty(turn.state, seat):
            continue
        state = turn.state
        idle = next(iter(idle_nodes(state)), None)
        spare = choose_spare(state.free, state.nodes) or idle or back_in_use(state)
        if spare is None:
            turn.finish(ExitCode.NO_SPARE, _no_spare(turn, old, not_shrunk))
            return taken
        seats = list(state.seats)
        if spare in seats:
            seats[seats.index(spare)] = old
        seats[seat] = spare
        turn.set(
            seats=tuple(seats),
            free=tuple(name for name in turn.state.free if name != spare),
            worn=tuple(name for name in turn.state.worn if name != spare),
        )
        if spare in turn.state.drained:
            left = {name: step for name, step in turn.state.drained.items() if name != spare}
            turn.set(drained=left)
            turn.say(f"{spare} is used again although it was drained: no spare is left")
        if turn.state.nodes[spare].stage is AgentStage.OFF:
            turn.start_agent(spare)
        taken[old] = spare
    return taken


def _no_spare(turn: Turn, node: str, not_shrunk: str) -> str:
    """The verdict when nobody can take this node's place, with what to do next."""
    state = turn.state
    gone = f"{node} {state.nodes[node].gone}"
    then = "training then restarts from your own checkpoint"
    held = state.config.spares or state.config.extras
    if not held and not not_shrunk:
        return f"{gone}, no spare was held: submit again with --spares 1; {then}"
    lost = f" (lost so far: {', '.join(state.lost)})" if len(state.lost) > 1 else ""
    if not_shrunk:
        lost += f", and {not_shrunk}"
    return f"{gone}, no spare left{lost}: submit again with more --spares; {then}"


def _say_placements(turn: Turn, taken: dict[str, str], losses: tuple[Loss, ...]) -> None:
    """One line for each of the losses: what happened, and where its ranks go."""
    epoch = turn.state.epoch
    ranks_now = turn.state.ranks
    for loss in _together(losses):
        if all(ranks_now[rank].aside for rank in loss.ranks):
            continue  # told when they were set aside
        if loss.whole_node:
            spare = taken.get(loss.node, "a spare")
            seat = turn.state.seats.index(spare)
            ranks = ranks_text(turn.state.ranks_of_seat(seat))
            turn.say(f"{loss_text(loss)}; {spare} takes {ranks}, epoch {epoch}")
        else:
            turn.say(f"{loss_text(loss)}; restarted on {loss.node}, epoch {epoch}")
    turn.set_incident(losses=())


def _together(losses: tuple[Loss, ...]) -> list[Loss]:
    """Deaths of one cause on one node as one loss, for people."""
    merged: dict[tuple[str, str, bool], Loss] = {}
    for loss in losses:
        key = (loss.node, loss.cause, loss.whole_node)
        ranks = merged[key].ranks + loss.ranks if key in merged else loss.ranks
        merged[key] = replace(loss, ranks=tuple(sorted(ranks)))
    return list(merged.values())


def repair_in_place(turn: Turn) -> None:
    """Survivors stay in their processes; lost ranks get new ones, or are set aside."""
    taken = take_seats(turn, make_fit(turn))
    if not turn.over:
        note_rung(turn, _rung_of(turn, taken))
        _say_placements(turn, taken, turn.incident.losses)
        turn.set(phase=Phase.PARKING)


def _rung_of(turn: Turn, taken: dict[str, str]) -> Rung:
    """By who goes on: all, all but some processes, all but some nodes, or nobody."""
    ranks = turn.state.present()
    if turn.incident.shed:
        return Rung.SHRINK
    if turn.incident.anew or not any(rank.holds and rank.stage in LIVE for rank in ranks):
        return Rung.WARM_RESTART
    if taken:
        return Rung.SWAP
    return Rung.LOCAL_RESTART if any(rank.stage not in LIVE for rank in ranks) else Rung.RETRY


def start_anew(turn: Turn, why: str, reason: str) -> None:
    """Every rank starts from the top; ranks whose script was not begun are kept as they are."""
    state = turn.state
    limit = state.config.max_restarts
    if state.restarts >= limit:
        started = state.begun or state.attempt > 0
        turn.finish(
            ExitCode.RECOVERY_FAILED if started else ExitCode.START_FAILED,
            f"{why}; {reason}; the job's budget of {plural(limit, 'restart')} is used up",
        )
        return
    turn.set_ranks(state.aside(), aside=False)
    taken = take_seats(turn)
    if turn.over:
        return
    _say_restart(turn, taken, reason)
    note_rung(turn, Rung.DURABLE)
    turn.set_incident(anew=False)
    turn.set(restarts=state.restarts + 1, phase=Phase.CLEARING)
    if not state.begun:
        return
    turn.kill(
        [
            rank.rank
            for rank in turn.state.ranks
            if rank.stage in LIVE or (rank.stage is Stage.ENDED and not rank.exited)
        ],
        "all ranks start anew",
    )
    # What an earlier attempt computed must not mix with the next one: it may start elsewhere.
    turn.set(
        ranks=RankTable(
            fresh_process(rank) if rank.stage is Stage.ENDED else rank for rank in turn.state.ranks
        ),
        attempt=state.attempt + 1,
        begun=False,
        steps_over=False,
        newest=-1,
        history=(*state.history, (turn.state.epoch, -1)),
        checkpoints=still_valid(state.checkpoints, -1),
        protecting=False,
        holders={},
        electors=(),
        bare_since=None,
        unprotected_step=-1,
        begun_at=0,
    )
    turn.set_ranks(
        range(len(state.ranks)),
        completed=-1,
        segments=None,
        own_nbytes=0,
        save_nbytes=0,
        digests=(None, None),
        died_in=None,
        brings_state=False,
    )


def _say_restart(turn: Turn, taken: dict[str, str], reason: str) -> None:
    """What happened, and that every rank starts anew.

    Without the runtime the exceptions that a loss causes end the scripts of the other ranks one by
    one; only the loss itself is told then.
    """
    state = turn.state
    losses = turn.incident.losses
    restart = f"all ranks start anew (restart {state.restarts + 1} of {state.config.max_restarts})"
    if not state.begun or state.attached:
        _say_placements(turn, taken, losses)
        if state.begun:
            turn.say(f"{restart}: {reason}")
        return
    nodes = tuple(loss for loss in losses if loss.whole_node)
    _say_placements(turn, taken, nodes)
    if losses and not nodes:
        turn.say(loss_text(_together(losses)[0]))
    turn.say(
        "the script does not use deadpool_runtime, or had not come to its first step: "
        f"{restart} and load its own checkpoints"
    )


def pending_seat_lost(turn: Turn, node: str, cause: str) -> None:
    """A node that was to take ranks is gone before it did: the next spare takes them.

    No process was lost, so the epoch stays; the ranks were absent before and still are.
    """
    seat = turn.state.seats.index(node)
    ranks = ranks_text(turn.state.ranks_of_seat(seat))
    taken = take_seats(turn, make_fit(turn))
    if turn.over:
        return
    note_rung(turn, Rung.SWAP if node in taken else Rung.SHRINK)
    new = f"; {taken[node]} takes {ranks}, epoch {turn.state.epoch}" if node in taken else ""
    turn.say(f"{node} {cause}{new}")
