"""Simulated jobs under random faults: no promise is broken, and one that were would be noticed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deadpool_launch.controller import core, planning, recovery
from deadpool_launch.controller.agents import on_node_gone
from deadpool_launch.controller.events import RankExited, RankSaid, RankStopped
from deadpool_launch.controller.rank import Rank, Stage
from deadpool_launch.controller.states import State
from deadpool_launch.controller.turn import Turn
from deadpool_launch.sim import cli
from deadpool_launch.sim.arenas import Arenas
from deadpool_launch.sim.cluster import Outcome, simulate
from deadpool_launch.sim.faults import Fault, FaultKind, Scope
from deadpool_launch.sim.promises import PromiseBroken
from deadpool_launch.sim.scenario import Scenario, random_scenario
from deadpool_launch.sim.shrink import shrink
from deadpool_launch.sim.values import Layout, LayoutKind
from deadpool_runtime.protocol import Copy, Plan
from deadpool_runtime.replication import agreement

#: Raise it for a longer search: ``DEADPOOL_SIM_SEEDS=100000``.
SEEDS = int(os.environ.get("DEADPOOL_SIM_SEEDS", "1000"))


def test_no_seed_breaks_a_promise() -> None:
    done = CliRunner().invoke(cli.command, ["--seeds", f"0:{SEEDS}"], standalone_mode=False)
    assert done.exception is None
    assert done.return_value == 0, done.output
    assert "completed" in done.output


@pytest.mark.parametrize("seed", [8357, 10097, 10940, 14610, 14654, 18086, 910025])
def test_a_seed_that_once_broke_a_promise_breaks_none(seed: int) -> None:
    """With one holder and a replica of every step, as they had then."""
    scenario = random_scenario(seed)
    plain = replace(scenario.config, replication_factor=1, replication_interval=1)
    assert simulate(replace(scenario, config=plain)).broken == ""


@pytest.mark.matrix
def test_a_long_job_with_few_replicas_loses_no_more_than_promised() -> None:
    """Long enough that slots are used again between two replicas."""
    for seed in range(60):
        power_off = Fault(FaultKind.POWER, "n1", 1 + random.Random(f"at {seed}").random() * 12)
        scenario = random_scenario(seed, nodes=3, spares=2, nproc_per_node=1)
        config = replace(scenario.config, replication_interval=7)
        job = replace(scenario, last_step=40, attaches=True, config=config)
        assert simulate(job.with_faults([power_off])).broken == "", seed


def test_ranks_of_one_node_reach_each_other_without_a_network() -> None:
    fault = Fault(FaultKind.PARTITION, "n0", 1.5, scope=Scope.PEERS)
    for seed in range(8):
        scenario = random_scenario(seed, nodes=1, spares=1, nproc_per_node=2)
        outcome = simulate(scenario.with_faults([fault]))
        assert (outcome.broken, outcome.verdict) == ("", "completed"), outcome.reason
        assert outcome.incidents == 0


def test_a_copy_that_is_gone_though_a_plan_names_it_is_noticed() -> None:
    layout = Layout(LayoutKind.FSDP, 2, 1)
    arenas, state = Arenas(layout), layout.expected(0, 4)
    plan = Plan(2, 4, arenas.address("n0"), [], None)
    slot = 0, False, 1
    arenas.seal("n0", slot, Copy(0, 4, 1, False, list(layout.segments[0]), []), state)
    arenas.wipe("n0", slot)
    with pytest.raises(PromiseBroken, match="of step 4 of rank 0 on n0 is needed and gone"):
        arenas.fetched(0, "n0", plan, slot, set())
    arenas.lose("n0")
    assert "there is no copy of step 4" in str(arenas.fetched(0, "n0", plan, slot, set()))


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    def trace(hash_seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "deadpool_launch.sim", "--seeds", "20:32", "--trace"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        return [line for line in done.stdout.splitlines() if " runs in " not in line]

    first = trace("1")
    assert len(first) > 500
    assert first == trace("2")


# ---------------------------------------------------------------- broken on purpose


def first_broken(seeds: Sequence[int], make: Callable[[int], Scenario] = random_scenario) -> str:
    """The promise that the first of these seeds breaks that breaks any; empty if none does."""
    return next((found for seed in seeds if (found := simulate(make(seed)).broken)), "")


def struck(*faults: Fault) -> Callable[[int], Scenario]:
    """Three nodes of two ranks and a spare, struck by these."""

    def make(seed: int) -> Scenario:
        scenario = random_scenario(seed, nodes=3, spares=2, nproc_per_node=2)
        return scenario.with_faults(faults)

    return make


def test_going_back_too_far_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(
        copies: Mapping[str, Sequence[Copy]],
        history: Sequence[tuple[int, int]],
        node_of: Mapping[int, str],
        refused: Set[int],
        adopts: Mapping[int, agreement.Adoption],
    ) -> agreement.Agreement:
        found = agreement.agree(copies, history, node_of, refused, adopts)
        if found.step is None or found.step == 0:
            return found
        return agreement.agree(copies, history, node_of, refused | {found.step}, adopts)

    monkeypatch.setattr(planning, "agree", older)
    make = struck(Fault(FaultKind.POWER, "n1", 3.2))
    assert "all go back to step" in first_broken(range(10), make)


def test_a_wrong_restore_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = struck(Fault(FaultKind.CORRUPT, "2", 3.0), Fault(FaultKind.KILL, "1", 3.1))
    assert first_broken(range(10), faults) == ""
    monkeypatch.setattr(recovery, "differing", lambda _: None)
    assert "resumes from a wrong value" in first_broken(range(10), faults)


def test_a_healthy_node_that_is_given_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_exited(turn: Turn, rank: Rank, exit_code: int | None, signal: int | None) -> None:
        on_node_gone(turn, turn.state.node_of(rank.rank), "has lost a process")

    monkeypatch.setattr(core, "on_exited", on_exited)
    make = struck(Fault(FaultKind.KILL, "3", 1.5))
    assert "n1 is given up (has lost a process) though it is well" in first_broken(range(5), make)


def test_words_of_an_older_process_that_are_believed_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = struck(Fault(FaultKind.LATE, "2", 2.6))
    assert first_broken(range(10), faults) == ""

    def speaker(state: State, event: RankSaid | RankExited | RankStopped) -> Rank | None:
        rank = state.ranks[event.rank]
        condemned = rank.stage in (Stage.DYING, Stage.FAILED, Stage.ENDED, Stage.ABSENT)
        if state.node_of(event.rank) != event.node or rank.stage is Stage.ABSENT:
            return None
        return None if condemned and not isinstance(event, RankExited) else rank

    monkeypatch.setattr(core, "_speaker", speaker)
    assert first_broken(range(10), faults)


@pytest.mark.parametrize(("nodes", "spares"), [(2, 1), (3, 2), (4, 1)])
def test_a_node_that_reaches_the_launcher_only_is_swapped(nodes: int, spares: int) -> None:
    fault = Fault(FaultKind.PARTITION, "n1", 2.6, scope=Scope.PEERS)
    for seed in range(8):
        scenario = random_scenario(seed, nodes=nodes, spares=spares, nproc_per_node=2)
        outcome = simulate(scenario.with_faults([fault]))
        assert (outcome.broken, outcome.verdict) == ("", "completed"), outcome.reason


def test_a_job_that_waits_for_ever_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "when_all_parked", lambda _: None)
    assert first_broken(range(5), struck(Fault(FaultKind.KILL, "1", 3.0)))


# ---------------------------------------------------------------- what people see of it


def test_shrinking_leaves_only_what_is_needed() -> None:
    faults = [Fault(FaultKind.KILL, str(rank), 1.0) for rank in range(5)]
    scenario = random_scenario(1).with_faults(faults)

    def run(tried: Scenario) -> Outcome:
        there = {fault.target for fault in tried.faults}
        return Outcome(tried, "", "", "broken" if there >= {"1", "3"} else "", 0.0, 0, 0, ())

    assert shrink(scenario, run) == (1, 3)


def test_a_broken_seed_tells_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "differing", lambda _: None)
    seed = next(seed for seed in range(400) if simulate(random_scenario(seed)).broken)
    done = CliRunner().invoke(cli.command, ["--seeds", str(seed)], standalone_mode=False)
    assert done.return_value == 1
    told = [line.strip() for line in done.output.splitlines()]
    replay = next(line for line in told if line.startswith("replay: "))
    again = CliRunner().invoke(cli.command, replay.split("sim ")[1].split(), standalone_mode=False)
    assert again.return_value == 1
    assert "BROKEN PromiseBroken: " in again.output
    assert any(line.startswith('faults: [{"kind":') for line in told)
