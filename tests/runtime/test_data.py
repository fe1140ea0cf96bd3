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
    Sampler,
    TensorDataset,
)

from deadpool_runtime import rng
from deadpool_runtime.batch_parts import fingerprint
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


class OwnOrder(Sampler[list[int]]):
    """Batches of 4 of 12, in an order from a generator of any kind or from its own count of epochs;
    one that is changed from epoch to epoch, or made anew in each."""

    def __init__(self, kind: str) -> None:
        self.kind, self.passes, self.last = kind, 0, list(range(12))
        makers: dict[str, Callable[[], Any]] = {
            "torch": lambda: torch.Generator().manual_seed(7),
            "numpy": lambda: np.random.default_rng(7),
            "legacy": lambda: np.random.RandomState(7),
            "python": lambda: random.Random(7),
        }
        self.rng = makers.get(kind, lambda: None)()

    def order(self) -> list[int]:
        if self.kind == "torch":
            return torch.randperm(12, generator=self.rng).tolist()
        if self.kind in ("numpy", "legacy"):
            return [int(index) for index in self.rng.permutation(12)]
        if self.kind == "python":
            return self.rng.sample(range(12), 12)  # type: ignore[no-any-return]
        if self.kind == "counting":
            self.passes += 1
            return random.Random(self.passes).sample(range(12), 12)
        random.Random(5).shuffle(self.last)
        return list(self.last)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        return iter([order[start : start + 4] for start in range(0, 12, 4)])

    def __len__(self) -> int:
        return 3


class Half(Sampler[int]):
    """Every second index of another sampler."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.inner)[::2])


class Wrapper:
    """Changes what another loader gives."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch + 1


class Augmented(Noisy):
    """Noise from a generator that the dataset has."""

    def __init__(self) -> None:
        super().__init__(noise=False)
        self.rng = np.random.default_rng(2)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.rng.random()


