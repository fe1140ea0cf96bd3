"""Weights that a replacement skips: never seen by anybody, and the same bits as if it had not."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import BATCHES, install
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import deadpool_runtime as deadpool
from deadpool_runtime import context, session, weights
from deadpool_runtime.errors import Misuse
from deadpool_runtime.recipes import is_plain


class Quiet(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that changes nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def stand_in(monkeypatch: pytest.MonkeyPatch, arena: Path, replaced: bool) -> None:
    """A process that has not begun, an original one or a replacement."""
    install(monkeypatch, arena)
    assert context._current is not None
    made = dataclasses.replace(context._current, replacement=replaced)
    monkeypatch.setattr(context, "_current", made)
    monkeypatch.setattr(weights, "_settled", False)
    torch.manual_seed(5)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a function as an original process and as a replacement of which nothing will be
    restored; returns what it returns in each."""

    def run(script: Callable[[], Any]) -> Any:
        results = []
        for replaced in (False, True):
            stand_in(monkeypatch, tmp_path, replaced)
            try:
                results.append(script())
            finally:
                weights.settle(())
        return results

    return run


def test_every_function_draws_the_same_and_moves_no_generator(both: Any) -> None:
    def script() -> Any:
        made = []
        before = torch.get_rng_state()
        with deadpool.initial_weights() as block:
            entered = torch.get_rng_state()
            for name in weights.RANDOM:
                for shape, dtype in (((64, 33), torch.float32), ((7, 5), torch.float64)):
                    made.append(getattr(nn.init, name)(torch.empty(shape, dtype=dtype)))
            made.append(nn.init.normal_(torch.empty(5, 40).t(), std=0.5))
            made.append(nn.init.normal_(torch.empty(40, 5)[3:], 2.0))
            assert torch.equal(torch.get_rng_state(), entered)
        assert not torch.equal(before, entered)
        return made, torch.rand(3), block.drawn, block.skipped

    (original, later, drawn, skipped), (made, later_too, drawn_too, skipped_too) = both(script)
    assert (drawn, skipped, drawn_too, skipped_too) == (18, 0, 18, 17)
    assert all(torch.equal(a, b) for a, b in zip(original, made, strict=True))
    assert len({tuple(each.flatten()[:4].tolist()) for each in made}) == len(made)
    assert torch.equal(later, later_too)


