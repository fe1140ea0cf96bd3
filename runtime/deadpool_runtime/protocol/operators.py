"""What an operator may ask a launcher, and what is answered."""

from __future__ import annotations

from deadpool_runtime.protocol.base import Message


class DrainNode(Message, frozen=True):
    """Take ``node`` out of the job; ``reason``: why, in the operator's words, or nothing."""

    node: str
    reason: str


class AskStanding(Message, frozen=True):
    """Say how the job stands; answered by ``JobStanding``."""


#: What an operator may ask. Each has one answer.
Question = DrainNode | AskStanding


class Request(Message, frozen=True):
    """First and only message of an operator's connection; answered by ``Reply``."""

    protocol: int
    body: Question


class Done(Message, frozen=True):
    """It is done, or has begun; ``text`` is a sentence."""

    text: str


class Denied(Message, frozen=True):
    """It cannot be done; ``text`` says why. ``mistaken``: what was asked for makes no sense for
    this job (a node that it does not have).
    """

    text: str
    mistaken: bool = False


class JobStanding(Message, frozen=True):
    """How the job stands. ``phase``: what the whole job is doing, in the launcher's word for it;
    ``step``: the newest that every rank has completed; ``nodes``: what each node is to the job;
    ``ranks``: how many take part; ``bare``: not every rank has a replica after an incident;
    ``incident``: the open one's number.
    """

    phase: str
    term: int
    epoch: int
    step: int
    nodes: dict[str, str]
    ranks: int
    bare: bool
    incident: int | None


Answer = Done | Denied | JobStanding


class Reply(Message, frozen=True):
    """The answer to a ``Request``; the connection ends with it."""

    body: Answer
