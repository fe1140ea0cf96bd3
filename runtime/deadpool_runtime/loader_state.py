"""What a loader keeps between its epochs: generators and attributes, its own and its samplers'.

A place in the data is found again by asking the loader and its samplers for an epoch once more, so
they must be then as they were when it began. ``LoaderState`` looks through the objects that decide
about the order of the data (the loader, samplers, whatever these consist of):

- generators of random numbers are saved as they are at the start of an epoch and before each fetch;
- attributes that consist of numbers, text, arrays and tensors, if they differ from what they were
  when training began, which is what a new process finds in them; those that a body changes also
  before each fetch (``loader_body``);
- an object with an iterator or the like in it, through its ``state_dict`` and ``load_state_dict``;
- what is left is refused if it is an iterator, whose place nobody knows, or cannot be compared, and
  else watched: training ends with a sentence when it changes.

Of datasets and of what puts batches together only the generators count, and a body must not change
the tensors and arrays of a dataset. With worker processes they
would run on in those, so they are refused. What is made while data is read (an iterator that is
kept for the length of an epoch) is taken to be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deadpool_runtime import generators
from deadpool_runtime.encoding import detached_copy
from deadpool_runtime.errors import Misuse
from deadpool_runtime.loader_body import BodyChanges
from deadpool_runtime.loader_values import from_plain, mark_of, to_plain
from deadpool_runtime.loader_walk import MISSING, Held, Walk, children_of, put_child

State = dict[str, Any]


class LoaderState:
    """Saves and brings back what ``loader`` keeps. Made when training begins; raises ``Misuse`` for
    what could not be brought back.

    ``only_generators``: the rest is in the loader's own ``state_dict``. ``is_saved``: whether a
    tensor is a part of what else is saved.
    """

    def __init__(
        self,
        loader: Any,
        *,
        only_generators: bool = False,
        is_saved: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self._only_generators = only_generators
        self._new_walk = partial(Walk, loader, only_generators=only_generators)
        self._walk = self._new_walk()
        self._walk.require_known()
        #: Whether items are read in other processes.
        self.has_workers = self._walk.has_workers
        #: The attributes when training began.
        self._first = {path: to_plain(held.value) for path, held in self._walk.plain.items()}
        self._marks = {path: mark_of(held.value) for path, held in self._walk.plain.items()}
        self._watched = {
            path: (held, mark_of(held.value)) for path, held in self._walk.opaque.items()
        }
        # (Nothing here refers to this object: a loader that nobody uses ends its workers at once.)
        self._body = BodyChanges(self._walk, self._new_walk, is_saved)

    def capture(self) -> State:
        """The state at the start of an epoch, before its iterator is made."""
        self.require_unchanged()
        self._walk = self._new_walk()
        changed = {
            path: to_plain(held.value)
            for path, held in self._walk.plain.items()
            if self._marks.get(path, MISSING) != mark_of(held.value)
        }
        for path, held in self._walk.opaque.items():
            if path in self._first:
                raise _changed(path, held.value)
        self._body.begin(self._walk)
        return {
            "generators": self.generators(),
            "attributes": changed,
            "missing": sorted(set(self._first) - set(self._walk.plain)),
            "objects": {
                path: detached_copy(each.state_dict()) for path, each in self._walk.objects.items()
            },
        }

    def generators(self) -> State:
        """The present states of the generators that were found when the epoch began."""
        return {path: generators.state_of(each) for path, each in self._walk.generators.items()}

    def require_unchanged(self) -> None:
        """Raise ``Misuse`` if something changed that is only watched."""
        for path, (held, mark) in self._watched.items():
            value = (children_of(held.holder) or {}).get(held.name)
            if mark_of(value) != mark:
                raise _changed(path, held.value)

    def restore(self, saved: State) -> None:
        """Make everything as it was at the start of the epoch that ``saved`` is of."""
        self.require_unchanged()
        self._walk = self._new_walk()
        known = {path: from_plain(plain) for path, plain in self._first.items()}
        known |= {path: from_plain(plain) for path, plain in saved["attributes"].items()}
        known |= dict.fromkeys(saved["missing"], MISSING)
        for path in set(self._walk.plain) - set(known) - set(self._watched):
            known[path] = MISSING
        for path in sorted(known):
            self._put(path, known[path])
        for path, state in saved["objects"].items():
            self._walk.objects[path].load_state_dict(detached_copy(state))
        self._walk = self._new_walk()
        for path, state in saved["generators"].items():
            if path not in self._walk.generators:
                self._put(path, generators.made_of(state))
        self._walk = self._new_walk()
        self.set_generators(saved["generators"])
        self._body.begin(self._walk)

    def fetched(self) -> None:
        """A batch was fetched; a body is to follow."""
        if not self._only_generators:
            self._body.fetched()

    def changed_by_body(self) -> State:
        """What bodies have changed in this epoch of what is saved at its start, before the next
        fetch; raises ``Misuse`` if they have changed something that is not."""
        return {} if self._only_generators else self._body.present()

    def restore_body(self, saved: State) -> None:
        """Bring back what ``changed_by_body`` gave."""
        if not self._only_generators:
            self._body.restore(saved, self._put)

    def set_generators(self, states: State) -> None:
        """Give the generators that were found when the epoch began those states."""
        for path, state in states.items():
            present = self._walk.generators.get(path)
            if present is not None:
                generators.set_state(present, state)

    def _put(self, path: str, value: Any) -> None:
        parent, _, name = path.rpartition("/")
        held = self._walk.plain.get(path, Held(self._walk.holders.get(parent), name, None))
        if held.holder is not None:
            put_child(held.holder, held.name, value)


def _changed(path: str, value: Any) -> Misuse:
    return Misuse(
        f"{path.replace('/', '.')} (a {type(value).__qualname__}) changed while data was read and "
        f"cannot be saved, so a lost rank's data could not be read again: give what it belongs to "
        f"state_dict and load_state_dict."
    )
