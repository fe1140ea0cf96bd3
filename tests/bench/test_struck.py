"""What is read from the steps of a training that was struck."""

from __future__ import annotations

import struck

#: Three ranks; a step takes a second, the last rank completes it a tenth later.
WORLD = 3


def _steps(first: int, last: int, begin: float, loss: str = "0x1p+0") -> list[struck.Line]:
    """Lines of steps ``first`` to ``last``, the first of which is completed at ``begin``."""
    return [
        {
            "kind": "step",
            "at": begin + (step - first) + 0.1 * (rank == 2),
            "rank": rank,
            "step": step,
            "loss": loss,
        }
        for step in range(first, last + 1)
        for rank in range(WORLD)
    ]


def _begun(at: float, first: int) -> list[struck.Line]:
    return [{"kind": "begun", "at": at + rank, "rank": rank, "first": first} for rank in range(3)]


def test_restart_from_a_checkpoint_costs_the_steps_behind_it_too() -> None:
    # Steps 1 to 15 are done at 15.1; struck at 15.6; new processes at 18 to 20, from step 10 on.
    lines = [*_begun(-5.0, 1), *_steps(1, 15, 1.0), *_begun(18.0, 11), *_steps(11, 22, 21.0)]
    found = struck.outcome(lines, 15.6, [3.0, 16.1, 17.0], WORLD)
    assert round(found.detected_s, 6) == 0.5
    assert found.restarted_s is not None
    assert round(found.restarted_s, 6) == 4.4
    assert round(found.resumed_s, 6) == 5.5
    # Step 16 comes five steps after step 11.
    assert round(found.new_step_s, 6) == 10.5
    assert found.replayed_steps == 5
    assert round(found.step_s, 6) == 1.0
    # Step 19 would have come at 19.1 and comes at 29.1; five of these ten seconds are replayed.
    assert round(found.lost_s, 6) == 10.0
    assert round(found.standstill_s, 6) == 5.0


def test_swap_in_place_replays_nothing_and_has_one_new_process() -> None:
    (new, *_) = _begun(15.8, 1)
    lines = [*_begun(-5.0, 1), *_steps(1, 15, 1.0), new, *_steps(16, 22, 17.0)]
    found = struck.outcome(lines, 15.6, [15.7], WORLD)
    assert (found.replayed_steps, round(found.restarted_s or 0.0, 6)) == (0, 0.2)
    # One second for the step itself is not lost.
    assert round(found.lost_s, 6) == 1.0
    assert round(found.resumed_s, 6) == round(found.new_step_s, 6) == 1.5


def test_exception_of_a_survivor_is_a_sign() -> None:
    broken = {"kind": "broken", "at": 15.65, "rank": 0, "why": "Connection closed by peer"}
    lines = [*_steps(1, 15, 1.0), broken, *_steps(16, 22, 17.0)]
    assert round(struck.outcome(lines, 15.6, [16.0], WORLD).detected_s, 6) == 0.05


def test_step_that_one_rank_has_not_completed_is_not_completed() -> None:
    lines = [*_steps(1, 3, 1.0)][:-1]
    assert list(struck.completions(lines, WORLD)) == [1, 2]


def test_losses_must_agree_bit_for_bit_and_with_themselves() -> None:
    lines = _steps(1, 5, 1.0)
    assert struck.same_numbers(lines, _steps(3, 9, 7.0))
    assert not struck.same_numbers(lines, _steps(3, 9, 7.0, loss="0x1.0000000000001p+0"))
    assert not struck.same_numbers([*lines, *_steps(4, 4, 9.0, loss="0x0p+0")], lines)
    assert not struck.same_numbers(lines, _steps(6, 9, 7.0))


def test_logs_of_torchrun_and_slurm_say_when_they_noticed() -> None:
    torchrun = (
        "I1201 12:00:00.100000 7 torch/distributed/elastic/agent/server/api.py:9] [default] worker"
        " group is fine\n"
        "E1201 12:00:01.500000 7 torch/distributed/elastic/multiprocessing/api.py:900] failed "
        "(exitcode: 1) local_rank: 0 (pid: 9) of binary: python\n"
        "I1201 12:00:03.250000 7 torch/distributed/elastic/agent/server/api.py:900] [default] "
        "Detected 1 new nodes from group_rank=0; will restart worker group\n"
    )
    first, second = struck.torchrun_signs(torchrun, 2026)
    assert second - first == 1.75
    slurm = (
        "[2026-12-01T12:00:01.500] sched: Allocate JobId=7 NodeList=n[1-3]\n"
        "[2026-12-01T12:00:05.000] error: Nodes n2 not responding, setting DOWN\n"
        "[2026-12-01T12:00:05.500] Requeuing JobId=7\n"
    )
    assert [at - first for at in struck.slurmctld_signs(slurm)] == [3.5, 4.0]


def test_summary_has_median_and_range_of_the_runs_that_have_the_number() -> None:
    found = struck.summary([{"a": 1.0, "b": None}, {"a": 5.0, "b": 2.0}, {"a": 2.0, "b": None}])
    assert found == {
        "a": {"median": 2.0, "low": 1.0, "high": 5.0},
        "b": {"median": 2.0, "low": 2.0, "high": 2.0},
    }
