"""One rank in this process, and a link that answers as a launcher would."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_rank import BATCHES, Launcher, Training, install, raising, run_body

from deadpool_runtime import context, protocol, session
from deadpool_runtime.encoding import decode
from deadpool_runtime.errors import Misuse, UnsupportedState
from deadpool_runtime.generators import made_of, state_of
from deadpool_runtime.groups.errors import UnsupportedLayout
from deadpool_runtime.job import Step
from deadpool_runtime.later import encode_own
from deadpool_runtime.user_state import copied, put_back


def test_what_a_rank_says_in_a_quiet_run(launcher: Launcher) -> None:
    run_body(training := Training(), lambda step, batch: training(batch))
    kinds = [k for k in launcher.kinds() if k not in ("Snapshotted", "Protected")]
    assert kinds == ["Attached", *["StepDone"] * 6, "StepsEnded", "FinalState"]
    done = [m for m in launcher.said if isinstance(m, protocol.StepDone)]
    assert [m.step for m in done] == [0, 1, 2, 3, 4, 5]
    copied = [m for m in launcher.said if isinstance(m, protocol.Snapshotted)]
    assert [m.step for m in copied] == [0, 1]
    assert {s.ranks for m in copied for s in m.segments} == {(0,)}
    parts = {"parameters", "buffers", "optimizer", "scheduler", "extras", "rng", "data", "user"}
    assert set(launcher.said[-1].parts) == parts


def test_a_step_revoked_in_its_body_is_run_again(expected: list[Any], launcher: Launcher) -> None:
    training = Training()
    numbers, completed = [], []
    job = training.job
    job.state["count"] = 0
    for step, batch in job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            job.state["count"] += 1
            if len(numbers) == 3:
                launcher.revoke()
            training(batch)
        completed.append(step.completed)
        job.state["after"] = step.number
    assert numbers == [1, 2, 3, 3, 4, 5]
    assert completed == [True, True, False, True, True, True]
    assert job.state == {"count": 5, "after": 5}
    assert training.weights() == expected


@pytest.mark.parametrize("back_to", [1, 2, 3])
def test_a_body_that_ends_after_a_revoke_is_void(
    expected: list[Any], launcher: Launcher, back_to: int
) -> None:
    training = Training()
    launcher.step = back_to
    numbers = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            training(batch)
            if len(numbers) == 4:
                launcher.revoke()
    assert numbers == [1, 2, 3, 4, *range(back_to + 1, 6)]
    assert training.weights() == expected


def test_a_loss_while_waiting_at_the_end(expected: list[Any], launcher: Launcher) -> None:
    training = Training()
    launcher.at_end = launcher.revoke
    launcher.step = 3
    numbers = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            training(batch)
    assert numbers == [1, 2, 3, 4, 5, 4, 5]
    assert training.weights() == expected


def test_an_exception_is_explained_by_a_revoke_that_comes_after_it(launcher: Launcher) -> None:
    launcher.verdict = False
    training = Training()
    send = launcher.send
    raised: list[int] = []

    def send_and_revoke(message: Any) -> None:
        send(message)
        if isinstance(message, protocol.StepRaised):
            launcher.revoke()

    launcher.send = send_and_revoke  # type: ignore[method-assign]
    for step, batch in training.job.steps(BATCHES):
        with step:
            if step.number == 2 and not raised:
                raised.append(step.number)
                raise ConnectionError("peer")
            training(batch)
    assert raised == [2]


def test_the_scripts_own_exception_comes_out(launcher: Launcher) -> None:
    with pytest.raises(ZeroDivisionError):
        run_body(Training(), raising(ZeroDivisionError()))
    assert launcher.kinds()[-1] == "StepRaised"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_leaving_on_purpose_asks_nobody(launcher: Launcher, error: BaseException) -> None:
    with pytest.raises(type(error)):
        run_body(Training(), raising(error))
    assert "StepRaised" not in launcher.kinds()


def test_silence_ends_the_wait_for_a_verdict(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "VERDICT_TIMEOUT_S", 0.05)
    launcher.verdict = False
    with pytest.raises(ZeroDivisionError):
        run_body(Training(), raising(ZeroDivisionError()))


def test_a_body_outside_of_with_is_refused(launcher: Launcher) -> None:
    with pytest.raises(Misuse, match="outside of `with step:`"):
        for _ in Training().job.steps(BATCHES):
            pass


def test_a_step_is_entered_once(launcher: Launcher) -> None:
    def body(step: Step, batch: Any) -> None:
        with step:
            pass

    with pytest.raises(Misuse, match="twice"):
        run_body(Training(), body)


@pytest.mark.parametrize("number", [1, 4])
def test_state_that_cannot_come_back_is_refused_by_name(launcher: Launcher, number: int) -> None:
    training = Training()

    def body(step: Step, batch: Any) -> None:
        training(batch)
        training.job.state["best"] = [1, 2.0]
        if step.number == number:
            training.job.state["best"] = [1, np.float64(1.0)]

    with pytest.raises(UnsupportedState, match=r"job\.state holds at 'best' at 1 a numpy.float64"):
        run_body(training, body)
    done = [m.step for m in launcher.said if isinstance(m, protocol.StepDone)]
    assert done == list(range(number))


def looped() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "surrogate": (lambda: "caf\udce9", "'best' the text"),
    "sparse": (lambda: [1, torch.eye(2).to_sparse()], "'best' at 1 a sparse tensor"),
    "meta": (lambda: torch.ones(2, device="meta"), "'best' a meta tensor"),
    "cycle": (looped, "'best' at 0 a list that contains itself"),
    "nan": (lambda: {"a": {float("nan"): 1}}, "'best' at 'a' a value under the key nan"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_value_is_refused_in_its_step(launcher: Launcher, kind: str) -> None:
    training = Training()
    make, text = ODD[kind]

    def body(step: Step, batch: Any) -> None:
        training(batch)
        if step.number == 3:
            training.job.state["best"] = make()

    with pytest.raises(UnsupportedState, match=f"job.state holds at {text}"):
        run_body(training, body)
    assert [m.step for m in launcher.said if isinstance(m, protocol.StepDone)] == [0, 1, 2]


def test_names_for_what_is_in_the_state_stay_true(launcher: Launcher) -> None:
    training = Training()
    state = training.job.state
    history, sums = state.setdefault("history", []), state.setdefault("sums", torch.zeros(1))
    state["same"] = [history]
    inner = state.setdefault("by name", {"a": []})["a"]
    numbers = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            history.append(step.number)
            inner.append(step.number)
            sums += step.number
            if len(numbers) == 3:
                state["same"] = None
                launcher.revoke()
            training(batch)
    assert numbers == [1, 2, 3, 3, 4, 5]
    assert history == inner == [1, 2, 3, 4, 5]
    assert sums.item() == 15
    assert state["history"] is state["same"][0] is history
    assert state["by name"]["a"] is inner
    assert state["sums"] is sums


def test_one_list_in_two_places_is_one_in_a_new_process() -> None:
    shared, each = [1], {"n": 1}
    state = {"a": shared, "b": [shared], "c": each, "d": each}
    own = decode(encode_own({"user": copied(state)}))["user"]
    new: dict[str, Any] = {}
    put_back(new, own)
    new["a"].append(2)
    new["c"]["n"] = 2
    assert new == {"a": [1, 2], "b": [[1, 2]], "c": {"n": 2}, "d": {"n": 2}}
    # And two stay two where they had become one.
    two: dict[str, Any] = {"a": shared, "b": shared}
    put_back(two, {"a": [3], "b": [4]})
    assert two == {"a": [3], "b": [4]}
    assert two["a"] is shared


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(5),
        lambda generator: torch.rand(2, generator=generator).tolist(),
    ),
    "numpy": (lambda: np.random.default_rng(5), lambda generator: generator.random()),
    "mersenne": (
        lambda: np.random.Generator(np.random.MT19937(5)),
        lambda generator: generator.random(),
    ),
    "legacy": (lambda: np.random.RandomState(5), lambda generator: generator.normal()),
    "python": (lambda: random.Random(5), lambda generator: generator.gauss(0, 1)),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_scripts_own_is_an_extra(launcher: Launcher, kind: str) -> None:
    make, draw = GENERATORS[kind]
    generator, other = make(), make()
    training = Training(noise=generator)
    drawn: dict[int, Any] = {}
    revoked: list[int] = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            drawn[step.number] = draw(generator)
            if step.number == 3 and not revoked:
                revoked.append(3)
                launcher.revoke()
            training(batch)
    assert drawn == {number: draw(other) for number in range(1, 6)}
    saved = decode(encode_own(state_of(generator)))
    assert draw(made_of(saved)) == draw(generator)


def test_an_exception_that_is_caught_outside_of_the_body_is_refused(launcher: Launcher) -> None:
    training = Training()

    def loop() -> None:
        for step, batch in training.job.steps(BATCHES):
            try:
                with step:
                    if step.number == 3:
                        raise ValueError("bad batch")
                    training(batch)
            except ValueError:
                continue

    with pytest.raises(Misuse, match="left the body of step 3 and was caught outside"):
        loop()


def test_a_text_that_is_no_unicode_is_sent_all_the_same(launcher: Launcher) -> None:
    with pytest.raises(ValueError, match="caf"):
        run_body(Training(), raising(ValueError("caf\udce9")))
    raised = [m for m in launcher.said if isinstance(m, protocol.StepRaised)]
    assert [m.error for m in raised] == ["ValueError: caf\\udce9"]


def test_no_groups_are_made_once_attached(launcher: Launcher) -> None:
    registry: Any = context.current_context().registry  # type: ignore[union-attr]
    assert not registry.sealed
    Training()
    assert registry.sealed


def test_attach_is_called_once(launcher: Launcher) -> None:
    Training()
    with pytest.raises(Misuse, match="second time"):
        Training()


def test_several_ranks_need_a_wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, world_size=2)
    with pytest.raises(UnsupportedLayout, match="wrap it first"):
        Training()
