"""Sentences of a rank for the user."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Notes:
    """Says nothing twice that differs in numbers only. From any thread.

    What is said of the copies before the launcher has found that they have room waits for its
    word: it may end the job with one sentence that says it better.
    """

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._kinds: set[str] = set()
        self._waiting: list[str] | None = []

    def say(self, text: str) -> None:
        """Tell the user at once."""
        kind = "".join(" " if letter.isdigit() else letter for letter in text)
        with self._lock:
            if kind in self._kinds:
                return
            self._kinds.add(kind)
        self._send(text)

    def say_of_copies(self, text: str) -> None:
        """Tell the user once ``begin`` was called."""
        with self._lock:
            if self._waiting is not None:
                self._waiting.append(text)
                return
        self.say(text)

    def begin(self) -> None:
        """The launcher lets the ranks train."""
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
        for text in waiting:
            self.say(text)
