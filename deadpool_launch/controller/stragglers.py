"""Ranks that are slower than their peers: found, named once, and swapped if the policy says so.

Agents tell how long a step takes each of their ranks without the time in which it waits for others
(``protocol.Pace``): all wait for the slowest, so the whole step takes everyone the same. Ranks with
the same part of the model have the same to do, and are compared with each other, window by window.

Slow is what takes ``straggler_factor`` times the median of its peers in three quarters of its
steps, with a difference that is worth the name and stands out from how much the peers differ, for
``straggler_windows`` in a row. On a machine that others keep busy any rank has slow steps, but not
all the time.
All of this is inferred. Only a policy makes a spare of it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deadpool_launch.controller.drains import wish
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.states import Phase, State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.controller.underway import Wish
from deadpool_launch.controller.wording import ranks_text
from deadpool_runtime.protocol import Pace

#: A smaller difference is not worth a word.
LEAST_S = 0.02
#: Median absolute deviations of the peers that a slow one is away from their median, and how many
#: peers it takes for that.
_DEVIATIONS = 6.0
_FOR_DEVIATION = 4
#: A rank that is told of has to come back under this part of the factor's excess.
_BACK = 0.5


@dataclass(frozen=True, slots=True)
class Compared:
    """A slow rank's time for a step, and the median of its peers."""

    own_s: float
    peers_s: float
    #: In how many steps that showed.
    steps: int


def slower(own_s: float, peers: Sequence[float], factor: float) -> bool:
    """Whether a rank that takes ``own_s`` or more for a step is slower than its peers."""
    median = statistics.median(peers)
    if own_s < factor * median or own_s - median < LEAST_S:
        return False
    if len(peers) < _FOR_DEVIATION:
        return True
    deviation = statistics.median(abs(each - median) for each in peers)
    return own_s - median > _DEVIATIONS * deviation


def peers_of(state: State) -> Iterable[list[Rank]]:
    """The ranks that have the same to do, together: those with the same parameters in common, and
    of those that have none in common with others the ones with as much state.
    """
    alike: dict[object, list[Rank]] = defaultdict(list)
    for rank in state.ranks:
        if rank.pace is None or rank.stage is not Stage.ATTACHED or rank.segments is None:
            continue
        shared = [ranks for ranks in rank.segments if len(ranks) > 1]
        largest = max(shared, key=lambda ranks: (rank.segments or {})[ranks], default=None)
        alike[largest or sum(rank.segments.values())].append(rank)
    return alike.values()


def on_paces(turn: Turn, paces: Iterable[Pace]) -> None:
    """Keep what is told; it is looked at when all agents have had time to tell the same."""
    state = turn.state
    if state.config.straggler == "ignore" or state.phase is not Phase.TRAINING:
        return
    for pace in paces:
        rank = state.ranks[pace.rank]
        if (rank.born, state.epoch) == (pace.born, pace.epoch) and rank.stage is Stage.ATTACHED:
            turn.set_rank(pace.rank, pace=pace, pace_is_new=True)
    if state.paces_at is None:
        turn.set(paces_at=turn.at + state.config.straggler_window_s)


def watch_paces(turn: Turn) -> None:
    """Compare the ranks, if it is time to."""
    at = turn.state.paces_at
    if at is None or at > turn.at:
        return
    turn.set(paces_at=None)
    if turn.state.phase is not Phase.TRAINING or turn.state.steps_over:
        return
    slow: dict[int, Compared] = {}
    well: list[int] = []
    for group in list(peers_of(turn.state)):
        for rank in group:
            assert rank.pace is not None
            peers = [peer.pace.own_s for peer in group if peer is not rank and peer.pace]
            if rank.pace_is_new and peers:
                _count_window(turn, rank, peers, slow, well)
    if well:
        turn.say(f"{_who(turn.state, well)} no slower than {_their(well)} peers any more")
    for node, members in _by_node(turn.state, slow).items():
        _act(turn, node, {rank: slow[rank] for rank in members})


def _count_window(
    turn: Turn, rank: Rank, peers: Sequence[float], slow: dict[int, Compared], well: list[int]
) -> None:
    """One window more; the rank goes to ``slow`` or ``well`` with its last."""
    config, pace = turn.state.config, rank.pace
    assert pace is not None
    factor = config.straggler_factor
    if rank.slow:
        factor = 1 + (factor - 1) * _BACK
    changes = slower(pace.low_s, peers, factor) is not rank.slow
    windows = rank.windows + 1 if changes else 0
    steps = rank.windows_steps + pace.steps if changes else 0
    turn.set_rank(rank.rank, pace_is_new=False, windows=windows, windows_steps=steps)
    if windows < config.straggler_windows:
        return
    turn.set_rank(rank.rank, slow=not rank.slow, windows=0, windows_steps=0)
    if rank.slow:
        well.append(rank.rank)
    else:
        slow[rank.rank] = Compared(pace.own_s, statistics.median(peers), steps)


def _by_node(state: State, ranks: Iterable[int]) -> dict[str, list[int]]:
    by_node: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(state.node_of(rank), []).append(rank)
    return by_node


def _act(turn: Turn, node: str, slow: Mapping[int, Compared]) -> None:
    """Name the slow ranks of a node; swap it if that is wanted and can be done."""
    ranks = list(slow)
    own_s = statistics.median(each.own_s for each in slow.values())
    peers_s = statistics.median(each.peers_s for each in slow.values())
    steps = min(each.steps for each in slow.values())
    verb = "computes" if len(ranks) == 1 else "compute"
    text = (
        f"{ranks_text(ranks)} on {node} {verb} for {_ms(own_s)} a step, {_their(ranks)} peers for "
        f"{_ms(peers_s)} (median of {steps} steps, inferred)"
    )
    turn.say(text)
    if turn.state.config.straggler == "swap":
        cause = f"is slow ({_ms(own_s)} a step, its peers {_ms(peers_s)}, inferred)"
        wish(turn, Wish(node, cause), 0)


def _who(state: State, ranks: Sequence[int]) -> str:
    nodes = ", ".join(_by_node(state, ranks))
    return f"{ranks_text(ranks)} on {nodes} {'is' if len(ranks) == 1 else 'are'}"


def _their(ranks: Sequence[int]) -> str:
    return "its" if len(ranks) == 1 else "their"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
