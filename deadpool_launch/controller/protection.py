"""Replicas: who keeps them, whether there is room for all copies, whether every rank has one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import structs

from deadpool_launch.controller import beginning
from deadpool_launch.controller.events import IncidentMark
from deadpool_launch.controller.node import AgentStage, Cause, Node
from deadpool_launch.controller.rank import Rank, Stage, Trait, stage_traits
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.wording import nodes_text, plural, ranks_text, size
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol
from deadpool_runtime.replication.naming import Ranks, members
from deadpool_runtime.replication.placement import Holding, Nodes, choose_holders
from deadpool_runtime.replication.room import Need, needs

#: Nodes that can hold replicas, and where their replicators listen.
Electors = tuple[tuple[str, protocol.Address], ...]

#: Steps whose digests are compared between ranks.
COMPARED_STEPS = (0, 1)


# ---------------------------------------------------------------- the begin of training


def when_all_attached(turn: Turn) -> None:
    """Every rank came to its first step: see that there is room for the copies, then let them
    train.

    A rank whose script has ended is not waited for; what that means is decided elsewhere.
    """
    state = turn.state
    there = stage_traits(Stage.ATTACHED, Stage.ENDED)
    if state.protecting or state.ranks.some(Trait.ANY_STAGE & ~there):
        return
    ready = turn.staged(Stage.ATTACHED)
    if not ready:
        return
    holdings, electors = _choose(state)
    need = needs(
        _segments(state),
        _own_nbytes(state),
        _node_of(state),
        holdings,
        state.config.replication_interval,
    )
    saves = {name: _save_nbytes(state, need[name]) for name in need}
    for name in state.seats:
        if name in need and need[name].nbytes + saves[name] > state.nodes[name].memory_nbytes:
            text = _too_little(state.nodes[name], need[name], saves[name])
            turn.finish(ExitCode.LITTLE_MEMORY, f"{text}; {_REMEDY}")
            return
    most = max((need[name].nbytes + saves[name] for name in state.seats if name in need), default=0)
    turn.set(need_nbytes=most, protecting=True)
    for name in state.free:
        refuse_small_spare(turn, name)
    if beginning.begin(turn):
        return
    if _electors(turn.state) == electors:
        holders = _remember(turn, holdings, electors)
    else:
        holders = choose(turn)
    turn.tell_each(
        {rank.rank: protocol.Protect(state.epoch, holders.get(rank.rank)) for rank in ready}
    )
    _say_unheld(turn)


_REMEDY = (
    "give the job more memory (--mem) or the nodes a larger /dev/shm, or run fewer ranks on a node"
)


def _save_nbytes(state: State, need: Need) -> int:
    """What writing a durable checkpoint takes on a node: each of its ranks first makes a private
    copy of its part, all at the same time."""
    return sum(state.ranks[rank].save_nbytes for rank in need.ranks)


def _too_little(node: Node, need: Need, save_nbytes: int) -> str:
    """Which node, how much it needs and how that comes about, how much it has."""
    parts = []
    if need.ranks:
        own = size(need.copy_nbytes // len(need.ranks))
        parts.append(f"{plural(len(need.ranks), 'rank')} x {need.copies} copies of {own}")
    if need.held:
        parts.append(
            f"{need.replicas} replicas of {ranks_text(need.held)} of {size(need.held_nbytes)} "
            "together"
        )
    if save_nbytes:
        parts.append(f"{size(save_nbytes)} while a durable checkpoint is written")
    return (
        f"{node.name} has too little memory for the copies of the state: "
        f"{size(need.nbytes + save_nbytes)} needed ({_listed(parts)}), "
        f"{size(node.memory_nbytes)} is {node.memory_limit}"
    )


def _listed(parts: list[str]) -> str:
    """``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def is_too_small(state: State, node: Node) -> bool:
    """Whether the node could not take the place of every other one."""
    return node.stage is AgentStage.WARM and node.memory_nbytes < state.need_nbytes


def small_text(state: State, node: Node) -> str:
    """Continues a sentence that starts with the node's name."""
    return (
        f"has too little memory for the copies of the state ({size(state.need_nbytes)} needed, "
        f"{size(node.memory_nbytes)} is {node.memory_limit}, seen)"
    )


def refuse_small_spare(turn: Turn, name: str) -> None:
    """A spare on which the copies have no room is not used."""
    node = turn.state.nodes[name]
    if is_too_small(turn.state, node):
        cause = small_text(turn.state, node)
        turn.drop_node(node, cause, Cause.UNFIT)
        turn.say(f"spare {name} {cause} and will not be used")