def test_it_means_the_same_without_a_launcher(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script() -> torch.Tensor:
        with deadpool.initial_weights():
            return nn.Linear(20, 30).weight

    original, _ = both(script)
    monkeypatch.setattr(context, "_current", None)
    torch.manual_seed(5)
    assert torch.equal(script(), original)
    assert not torch.equal(script(), original)  # the second block has other numbers
    torch.manual_seed(5)
    assert torch.equal(script(), original)


def test_what_is_not_skipped_is_drawn_in_both(both: Any) -> None:
    by_name = nn.init.normal_

    def script() -> Any:
        with deadpool.initial_weights() as block:
            own = nn.init.normal_(torch.empty(4), generator=torch.Generator().manual_seed(1))
            made = [own, by_name(torch.empty(4)), nn.init.sparse_(torch.empty(4, 4), 0.5)]
            made.append(nn.MultiheadAttention(4, 2).in_proj_weight)
            with pytest.raises(TypeError, match="unexpected"):
                nn.init.normal_(torch.empty(3), wrong=1)  # type: ignore[call-arg]
        return made, block.skipped

    (original, _), (made, skipped) = both(script)
    assert all(torch.equal(a, b) for a, b in zip(original, made, strict=True))
    # A call on one would import much of torch.
    assert not is_plain(torch.empty(3, device="meta"))
    assert skipped == 2  # of the attention's output projection


def test_the_functions_are_put_back_also_after_an_exception(both: Any) -> None:
    names = [*weights.RANDOM, "sparse_"]
    before = [getattr(nn.init, name) for name in names]

    def script() -> None:
        with deadpool.initial_weights() as outer:
            with deadpool.initial_weights() as inner:
                assert inner is outer
            assert nn.init.normal_ is not before[1]
        with pytest.raises(ZeroDivisionError), deadpool.initial_weights():
            raise ZeroDivisionError

    methods = dict(vars(torch.Tensor))
    both(script)
    assert [getattr(nn.init, name) for name in names] == before
    assert dict(vars(torch.Tensor)) == methods
    assert not _get_current_dispatch_mode_stack()


def _scaled(model: nn.Linear) -> Any:
    with torch.no_grad():
        model.weight.mul_(0.02)
    return model.weight


def _part_overwritten(model: nn.Linear) -> Any:
    model.weight.data[3:5].zero_()
    return model.weight


def _replaced(model: nn.Linear) -> Any:
    model.weight.data = model.weight.data.t()[:, :9].clone()
    return model.weight


def _drawn_again(model: nn.Linear) -> Any:
    model.weight.data.normal_(0.0, 0.1)
    return model.weight


def _transposed_in_place(model: nn.Linear) -> Any:
    model.weight.data[:8, :8].copy_(model.weight.data[:8, :8].t())
    return model.weight


def _in_inference_mode(model: nn.Linear) -> Any:
    with torch.inference_mode():
        return model.weight.t().contiguous() + 0


def _under_a_later_mode(model: nn.Linear) -> Any:
    with Quiet():  # type: ignore[no-untyped-call]
        return model.weight.norm()


def _weight_normed(model: nn.Linear) -> Any:
    normed = nn.utils.parametrizations.weight_norm(model)
    return normed.weight


def _saved(model: nn.Linear) -> Any:
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    return torch.load(stream)["weight"]


def _loaded(model: nn.Linear) -> Any:
    model.load_state_dict({k: torch.full_like(v, 3.0) for k, v in model.state_dict().items()})
    return model.weight


@pytest.mark.parametrize(
    "use",
    [
        _scaled,
        _part_overwritten,
        _replaced,
        _drawn_again,
        _transposed_in_place,
        _in_inference_mode,
        _under_a_later_mode,
        _weight_normed,
        _saved,
        _loaded,
        copy.deepcopy,
        lambda model: copy.deepcopy(model.weight.detach()),
        lambda model: copy.deepcopy(model.to(torch.bfloat16)).double(),
        lambda model: torch.from_numpy(model.weight.detach().numpy().copy()),
        lambda model: torch.tensor(model.weight.tolist()),
        lambda model: torch.tensor(model.weight[3, 3].item()),
        lambda model: model.weight.data.view(torch.float16).clone().view(torch.float32),
        lambda model: model.weight.data.copy_(model.weight.data),
        lambda model: repr(model.weight),
        lambda model: model(torch.ones(2, 17)),
        lambda model: bytes(model.weight[0, :4].clone().untyped_storage()),
        lambda model: torch.zeros(9, 17).copy_(model.weight[0]),
        lambda model: torch.zeros(40, 17)[2:11].copy_(model.weight[:9]),
        lambda model: model.to_empty(device="cpu").reset_parameters() or model.weight,
    ],
)
def test_whatever_is_done_with_a_weight_finds_the_originals(
    both: Any, use: Callable[[nn.Linear], Any]
) -> None:
    def script() -> Any:
        with deadpool.initial_weights():
            model = nn.Linear(17, 33)
            model.to_empty(device="cpu").reset_parameters()
        return use(model), torch.rand(2)

    (original, later), (made, later_too) = both(script)
    assert torch.equal(later, later_too)
    if isinstance(original, nn.Module):
        original, made = (
            torch.cat([p.flatten() for p in m.parameters()]) for m in (original, made)
        )
    if isinstance(original, torch.Tensor):
        assert original.isfinite().all()
        assert torch.equal(original, made)
    else:
        assert original == made


def test_what_will_be_restored_stays_nan_and_the_rest_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, replaced=True)
    with deadpool.initial_weights() as block:
        model, other, dropped = nn.Linear(9, 9), nn.Linear(9, 9), nn.Linear(9, 9)
    model.double()
    tied = nn.Linear(9, 9, bias=False)
    tied.weight = model.weight
    half = nn.Parameter(other.weight.detach()[:5])
    del dropped
    weights.settle([model.weight, model.bias, half])
    assert block.skipped == 6
    assert model.weight.isnan().all()
    assert tied.weight.isnan().all()
    assert model.bias.isnan().all()
    assert other.weight.isfinite().all()  # as half of its memory will not be restored
    assert other.bias.isfinite().all()


def test_a_weight_written_unseen_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, replaced=True)
    with deadpool.initial_weights():
        weight = nn.init.normal_(torch.empty(4, 4))
        ctypes.memset(weight.data_ptr(), 0, 4)
        with pytest.raises(Misuse, match=r"shape \(4, 4\).*outside of that block"):
            weight.sum()
    weights.settle(())


def test_modes_may_be_entered_before_the_end_and_left_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, replaced=True)
    with deadpool.initial_weights():
        weight = nn.init.normal_(torch.empty(4, 4))
    with Quiet() as mode:  # type: ignore[no-untyped-call]
        weights.settle([weight])
        assert _get_current_dispatch_mode_stack() == [mode]
    assert not _get_current_dispatch_mode_stack()
    assert weight.isnan().all()
    with deadpool.initial_weights() as block:
        nn.init.normal_(weight)
    assert block.skipped == 0
    assert weight.isfinite().all()


def test_inside_another_mode_nothing_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, replaced=True)
    with Quiet(), deadpool.initial_weights() as block:  # type: ignore[no-untyped-call]
        assert nn.init.normal_(torch.empty(4, 4)).isfinite().all()
    assert (block.drawn, block.skipped) == (1, 0)


def test_attach_reads_nothing_that_was_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, replaced=True)
    with deadpool.initial_weights():
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    averaged = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session.attach(model, optimizer, extras={"averaged": averaged}).steps(BATCHES)
    drawn = [
        part
        for module in (model, averaged.module)
        for name, part in module.named_parameters()
        if not name.startswith("1.")
    ]
    weights.settle(drawn)
    assert all(part.isnan().all() for part in drawn)


STEPS = ("--max-steps", "6", "--initial-weights")


def test_a_replaced_rank_skips_its_weights_and_the_numbers_stay(
    train: Callable[..., Any], undisturbed: Callable[..., Any]
) -> None:
    reference = undisturbed(*STEPS)
    run = train(*STEPS, "--die", "1:4:backward")
    assert run.outcome.plans == [(2, 3)]
    assert {rank: result["skipped"] for rank, result in run.results.items()} == {0: 0, 1: 6, 2: 0}
    assert all(result["drawn"] == 6 for result in run.results.values())
    assert run.numbers() == reference.numbers()
