"""Which batch comes next, and how to come back to it.

A position is the epoch, how many batches of it were taken, and the random state with which the
epoch's iterator was made. Coming back means: set that state, make the iterator, skip what was
taken, set the random state from before the fetch, fetch. A ``DataLoader`` skips indices without
loading anything; other loaders are skipped by ``next()``; loaders with ``state_dict`` and
``load_state_dict`` are asked to do it themselves.

Survivors of a recovery do the same as a replacement: a batch that was handed out once may have
been changed in ways nothing tells (``.data``, ``.numpy()``, ``.grad``), so none is given twice.

Not covered: random augmentation inside ``DataLoader`` worker processes (their seeds and order are
not part of the position), and samplers that draw from the global generators while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from deadpool_runtime import rng
from deadpool_runtime.encoding import detached_copy
from deadpool_runtime.errors import Misuse

Position = dict[str, Any]


@dataclass
class Fetched:
    """Batch ``number`` (from 1), or the end of the data when ``ended``.

    ``position`` and ``before``, the random state before the fetch, bring it back in any process.
    """

    number: int
    ended: bool
    position: Position
    before: rng.RngState
    batch: Any = None

    def take(self) -> Any:
        """Hand the batch out, holding no further reference to it here."""
        batch, self.batch = self.batch, None
        return batch


class Batches:
    """The batches of one ``job.steps`` call, numbered from 1 across epochs.

    ``epochs``: -1 for no limit. ``remember``: keep what is needed to come back to a batch; off
    where nothing is protected.
    """

    def __init__(
        self, loader: Iterable[Any], *, max_steps: int | None, epochs: int, remember: bool
    ) -> None:
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        _require_repeatable(loader, self._stateful)
        self._loader = loader
        self._max_steps = max_steps
        self._epochs = epochs
        self._remember = remember
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._taken = 0
        self._start: dict[str, Any] = {}
        self._newest = 0
        self._newest_position: Position = {}

    def position(self) -> Position:
        """The position of what was fetched last."""
        return self._newest_position

    def obtain(self, number: int, *, last: bool = False) -> Fetched:
        """Batch ``number``, which is the next one. ``last``: the script wants no more; the answer
        is the end."""
        if number != self._newest + 1:
            raise Misuse(f"batch {number} was asked for after batch {self._newest}")
        return self._noted(self._fetch(number, last))

    def rewind(self, number: int, position: Position, before: rng.RngState) -> Fetched:
        """Go to batch ``number`` as ``position`` describes it, whatever was fetched so far."""
        self._iterator = None
        self._epoch, self._taken = position["epoch"], position["taken"]
        self._start = position["start"]
        if position["ended"]:
            rng.restore(before)
            return self._noted(Fetched(number, True, position, before))
        first = self._taken == 1
        rng.restore(self._start["rng"])
        for generator, state in zip(self._generators(), self._start["generators"], strict=True):
            generator.set_state(state)
        self._set_epoch()
        if self._stateful:
            self._loader.load_state_dict(detached_copy(position["loader"]))  # type: ignore[attr-defined]
            self._iterator = iter(self._loader)
        else:
            self._iterator = _open_at(
                self._loader,
                self._taken - 1,
                partial(rng.restore, self._start["rng"]) if self._start["reused"] else None,
            )
        if not first:
            rng.restore(before)
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise Misuse(
                f"The loader has fewer batches than when batch {self._taken} of epoch "
                f"{self._epoch} was first read: it must give the same ones each time."
            ) from None
        return self._noted(Fetched(number, False, position, before, batch))

    def _fetch(self, number: int, last: bool) -> Fetched:
        before = rng.capture() if self._remember else {}
        loader_state = self._loader_state() if self._iterator is not None else None
        if last or (self._max_steps is not None and number > self._max_steps):
            return self._end(number, before)
        while True:
            if self._iterator is None:
                if self._epoch == self._epochs:
                    return self._end(number, before)
                loader_state = self._loader_state()
                self._open_epoch()
                assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                if self._taken == 0:
                    raise Misuse("The loader given to job.steps has no batches.") from None
                self._iterator = None
                self._epoch += 1
                self._taken = 0
                continue
            self._taken += 1
            position = self._position(ended=False, loader=loader_state)
            return Fetched(number, False, position, before, batch)

    def _end(self, number: int, before: rng.RngState) -> Fetched:
        return Fetched(number, True, self._position(ended=True, loader=None), before)

    def _noted(self, fetched: Fetched) -> Fetched:
        self._newest, self._newest_position = fetched.number, fetched.position
        return fetched

    def _open_epoch(self) -> None:
        self._set_epoch()
        reused = getattr(self._loader, "persistent_workers", False) and (
            getattr(self._loader, "_iterator", None) is not None
        )
        if self._remember:
            self._start = {
                "rng": rng.capture(),
                "generators": [generator.get_state() for generator in self._generators()],
                "reused": bool(reused),
            }
        self._taken = 0
        self._iterator = iter(self._loader)

    def _position(self, *, ended: bool, loader: Any) -> Position:
        return {
            "epoch": self._epoch,
            "taken": self._taken,
            "start": self._start,
            "loader": loader,
            "ended": ended,
        }

    def _loader_state(self) -> Any:
        if not self._stateful or not self._remember:
            return None
        return detached_copy(self._loader.state_dict())  # type: ignore[attr-defined]

    def _set_epoch(self) -> None:
        for name in ("sampler", "batch_sampler"):
            set_epoch = getattr(getattr(self._loader, name, None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self._epoch)

    def _generators(self) -> list[torch.Generator]:
        """The generators that were given to the loader and its samplers, each once."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        holders = (
            self._loader,
            getattr(self._loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        found = [getattr(holder, "generator", None) for holder in holders]
        unique = {id(item): item for item in found if isinstance(item, torch.Generator)}
        return list(unique.values())


def _require_repeatable(loader: Any, stateful: bool) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"job.steps needs a loader to iterate over, not a {type(loader).__name__}.")
    if stateful:
        return
    if isinstance(loader, Iterator):
        raise TypeError(
            f"job.steps was given a {type(loader).__name__}, which can be read only once, so a "
            f"lost rank's batches could not be read again: give the loader itself, not "
            f"iter(loader) or a generator."
        )
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            "job.steps cannot find its place again in a DataLoader over an IterableDataset: use a "
            "map-style dataset or a loader with state_dict and load_state_dict."
        )


