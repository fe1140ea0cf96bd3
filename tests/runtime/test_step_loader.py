"""The batches of an optimizer step as one item: order, places, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from deadpool_runtime.data import Batches
from deadpool_runtime.errors import Misuse
from deadpool_runtime.integrations.step_loader import step_loader


class Numbers(Dataset[torch.Tensor]):
    """Items that draw from the global generator, as random augmentation does."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(100))


def loader_of(**options: Any) -> DataLoader[torch.Tensor]:
    data = Numbers()
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        data, num_replicas=2, rank=1, seed=4
    )
    return DataLoader(data, batch_size=2, sampler=sampler, **options)


def batches_of(loader: DataLoader[torch.Tensor], epoch: int) -> list[list[float]]:
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(epoch)
    torch.manual_seed(7)
    return [batch.tolist() for batch in loader]


def passes_of(loader: DataLoader[Any], epochs: int) -> list[list[list[list[float]]]]:
    found = []
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        torch.manual_seed(7)
        found.append([[batch.tolist() for batch in step] for step in loader])
    return found


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_steps_are_the_loaders_own_batches_in_its_order(workers: int) -> None:
    passes = passes_of(step_loader(loader_of(num_workers=workers), 4), 2)
    for epoch, steps in enumerate(passes):
        assert [len(step) for step in steps] == [4, 2]
        flat = [batch for step in steps for batch in step]
        assert flat == batches_of(loader_of(num_workers=workers), epoch)


def test_limit_is_counted_in_batches() -> None:
    (steps,) = passes_of(step_loader(loader_of(), 2, limit=5), 1)
    assert [len(step) for step in steps] == [2, 2, 1]
    assert steps[0] == batches_of(loader_of(), 0)[:2]


def test_a_training_that_began_earlier_goes_on_at_its_place() -> None:
    first, second = passes_of(step_loader(loader_of(), 2, first_epoch=3, skip=4), 2)
    indices = [[int(value) for batch in step for value in batch] for step in first]
    whole = [int(value) for batch in batches_of(loader_of(), 3) for value in batch]
    assert [index for step in indices for index in step] == whole[8:]
    assert [batch for step in second for batch in step] == batches_of(loader_of(), 4)


def test_every_place_is_found_again_without_the_items_before() -> None:
    def fresh() -> Batches:
        torch.manual_seed(1)
        return Batches(step_loader(loader_of(), 2), max_steps=9, epochs=-1, remember=True)

    read = fresh()
    seen = [read.obtain(number) for number in range(1, 6)]
    for wanted in seen:
        again = fresh().rewind(wanted.number, wanted.position, wanted.before)
        assert [one.tolist() for one in again.batch] == [one.tolist() for one in wanted.batch]


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        ([1, 2, 3], "come from a list"),
        (DataLoader(Endless()), "IterableDataset"),
        (DataLoader(Numbers(), batch_size=None), "does no batching"),
    ],
)
def test_what_cannot_be_rewound_is_refused(loader: Any, sentence: str) -> None:
    with pytest.raises(Misuse, match=sentence):
        step_loader(loader, 2)
