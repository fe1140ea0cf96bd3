"""The tensors of a state in the order of the slots' segments, found again only when they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deadpool_runtime.replication.layout import layout_segments
from deadpool_runtime.replication.manifest import Segment
from deadpool_runtime.state import Item


class Arrangement:
    """``segments`` is the same object as long as keys, shapes, types and ranks are the same, and
    ``tensors`` are the items' in the order of the segments' entries."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.tensors: list[list[torch.Tensor]] = []
        self._items: Sequence[Item] = ()
        self._shapes: list[Any] = []
        self._names: list[Any] = []
        #: Where in the list of items each entry of each segment is.
        self._places: list[list[int]] = []

    def update(self, items: Sequence[Item]) -> None:
        """Arrange ``items``; that is cheapest if they are the same object as the time before."""
        # ``.data`` gives a tensor of a model another shape; optimizers leave theirs alone.
        shapes = [item.tensor.shape for item in items if item.key[0] != "o"]
        if items is self._items and shapes == self._shapes:
            return
        self._items, self._shapes = items, shapes
        names = [(item.key, item.tensor.shape, item.tensor.dtype, item.ranks) for item in items]
        if names != self._names:
            self._names = names
            self.segments, _ = layout_segments(items)
            places = {item.key: place for place, item in enumerate(items)}
            self._places = [[places[entry.key] for entry in s.entries] for s in self.segments]
        self.tensors = [[items[place].tensor for place in each] for each in self._places]
