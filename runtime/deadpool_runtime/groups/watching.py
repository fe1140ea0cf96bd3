"""Objects that no model leads to are found as they are made."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from deadpool_runtime.groups.errors import UnsupportedLayout

MARK = "_deadpool_watches"


class Watch:
    """Every living object of the classes that are followed, made from then on in this process.

    ``refusal`` is what ``UnsupportedLayout`` says of those made once the watch is sealed.
    """

    def __init__(self, refusal: str) -> None:
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        self._refusal = refusal
        self._sealed = False

    def open(self) -> None:
        """Allow that objects are made."""
        self._sealed = False

    def seal(self) -> None:
        """Refuse objects from here on."""
        self._sealed = True

    def follow(self, kind: Any) -> None:
        """Note every object of this class; following it again changes nothing."""
        construct = kind.__init__
        if hasattr(construct, MARK):
            return

        @functools.wraps(construct)
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:
            if self._sealed:
                raise UnsupportedLayout(self._refusal)
            construct(made, *args, **kwargs)
            self.living.add(made)

        setattr(__init__, MARK, True)
        kind.__init__ = __init__