class _SkippingSampler:
    """A sampler without its first ``skip`` entries, until ``skip`` is set to 0."""

    def __init__(
        self, inner: Iterable[Any], skip: int, before_first: Callable[[], None] | None
    ) -> None:
        self._inner = inner
        self.skip = skip
        self.before_first = before_first
        #: The iterator made last; loaders with workers make two and use the second.
        self.iterator: _SkippingIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = _SkippingIterator(iter(self._inner), self.skip, self.before_first)
        return self.iterator

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]


class _SkippingIterator:
    """Skips on the first ``next`` or by ``advance``, whichever is first: samplers draw their seed
    when they are first asked, and by then the loader has drawn its own."""

    def __init__(
        self, inner: Iterator[Any], skip: int, before_first: Callable[[], None] | None
    ) -> None:
        self._inner = inner
        self._skip = skip
        self._before_first = before_first
        self._advanced = False

    def advance(self) -> None:
        if self._advanced:
            return
        self._advanced = True
        if self._before_first is not None:
            self._before_first()
        for _ in range(self._skip):
            next(self._inner, None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.advance()
        return next(self._inner)


def _open_at(
    loader: Iterable[Any], skip: int, before_first: Callable[[], None] | None
) -> Iterator[Any]:
    """An iterator over ``loader`` without its first ``skip`` batches.

    ``before_first``: called just before the sampler is first asked, where the epoch reused the
    worker processes of the one before. Then no seed for new workers had been drawn.
    """
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        original = loader.__dict__[name]
        sampler = _SkippingSampler(original, skip, before_first)
        loader._iterator = None  # persistent workers hold batches that were asked for already
        # Past DataLoader's own refusal to exchange samplers: it guards users, and this is undone.
        loader.__dict__[name] = sampler
        try:
            iterator: Iterator[Any] = iter(loader)
        finally:
            loader.__dict__[name] = original
            # An iterator with persistent workers keeps the sampler for its later epochs.
            sampler.skip, sampler.before_first = 0, None
        if skip and sampler.iterator is not None:
            sampler.iterator.advance()
        return iterator
    iterator = iter(loader)
    for taken in range(skip):
        try:
            next(iterator)
        except StopIteration:
            raise Misuse(
                f"The loader has only {taken} batches now, but gave more before: it must give the "
                f"same ones each time."
            ) from None
    return iterator
