"""What goes to the agents: which actions are messages, and how each message arrives once.

Pure. The messages to an agent are numbered in the order of the actions they come from, so that a
launcher which goes through the same events again gives each the same number. An agent says which it
has received; what it has not is sent again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from deadpool_launch.controller import events
from deadpool_launch.controller.states import State
from deadpool_runtime import protocol


class Mailbox(msgspec.Struct):
    """The messages between the launcher and one agent."""

    #: Number of the newest order to the agent.
    sent: int = 0
    #: Number of the agent's newest report that is in the log.
    heard: int = 0
    #: Orders that the agent is not known to have received, in order.
    unheard: list[tuple[int, protocol.ToAgent]] = []
    #: The how manieth agent of the node it is; an older one has no mail any more.
    born: int = 1

    def post(self, body: protocol.ToAgent) -> int:
        """Number a message and keep it until the agent has it; returns the number."""
        self.sent += 1
        self.unheard.append((self.sent, body))
        return self.sent

    def received(self, number: int) -> None:
        """The agent has all orders up to this one."""
        if self.unheard and self.unheard[0][0] <= number:
            self.unheard = [order for order in self.unheard if order[0] > number]


def messages(state: State, action: events.Action) -> Iterator[tuple[str, protocol.ToAgent]]:
    """The node and the message, for each message to an agent that the action is; ``state`` is the
    one that came with it.
    """
    match action:
        case events.ReleaseNode(node=node, reason=reason):
            yield node, protocol.StopAgent(reason)
        case events.StartRanks(node=node, epoch=epoch, node_index=index, ranks=ranks):
            first = index * state.config.nproc_per_node
            local = [rank - first for rank in ranks]
            yield node, protocol.StartRanks(epoch, index, list(ranks), local)
        case events.KillRanks(node=node, ranks=ranks, reason=reason):
            yield node, protocol.KillRanks(list(ranks), reason)
        case events.TakeInventory(node=node, epoch=epoch):
            yield node, protocol.TakeInventory(epoch)
        case events.TakeStandings(node=node, number=number):
            yield node, protocol.TakeStandings(number)
        case events.TakeStacks(node=node, ranks=ranks):
            yield node, protocol.TakeStacks(list(ranks))
        case events.TryPaths(node=node, number=number, peers=peers, timeout_s=timeout_s):
            yield node, protocol.TryPaths(number, dict(peers), timeout_s)
        case events.Tell(ranks=ranks, body=body):
            by_node: dict[str, list[int]] = {}
            for rank in ranks:
                by_node.setdefault(state.node_of(rank), []).append(rank)
            for node, on_node in by_node.items():
                yield node, protocol.TellRanks(on_node, body)
        case _:
            pass


def post(
    mail: dict[str, Mailbox], state: State, action: events.Action
) -> list[tuple[str, int, protocol.ToAgent]]:
    """Put the messages that the action is into the mail; returns node, number and message of each.

    The mail of a node begins with the order to start its agent and ends when it is fenced off.
    """
    match action:
        case events.StartAgent(node=node, born=born):
            mail[node] = Mailbox(born=born)
        case events.FenceNode(node=node):
            mail.pop(node, None)
        case _:
            return [
                (node, mail[node].post(body), body)
                for node, body in messages(state, action)
                if node in mail
            ]
    return []


def note_heard(mail: dict[str, Mailbox], event: events.Event, number: int) -> None:
    """The event is in the log, so its report need not be sent again; 0 if it came with none."""
    box = mail.get(getattr(event, "node", ""))
    if number and box is not None:
        box.heard = number
