"""What messages look like on the wire, one of each: ``wire_format.txt``.

A launcher and its agents may be of two versions for a while. If a line of that file changes, write
it anew with ``DEADPOOL_REWRITE=1``, read the diff, and think of ``PROTOCOL_VERSION``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, get_args

import msgspec
from mutate import sample
from parsers import UNIONS

from deadpool_runtime import protocol

WRITTEN = Path(__file__).with_name("wire_format.txt")
#: What stands in another message.
INSIDE: dict[str, Any] = {
    "to-agent": protocol.ToAgent,
    "from-agent": protocol.FromAgent,
    "question": protocol.Question,
    "answer": protocol.Answer,
}
#: Samples begin as if they were so deep in another, which makes them short.
_DEPTH = 3


def test_every_message_has_the_form_that_it_had() -> None:
    lines = [f"version {protocol.PROTOCOL_VERSION}"]
    for name, union in {**UNIONS, **INSIDE}.items():
        lines += ["", f"# {name}", *map(_as_sent, get_args(union))]
    text = "\n".join(lines) + "\n"
    if os.environ.get("DEADPOOL_REWRITE"):
        WRITTEN.write_text(text)
    assert text.splitlines() == WRITTEN.read_text().splitlines()


def _as_sent(kind: type[protocol.Message]) -> str:
    """A message of this kind, by what anybody reads who knows msgpack and nothing else."""
    message = sample(kind, random.Random(kind.__name__), _DEPTH)
    (body,) = protocol.Frames().feed(protocol.frame(message))
    found: dict[str, Any] = msgspec.msgpack.decode(body)
    return repr(found)


def test_a_frame_is_its_length_and_its_message() -> None:
    assert protocol.frame(protocol.Leave()) == b"\0\0\0\x0c\x81\xa4type\xa5Leave"


def test_a_proof_is_made_of_the_secret_the_side_and_both_challenges() -> None:
    found = protocol.proof(b"secret", "client", b"server's", b"client's")
    assert found.hex() == ("dbe58a3206a5b19777219768e01a966f7c9f6d253ddace2d35028c1bbf21c9f6")
