"""Nodes that reach the launcher but not each other: who is cut off?

1. A plan is out, and a rank could not connect to its peers (``NotConnected``). That its peer died
   meanwhile would explain it; until that could have been noticed, nothing is decided. torch takes
   long to give up, so it is asked before, too, once the loss of a peer would have been noticed.
   Then nothing follows but from answers that say who is cut off.
2. Every agent that is warm, those of spares too, tries to reach some others (``TryPaths``).
3. The answers name nodes that most others have no path to (``cut_off``). They are lost, which is
   inferred, and spares take their ranks, or the job goes on without them if it may.
4. If no such node is found, for instance because two nodes blame each other, it would be a guess
   whose fault it is, and no spare is spent on a guess: the plan has come to nothing (``stall``). A
   spare that was not started yet is, so that there is a witness the next time.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.events import TryPaths
from deadpool_launch.controller.losses import stall
from deadpool_launch.controller.node import AgentStage
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.shrinking import can_do_without
from deadpool_launch.controller.states import State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Paths
from deadpool_launch.controller.wording import nodes_text, ranks_text, seconds, short_error
from deadpool_runtime import protocol

#: So many others each agent tries to reach: enough to tell, and few with thousands of nodes.
WITNESSES = 16
#: A node is cut off only if at least so many others have no path to it.
_ENOUGH = 2


def on_not_connected(turn: Turn, rank: Rank, body: protocol.NotConnected) -> None:
    """A rank could not connect its groups; with the first one the agents are asked."""
    if rank.stage is not Stage.RESTORING or body.epoch != turn.state.epoch:
        return
    why = short_error(body.reason)
    turn.mark("not connected", f"rank {rank.rank}: {why}")
    reason = f"rank {rank.rank} could not connect to its peers ({why}, seen)"
    paths = turn.state.paths
    if paths is None:
        _ask(turn, reason, turn.state.config.heartbeat_timeout_s)
    elif paths.early:
        turn.set(paths=replace(paths, reason=reason, early=False))


def when_connecting_takes_long(turn: Turn) -> None:
    """No rank has given up yet: ask, with more patience, as all may be well and slow."""
    behind = [rank.rank for rank in turn.state.present() if not rank.rebuilt]
    turn.set(connect_by=None)
    if turn.state.paths is None and behind:
        limit = seconds(turn.state.config.verdict_wait_s)
        reason = f"{ranks_text(behind)} did not connect to all peers within {limit}"
        turn.mark("slow to connect", reason)
        _ask(turn, reason, 2 * turn.state.config.heartbeat_timeout_s, early=True)


def _ask(turn: Turn, reason: str, timeout_s: float, *, early: bool = False) -> None:
    state = turn.state
    order = (*state.seats, *state.free, *state.worn)
    names = [n for n in dict.fromkeys(order) if state.nodes[n].stage is AgentStage.WARM]
    asked = {name: others_of(names, place) for place, name in enumerate(names)}
    # An agent's answer takes as long as its calls, and its way here.
    by = turn.at + timeout_s + state.config.verdict_wait_s - state.config.heartbeat_timeout_s
    number = state.trials + 1
    turn.set(trials=number, paths=Paths(number, by, reason, early, asked, {}))
    for name, others in asked.items():
        if others:
            places = {o: at for o in others if (at := state.nodes[o].replicator) is not None}
            turn.act(TryPaths(name, number, places, timeout_s))


def others_of(names: list[str], place: int) -> tuple[str, ...]:
    """Whom the node at this place tries: those after it, in a circle."""
    following = names[place + 1 :] + names[:place]
    return tuple(following[:WITNESSES])


def on_paths_tried(turn: Turn, node: str, number: int, unreached: tuple[str, ...]) -> None:
    """An agent answers. With the last answer it may be known who is cut off."""
    paths = turn.state.paths
    if paths is None or paths.number != number or node in paths.unreached:
        return
    told = {**paths.unreached, node: unreached}
    turn.set(paths=replace(paths, unreached=told))
    if len(told) == len(paths.asked) and cut_off(paths.asked, told):
        judge(turn)


def judge(turn: Turn) -> None:
    """Every agent has answered, or has had its time."""
    state, paths = turn.state, turn.state.paths
    assert paths is not None
    turn.set(paths=None)
    broken = no_path(paths.unreached)
    found = cut_off(paths.asked, paths.unreached)
    seated = [name for name in state.seats if name in found]
    who = nodes_text(seated)
    if seated and (_spares_for(state, found) >= len(seated) or can_do_without(state, found)):
        for name in found:
            on_node_gone(turn, name, _cut_off_text(name, paths, broken[name]))
        return
    if paths.early:
        if broken:
            _call_witness(turn)
        return
    if seated:
        text = f"{paths.reason}; {who} cut off (inferred), and there are too few spares"
    elif broken:
        _call_witness(turn)
        text = (
            f"{paths.reason}; {nodes_text(sorted(broken))} do not all reach each other, and whose "
            "fault that is would be a guess"
        )
    else:
        text = f"{paths.reason}, though every node reaches the others"
    stall(turn, text)


def _call_witness(turn: Turn) -> None:
    """Start the agent of a spare, which is not used by that: next time it can tell who is cut off
    from it as well.
    """
    spares = [turn.state.nodes[name] for name in turn.state.free]
    if not any(node.stage is AgentStage.STARTING for node in spares):
        cold = [node.name for node in spares if node.stage is AgentStage.OFF]
        for name in cold[:1]:
            turn.start_agent(name)


def _spares_for(state: State, without: Set[str]) -> int:
    return sum(
        name not in without and state.nodes[name].stage is not AgentStage.GONE
        for name in state.free
    )


def _cut_off_text(name: str, paths: Paths, others: Set[str]) -> str:
    tried = tested(paths.asked, paths.unreached)[name]
    return (
        f"has no path to {nodes_text(sorted(others))} ({len(others)} of the {len(tried)} nodes "
        "that it was tried with, inferred)"
    )


# ---------------------------------------------------------------- who is cut off


def no_path(unreached: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    """For each node those that it does not reach or that do not reach it; none without any."""
    broken: dict[str, set[str]] = {}
    for node, others in unreached.items():
        for other in others:
            broken.setdefault(node, set()).add(other)
            broken.setdefault(other, set()).add(node)
    return broken


def tested(
    asked: Mapping[str, tuple[str, ...]], unreached: Mapping[str, tuple[str, ...]]
) -> dict[str, set[str]]:
    """For each node those with which the path was tried from either end, and told of."""
    pairs: dict[str, set[str]] = {name: set() for name in asked}
    for node in unreached:
        for other in asked.get(node, ()):
            pairs[node].add(other)
            pairs[other].add(node)
    return pairs


def cut_off(
    asked: Mapping[str, tuple[str, ...]], unreached: Mapping[str, tuple[str, ...]]
) -> frozenset[str]:
    """The nodes that are cut off from the others, which are more and all reach each other.

    The nodes that most others blame are taken away, those that are blamed equally often together,
    until nobody blames anybody. Empty if that leaves half of the nodes or fewer, or takes a node
    that not most of those who tried blame, and at least two: then it cannot be told who it is.
    """
    pairs = tested(asked, unreached)
    broken = no_path(unreached)
    left = set(asked)
    while True:
        blamed = {name: len(broken.get(name, set()) & left) for name in left}
        most = max(blamed.values(), default=0)
        if most == 0:
            break
        worst = {name for name, count in blamed.items() if count == most}
        if most < _ENOUGH or any(most * 2 <= len(pairs[name] & left) for name in worst):
            return frozenset()
        left -= worst
    return frozenset(set(asked) - left) if len(left) * 2 > len(asked) else frozenset()
