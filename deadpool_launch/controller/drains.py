"""Planned moves: the ranks of a node go to a spare between two steps, and nothing is run again.

1. Somebody asks for it (``on_drain_requested``), and while nothing else is being mended the first
   wish is seen to: a spare's agent comes up, beside the training.
2. All ranks come to the end of the same step (``halts.py``).
3. An incident that is no fault opens. Every rank parks, those of the node as well: their copies are
   whole then. Their processes end (``let_leave``), the spare takes their place, and all goes on as
   after a loss (``recovery.py``), from the step that everybody has completed.
4. The node's copies are fetched from it like those of any node. Its agent goes when every rank has
   had time for new replicas (``release``).

A fault that comes between goes first; the wish waits. A node with nobody to take its place stays in
use: it was asked for, not lost.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_launch.controller import halts
from deadpool_launch.controller.events import Answered, DrainRequested, NodeStateSeen, ReleaseNode
from deadpool_launch.controller.ladder import Rung, note_rung
from deadpool_launch.controller.losses import forget_processes, open_epoch
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.placement import choose_spare
from deadpool_launch.controller.rank import Stage, Trait, stage_traits
from deadpool_launch.controller.shrinking import is_left_empty
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Wish
from deadpool_launch.controller.wording import nodes_text, ranks_text, seconds

#: A rank that is past so many more steps proves that every rank has a replica of a later one.
_STEPS_TO_REPLICATE = 3
#: Health words of ``deadpool_slurm.parse`` that matter here.
_CORDONED, _OK = "cordoned", "ok"


def on_drain_requested(turn: Turn, event: DrainRequested) -> None:
    """Take a wish in, or say why not. The caller goes on with ``recovery.advance``."""
    wish(turn, Wish(event.node, event.why), event.request)


def on_node_state(turn: Turn, event: NodeStateSeen) -> None:
    """What Slurm has the node as. Only a drained one is acted upon: of a node's death our own
    heartbeats know more, and sooner; what Slurm says of it is told with the loss.
    """
    node = turn.state.nodes.get(event.node)
    if node is None:
        return
    ok = event.health == _OK
    turn.set_node(event.node, slurm="" if ok else event.state)
    if ok and event.node != turn.state.leaving:
        _think_better(turn, event)
    known = {wish.node for wish in turn.state.wishes} | set(turn.state.drained)
    idle = node.stage is AgentStage.GONE or event.node in known
    if event.health != _CORDONED or idle or turn.state.config.on_drain == "ignore":
        return
    said = f"Slurm has it as {event.state}" + (f": {event.reason}" if event.reason else "")
    wish(turn, Wish(event.node, f"is drained ({said}, inferred)", slurms=True), 0)


def _think_better(turn: Turn, event: NodeStateSeen) -> None:
    """Slurm no longer wants the node drained; a move that is under way goes on."""
    wishes = turn.state.wishes
    kept = tuple(wish for wish in wishes if not (wish.slurms and wish.node == event.node))
    if len(kept) == len(wishes):
        return
    turn.set(wishes=kept)
    halt = turn.state.halt
    if halt is not None and not halt.stop and kept[:1] != wishes[:1]:
        halts.cancel(turn)
    turn.say(f"{event.node} stays in use: Slurm has it as {event.state} again")


def wish(turn: Turn, wish: Wish, request: int) -> None:
    """Take in that a node is to be done without. ``request``: whom to answer; 0: nobody."""
    refusal, mistaken = _refusal(turn.state, wish.node)
    if refusal:
        if request:
            turn.act(Answered(request, False, refusal, mistaken))
        else:
            turn.say(f"{wish.node} {wish.why}, but {refusal}")
        return
    text = _outlook(turn.state, wish.node)
    if wish.node in turn.state.seats:
        turn.set(wishes=(*turn.state.wishes, wish))
        turn.say(f"{wish.node} {wish.why}: {text}")
    else:
        turn.say(f"spare {wish.node} {wish.why} and will not be used")
        _set_aside(turn, wish.node)
    if request:
        turn.act(Answered(request, True, text))


def _refusal(state: State, name: str) -> tuple[str, bool]:
    """Why a node cannot be drained, and whether that is because the request makes no sense."""
    if name not in state.nodes:
        return f"{name} is no node of this job; those are {nodes_text(state.nodes)}", True
    node = state.nodes[name]
    if name in state.drained:
        return f"{name} was drained before", False
    if node.stage is AgentStage.GONE:
        return f"{name} has no part in the job any more: it {node.gone}", False
    if any(wish.node == name for wish in state.wishes):
        return f"{name} is being drained already", False
    if name not in state.seats:
        return "", False
    if is_left_empty(state, state.seats.index(name)):
        return f"{name} has no ranks at present: they are set aside", False
    if state.steps_over or state.stop is not None:
        return f"the job is about to end, and {name} stays in use until then", False
    usable = [spare for spare in state.free if state.nodes[spare].stage is not AgentStage.GONE]
    if len(usable) <= len(state.wishes):
        ranks = ranks_text(state.ranks_of_seat(state.seats.index(name)))
        return f"no spare is left that could take {ranks} of {name}", False
    return "", False


def _outlook(state: State, name: str) -> str:
    """What will happen."""
    if name not in state.seats:
        return f"{name} had no ranks and will not be used"
    ranks = ranks_text(state.ranks_of_seat(state.seats.index(name)))
    when = "at the end of a step"
    if state.incident is not None:
        when = "once the present recovery is over"
    elif state.wishes:
        when = f"after those of {state.wishes[0].node}"
    elif not state.protecting:
        when = "once every rank has come to its first step"
    return f"{ranks} will move to a spare {when}"


# ---------------------------------------------------------------- the move


def proceed(turn: Turn) -> None:
    """See to the first wish, as far as the state allows. Called while the job trains."""
    state = turn.state
    halt = state.halt
    if halt is not None:
        if not halt.stop and not state.wishes:
            halts.cancel(turn)  # the node was lost after its ranks had ended
        elif not halt.stop and halts.all_there(state):
            _open(turn, "")
        return
    if not state.wishes or state.stop is not None:
        return
    if state.steps_over:
        who = nodes_text(wish.node for wish in state.wishes)
        turn.set(wishes=())
        turn.say(f"{who} stays in use: the last step is over")
        return
    if not halts.is_quiet(state):
        return
    if state.wishes[0].replicated and state.bare_since is not None:
        return
    spare = choose_spare(state.free, state.nodes)
    if is_left_empty(state, state.seats.index(state.wishes[0].node)):
        _stay(turn, "its ranks are set aside")
    elif spare is None:
        _stay(turn)
    elif state.nodes[spare].stage is AgentStage.OFF:
        turn.start_agent(spare)
    elif state.nodes[spare].stage is AgentStage.WARM:
        halts.begin(turn, turn.at + state.config.collective_timeout_s, stop=False)


def when_late(turn: Turn) -> None:
    """Not every rank came to the boundary in time: move all the same, in the middle of a step.

    But not where a rank has left its steps: it could not be unwound. And not before an exception
    that waits is judged:

    1. Rank 1 does not come to the boundary, and the time for that is nearly over.
    2. An exception leaves the step of rank 0, which waits for a loss that explains it.
    3. A move begun now would unwind rank 0, and whatever the script has failed of would be gone.
    """
    halt = turn.state.halt
    if halt is not None and turn.state.ranks.some(Trait.SIGN):
        turn.set(halt=replace(halt, by=turn.at + turn.state.config.verdict_wait_s))
        return
    if turn.state.wishes and turn.state.ranks.every(stage_traits(Stage.ATTACHED)):
        limit = seconds(turn.state.config.collective_timeout_s)
        _open(turn, f"; not every rank came to the end of a step within {limit}")
        return
    halts.cancel(turn)
    if turn.state.wishes:
        _stay(turn, "ranks have left their steps")


def _open(turn: Turn, late: str) -> None:
    wish = turn.state.wishes[0]
    open_epoch(turn, f"{wish.node} {wish.why}{late}", planned=True)
    if not turn.over:
        turn.set(leaving=wish.node, phase=Phase.PARKING)


def _stay(turn: Turn, why: str = "no spare is left") -> None:
    wish, *rest = turn.state.wishes
    turn.set(wishes=tuple(rest), leaving="")
    turn.say(f"{wish.node} stays in use although it {wish.why}: {why}")


def let_leave(turn: Turn) -> None:
    """Every rank is parked, and its last copy whole: hand the place of the node to a spare."""
    state = turn.state
    node = state.leaving
    if not node or not state.ranks.every(stage_traits(Stage.PARKED)):
        return
    spare = choose_spare(state.free, state.nodes)
    if spare is None:
        _stay(turn)
        return
    wish, *rest = state.wishes
    note_rung(turn, Rung.SWAP)
    seat = state.seats.index(node)
    members = tuple(rank for rank in state.ranks_of_seat(seat) if not state.ranks[rank].aside)
    turn.kill(members, f"they move to {spare}")
    forget_processes(turn, members)
    turn.set(
        seats=(*state.seats[:seat], spare, *state.seats[seat + 1 :]),
        free=tuple(name for name in state.free if name != spare),
        wishes=tuple(rest),
        leaving="",
    )
    if turn.state.nodes[spare].stage is AgentStage.OFF:
        turn.start_agent(spare)
    _set_aside(turn, node)
    turn.say(f"{node} {wish.why}; {spare} takes {ranks_text(members)}, epoch {state.epoch}")


# ---------------------------------------------------------------- afterwards


def _set_aside(turn: Turn, name: str) -> None:
    """From now on the node is used for the copies on it only."""
    state = turn.state
    until = state.newest + _STEPS_TO_REPLICATE if state.protecting else state.newest
    free = tuple(each for each in state.free if each != name)
    turn.set(free=free, drained={**state.drained, name: until})
    release(turn)


def release(turn: Turn) -> None:
    """Let the agents of drained nodes go that nothing is fetched from any more."""
    state = turn.state
    if state.incident is not None or state.bare_since is not None:
        return
    for name, until in state.drained.items():
        node = state.nodes[name]
        if node.stage is AgentStage.GONE or state.newest < until:
            continue
        if node.stage is not AgentStage.OFF:
            turn.act(ReleaseNode(name, "the node is drained"))
        turn.set_node(
            name,
            stage=AgentStage.GONE,
            deadline=None,
            gone="was drained",
            replicator=None,
            inventory_by=None,
            copies=(),
        )
