"""Which batch comes next, and how to come back to it.

A position is the epoch, how many batches of it were taken, and the state with which the epoch's
iterator was made: of the global random generators, and of what the loader and its samplers keep
(``loader_state``). Coming back means: set that state, make the iterator, skip what was taken, set
the random state from before the fetch, fetch. A ``DataLoader`` skips indices without loading
anything (``skipping``); other loaders are skipped by ``next()``; loaders with ``state_dict`` and
``load_state_dict`` are asked to do it themselves.

Survivors of a recovery do the same as a replacement: a batch that was handed out once may have
been changed in ways nothing tells (``.data``, ``.numpy()``, ``.grad``), so none is given twice; of
what the loader keeps the script gets a copy (``batch_parts``).

Whether a place was found again is checked: the position has a hash of the batch's indices, and one
of the batch itself, unless it comes from worker processes. Random augmentation in those is not
covered: their seeds and order are not part of the position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from deadpool_runtime import rng
from deadpool_runtime.batch_parts import fingerprint, gives_new_batches, own_batch
from deadpool_runtime.encoding import detached_copy
from deadpool_runtime.errors import Misuse
from deadpool_runtime.loader_state import LoaderState
from deadpool_runtime.skipping import Order

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
    where nothing is protected. ``is_saved``: whether a tensor is a part of the training's state.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        max_steps: int | None,
        epochs: int,
        remember: bool,
        is_saved: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        _require_repeatable(loader, self._stateful)
        self._loader = loader
        self._max_steps = max_steps
        self._epochs = epochs
        self._remember = remember
        self._kept = (
            LoaderState(loader, only_generators=self._stateful, is_saved=is_saved)
            if remember
            else None
        )
        self._order = Order(loader)
        self._all_new = gives_new_batches(loader)
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._taken = 0
        self._start: dict[str, Any] = {}
        self._newest = 0
        self._newest_position: Position = {}

    def position(self) -> Position:
        """The position of what was fetched last, as it must be the same in two runs: without the
        attributes of the loader, among which there may be times."""
        start = self._newest_position.get("start", {})
        return {
            **{key: value for key, value in self._newest_position.items() if key != "body"},
            "start": {key: value for key, value in start.items() if key != "kept"},
        }

    def obtain(self, number: int, *, last: bool = False) -> Fetched:
        """Batch ``number``, which is the next one. ``last``: the script wants no more; the answer
        is the end."""
        if number != self._newest + 1:
            raise Misuse(f"batch {number} was asked for after batch {self._newest}")
        return self._noted(self._fetch(number, last))

    def position_after(self, theirs: Position) -> Position:
        """A peer's position as this process's own loader can be brought to it: it goes as far, with
        the random state and the samplers that this process has."""
        assert self._kept is not None
        start = {"rng": rng.capture(), "kept": self._kept.capture(), "reused": False}
        own = {
            "start": start,
            "generators": self._kept.generators(),
            "body": {},
            "order": "",
            "batch": "",
        }
        return {**theirs, **own}

    def rewind(self, number: int, position: Position, before: rng.RngState) -> Fetched:
        """Go to batch ``number`` as ``position`` describes it, whatever was fetched so far."""
        self._iterator = None
        if self._kept is not None and self._newest:
            self._kept.changed_by_body()  # what cannot be undone is refused
        self._epoch, self._taken = position["epoch"], position["taken"]
        self._start = position["start"]
        if position["ended"]:
            rng.restore(before)
            return self._noted(Fetched(number, True, position, before))
        first = self._taken == 1
        rng.restore(self._start["rng"])
        if self._kept is not None:
            self._kept.restore(self._start["kept"])
        self._set_epoch()
        if self._stateful:
            self._loader.load_state_dict(detached_copy(position["loader"]))  # type: ignore[attr-defined]
            self._iterator = iter(self._loader)
        else:
            self._iterator = self._order.open_at(
                self._taken - 1, self._restore_start if self._start["reused"] else None
            )
        if not first:
            rng.restore(before)
            if self._kept is not None and not self._stateful:
                self._kept.set_generators(position["generators"])
                if position["body"]:
                    self._kept.restore_body(position["body"])
        try:
            batch = self._next_batch()
        except StopIteration:
            raise Misuse(
                f"The loader has fewer batches than when batch {self._taken} of epoch "
                f"{self._epoch} was first read: it must give the same ones each time."
            ) from None
        self._require_same(position, batch)
        return self._noted(Fetched(number, False, position, before, batch))

    def _restore_start(self) -> None:
        rng.restore(self._start["rng"])
        if self._kept is not None:
            self._kept.set_generators(self._start["kept"]["generators"])

    def _next_batch(self) -> Any:
        """The next batch; nothing here holds a reference to what the loader gave."""
        assert self._iterator is not None
        box = [next(self._iterator)]
        return box[0] if self._all_new else own_batch(box)

    def _require_same(self, position: Position, batch: Any) -> None:
        """Raise ``Misuse`` if ``batch`` is not the one that the position was made of."""
        where = f"batch {self._taken} of epoch {self._epoch}"
        there, here = position["order"], self._order.digest(self._taken)
        if there and here and there != here:
            raise Misuse(
                f"The loader's sampler gave other indices for {where} than when it was first "
                f"asked, so a lost rank's data cannot be read again: let its order follow from the "
                f"epoch and from generators and attributes of its own."
            )
        if position["batch"] and position["batch"] != self._fingerprint(batch):
            raise Misuse(
                f"The loader gave another {where} than when it was first read, so a lost rank's "
                f"data cannot be read again: let it follow from the index, the global random "
                f"generators, and generators that the loader or the dataset has."
            )

    def _fingerprint(self, batch: Any) -> str:
        unknown = self._stateful or self._kept is None or self._kept.has_workers
        return "" if unknown else fingerprint(batch)

    def _fetch(self, number: int, last: bool) -> Fetched:
        before = rng.capture() if self._remember else {}
        generators = self._kept.generators() if self._kept is not None else {}
        body = self._kept.changed_by_body() if self._kept is not None and self._newest else {}
        loader_state = self._loader_state() if self._iterator is not None else None
        if last or (self._max_steps is not None and number > self._max_steps):
            return self._end(number, before)
        while True:
            if self._iterator is None:
                if self._epoch == self._epochs:
                    return self._end(number, before)
                loader_state = self._loader_state()
                self._open_epoch()
                body = {}  # it is in what the epoch starts with
                assert self._iterator is not None
            try:
                batch = self._next_batch()
            except StopIteration:
                if self._taken == 0:
                    raise Misuse("The loader given to job.steps has no batches.") from None
                self._iterator = None
                self._epoch += 1
                self._taken = 0
                continue
            self._taken += 1
            if self._kept is not None and self._taken == 1:
                self._kept.require_unchanged()
            position = self._position(ended=False, loader=loader_state)
            if self._remember:
                position["generators"] = generators
                position["body"] = body
                position["order"] = self._order.digest(self._taken)
                position["batch"] = self._fingerprint(batch)
            return Fetched(number, False, position, before, batch)

    def _end(self, number: int, before: rng.RngState) -> Fetched:
        return Fetched(number, True, self._position(ended=True, loader=None), before)

    def _noted(self, fetched: Fetched) -> Fetched:
        self._newest, self._newest_position = fetched.number, fetched.position
        if self._kept is not None:
            self._kept.fetched()
        return fetched

    def _open_epoch(self) -> None:
        self._set_epoch()
        reused = getattr(self._loader, "persistent_workers", False) and (
            getattr(self._loader, "_iterator", None) is not None
        )
        if self._remember:
            self._start = {
                "rng": rng.capture(),
                "kept": {} if self._kept is None else self._kept.capture(),
                "reused": bool(reused),
            }
        self._taken = 0
        self._iterator = self._order.open() if self._remember else iter(self._loader)

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
