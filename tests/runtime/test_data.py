"""Coming back to a batch: the same data, the same random numbers after it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from deadpool_runtime import rng
from deadpool_runtime.data import Batches
from deadpool_runtime.encoding import decode, digest_of, encode
from deadpool_runtime.errors import Misuse


class Noisy(Dataset[torch.Tensor]):
    """Item i is i plus noise from all generators; counts what was read."""

    reads = 0

    def __init__(self, noise: bool = True) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        Noisy.reads += 1
        noise = torch.rand(2) + random.random() + np.random.rand() if self.noise else 0
        return index + torch.zeros(2) + noise


class Plain:
    """A loader of the user's own, shuffled anew at each pass."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(6))
        random.shuffle(order)
        for start in range(0, 6, 2):
            yield order[start : start + 2]


class Stateful:
    """Knows its own place; the iterator it makes goes on from there."""

    def __init__(self) -> None:
        self.passes, self.at = 0, 0

    def __iter__(self) -> Iterator[tuple[int, int, float]]:
        while self.at < 4:
            self.at += 1
            yield self.passes, self.at, random.random()
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.at = state["passes"], state["at"]


def with_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Noisy(), 4, shuffle=True, generator=generator)


def distributed() -> DataLoader[Any]:
    dataset = Noisy()
    return DataLoader(dataset, 2, sampler=DistributedSampler(dataset, 2, 1, seed=4))


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(1) * i for i in range(5)],
    "own class": Plain,
    "stateful": Stateful,
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "generator": with_generator,
    "distributed": distributed,
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "replacement": lambda: DataLoader(
        Noisy(), 4, sampler=RandomSampler(Noisy(), replacement=True, num_samples=40)
    ),
    "workers": lambda: DataLoader(Noisy(noise=False), 4, shuffle=True, num_workers=1),
    "persistent": lambda: DataLoader(
        Noisy(noise=False), 4, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def body() -> tuple[float, float, float]:
    """A step's body, as far as randomness is concerned."""
    return torch.rand(1).item(), random.random(), np.random.rand()


def flat(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def run(batches: Batches, first: int, last: int) -> list[Any]:
    """Batches first..last with the numbers drawn after each."""
    return [(flat(batches.obtain(number).take()), body()) for number in range(first, last + 1)]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("back_to", [1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_another_process_reads_on_where_one_was_lost(name: str, back_to: int) -> None:
    seed(1)
    batches = Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=True)
    story, saved = [], {}
    for number in range(1, 10):
        fetched = batches.obtain(number)
        saved[number] = encode([fetched.position, fetched.before], "position")
        story.append((flat(fetched.take()), body()))
    seed(99)
    other = Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=True)
    position, before = decode(saved[back_to])
    fetched = other.rewind(back_to, position, before)
    again = [(flat(fetched.take()), body()), *run(other, back_to + 1, 9)]
    assert again == story[back_to - 1 :]
    assert other.obtain(10).ended


@pytest.mark.parametrize("name", LOADERS)
def test_watching_changes_nothing(name: str) -> None:
    seed(1)
    watched = run(Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=True), 1, 9)
    seed(1)
    alone = run(Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=False), 1, 9)
    assert watched == alone


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("back_to", [1, 3, 4, 7, 9, 10])
def test_a_survivor_reads_again_with_the_loader_it_has(name: str, back_to: int) -> None:
    seed(1)
    batches = Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=True)
    story, saved = [], {}
    for number in range(1, 11):
        fetched = batches.obtain(number)
        saved[number] = fetched.position, fetched.before
        if not fetched.ended:
            story.append((flat(fetched.take()), body()))
    end = body()
    for _ in range(2):
        seed(99)
        fetched = batches.rewind(back_to, *saved[back_to])
        if not fetched.ended:
            again = [(flat(fetched.take()), body()), *run(batches, back_to + 1, 9)]
            assert again == story[back_to - 1 :]
            assert batches.obtain(10).ended
        assert digest_of(batches.position(), "here") == digest_of(saved[10][0], "there")
        assert body() == end


def test_a_batch_is_never_given_out_twice() -> None:
    batches = Batches(DataLoader(Noisy(), 4), max_steps=9, epochs=-1, remember=True)
    fetched = batches.obtain(1)
    first = fetched.take()
    kept = first.clone()
    # What no version counter tells.
    first.data.mul_(2)
    first.requires_grad_(True)
    first.grad = torch.ones_like(first)
    again = batches.rewind(1, fetched.position, fetched.before).take()
    assert torch.equal(again, kept)
    assert not again.requires_grad
    assert again.grad is None


def test_only_the_next_batch_can_be_obtained() -> None:
    batches = Batches([1, 2, 3], max_steps=3, epochs=-1, remember=True)
    run(batches, 1, 2)
    with pytest.raises(Misuse, match="batch 2 was asked for after batch 2"):
        batches.obtain(2)


def test_the_end_is_a_place_one_can_come_back_to() -> None:
    batches = Batches([1, 2], max_steps=None, epochs=1, remember=True)
    run(batches, 1, 2)
    end = batches.obtain(3)
    assert end.ended
    other = Batches([1, 2], max_steps=None, epochs=1, remember=True)
    assert other.rewind(3, end.position, end.before).ended


def test_skipping_in_a_dataloader_reads_nothing() -> None:
    seed(1)
    dataset = TensorDataset(torch.arange(1000))
    batches = Batches(DataLoader(dataset, 1), max_steps=None, epochs=1, remember=True)
    for number in range(1, 900):
        fetched = batches.obtain(number)
    reads: list[int] = []

    class Counting(Dataset[int]):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> int:
            reads.append(index)
            return index

    other = Batches(DataLoader(Counting(), 1), max_steps=None, epochs=1, remember=True)
    other.rewind(899, fetched.position, fetched.before)
    assert reads == [898]


def test_generators_are_refused() -> None:
    with pytest.raises(TypeError, match="only once"):
        Batches((i for i in range(3)), max_steps=1, epochs=-1, remember=True)


def test_iterable_datasets_are_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(TypeError, match="IterableDataset"):
        Batches(DataLoader(Stream()), max_steps=1, epochs=-1, remember=True)


def test_what_is_no_loader_is_refused() -> None:
    with pytest.raises(TypeError, match="not a int"):
        Batches(3, max_steps=1, epochs=-1, remember=True)  # type: ignore[arg-type]


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(Misuse, match="no batches"):
        Batches([], max_steps=3, epochs=-1, remember=True).obtain(1)


def test_a_loader_that_shrank_is_noticed() -> None:
    batches = Batches([1, 2, 3], max_steps=None, epochs=1, remember=True)
    run(batches, 1, 2)
    third = batches.obtain(3)
    shorter = Batches([1, 2], max_steps=None, epochs=1, remember=True)
    with pytest.raises(Misuse, match="same ones"):
        shorter.rewind(3, third.position, third.before)


def test_all_generators_come_back() -> None:
    seed(5)
    np.random.standard_normal(3)
    random.gauss(0, 1)
    state = decode(encode(rng.capture(), "rng"))
    first = body(), np.random.standard_normal(3).tolist(), random.gauss(0, 1)
    seed(6)
    rng.restore(state)
    assert (body(), np.random.standard_normal(3).tolist(), random.gauss(0, 1)) == first
