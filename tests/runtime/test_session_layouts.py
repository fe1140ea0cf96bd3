"""Every parallel layout under protection: killed ranks, lost nodes and lost holders change no bit.

Real ranks, real collectives, real replicators; each rank is on a node of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import parallel_layouts
import pytest

from deadpool_launch.whatif.sizes import Layout, sizes_of_rank
from deadpool_runtime import protocol
from deadpool_runtime.testing import JobFailed

#: One rank of each layout that is lost in the everyday tests.
EVERYDAY = {
    "ddp": 1,
    "zero": 1,
    "fsdp": 2,
    "hsdp": 0,
    "ddp_tp": 3,
    "fsdp_tp": 1,
    "ddp_1f1b": 2,
    "fsdp_1f1b_tp": 5,
}
#: Layouts in which some state is on one rank alone.
SHARDED = ("zero", "fsdp", "fsdp_tp", "fsdp_1f1b_tp")
#: What training scripts do besides, and the layouts that it is tried with.
FEATURES = (
    ("ddp", ("clip", "average", "scale")),
    ("ddp_momentum", ("clip", "average")),
    ("zero_momentum", ("clip",)),
    ("fsdp_momentum", ("clip",)),
    ("fsdp_accumulated", ("clip",)),
)


class PowerOff:
    """Powers nodes off, each when its rank has come to a step: its own, or its replica's holder's.

    ``victims``: (rank, step, "node" or "holder"), in order of the steps.
    """

    def __init__(self, *victims: tuple[int, int, str]) -> None:
        self.victims = list(victims)
        self.done: list[tuple[int, int, str]] = []

    def __call__(self, launcher: Any, rank: int, message: Any) -> None:
        if not self.victims or not isinstance(message, protocol.StepDone):
            return
        victim, step, which = self.victims[0]
        if (rank, message.step) != (victim, step):
            return
        self.done.append(self.victims.pop(0))
        lost = victim
        if which == "holder":
            held_by = launcher.holder(victim).name
            size = range(launcher.world_size)
            lost = next(other for other in size if launcher.node(other).name == held_by)
        launcher.power_off(lost)


@pytest.mark.parametrize("layout", EVERYDAY)
def test_a_killed_rank_changes_no_bit(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], layout: str
) -> None:
    outcome, numbers = run_layout(layout, "--die", f"{EVERYDAY[layout]}:4:backward")
    assert [step for _, step in outcome.plans] == [3]
    assert numbers == undisturbed_layout(layout)


@pytest.mark.parametrize("layout", ["zero", "fsdp", "hsdp", "fsdp_1f1b_tp"])
def test_a_lost_node_changes_no_bit(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], layout: str
) -> None:
    strike = PowerOff((EVERYDAY[layout], 3, "node"))
    outcome, numbers = run_layout(layout, on_message=strike)
    assert strike.victims == []
    assert all(step >= 2 for _, step in outcome.plans)
    assert numbers == undisturbed_layout(layout)


@pytest.mark.parametrize("layout", ["zero", "fsdp"])
def test_the_holder_and_later_the_rank_itself_may_be_lost(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], layout: str
) -> None:
    rank = EVERYDAY[layout]
    strike = PowerOff((rank, 2, "holder"), (rank, 5, "node"))
    _, numbers = run_layout(layout, on_message=strike)
    assert strike.victims == []
    assert numbers == undisturbed_layout(layout)


def power_off_with_holder(lost: list[int]) -> Callable[[Any, int, Any], None]:
    """Power off rank 1's node after step 3 and that of its replica's holder with it."""

    def both(launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, protocol.StepDone) and (rank, message.step) == (1, 3) and not lost:
            holder = launcher.holder(1).name
            lost.extend(
                [1, next(r for r in range(launcher.world_size) if launcher.node(r).name == holder)]
            )
            for each in lost:
                launcher.power_off(each)

    return both


def test_a_rank_without_state_of_its_own_may_be_lost_with_its_holder(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any]
) -> None:
    lost: list[int] = []
    _, numbers = run_layout("ddp", on_message=power_off_with_holder(lost))
    assert len(lost) == 2
    assert numbers == undisturbed_layout("ddp")


@pytest.mark.parametrize("layout", ["zero", "fsdp"])
def test_a_rank_that_is_lost_with_its_holder_is_not_made_up(
    run_layout: Callable[..., Any], layout: str
) -> None:
    with pytest.raises(JobFailed, match="no step is whole"):
        run_layout(layout, on_message=power_off_with_holder([]))


@pytest.mark.parametrize(
    "layout", ["zero", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("fsdp", "hsdp"))]
)
def test_with_two_holders_a_rank_may_be_lost_with_one_of_them(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], layout: str
) -> None:
    lost: list[int] = []
    outcome, numbers = run_layout(layout, on_message=power_off_with_holder(lost), factor=2)
    assert len(lost) == 2
    assert outcome.plans
    assert all(step >= 2 for _, step in outcome.plans)
    assert numbers == undisturbed_layout(layout)


@pytest.mark.parametrize(
    "case",
    [
        ("zero", 2),
        *(pytest.param((each, 3), marks=pytest.mark.matrix) for each in ("zero", "ddp", "fsdp")),
    ],
)
def test_with_an_interval_a_lost_node_costs_as_many_steps_at_most(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], case: tuple[str, int]
) -> None:
    """What all have completed before the first plan, and what all go back to."""
    layout, interval = case
    strike = PowerOff((1, 5, "node"))
    completed: dict[int, int] = {}

    def strike_and_note(launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, protocol.StepDone) and not launcher.outcome.plans:
            completed[rank] = message.step
        strike(launcher, rank, message)

    outcome, numbers = run_layout(layout, on_message=strike_and_note, interval=interval)
    assert strike.victims == []
    ((_, step),) = outcome.plans
    assert step % interval == 0
    assert 0 <= min(completed.values()) - step <= interval
    assert numbers == undisturbed_layout(layout)


@pytest.mark.matrix
def test_with_an_interval_the_step_that_a_dead_process_goes_back_to_is_replicated(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any]
) -> None:
    """The death costs the step under way and no other; a node that is lost after that two."""
    strike = PowerOff((0, 4, "node"))
    outcome, numbers = run_layout("zero", "--die", "1:3:backward", on_message=strike, interval=3)
    assert strike.victims == []
    first, second = (step for _, step in outcome.plans)
    assert first == 2
    assert second in (first, first + 3)
    assert numbers == undisturbed_layout("zero")


@pytest.mark.matrix
@pytest.mark.parametrize(("factor", "interval"), [(1, 2), (2, 1), (2, 3)])
def test_arenas_have_as_many_slots_as_a_plan_counts(
    run_layout: Callable[..., Any], factor: int, interval: int
) -> None:
    steps = 6 * interval
    slots: list[Counter[str]] = []

    def look(launcher: Any, rank: int, message: Any) -> None:
        if isinstance(message, protocol.StepDone) and (rank, message.step) == (0, steps - 1):
            for each in launcher.outcome.pids:
                names = (path.name for path in launcher.node(each).arena.path.iterdir())
                slots.append(Counter(name.partition("-")[0] for name in names))

    run_layout("fsdp", f"--steps={steps}", on_message=look, factor=factor, interval=interval)
    layout = Layout(3, 0, 1, "fsdp", factor=factor, interval=interval)
    need = sizes_of_rank(1 << 20, layout).need
    # With one holder the own part has a slot at another node too.
    held = {"own": need.copies * len(need.ranks), "held": need.replicas * len(need.held)}
    assert [{what: found[what] for what in held} for found in slots] == [held] * 3


@pytest.mark.parametrize(("layout", "features"), FEATURES)
def test_what_training_scripts_do_besides_changes_no_bit(
    run_layout: Callable[..., Any],
    undisturbed_layout: Callable[..., Any],
    layout: str,
    features: tuple[str, ...],
) -> None:
    args = [word for feature in features for word in ("--with", feature)]
    _, numbers = run_layout(layout, *args, "--die", "1:4:stepped")
    assert numbers == undisturbed_layout(layout, *args)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", parallel_layouts.LAYOUTS)
@pytest.mark.parametrize(
    "deaths",
    [("0:1:forward",), ("1:1:stepped",), ("1:3:forward", "0:5:backward"), ("1:6:stepped",)],
    ids=lambda deaths: "+".join(deaths),
)
def test_every_layout_and_death(
    run_layout: Callable[..., Any],
    undisturbed_layout: Callable[..., Any],
    layout: str,
    deaths: tuple[str, ...],
) -> None:
    args = [word for death in deaths for word in ("--die", death)]
    outcome, numbers = run_layout(layout, *args)
    assert outcome.plans
    assert numbers == undisturbed_layout(layout)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", parallel_layouts.LAYOUTS)
@pytest.mark.parametrize("which", ["node", "holder"])
def test_every_layout_and_lost_node(
    run_layout: Callable[..., Any], undisturbed_layout: Callable[..., Any], layout: str, which: str
) -> None:
    strike = PowerOff((1, 2, which), (0, 4, "node"))
    _, numbers = run_layout(layout, on_message=strike)
    assert strike.victims == []
    assert numbers == undisturbed_layout(layout)
