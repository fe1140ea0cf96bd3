"""Which carrier a link uses in each direction, now.

Both ends of a link know both nodes' offers. Each pair of offers of a kind has a *label* that the
two ends work out for themselves; chunks name the label, so a carrier that came anew never gets a
ticket of its forerunner. An end that broke is not tried again before one of the offers changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import xxhash

from deadpool_runtime.replication.carriers import tcp
from deadpool_runtime.replication.carriers.base import Kind, Receiver, Sender

#: Kinds in the order in which they are tried; TCP comes after all of them.
PREFERENCE = ("memory", "mpi")


def label_of(name: str, sender: bytes, receiver: bytes) -> str:
    """The name of a carrier between a node that offered ``sender`` and one that offered
    ``receiver``.
    """
    return f"{name}:{xxhash.xxh3_64_hexdigest(sender + b'|' + receiver)}"


def name_of(label: str) -> str:
    """The kind's name."""
    return label.partition(":")[0]


class Choice:
    """The ends of one link. Safe to use from any thread."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        peer: str,
        fallback: tuple[Sender, Receiver],
        note: Callable[[str], None],
    ) -> None:
        self._kinds = sorted(kinds, key=lambda kind: PREFERENCE.index(kind.name))
        self._peer = peer
        self._fallback = fallback
        self._note = note
        self._lock = threading.Lock()
        self._theirs: dict[str, bytes] = {}
        #: By kind: the label that the ends below were made for, broken or not.
        self._labels: dict[str, tuple[str, str]] = {}
        self._senders: dict[str, Sender] = {}
        self._receivers: dict[str, Receiver] = {}
        self._closed = False
        self._told = ""

    def ours(self) -> dict[str, bytes]:
        """This node's offers."""
        found = ((kind.name, kind.offer()) for kind in self._kinds)
        return {name: offer for name, offer in found if offer is not None}

    def choose(self, theirs: dict[str, bytes] | None = None) -> dict[str, bytes]:
        """Make ends for the offers as they are now (``theirs`` None: the other node's are as they
        were) and close those whose offers are gone. Returns this node's offers.
        """
        with self._lock:
            if theirs is not None:
                self._theirs = dict(theirs)
            ours = self.ours()
            for kind in self._kinds:
                self._choose(kind, ours.get(kind.name), self._theirs.get(kind.name))
            told = self._name()
        self._tell(told)
        return ours

    def _choose(self, kind: Kind, ours: bytes | None, theirs: bytes | None) -> None:
        before = self._labels.get(kind.name)
        now = None
        if ours is not None and theirs is not None and not self._closed:
            now = label_of(kind.name, ours, theirs), label_of(kind.name, theirs, ours)
        if now == before:
            return
        if before is not None:
            self._drop(before[0], before[1])
        if now is None or ours is None or theirs is None:
            self._labels.pop(kind.name, None)
            return
        sender, receiver = kind.sender(theirs), kind.receiver(theirs)
        # Without an end the offers do not match yet; a later call looks again.
        if sender is None or receiver is None:
            self._labels.pop(kind.name, None)
            for end in (sender, receiver):
                if end is not None:
                    end.close()
            return
        self._labels[kind.name] = now
        self._senders[now[0]], self._receivers[now[1]] = sender, receiver

    def _drop(self, sender: str, receiver: str) -> None:
        if (sending := self._senders.pop(sender, None)) is not None:
            sending.close()
        if (receiving := self._receivers.pop(receiver, None)) is not None:
            receiving.close()

    def _name(self) -> str:
        return name_of(next(iter(self._senders), tcp.NAME))

    def _tell(self, name: str, reason: str = "") -> None:
        """Note a change of the sending carrier."""
        if name != self._told and not self._closed:
            if self._told:
                why = f": {reason}" if reason else ""
                self._note(f"chunks to {self._peer} go by {name}, not {self._told} any more{why}")
            self._told = name

    def sender(self) -> tuple[str, Sender]:
        """The carrier for the next chunk."""
        with self._lock:
            for name in PREFERENCE:
                label = self._labels.get(name, ("", ""))[0]
                if label in self._senders:
                    return label, self._senders[label]
        return tcp.NAME, self._fallback[0]

    def receiver(self, label: str) -> Receiver | None:
        """The end for a chunk that came with this label; None if it is gone."""
        if label == tcp.NAME:
            return self._fallback[1]
        with self._lock:
            return self._receivers.get(label)

    def drop_sender(self, label: str, reason: str) -> bool:
        """That carrier is broken; False if that was known."""
        with self._lock:
            sender = self._senders.pop(label, None)
            told = self._name()
        if sender is None:
            return False
        sender.close()
        self._tell(told, f"{name_of(label)} broke, {reason}")
        return True

    def drop_receiver(self, label: str) -> None:
        """That carrier is broken."""
        with self._lock:
            receiver = self._receivers.pop(label, None)
        if receiver is not None:
            receiver.close()

    def close(self) -> None:
        """The link ended."""
        with self._lock:
            self._closed = True
            for kind in list(self._labels):
                self._drop(*self._labels[kind])
        for end in self._fallback:
            end.close()
