"""What the rules say about what a rank shows: its exception, or how its process ended.

Here the controller's knowledge becomes an ``Observation`` of ``deadpool_launch.classify``; what
follows from the verdict is in ``verdicts.py`` and ``messages.py``. Without rules nothing is said.
"""

from __future__ import annotations

from deadpool_launch.classify.model import Kind, Observation, Verdict, classify, count_alike
from deadpool_launch.classify.traces import root_error
from deadpool_launch.controller.rank import Rank, Trait
from deadpool_launch.controller.states import State

#: A rank is lost by these, and may come back.
LOSING = frozenset({Kind.TRANSIENT, Kind.PERMANENT})


def cause_of(state: State, rank: Rank) -> Verdict | None:
    """Of the exception of a rank that raised in a step or whose script failed.

    A fault that came at the same step before is never the hardware's, whatever a rule says.
    """
    rules = state.config.rules
    if not rules:
        return None
    alike = 1
    if state.ranks.every(Trait.SIGN):
        alike = count_alike(rank.error, [other.error for other in state.present()])
    times = times_at_step(rank)
    verdict = classify(
        Observation(
            error=root_error(rank.traceback) or rank.error,
            traceback=rank.traceback,
            ranks_alike=alike,
            ranks=len(state.present()),
            times_at_step=times,
        ),
        rules,
    )
    if verdict is not None and verdict.kind in LOSING and times > 1:
        verdict = None
    return _or_of_the_node(state, rank, verdict)


def cause_of_exit(
    state: State, rank: Rank, exit_code: int | None, signal: int | None
) -> Verdict | None:
    """Of a process that ended without a word."""
    seen = Observation(
        exit_code=exit_code,
        signal=signal,
        ranks=len(state.present()),
        times_at_step=times_at_step(rank),
    )
    return _or_of_the_node(state, rank, classify(seen, state.config.rules))


def _or_of_the_node(state: State, rank: Rank, verdict: Verdict | None) -> Verdict | None:
    """A node whose hardware has shown a fault is the cause of what else would be the script's, or
    would pass.
    """
    trouble = state.nodes[state.node_of(rank.rank)].trouble
    if trouble is None or (verdict is not None and verdict.kind in (Kind.JOB, Kind.ECHO)):
        return verdict
    return trouble


def step_of(rank: Rank) -> int:
    """The step that the rank is in, or was in when it raised."""
    return rank.completed + 1 if rank.raised is None else rank.raised


def times_at_step(rank: Rank) -> int:
    """How often a process of the rank has come to grief at this step, with this time."""
    return 2 if rank.died_in == step_of(rank) else 1
