"""One item per optimizer step, made of a ``DataLoader`` that gives one batch at a time.

A step of DEADPOOL is an optimizer step with all its micro-batches, and its place in the data is the
number of items that were taken. So the batches of a step become one item. The sampler, the order of
the data and the worker processes stay the framework's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from deadpool_runtime.errors import Misuse

#: What of a loader does not depend on how many batches are fetched at once.
_KEPT = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


@dataclass(eq=False)
class Groups:
    """A batch sampler that gives lists of batches of another one, ``per_step`` at a time; the last
    list of an epoch may be shorter.

    ``limit``: batches that are used of an epoch; all if None. ``first_epoch`` and ``skip``: the
    epoch that the first pass is of, and how many of its batches were used before.
    """

    batches: Any
    per_step: int
    limit: int | None = None
    first_epoch: int = 0
    skip: int = 0
    #: How many passes were begun before the present one.
    passes: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Tell all samplers within; ``epoch`` counts the passes, from 0."""
        self.passes = epoch
        for each in _samplers_in(self.batches):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(self.first_epoch + epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        skip = 0 if self.passes else self.skip
        batches = islice(self.batches, skip, self.limit)
        while group := list(islice(batches, self.per_step)):
            yield group


def _samplers_in(sampler: Any) -> Iterator[Any]:
    """A sampler and those that it consists of, by the names that torch and accelerate use."""
    yield sampler
    for name in ("batch_sampler", "sampler"):
        inner = getattr(sampler, name, None)
        if inner is not None:
            yield from _samplers_in(inner)


class Items(Dataset[Any]):
    """A dataset whose items are the batches of a step. Each is put together before the next is
    read, as the loader itself would do."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitem__(self, indices: list[Any]) -> Any:
        get_all = getattr(self.dataset, "__getitems__", None)
        return self.collate(get_all(indices) if get_all else [self.dataset[i] for i in indices])

    def __len__(self) -> int:
        return len(self.dataset)


def _as_they_are(batches: list[Any]) -> list[Any]:
    return batches


def step_loader(
    loader: Any,
    per_step: int,
    *,
    limit: int | None = None,
    first_epoch: int = 0,
    skip: int = 0,
) -> DataLoader[Any]:
    """A loader of the same batches in the same order, ``per_step`` in one item.

    Raises ``Misuse`` for a loader that cannot be rewound.
    """
    if not isinstance(loader, DataLoader):
        raise Misuse(
            f"The training data come from a {type(loader).__qualname__}: under deadpool-launch "
            f"let them come from one torch DataLoader, so that lost batches can be read again."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise Misuse(
            f"The training data are an IterableDataset ({type(loader.dataset).__qualname__}), in "
            f"which no place can be found again after a recovery: use a map-style dataset."
        )
    sampler = loader.batch_sampler
    if sampler is None:
        raise Misuse(
            "The training DataLoader does no batching (batch_size=None): give it a batch_size or "
            "a batch_sampler."
        )
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return DataLoader(
        Items(loader.dataset, loader.collate_fn),
        batch_sampler=Groups(sampler, per_step, limit, first_epoch, skip),
        collate_fn=_as_they_are,
        **kept,
    )
