"""From parked ranks to the plan.

Every node is asked which copies it has, a step is agreed on, and each rank is told what to fetch
and where its replica goes from now on. Where the copies are not enough for any step, the ranks read
a durable checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import cycle

from deadpool_launch.controller import beginning
from deadpool_launch.controller.checkpoints import newest_usable, why_none
from deadpool_launch.controller.events import TakeInventory
from deadpool_launch.controller.incident import Incident
from deadpool_launch.controller.ladder import Rung, note_rung
from deadpool_launch.controller.losses import open_epoch, restore_limit_s
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.protection import choose, tell_unheld
from deadpool_launch.controller.rank import LIVE, Rank, Stage, Trait, stage_traits
from deadpool_launch.controller.rungs import start_anew
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import nodes_text, plural, ranks_text, steps_text
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol
from deadpool_runtime.replication.agreement import (
    Adoption,
    Agreement,
    Fetch,
    Lent,
    agree,
    replicated_before,
)
from deadpool_runtime.replication.naming import packed
from deadpool_runtime.replication.shards import Shared, agree_on_shared

#: How many of the steps that cannot be made whole are named.
_NAMED_STEPS = 3


def when_all_parked(turn: Turn) -> None:
    """Nothing is copied any more: let every agent that lives, spares included, take stock."""
    state = turn.state
    _mark_parked(turn)
    if not state.ranks.every(stage_traits(Stage.PARKED)):
        return
    asked = [node.name for node in state.nodes.values() if node.stage is AgentStage.WARM]
    for name in asked:
        turn.act(TakeInventory(name, state.epoch))
    turn.set_nodes(asked, inventory_by=turn.at + state.config.inventory_s, copies=())
    turn.set(phase=Phase.INVENTORY)


def _mark_parked(turn: Turn) -> None:
    """Two marks, whichever comes first: the survivors are parked; the replacements are ready."""
    state = turn.state
    ranks, marked = state.ranks, turn.incident.marked
    if "parked" not in marked and not ranks.some(Trait.SURVIVOR_NOT_PARKED):
        old = ranks.having(Trait.SURVIVOR)
        if old:
            turn.mark("parked", ranks_text(rank.rank for rank in old))
    if "spare ready" in marked or ranks.some(Trait.NEWCOMER_NOT_PARKED):
        return
    new = ranks.having(Trait.NEWCOMER)
    if new:
        nodes = dict.fromkeys(state.node_of(rank.rank) for rank in new)
        who = ranks_text(rank.rank for rank in new)
        turn.mark("spare ready", f"{who} on {nodes_text(nodes)}")


def when_inventory_complete(turn: Turn) -> None:
    """Every node that lives has answered: plan."""
    state = turn.state
    if state.nodes.answers:
        return
    copies = {node.name: node.copies for node in state.nodes.values() if node.copies}
    count = sum(map(len, copies.values()))
    turn.mark("inventory", f"{count} copies on {nodes_text(copies)}" if copies else "no copies")
    node_of = {rank.rank: state.node_of(rank.rank) for rank in state.present()}
    if beginning.is_due(state):
        if not beginning.give_up_if_none(turn):
            _begin_with_checkpoint(turn)
        return
    if turn.incident.climbed >= Rung.DURABLE and (saved := newest_usable(state)) is not None:
        _read_checkpoint(turn, saved, "the copies in memory did not help")
        return
    agreement = _agreed(turn, copies, node_of)
    if agreement.step is None:
        _nothing_whole(turn, _why_nothing(agreement, turn.incident.refused))
        return
    before = state.holders
    holders = choose(turn)
    store = turn.address(store_rank(turn))
    aside = list(state.aside())
    every_step = state.config.replication_interval == 1
    keep = () if every_step else replicated_before(agreement.step, copies, state.history)
    plans = {
        rank: protocol.Plan(
            epoch=state.epoch,
            step=agreement.step,
            store=store,
            pieces=[_piece(turn, rank, fetch) for fetch in fetches],
            holder=holders.get(rank),
            aside=aside,
            former=packed(agreement.former),
            shards=[_shard(turn, lent) for lent in agreement.lent.get(rank, ())],
            keep=list(keep),
        )
        for rank, fetches in agreement.fetches.items()
    }
    sources = {
        rank: tuple(dict.fromkeys(nodes))
        for rank in agreement.fetches
        if (nodes := _sources(agreement, rank))
    }
    _carry_out(turn, plans, agreement.step, sources)
    turn.mark("plan", _plan_text(agreement.step, agreement))
    tell_unheld(turn, before)


def _agreed(
    turn: Turn, copies: Mapping[str, tuple[protocol.Copy, ...]], node_of: Mapping[int, str]
) -> Agreement:
    """The newest step, fetched from nodes that nobody had trouble with if it is there as well."""
    incident = turn.incident
    agreement = _agreed_on(turn.state, incident, copies, node_of)
    trusted = {name: its for name, its in copies.items() if name not in incident.doubted}
    if agreement.step is None or len(trusted) == len(copies):
        return agreement
    other = _agreed_on(turn.state, incident, trusted, node_of)
    return other if other.step == agreement.step else agreement


def _agreed_on(
    state: State,
    incident: Incident,
    copies: Mapping[str, tuple[protocol.Copy, ...]],
    node_of: Mapping[int, str],
) -> Agreement:
    adopts = _adopts(state)
    if not _shares(state):
        return agree(copies, state.history, node_of, incident.refused, adopts)
    shared = Shared(state.config.world_size, state.aside_in)
    # What failed once is tried again in the simplest way.
    return agree_on_shared(
        copies,
        state.history,
        node_of,
        incident.refused,
        adopts,
        shared,
        twice=not incident.failed,
    )


def _shares(state: State) -> bool:
    """Whether optimizers share out their state over the ranks that take part."""
    return any(rank.shares for rank in state.present())


def _sources(agreement: Agreement, rank: int) -> list[str]:
    """The nodes that a rank fetches from."""
    lent = [each.node for each in agreement.lent.get(rank, ()) if each.node is not None]
    return [*(fetch.node for fetch in agreement.fetches[rank]), *lent]


def _carry_out(
    turn: Turn,
    plans: Mapping[int, protocol.Plan],
    step: int,
    sources: Mapping[int, tuple[str, ...]],
) -> None:
    turn.tell_each(plans)
    if aside := turn.state.aside():
        turn.set(aside_in={**turn.state.aside_in, turn.state.epoch: aside})
    newest = max(turn.incident.newest, _common_step(turn.state))
    until = turn.at + restore_limit_s(turn)
    turn.set_ranks(plans, stage=Stage.RESTORING, deadline=until)
    turn.set_incident(step=step, newest=newest, sources=sources)
    connect_by = turn.at + turn.state.config.verdict_wait_s
    turn.set(phase=Phase.RESTORING, connect_by=connect_by)


def _adopts(state: State) -> dict[int, Adoption]:
    """For each rank that was aside: until which step peers' copies stand for its own, and whose.

    Those whose state has the same parts as its own, and who were there all the time.
    """
    found = {}
    for rank in state.present():
        if rank.adopts >= 0 and rank.segments is not None:
            peers = tuple(
                other.rank
                for other in state.present()
                if other.adopts < rank.adopts and other.segments is not None and _alike(other, rank)
            )
            found[rank.rank] = Adoption(rank.adopts, peers)
    return found


def _alike(one: Rank, other: Rank) -> bool:
    """Whether two ranks have the same of everything that ranks have in common."""
    assert one.segments is not None
    assert other.segments is not None
    return {each for each in one.segments if len(each) > 1} == {
        each for each in other.segments if len(each) > 1
    }


def _piece(turn: Turn, rank: int, fetch: Fetch) -> protocol.Piece:
    source = turn.state.nodes[fetch.node].replicator
    assert source is not None, "a node that took stock has a replicator"
    return protocol.Piece(
        source=source,
        rank=fetch.rank,
        replica=fetch.replica,
        segments=list(fetch.segments),
        base=fetch.base,
        adopted=fetch.base and fetch.rank != rank,
    )


def _shard(turn: Turn, lent: Lent) -> protocol.Shard:
    source = None if lent.node is None else turn.state.nodes[lent.node].replicator
    return protocol.Shard(lent.rank, lent.replica, list(lent.segments), source)


def _plan_text(step: int, agreement: Agreement) -> str:
    text = f"step {step} is the newest that is whole on every rank"
    if agreement.lacking:
        text += f" ({_lacking_text(agreement.lacking)})"
    fetching = {rank: fetches for rank, fetches in agreement.fetches.items() if fetches}
    if fetching:
        nodes = sorted({fetch.node for fetches in fetching.values() for fetch in fetches})
        verb = "fetches" if len(fetching) == 1 else "fetch"
        text += f"; {ranks_text(fetching)} {verb} from {nodes_text(nodes)}"
    if agreement.former:
        text += f"; what {ranks_text(agreement.former)} had of the optimizers' state is shared out"
        text += " anew"
    return text


def _lacking_text(lacking: Mapping[int, tuple[int, ...]]) -> str:
    """``step 21 is not on rank 3``, for the newest few steps."""
    newest = sorted(lacking, reverse=True)[:_NAMED_STEPS]
    return ", ".join(f"step {step} is not on {ranks_text(lacking[step])}" for step in newest)


def _why_nothing(agreement: Agreement, refused: frozenset[int]) -> str:
    if agreement.lacking:
        why = f"no step is whole on every rank: {_lacking_text(agreement.lacking)}"
    else:
        why = "no copy of any step is left"
    return f"{why}; {steps_text(sorted(refused))} refused" if refused else why


def _nothing_whole(turn: Turn, reason: str) -> None:
    """No step can be made whole from the copies in memory. The one place that decides what then.

    Starting anew takes a new epoch: replacements born in this one are about to be killed.
    """
    if turn.state.newest >= 1:
        step = newest_usable(turn.state)
        if step is not None:
            _read_checkpoint(turn, step, reason)
            return
        turn.finish(
            ExitCode.STATE_LOST,
            f"{turn.incident.reason}; {reason}; {why_none(turn.state)}; step {turn.state.newest} "
            "was completed, and training never starts again from random weights",
        )
        return
    open_epoch(turn, reason)
    if not turn.over:
        start_anew(turn, turn.incident.reason, reason)


def _begin_with_checkpoint(turn: Turn) -> None:
    """Nothing of this launch is lost by it: it has completed no step."""
    step = newest_usable(turn.state)
    assert step is not None
    where = turn.state.config.checkpoint_dir
    turn.set_incident(begins=True)
    _send_to_checkpoint(
        turn,
        step,
        f"step {step} of an earlier launch",
        f"training goes on from the durable checkpoint of step {step} in {where}",
    )


def _read_checkpoint(turn: Turn, step: int, reason: str) -> None:
    """What has to be done again is told."""
    lost = _lost_steps(turn.state, step)
    _send_to_checkpoint(
        turn,
        step,
        f"step {step}; {lost} lost",
        f"{reason}: going back to the durable checkpoint of step {step}; {lost} lost",
    )


def _send_to_checkpoint(turn: Turn, step: int, detail: str, text: str) -> None:
    """Send all ranks back to a durable checkpoint. ``detail`` is for the journal.

    From here on no copy that was made before this epoch counts:

    1. All copies of step 24 are lost with two nodes; a third still has its own of steps 22 to 24.
    2. The ranks read the checkpoint of step 20, and run steps 21 to 23 again.
    3. Another loss. A new copy of step 23 and the old one must not be mixed.
    """
    state = turn.state
    holders = choose(turn)
    store = turn.address(store_rank(turn))
    # It was written by all ranks, so those that are aside have shards in it.
    anew = _shares(state) and bool(state.aside())
    former = packed(tuple(range(state.config.world_size))) if anew else ()
    shards: dict[int, list[protocol.Shard]] = defaultdict(list)
    for rank, bringer in zip(state.aside() if anew else (), cycle(state.present()), strict=False):
        shards[bringer.rank].append(protocol.Shard(rank, False, []))
    plans = {
        rank.rank: protocol.Plan(
            epoch=state.epoch,
            step=step,
            store=store,
            pieces=[],
            holder=holders.get(rank.rank),
            checkpoint=state.config.checkpoint_dir,
            aside=list(state.aside()),
            former=former,
            shards=shards[rank.rank],
        )
        for rank in state.present()
    }
    turn.set_incident(checkpoint=step, reading=True)
    note_rung(turn, Rung.DURABLE)
    turn.mark("durable checkpoint", detail)
    turn.say(text)
    turn.set(history=(*state.history, (state.epoch, -1)))
    _carry_out(turn, plans, step, {})
    tell_unheld(turn, state.holders)


def _lost_steps(state: State, step: int) -> str:
    assert state.incident is not None
    newest = max(state.incident.newest, _common_step(state))
    return plural(max(0, newest - step), "completed step")


def _common_step(state: State) -> int:
    """The newest step that every rank is known to have completed: one that only some have was cut
    short for the job. Ranks that are aside, or were until now, were not there.
    """
    assert state.incident is not None
    back = state.incident.regained
    return min(rank.completed for rank in state.present() if rank.rank not in back)


def store_rank(turn: Turn) -> int:
    """The lowest rank with a store server, a survivor before a replacement."""
    up = [rank for rank in turn.state.ranks if rank.stage in LIVE and rank.store_port]
    return min(up, key=lambda rank: (rank.replacement, rank.rank)).rank
