"""The pages of documentation as data: blocks, commands, links and headings."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: What begins a command outside fenced blocks: in a span of code, or in a block that is indented.
PROGRAMS = ("deadpool", "deadpool-launch", "make", "python")
#: Languages of fenced blocks that hold commands.
SHELL = "sh"

_FENCE = re.compile(r"^```(\w*)$")
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^(#+) (.*)$")
_INCLUDED = re.compile(r'^--8<-- "([^":]+)(?::(\w+))?"$')


class Block(NamedTuple):
    """A fenced block."""

    language: str
    line: int  #: the number of its first line
    text: str


class Command(NamedTuple):
    """A command that a page names."""

    where: str
    words: tuple[str, ...]
    whole: bool  #: it stands in a block, from where it can be copied


def pages() -> dict[str, str]:
    """The README and every page of the site: path in the checkout, and text."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if fence := _FENCE.match(line):
            inside = []
            for _, line in lines:
                if line == "```":
                    break
                inside.append(line)
            found.append(Block(fence[1], number + 1, "\n".join(inside)))
    return found


def prose(text: str) -> str:
    """The page with every fenced block emptied; lines keep their numbers."""
    kept, open_fence = [], False
    for line in text.splitlines():
        is_fence = line.startswith("```")
        kept.append("" if open_fence or is_fence else line)
        open_fence ^= is_fence
    return "\n".join(kept)


def commands(name: str, text: str) -> Iterator[Command]:
    """Every command that the page names: in shell blocks, in indented ones, and in the text."""
    for block in blocks(text):
        if block.language == SHELL:
            yield from _of_block(name, block)
    for number, line in enumerate(prose(text).splitlines(), 1):
        where = f"{name}:{number}"
        if line.startswith("    ") and line.split()[0] in PROGRAMS:
            yield Command(where, _words(line), whole=True)
            continue
        for span in _SPAN.findall(line):
            if span.partition(" ")[0] in PROGRAMS and " " in span:
                yield Command(where, _words(span), whole=False)


def options(text: str) -> set[str]:
    """The long options that the text names by themselves, as ``--spares`` or ``--spares 1``."""
    return {
        span.split()[0].partition("=")[0]
        for span in _SPAN.findall(prose(text))
        if re.match(r"--[a-z]", span)
    }


def links(text: str) -> list[str]:
    """The targets of links and pictures."""
    return _LINK.findall(re.sub(r"`[^`]*`", "", prose(text)))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site's generator makes them."""
    found = set()
    for line in prose(text).splitlines():
        if heading := _HEADING.match(line):
            plain = unicodedata.normalize("NFKD", heading[2]).encode("ascii", "ignore").decode()
            plain = re.sub(r"[^\w\s-]", "", plain.replace("`", "")).strip().lower()
            found.add(re.sub(r"[-\s]+", "-", plain))
    return found


def included(text: str) -> list[tuple[str, str | None]]:
    """What a page includes: a file of the checkout, and a marked part of it."""
    matches = map(_INCLUDED.match, text.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def _of_block(name: str, block: Block) -> Iterator[Command]:
    whole = block.text.replace("\\\n", " ")
    for offset, line in enumerate(whole.splitlines()):
        words = _words(line)
        if words:
            yield Command(f"{name}:{block.line + offset}", words, whole=True)


def _words(line: str) -> tuple[str, ...]:
    """The words of one command, without comment, ``exec`` and what its output goes to."""
    # Variables are the shell's to replace.
    whole = line.partition(" > ")[0].replace("$SCRATCH", "/scratch")
    words = shlex.split(whole, comments=True)
    return tuple(words[1:] if words[:1] == ["exec"] else words)