class Resumable(OwnOrder):
    """Has something nobody can save, and saves itself."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.ticks = iter(range(100))

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


def own_order(kind: str) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Noisy(), batch_sampler=OwnOrder(kind))


def nested() -> DataLoader[Any]:
    sampler = RandomSampler(Noisy(), generator=torch.Generator().manual_seed(3))
    return DataLoader(Noisy(), 2, sampler=Half(sampler))


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
    "own order, torch": own_order("torch"),
    "own order, numpy": own_order("numpy"),
    "own order, legacy numpy": own_order("legacy"),
    "own order, Python": own_order("python"),
    "own order, counting": own_order("counting"),
    "own order, in place": own_order("in place"),
    "own order, resumable": lambda: DataLoader(Noisy(), batch_sampler=Resumable()),
    "nested sampler": nested,
    "wrapper": lambda: Wrapper(with_generator()),
    "dataset's generator": lambda: DataLoader(Augmented(), 4, shuffle=True),
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
def test_another_process_reads_on_where_one_was_lost(name: str) -> None:
    seed(1)
    batches = Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=True)
    story, saved = [], {}
    for number in range(1, 10):
        fetched = batches.obtain(number)
        saved[number] = encode([fetched.position, fetched.before], "position")
        story.append((flat(fetched.take()), body()))
    for back_to in range(1, 10):
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
def test_a_survivor_reads_again_with_the_loader_it_has(name: str) -> None:
    seed(1)
    batches = Batches(LOADERS[name](), max_steps=9, epochs=-1, remember=True)
    story, saved = [], {}
    for number in range(1, 11):
        fetched = batches.obtain(number)
        saved[number] = fetched.position, fetched.before
        if not fetched.ended:
            story.append((flat(fetched.take()), body()))
    end, place = body(), batches.position()
    for back_to in [1, 3, 4, 4, 7, 9, 10, 10]:
        seed(99)
        fetched = batches.rewind(back_to, *saved[back_to])
        if not fetched.ended:
            again = [(flat(fetched.take()), body()), *run(batches, back_to + 1, 9)]
            assert again == story[back_to - 1 :]
            assert batches.obtain(10).ended
        assert digest_of(batches.position(), "here") == digest_of(place, "there")
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


def changing(batch: Any) -> None:
    """Whatever a body may do to its batch in place."""
    if isinstance(batch, torch.Tensor):
        batch.mul_(2)
    elif isinstance(batch, np.ndarray):
        batch *= 2
    elif isinstance(batch, dict):
        changing(batch.pop("x"))
    else:
        for part in batch:
            changing(part)
        if isinstance(batch, list):
            batch.clear()


def items(count: int = 12) -> list[torch.Tensor]:
    return [torch.arange(3.0) + index for index in range(count)]


def whole(batch: list[torch.Tensor]) -> torch.Tensor:
    return batch[0]


GIVEN_OUT: dict[str, Callable[[], Any]] = {
    "tensors": items,
    "arrays": lambda: [item.numpy() for item in items()],
    "views": lambda: torch.arange(36.0).reshape(12, 3).unbind(),
    "lists": lambda: [[item, item.numpy()] for item in items()],
    "tuples": lambda: [(item,) for item in items()],
    "dicts": lambda: [{"x": item} for item in items()],
    "unbatched": lambda: DataLoader(items(), batch_size=None),  # type: ignore[arg-type]
    "collated": lambda: DataLoader(items(), collate_fn=whole),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", GIVEN_OUT)
def test_a_body_that_changes_its_batch_gets_it_unchanged_again(name: str) -> None:
    batches = Batches(GIVEN_OUT[name](), max_steps=30, epochs=-1, remember=True)
    saved: dict[int, tuple[Any, Any, str]] = {}
    for number in range(1, 16):
        fetched = batches.obtain(number)
        batch = fetched.take()
        saved[number] = fetched.position, fetched.before, fingerprint(batch)
        changing(batch)
    for number in (14, 3):
        position, before, was = saved[number]
        again = batches.rewind(number, position, before).take()
        assert fingerprint(again) == was
        changing(again)


def test_what_is_new_is_not_copied() -> None:
    made: list[int] = []

    def collate(batch: list[torch.Tensor]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "x": torch.stack(batch),
            "y": [torch.stack(batch)],
            "z": np.ones(3),
        }
        made[:] = [found["x"].data_ptr(), found["y"][0].data_ptr(), found["z"].ctypes.data]
        return found

    loader: DataLoader[Any] = DataLoader(items(), 4, collate_fn=collate)  # type: ignore[arg-type]
    batch = Batches(loader, max_steps=1, epochs=-1, remember=True).obtain(1).take()
    assert [batch["x"].data_ptr(), batch["y"][0].data_ptr(), batch["z"].ctypes.data] == made


def test_an_order_that_is_another_the_second_time_is_refused() -> None:
    passes = iter(range(100))

    class Drifting(OwnOrder):
        def order(self) -> list[int]:
            return random.Random(next(passes)).sample(range(12), 12)

    loader = DataLoader(Noisy(), batch_sampler=Drifting("other"))
    batches = Batches(loader, max_steps=9, epochs=-1, remember=True)
    fetched = batches.obtain(1)
    with pytest.raises(Misuse, match="gave other indices for batch 1 of epoch 0"):
        batches.rewind(1, fetched.position, fetched.before)


def test_a_batch_that_is_another_the_second_time_is_refused() -> None:
    reads = iter(range(100))

    class Drifting:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(5):
                yield torch.ones(3) * next(reads)

    batches = Batches(Drifting(), max_steps=9, epochs=-1, remember=True)
    fetched = batches.obtain(1)
    with pytest.raises(Misuse, match="gave another batch 1 of epoch 0"):
        batches.rewind(1, fetched.position, fetched.before)


def test_a_sampler_that_keeps_an_iterator_is_refused_by_name() -> None:
    sampler = OwnOrder("counting")
    sampler.rng = iter([1, 2, 3])
    loader = DataLoader(Noisy(), batch_sampler=sampler)
    with pytest.raises(
        Misuse, match=r"cannot save loader\.batch_sampler\.rng \(a builtins\.list_it"
    ):
        Batches(loader, max_steps=9, epochs=-1, remember=True)


def test_a_datasets_generator_in_worker_processes_is_refused() -> None:
    loader = DataLoader(Augmented(), 4, num_workers=1)
    with pytest.raises(Misuse, match=r"loader\.dataset\.rng is a random generator"):
        Batches(loader, max_steps=9, epochs=-1, remember=True)


def test_much_data_that_a_loader_changes_is_refused_in_the_first_step() -> None:
    class Shuffling:
        def __init__(self) -> None:
            self.rows = torch.arange(2.0e6)

        def __iter__(self) -> Iterator[torch.Tensor]:
            self.rows = self.rows[torch.randperm(len(self.rows))]
            return iter(self.rows.view(4, 500_000))

    with pytest.raises(Misuse, match=r"loader\.rows \(a Tensor\) changed"):
        Batches(Shuffling(), max_steps=9, epochs=-1, remember=True).obtain(1)


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

    class Counting(Dataset[tuple[torch.Tensor]]):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> tuple[torch.Tensor]:
            reads.append(index)
            return (torch.tensor(index),)

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
