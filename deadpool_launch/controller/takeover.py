"""How a launcher takes over from one that ended: it goes through the same events once more.

Pure. The controller is a function of its events, so the state comes out as it was, and with it each
order to each agent under the number it had: what an agent did not hear is sent again, what it heard
is not obeyed twice. So a launcher may end at any moment, in the middle of a recovery too, and the
next one neither asks what happened nor begins anything anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from deadpool_launch.controller import core, mail, persist
from deadpool_launch.controller.events import Finish, RankSaid, StartAgent
from deadpool_launch.controller.node import AgentStage, Node
from deadpool_launch.controller.rank import LIVE, Rank, Stage
from deadpool_launch.controller.states import State
from deadpool_launch.controller.tables import NodeTable, RankTable
from deadpool_launch.controller.underway import Halt, Look, Paths
from deadpool_launch.controller.wording import nodes_text, plural, ranks_text
from deadpool_runtime import protocol

_Question = TypeVar("_Question", Look, Paths, Halt)


def replayed(
    kept: persist.Kept, entries: Iterable[persist.Entry], *, tolerant: bool = False
) -> persist.Kept:
    """What the launcher that ended knew in the end. ``tolerant``: go no further than to an event
    that cannot be answered; it may be what the launcher ended of.
    """
    state, at, finish = kept.state, kept.at, kept.finish
    boxes = {node: msgspec.structs.replace(box) for node, box in kept.mail.items()}
    handles, pids = dict(kept.handles), dict(kept.pids)
    for entry in entries:
        if isinstance(entry, persist.Started):
            handles[entry.node] = entry.handle
            continue
        event, number = entry
        try:
            state, actions = core.step(state, event)
        except Exception:
            if tolerant:
                break
            raise
        at = event.at
        mail.note_heard(boxes, event, number)
        if isinstance(event, RankSaid) and isinstance(event.body, protocol.RankUp):
            pids[event.rank] = event.body.pid
        for action in actions:
            mail.post(boxes, state, action)
            if isinstance(action, StartAgent):
                handles.pop(action.node, None)  # of an agent before it, which was fenced off
            if isinstance(action, Finish):
                finish = action
    return persist.Kept(kept.term, at, state, boxes, handles, pids, finish)


def with_later_deadlines(state: State, by_s: float) -> State:
    """The state with all deadlines put off: a time without a launcher is no patience used up."""

    def later(at: float | None) -> float | None:
        return None if at is None else at + max(0.0, by_s)

    def of_node(node: Node) -> Node:
        return replace(
            node,
            deadline=later(node.deadline),
            inventory_by=later(node.inventory_by),
            back_at=later(node.back_at),
        )

    def of_rank(rank: Rank) -> Rank:
        return replace(rank, deadline=later(rank.deadline), overdue_at=later(rank.overdue_at))

    def of_question(question: _Question | None) -> _Question | None:
        return None if question is None else replace(question, by=question.by + max(0.0, by_s))

    return replace(
        state,
        nodes=NodeTable({name: of_node(node) for name, node in state.nodes.items()}),
        ranks=RankTable(of_rank(rank) for rank in state.ranks),
        look=of_question(state.look),
        paths=of_question(state.paths),
        gather_until=later(state.gather_until),
        notice_at=later(state.notice_at),
        paces_at=later(state.paces_at),
        connect_by=later(state.connect_by),
        # The time limit does not wait for a launcher, so ``stop`` stays as it is.
        halt=of_question(state.halt),
    )


def expected_back(state: State) -> list[str]:
    """The nodes whose agents were there."""
    up = (AgentStage.CONNECTED, AgentStage.WARM)
    return [name for name, node in state.nodes.items() if node.stage in up]


def who_is_back(state: State, missing: Iterable[str], there: set[tuple[int, int]]) -> str:
    """For people: how many agents came to the new launcher, and which ranks are gone.

    ``there``: rank and birth of every process that the agents have.
    """
    missing = sorted(missing)
    back = len(expected_back(state)) - len(missing)
    text = f"{plural(back, 'agent')} {'is' if back == 1 else 'are'} back"
    gone = [
        rank.rank
        for rank in state.ranks
        if rank.stage in LIVE
        and rank.stage is not Stage.STARTING
        and state.node_of(rank.rank) not in missing
        and (rank.rank, rank.born) not in there
    ]
    if missing:
        text += f", not {_that_of(missing)}"
    if gone:
        return f"{text}; {ranks_text(gone)} ended meanwhile"
    return text if missing else f"{text}, no rank was disturbed"


def _that_of(nodes: Sequence[str]) -> str:
    return f"{'that' if len(nodes) == 1 else 'those'} of {nodes_text(nodes)}"
