"""The errors a user's script can meet.

    RuntimeError
      Interrupted        a peer was lost; raised inside a step's body and caught by ``with step:``
      CorruptState       a copy of the state does not have the hash it was sealed with
      Misuse             the script uses the API in a way that cannot be recovered
    ValueError
      UnsupportedState   an object cannot be saved and brought back

``UnsupportedLayout`` (models that cannot be recovered in place) is in ``groups.errors``.
"""

from __future__ import annotations


class Interrupted(RuntimeError):
    """A peer was lost while a step's body ran; ``with step:`` catches this and runs it again.

    A body that catches ``Exception`` around ``optimizer.step()`` must let this one through.
    """


class CorruptState(RuntimeError):
    """A snapshot or transferred state does not have the hash it was sealed with."""


class Misuse(RuntimeError):
    """The script uses ``job.steps`` or ``with step:`` in a way that cannot be recovered."""


class UnsupportedState(ValueError):
    """An object of the script cannot be saved and brought back, so it is refused."""
