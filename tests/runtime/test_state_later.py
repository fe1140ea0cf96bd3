"""What lies on a device is in the own part as it was, though it is looked at later.

There is no device here: CPU memory is taken for that of one.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from one_rank import BATCHES, Launcher, Training
from state_copies import state_of
from torch import nn

from deadpool_runtime import constants, later
from deadpool_runtime.encoding import decode
from deadpool_runtime.later import Later, encode_own, settled, state_of_extra
from deadpool_runtime.replication import snapshots
from deadpool_runtime.replication.copying import Copier
from deadpool_runtime.replication.streams import CpuStream

LARGE, CHANGED, HUGE = "b/0/large", "b/0/changed", "b/0/huge"


@pytest.fixture(autouse=True)
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "is_remote", lambda tensor: True)


def used_scaler() -> tuple[Any, nn.Parameter]:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    parameter = nn.Parameter(torch.ones(1))
    return scaler, parameter


def use(scaler: Any, parameter: nn.Parameter) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_a_scaler_tells_its_numbers_as_they_were() -> None:
    scaler, parameter = used_scaler()
    assert state_of_extra(scaler) == scaler.state_dict()
    for _ in range(5):
        use(scaler, parameter)
        expected, taken = scaler.state_dict(), state_of_extra(scaler)
        assert {name for name, each in taken.items() if isinstance(each, Later)} == {
            "scale",
            "_growth_tracker",
        }
        for _ in range(2):
            use(scaler, parameter)
        assert scaler.state_dict() != expected
        found = settled(taken)
        assert found == expected
        assert list(map(type, found.values())) == list(map(type, expected.values()))


def test_a_scaler_with_a_state_of_its_own_is_asked_for_it() -> None:
    class Noting(torch.amp.GradScaler):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

    scaler = Noting("cpu")
    use(scaler, nn.Parameter(torch.ones(1)))
    assert state_of_extra(scaler) == scaler.state_dict()
    assert settled(state_of_extra(torch.amp.GradScaler("cpu", enabled=False))) == {}


def test_buffers_are_those_of_the_time_at_which_they_were_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has no room beside itself on the device is looked at without delay."""
    monkeypatch.setattr(constants, "CLONED_NBYTES", 200_000)
    model = nn.Linear(1, 1)
    model.register_buffer("small", torch.ones(4))
    for name, size in (("large", 20_000), ("changed", 20_000), ("huge", 60_000)):
        model.register_buffer(name, torch.arange(float(size)))
    state = state_of(model)
    state.items()
    dict(model.named_buffers())["changed"].data.add_(1)
    own = state.own_part()
    assert {key for key, each in own["buffers"].items() if isinstance(each, Later)} == {
        LARGE,
        CHANGED,
    }
    assert HUGE not in own["buffers"]
    for buffer in model.buffers():
        buffer.zero_()
    buffers = decode(encode_own(own))["buffers"]
    assert sorted(buffers) == [CHANGED, "b/0/small"]
    assert torch.equal(buffers["b/0/small"], torch.ones(4))
    assert torch.equal(buffers[CHANGED], torch.arange(20_000.0) + 1)


def test_a_job_whose_own_parts_are_made_by_the_copier_goes_on_as_it_went(
    expected: list[Any], launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by: list[str] = []

    def noting_encode_own(own: dict[str, Any]) -> bytes:
        made_by.append(threading.current_thread().name)
        return encode_own(own)

    monkeypatch.setattr(snapshots, "encode_own", noting_encode_own)
    monkeypatch.setattr(snapshots, "Copier", partial(Copier, stream=CpuStream()))
    training = Training(scaler=used_scaler()[0])
    numbers = []
    for step, batch in training.job.steps(BATCHES):
        with step:
            numbers.append(step.number)
            training(batch)
            if len(numbers) == 4:
                launcher.revoke()
    assert numbers == [1, 2, 3, 4, 4, 5]
    assert training.weights() == expected
    assert set(made_by) == {"deadpool-copier"}
