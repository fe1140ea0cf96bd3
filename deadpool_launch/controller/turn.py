"""One turn of the controller: the state being worked out and the actions given so far.

``core.step`` makes a turn, lets the handlers work on it and takes state and actions out again; no
turn outlives one event. The handlers change the state only through the methods below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_launch.controller.events import (
    Action,
    FenceNode,
    Finish,
    IncidentClosed,
    IncidentMark,
    KillRanks,
    Say,
    StartAgent,
    Tell,
)
from deadpool_launch.controller.incident import Incident
from deadpool_launch.controller.node import AgentStage, Cause, Node
from deadpool_launch.controller.quarantine import after_loss, left_out, stays_out_text
from deadpool_launch.controller.rank import Rank, Stage, stage_traits
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.tables import changed
from deadpool_launch.controller.wording import plural
from deadpool_launch.exits import ExitCode
from deadpool_runtime import protocol

#: The rung of an incident that ends the job; ``ladder.Rung`` has them all.
_STOP = 6


class Turn:
    """The answer to one event while it is being worked out."""

    def __init__(self, state: State, at: float) -> None:
        self.state = state
        self.at = at
        self.actions: list[Action] = []

    # ------------------------------------------------------------ reading

    @property
    def over(self) -> bool:
        """``Finish`` was given: the rest of the turn must not decide anything more."""
        return self.state.phase is Phase.ENDED

    @property
    def incident(self) -> Incident:
        """The open incident; asking for it without one is a defect."""
        assert self.state.incident is not None
        return self.state.incident

    def staged(self, *stages: Stage) -> list[Rank]:
        """The ranks in any of these stages."""
        return self.state.ranks.having(stage_traits(*stages))

    def address(self, rank: int) -> protocol.Address:
        """Where this rank's store server listens."""
        host = self.state.nodes[self.state.node_of(rank)].host
        return protocol.Address(host=host, port=self.state.ranks[rank].store_port)

    # ------------------------------------------------------------ changing

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = changed(self.state, **changes)

    def set_rank(self, rank: int, **changes: Any) -> None:
        """Change fields of one rank."""
        self.set_ranks((rank,), **changes)

    def set_ranks(self, ranks: Iterable[int], **changes: Any) -> None:
        """Change the same fields of several ranks."""
        table = self.state.ranks
        entries = {rank: changed(table[rank], **changes) for rank in ranks}
        if entries:
            self.state = changed(self.state, ranks=table.with_changes(entries))

    def set_node(self, name: str, **changes: Any) -> None:
        """Change fields of one node."""
        self.set_nodes((name,), **changes)

    def set_nodes(self, names: Iterable[str], **changes: Any) -> None:
        """Change the same fields of several nodes."""
        table = self.state.nodes
        self.set(nodes=table.with_nodes([changed(table[name], **changes) for name in names]))

    def set_incident(self, **changes: Any) -> None:
        """Change fields of the open incident."""
        self.set(incident=changed(self.incident, **changes))

    # ------------------------------------------------------------ acting

    def act(self, action: Action) -> None:
        """Ask the driver for something; after ``Finish`` nothing is asked for."""
        if not self.over:
            self.actions.append(action)

    def say(self, text: str) -> None:
        """Tell the user."""
        self.act(Say(text))

    def tell(self, ranks: Iterable[int], body: protocol.ToRank) -> None:
        """Send a message to ranks; to none if there are none."""
        ranks = tuple(ranks)
        if ranks:
            self.act(Tell(ranks, body))

    def tell_each(self, bodies: Mapping[int, protocol.ToRank]) -> None:
        """Send each rank its own message; neighbours with the same one get it together."""
        ranks: list[int] = []
        for rank in sorted(bodies):
            if ranks and bodies[rank] != bodies[ranks[-1]]:
                self.tell(ranks, bodies[ranks[-1]])
                ranks = []
            ranks.append(rank)
        if ranks:
            self.tell(ranks, bodies[ranks[-1]])

    def mark(self, phase: str, detail: str) -> None:
        """Note a phase of the incident, once per epoch."""
        if phase not in self.incident.marked:
            self.set_incident(marked=self.incident.marked | {phase})
            self.act(IncidentMark(self.incident.number, self.at, phase, detail))

    def start_agent(self, node: str) -> None:
        """Order an agent and begin to wait for it."""
        born = self.state.nodes[node].born + 1
        self.act(StartAgent(node, born))
        checks_s = self.state.config.admission_s if born > 1 else 0.0
        self.set_node(
            node,
            stage=AgentStage.STARTING,
            deadline=self.at + self.state.config.agent_start_s + checks_s,
            born=born,
        )

    def drop_node(self, node: Node, reason: str, cause: Cause = Cause.PASSING) -> None:
        """Give this node up, and keep it from taking part; ``cause`` says whether it comes back."""
        self.act(FenceNode(node.name, reason))
        self.set_node(
            node.name,
            stage=AgentStage.GONE,
            deadline=None,
            gone=reason,
            replicator=None,
            inventory_by=None,
            copies=(),
            **after_loss(node, self.at, self.state.config, cause),
        )
        self.set(
            free=tuple(name for name in self.state.free if name != node.name),
            lost=(*self.state.lost, node.name),
            wishes=tuple(wish for wish in self.state.wishes if wish.node != node.name),
        )
        if text := stays_out_text(self.state.nodes[node.name], self.state.config):
            self.say(text)

    def kill(self, ranks: Iterable[int], reason: str) -> None:
        """Condemn the processes of these ranks; their exits are awaited."""
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.state.node_of(rank), []).append(rank)
        for node, members in by_node.items():
            self.act(KillRanks(node, tuple(members), reason))
            self.set_ranks(
                members,
                stage=Stage.DYING,
                deadline=self.at + self.state.config.kill_s,
            )

    def close_incident(self, verdict: str, reason: str, replayed_steps: int) -> None:
        """Give the open incident its verdict."""
        rung = _STOP if verdict == "stopped" else self.incident.rung
        number = self.incident.number
        self.act(IncidentClosed(number, self.at, verdict, reason, replayed_steps, rung))
        self.set(incident=None)

    def finish(self, code: ExitCode, reason: str, detail: str = "") -> None:
        """End the job; an open incident ends with it."""
        if self.state.incident is not None:
            self.close_incident("stopped", reason, 0)
        if self.state.unprotected:
            count = plural(self.state.unprotected, "step")
            self.say(f"{count} began without a confirmed replica of the step before")
        if names := left_out(self.state):
            self.say(f"leave out of the next job: --exclude={','.join(names)}")
        verdict = "completed" if code is ExitCode.OK else code.name.lower().replace("_", " ")
        self.act(Finish(verdict, code, reason, detail))
        self.set(phase=Phase.ENDED, gather_until=None, notice_at=None)


def fresh_process(rank: Rank, **changes: Any) -> Rank:
    """The rank without a process: what belonged to the old one is forgotten."""
    return replace(
        Rank(
            rank=rank.rank,
            completed=rank.completed,
            segments=rank.segments,
            own_nbytes=rank.own_nbytes,
            save_nbytes=rank.save_nbytes,
            digests=rank.digests,
            replica=rank.replica,
            fixed=rank.fixed,
            shares=rank.shares,
            brings_state=rank.brings_state,
            aside=rank.aside,
            adopts=rank.adopts,
            died_in=rank.died_in,
            born=rank.born,
        ),
        **changes,
    )
