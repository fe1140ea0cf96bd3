"""What bodies change of a loader in the middle of an epoch is there again after a recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from deadpool_runtime import rng
from deadpool_runtime.data import Batches
from deadpool_runtime.encoding import decode, digest_of, encode
from deadpool_runtime.errors import Misuse

#: Three batches in an epoch.
ITEMS, BATCH = 12, 4


def items() -> TensorDataset:
    return TensorDataset(torch.arange(float(ITEMS)))


class Ordered(Sampler[int]):
    """Begins an epoch with what attributes of any kind say then, and counts what it gives."""

    def __init__(self) -> None:
        self.first = 0
        self.names = ["a"]
        self.ranks = np.zeros(3, dtype=np.int64)
        self.table = {"more": {1, 2}, "deep": [[0.5]]}
        self.given = 0

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.begun = self.first
        late = getattr(self, "late", 0) + 2 * hasattr(self, "gone")
        shift = self.first + len(self.names) + int(self.ranks.sum()) + late
        shift += len(self.table["more"]) + int(2 * self.table["deep"][0][0])  # type: ignore[index]
        for index in range(ITEMS):
            self.given += 1
            yield (index * 5 + shift) % ITEMS


def weighted() -> DataLoader[Any]:
    weights: Any = torch.ones(ITEMS, dtype=torch.float64)
    sampler = WeightedRandomSampler(weights, ITEMS)
    return DataLoader(items(), BATCH, sampler=sampler)


def ordered() -> DataLoader[Any]:
    return DataLoader(items(), BATCH, sampler=Ordered())


def weigh(sampler: Any, step: int) -> None:
    sampler.weights[step % ITEMS] = 30.0 + step


def weigh_anew(sampler: Any, step: int) -> None:
    sampler.weights = sampler.weights.clone().index_fill(0, torch.tensor(step % ITEMS), 50.0)


def count(sampler: Any, step: int) -> None:
    sampler.first += step


def name(sampler: Any, step: int) -> None:
    sampler.names.append(f"step {step}")


def rank(sampler: Any, step: int) -> None:
    sampler.ranks[step % 3] += 1


def fill(sampler: Any, step: int) -> None:
    sampler.table["more"].add(step + 10)
    sampler.table["deep"][0][0] += 1.5


def come(sampler: Any, step: int) -> None:
    sampler.late = getattr(sampler, "late", 0) + step


def come_and_go(sampler: Any, step: int) -> None:
    if hasattr(sampler, "gone"):
        del sampler.gone
    else:
        sampler.gone = step


BODIES: dict[str, tuple[Callable[[], DataLoader[Any]], Callable[[Any, int], None]]] = {
    "weights": (weighted, weigh),
    "other weights": (weighted, weigh_anew),
    "a number": (ordered, count),
    "a list": (ordered, name),
    "an array": (ordered, rank),
    "containers": (ordered, fill),
    "a new attribute": (ordered, come),
    "one that goes": (ordered, come_and_go),
}


class Run:
    """One process that trains: some of its bodies change the sampler."""

    def __init__(self, make: Callable[[], DataLoader[Any]], body: Callable[[Any, int], None]):
        self.loader, self.body = make(), body
        self.batches = Batches(self.loader, max_steps=10, epochs=-1, remember=True)

    def step(self, number: int, fetched: Any) -> Any:
        batch = fetched.take()[0].tolist()
        if number % 3 != 1:
            self.body(self.loader.sampler, number)
        return batch, torch.rand(1).item()

    def on(self, first: int, last: int) -> list[Any]:
        numbers = range(first, last + 1)
        return [self.step(number, self.batches.obtain(number)) for number in numbers]


@pytest.mark.parametrize("what", BODIES)
def test_what_a_body_changed_of_a_sampler_comes_back(what: str) -> None:
    torch.manual_seed(1)
    survivor = Run(*BODIES[what])
    story, saved = [], {}
    for number in range(1, 11):
        fetched = survivor.batches.obtain(number)
        saved[number] = encode([fetched.position, fetched.before], "position")
        story.append(survivor.step(number, fetched))
    end = digest_of(rng.capture(), "the end")
    for back_to in range(1, 11):
        for process in (Run(*BODIES[what]), survivor):
            torch.manual_seed(99)
            again = process.batches.rewind(back_to, *decode(saved[back_to]))
            told = [process.step(back_to, again), *process.on(back_to + 1, 10)]
            assert told == story[back_to - 1 :]
            assert digest_of(rng.capture(), "here") == end


def test_nothing_is_saved_of_what_no_body_changed() -> None:
    run = Run(ordered, lambda sampler, step: None)
    for number in range(1, 6):
        fetched = run.batches.obtain(number)
        assert not fetched.position["body"].get("values")
        assert not fetched.position["body"].get("missing")
        run.step(number, fetched)


# ---------------------------------------------------------------- refused


def refused_after(loader: Any, body: Callable[[], Any], path: str, **options: Any) -> None:
    batches = Batches(loader, max_steps=10, epochs=-1, remember=True, **options)
    batches.obtain(1)
    batches.obtain(2)
    body()
    with pytest.raises(Misuse, match=rf"{path} \(an? \w+\) was changed in the body of a step"):
        batches.obtain(3)


def test_weights_too_large_to_be_saved_with_each_step_are_refused() -> None:
    weights: Any = torch.ones(1_000_000, dtype=torch.float64)
    sampler = WeightedRandomSampler(weights, ITEMS)
    loader = DataLoader(TensorDataset(torch.zeros(1_000_000)), BATCH, sampler=sampler)
    refused_after(loader, lambda: sampler.weights.mul_(2), r"sampler\.weights")


def test_an_attribute_that_becomes_something_else_is_refused() -> None:
    loader = ordered()
    other: Any = DataLoader(items())
    refused_after(loader, lambda: setattr(loader.sampler, "first", other), r"sampler\.first")


class Labelled(Dataset[float]):
    """Has labels of its own, and a cache that it fills as it is read."""

    def __init__(self) -> None:
        self.labels = torch.zeros(ITEMS)
        self.sizes = np.ones(ITEMS)
        self.cache = torch.zeros(ITEMS)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> float:
        self.cache[index] = index
        return float(self.labels[index] + self.sizes[index] + self.cache[index])


@pytest.mark.parametrize("what", ["labels", "sizes"])
def test_a_datasets_tensors_and_arrays_are_refused_when_a_body_changes_them(what: str) -> None:
    dataset = Labelled()

    def body() -> None:
        getattr(dataset, what)[3] = 7

    refused_after(DataLoader(dataset, BATCH), body, rf"loader\.dataset\.{what}")


def test_a_datasets_tensor_that_is_saved_elsewhere_may_change() -> None:
    dataset = Labelled()
    batches = Batches(
        DataLoader(dataset, BATCH),
        max_steps=10,
        epochs=-1,
        remember=True,
        is_saved=lambda tensor: tensor is dataset.labels,
    )
    for number in range(1, 6):
        batches.obtain(number)
        dataset.labels[number] = number


def test_a_change_of_a_dataset_that_is_undone_with_its_step_is_refused() -> None:
    dataset = Labelled()
    batches = Batches(DataLoader(dataset, BATCH), max_steps=10, epochs=-1, remember=True)
    fetched = batches.obtain(1)
    position, before = fetched.position, fetched.before
    dataset.labels[3] = 7
    with pytest.raises(Misuse, match=r"loader\.dataset\.labels"):
        batches.rewind(1, position, before)