# ---------------------------------------------------------------- holders


def choose(turn: Turn) -> dict[int, protocol.Holder | None]:
    """Choose the holder of each rank among the nodes that can be one now, and remember them."""
    return _remember(turn, *_choose(turn.state))


def _remember(
    turn: Turn, holdings: Mapping[int, Holding | None], electors: Electors
) -> dict[int, protocol.Holder | None]:
    holders = {rank: _holder(turn, holding) for rank, holding in holdings.items()}
    turn.set(holders=holders, electors=electors)
    return holders


def keep_holders(turn: Turn) -> None:
    """A node or a replicator came or went while the ranks train: tell those whom it concerns."""
    state = turn.state
    if not state.protecting or state.steps_over or state.electors == _electors(state):
        return
    before = state.holders
    after = choose(turn)
    turn.tell_each(
        {
            rank.rank: protocol.Protect(state.epoch, after[rank.rank])
            for rank in turn.staged(Stage.ATTACHED)
            if rank.rank in after and after[rank.rank] != before.get(rank.rank)
        }
    )
    tell_unheld(turn, before)


def tell_unheld(turn: Turn, before: Mapping[int, protocol.Holder | None]) -> None:
    """Tell people when fewer are left to hold what so many held ``before``, or nobody."""
    after = turn.state.holders
    if any(_count(after[rank]) < _count(before.get(rank)) for rank in after):
        _say_unheld(turn)


def _count(holder: protocol.Holder | None) -> int:
    return 0 if holder is None else 1 + len(holder.more)


def _choose(state: State) -> tuple[dict[int, Holding | None], Electors]:
    electors = _electors(state)
    names, seats = dict(electors), set(state.seats)
    nodes = Nodes(
        active=tuple(name for name in names if name in seats),
        spares=tuple(name for name in names if name not in seats),
        domains=state.config.domains,
    )
    node_of = _node_of(state)
    segments = {rank: sizes for rank, sizes in _segments(state).items() if node_of[rank] in names}
    factor = state.config.replication_factor
    return choose_holders(segments, node_of, nodes, factor), electors


def _electors(state: State) -> Electors:
    nodes = (state.nodes[name] for name in (*state.seats, *state.free))
    return tuple(
        (node.name, node.replicator)
        for node in nodes
        if node.stage is AgentStage.WARM and node.replicator is not None
    )


def _holder(turn: Turn, holding: Holding | None) -> protocol.Holder | None:
    if holding is None:
        return None
    deputy = None if holding.deputy is None else turn.state.nodes[holding.deputy].replicator
    first, *more = (
        protocol.Holder(share.node, _listening(turn.state.nodes[share.node]), list(share.segments))
        for share in holding.shares
    )
    return structs.replace(first, deputy=deputy, more=more)


def _listening(node: Node) -> protocol.Address:
    assert node.replicator is not None, "a holder was chosen among nodes with a replicator"
    return node.replicator


def _segments(state: State) -> dict[int, Mapping[Ranks, int]]:
    return {rank.rank: rank.segments for rank in state.present() if rank.segments is not None}


def _own_nbytes(state: State) -> dict[int, int]:
    return {rank.rank: rank.own_nbytes for rank in state.present()}


def _node_of(state: State) -> dict[int, str]:
    return {rank.rank: state.node_of(rank.rank) for rank in state.present()}


def _say_unheld(turn: Turn) -> None:
    """No other node can hold a replica. A job of one node was told so when it was planned."""
    unheld = [rank for rank, holder in turn.state.holders.items() if holder is None]
    if unheld and len(turn.state.nodes) > 1:
        nodes = nodes_text(dict.fromkeys(turn.state.node_of(rank) for rank in unheld))
        turn.say(
            f"no other node is up that could hold replicas of {ranks_text(unheld)}: until one is, "
            f"the loss of {nodes} loses their state"
        )
        if turn.state.incident is not None:
            turn.mark("redundancy gone", f"{ranks_text(unheld)} on {nodes}")
        return
    wanted = turn.state.config.replication_factor
    fewest = min(map(_count, turn.state.holders.values()), default=0)
    if 0 < fewest < wanted:
        turn.say(
            f"so few nodes are up that each rank's replica goes to {fewest} of them instead of "
            f"{wanted} (replication.factor)"
        )


