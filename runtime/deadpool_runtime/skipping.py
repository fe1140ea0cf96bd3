"""The order of the samples: which come next, and how to skip some without loading them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import xxhash
from torch.utils.data import DataLoader

from deadpool_runtime.encoding import Digest
from deadpool_runtime.errors import Misuse, UnsupportedState


class Order:
    """Opens iterators over one loader and keeps account of the indices that its sampler gives.

    For a ``DataLoader`` that is iterated over as torch's own, a sampler that skips and looks on
    stands in the place of the real one while the iterator is made.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._name = ""
        if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
            self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            self._sampler = _SkippingSampler(vars(loader)[self._name])

    def open(self) -> Iterator[Any]:
        """A new iterator from the start."""
        if not self._name:
            return iter(self._loader)
        return self._open(0, None)

    def open_at(self, skip: int, before_first: Callable[[], None] | None) -> Iterator[Any]:
        """An iterator without the first ``skip`` batches.

        ``before_first``: called just before the sampler is first asked, where the epoch reused the
        worker processes of the one before. Then no seed for new workers had been drawn.
        """
        if self._name:
            # Persistent workers hold batches that were asked for already.
            self._loader._iterator = None  # type: ignore[attr-defined]
            return self._open(skip, before_first)
        iterator = iter(self._loader)
        for taken in range(skip):
            try:
                next(iterator)
            except StopIteration:
                raise Misuse(
                    f"The loader has only {taken} batches now, but gave more before: it must give "
                    f"the same ones each time."
                ) from None
        return iterator

    def _open(self, skip: int, before_first: Callable[[], None] | None) -> Iterator[Any]:
        attributes = vars(self._loader)
        sampler, original = self._sampler, attributes[self._name]
        sampler.inner, sampler.skip, sampler.before_first = original, skip, before_first
        # Past DataLoader's own refusal to exchange samplers: it guards users, and this is undone.
        attributes[self._name] = sampler
        try:
            iterator = iter(self._loader)
        finally:
            attributes[self._name] = original
            # An iterator with persistent workers keeps the sampler for its later epochs.
            sampler.skip, sampler.before_first = 0, None
        if skip and sampler.iterator is not None:
            sampler.iterator.advance()
        return iterator

    def digest(self, taken: int) -> str:
        """A hash of the indices of the epoch's batch number ``taken``, from 1; empty if not known.

        Not of those before it: samplers that draw them one by one from the global generators give
        others when they are skipped.
        """
        if not self._name or self._sampler.iterator is None:
            return ""
        return self._sampler.iterator.digest(taken)


class _SkippingSampler:
    """A sampler without its first ``skip`` entries, until ``skip`` is set to 0."""

    def __init__(self, inner: Iterable[Any]) -> None:
        self.inner = inner
        self.skip = 0
        self.before_first: Callable[[], None] | None = None
        #: The iterator made last; loaders with workers make two and use the second.
        self.iterator: _SkippingIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        self.iterator = _SkippingIterator(iter(self.inner), self.skip, self.before_first)
        return self.iterator

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


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
        self._given = 0
        #: By the entry's number, its hash; of entries that may still be asked for.
        self._digests: dict[int, str] = {}

    def advance(self) -> None:
        if self._advanced:
            return
        self._advanced = True
        before_first, self._before_first = self._before_first, None  # it may hold the loader
        if before_first is not None:
            before_first()
        for _ in range(self._skip):
            try:
                self._next()
            except StopIteration:
                return

    def digest(self, taken: int) -> str:
        for older in [count for count in self._digests if count < taken]:
            del self._digests[older]
        return self._digests.get(taken, "")

    def _next(self) -> Any:
        entry = next(self._inner)
        self._given += 1
        self._digests[self._given] = xxhash.xxh3_128_hexdigest(_bytes_of(entry))
        return entry

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.advance()
        return self._next()


def _bytes_of(entry: Any) -> bytes:
    """The indices of one batch, whatever kind of integers they are."""
    try:
        return array("q", entry if isinstance(entry, list | tuple) else [entry]).tobytes()
    except (TypeError, OverflowError):
        pass
    digest = Digest()
    try:
        digest.add(entry, "an index")
    except (UnsupportedState, RecursionError):  # an index of some kind of the script's own
        return b"?"
    return digest.hexdigest().encode()
