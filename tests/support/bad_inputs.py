"""Wrong command lines, files and variables, as rows of tables; how they are run is in
``test_bad_input.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

#: What stands in a file; None: it is a folder.
Content = str | bytes | None

#: A script that ends at once, and a run directory whose job has ended; every case has them.
SCRIPT = "print('hello')\n"


@dataclass(frozen=True)
class Case:
    """One wrong input, and what is said of it."""

    #: Program and arguments.
    words: tuple[str, ...]
    #: Parts of the sentence.
    parts: tuple[str, ...]
    code: int = 2
    files: Mapping[str, Content] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    #: Sentences; commands that check a file say one for each thing that is wrong in it.
    lines: int = 1
    #: Links that lead nowhere.
    links: tuple[str, ...] = ()
    #: Run by somebody who may not look into folders of mode 0700.
    by_another: bool = False

    @property
    def line(self) -> str:
        """As it would be typed."""
        return shlex.join(self.words)


def bad(
    line: str,
    *parts: str,
    code: int = 2,
    files: Mapping[str, Content] | None = None,
    env: Mapping[str, str] | None = None,
    lines: int = 1,
    links: tuple[str, ...] = (),
    by_another: bool = False,
) -> Case:
    """A case, with its command line as it would be typed."""
    words = tuple(shlex.split(line))
    return Case(words, parts, code, files or {}, env or {}, lines, links, by_another)


def bad_file(command: str, text: Content, *parts: str, lines: int = 1) -> Case:
    """The command with the wrong file ``x.yaml``, which the sentence names."""
    return bad(f"{command} x.yaml", "x.yaml", *parts, files={"x.yaml": text}, lines=lines)