# ---------------------------------------------------------------- redundancy


def on_protected(turn: Turn, rank: Rank, body: protocol.Protected) -> None:
    """A rank has a confirmed replica of this epoch. Once all have, any node may be lost again.

    A rank that restored the plan's step replicates it at once, so this may come before ``Resume``.
    """
    if body.epoch != turn.state.epoch or rank.stage not in (Stage.RESTORING, Stage.ATTACHED):
        return
    turn.set_rank(rank.rank, protected=body.epoch)
    note_redundancy(turn)


def note_redundancy(turn: Turn) -> None:
    """Mark the end of the time without redundancy, if it has come."""
    state = turn.state
    if state.bare_since is None or state.phase is not Phase.TRAINING:
        return
    if not state.ranks.all_protected(state.epoch):
        return
    bare_s = turn.at - state.bare_since
    turn.set(bare_since=None)
    if not all(state.holders.get(rank.rank) for rank in state.present()):
        return
    detail = f"every rank has a replica again, {bare_s:.1f} s after the first sign"
    if state.incident is not None:
        turn.mark("redundancy restored", detail)
        turn.set_incident(bare_s=bare_s)
    else:
        turn.act(IncidentMark(state.incidents, turn.at, "redundancy restored", detail))
        turn.say(detail)


def note_unprotected(turn: Turn, rank: Rank, body: protocol.StepDone) -> None:
    """A rank went on without a confirmed replica: count the step once for all ranks.

    Every such step is counted; people are told of the first, second, fourth, eighth and so on.
    """
    if body.unprotected <= rank.unprotected:
        return
    turn.set_rank(rank.rank, unprotected=body.unprotected)
    if body.step <= turn.state.unprotected_step:
        return
    total = turn.state.unprotected + 1
    turn.set(unprotected=total, unprotected_step=body.step)
    if total & (total - 1) == 0:
        so_far = f" ({total} such steps so far)" if total > 1 else ""
        every_step = turn.state.config.replication_interval == 1
        which = "the step before" if every_step else "the newest step that is to have one"
        turn.say(
            f"rank {rank.rank} went through step {body.step} without a confirmed replica of "
            f"{which}{so_far}"
        )


# ---------------------------------------------------------------- what must be equal


def differing(
    reports: Mapping[int, Iterable[protocol.SegmentDigest]],
) -> tuple[tuple[int, ...], list[list[int]]] | None:
    """A segment that is not the same on all of its ranks, and the ranks that agree; None if none.

    One that some of its ranks do not report is not the same either: they disagree about what they
    have in common.
    """
    found: dict[Ranks, dict[str, list[int]]] = defaultdict(dict)
    for rank in sorted(reports):
        for segment in reports[rank]:
            if len(segment.ranks) > 1:
                found[segment.ranks].setdefault(segment.digest, []).append(rank)
    for ranks, by_digest in sorted((members(name), told) for name, told in found.items()):
        having = {rank for agreed in by_digest.values() for rank in agreed}
        lacking = [rank for rank in ranks if rank in reports and rank not in having]
        groups = [*by_digest.values(), *([lacking] if lacking else [])]
        if len(groups) > 1:
            return ranks, groups
    return None


def differing_text(ranks: tuple[int, ...], groups: list[list[int]]) -> str:
    """``rank 0 and ranks 1-3 in the tensors that ranks 0-3 have in common``."""
    who = " and ".join(ranks_text(group) for group in groups)
    return f"{who} in the tensors that {ranks_text(ranks)} have in common"


def on_snapshotted(turn: Turn, rank: Rank, body: protocol.Snapshotted) -> None:
    """A peer's segment can replace a lost one only if it is the same: compared at the start."""
    if body.epoch != turn.state.epoch or body.step not in COMPARED_STEPS:
        return
    first, second = rank.digests
    new = tuple(body.segments)
    turn.set_rank(rank.rank, digests=(new, second) if body.step == 0 else (first, new))
    if turn.state.ranks.some(Trait.NO_DIGESTS[body.step]):
        return
    told = {other.rank: other.digests[body.step] for other in turn.state.present()}
    found = differing({member: digests or () for member, digests in told.items()})
    if found is not None:
        turn.finish(
            ExitCode.SCRIPT_FAILED,
            f"the state after step {body.step} differs between {differing_text(*found)}; they "
            "must hold the same values from the first step on (same seed, or parameters sent "
            "from one rank to the others)",
        )
