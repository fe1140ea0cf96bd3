"""Who holds a hanging job up, from what each rank says of itself."""

from __future__ import annotations

import pytest
from workbench import in_group

from deadpool_launch.controller.diagnosis import Hang, diagnose
from deadpool_launch.controller.hangs import is_echo
from deadpool_runtime.protocol import GroupStanding, Standing

LIMIT_S = 300.0


def standing(rank: int, *groups: GroupStanding, step: int = 7, step_s: float = 301.0) -> Standing:
    return Standing(rank, 1, 1, step, step_s, list(groups))


def message(name: str, op: str = "", peer_s: float = 0.0) -> GroupStanding:
    return GroupStanding(name, 0, 0, False, "", 0.0, op, peer_s)


def found(*standings: Standing) -> Hang:
    hang = diagnose(standings, LIMIT_S)
    assert hang is not None
    return hang


def test_nobody_is_late() -> None:
    late = in_group(5, 200.0)
    assert diagnose([standing(0, late, step_s=200.0), standing(1, step_s=2.0)], LIMIT_S) is None
    assert diagnose([], LIMIT_S) is None


def test_rank_that_is_waited_for_and_waits_for_nothing_is_named() -> None:
    hang = found(standing(0, in_group(5, 300.0)), standing(1, in_group(4)))
    text = "did not come to all_reduce no. 5 of group 0 that rank 0 has waited in for 300 s"
    assert hang == Hang((1,), f"{text} (inferred)")


def test_a_chain_of_waits_leads_to_the_one_that_waits_for_nothing() -> None:
    """Ranks 0 and 1 are one group, 1 and 2 another: 0 waits for 1, which waits for 2."""
    hang = found(
        standing(0, in_group(5, 300.0, "a")),
        standing(1, in_group(4, 0.0, "a"), in_group(9, 250.0, "b")),
        standing(2, in_group(8, 0.0, "b")),
    )
    assert hang.culprits == (2,)
    assert "no. 9 of group b that rank 1 has waited in for 250 s" in hang.text


def test_of_ranks_that_wait_for_each_other_the_one_waited_for_longest_is_named() -> None:
    hang = found(
        standing(0, in_group(5, 300.0, "a"), in_group(8, 0.0, "b")),
        standing(1, in_group(4, 0.0, "a"), in_group(9, 250.0, "b")),
    )
    assert hang.culprits == (1,)


def test_a_rank_that_has_gone_on_is_seen_as_well() -> None:
    """It does not overrun its step, but never came to the collective of the one before."""
    hang = found(standing(0, in_group(5, 300.0)), standing(1, in_group(4), step=8, step_s=20.0))
    assert hang.culprits == (1,)


def test_with_several_under_way_the_oldest_counts() -> None:
    ahead = GroupStanding("0", 8, 5, True, "all_reduce", 300.0)
    hang = found(standing(0, ahead), standing(1, in_group(5, 290.0)), standing(2, in_group(4)))
    assert hang.culprits == (2,)
    assert "all_reduce no. 5 of group 0 that 2 ranks have waited in" in hang.text


def test_ranks_in_different_collectives_under_one_number_are_told_apart() -> None:
    hang = found(
        standing(0, in_group(5, 300.0)),
        standing(1, in_group(5, 300.0, op="barrier")),
        standing(2, in_group(5, 300.0, op="barrier")),
    )
    text = "no. 5 of group 0 is not the same on every rank: rank 0 in all_reduce, ranks 1-2 in"
    assert hang == Hang((), f"{text} barrier for 300 s (inferred)")


def test_a_message_that_does_not_come_is_its_silent_peers_fault() -> None:
    """A pipeline of three: rank 2 waits for 1, which waits for 0, which does something else."""
    hang = found(
        standing(0, message("p")),
        standing(1, message("p", "recv", 300.0)),
        standing(2, message("p", "recv", 299.0)),
    )
    assert hang == Hang(
        (0,), "did not answer recv of group p that 2 ranks have waited in for 300 s (inferred)"
    )


def test_ranks_that_wait_in_no_collective_are_named_by_the_step_clock() -> None:
    hang = found(standing(0, in_group(5)), standing(1, in_group(5), step_s=310.0))
    assert hang == Hang(
        (0, 1), "did not end step 7 within 310 s, outside of any collective (inferred)"
    )


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        ("RuntimeError: Connection closed by peer [10.0.0.3]:41920", True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        ("RuntimeError: writev [10.0.0.3]:4120: Broken pipe", True),
        ("DistBackendError: NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError: the process groups of this process were aborted", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", False),
        ("RuntimeError: shape mismatch", False),
        ("ValueError: Connection closed by peer", False),
    ],
)
def test_only_broken_collectives_are_echoes(error: str, echo: bool) -> None:
    assert is_echo(error) is echo
