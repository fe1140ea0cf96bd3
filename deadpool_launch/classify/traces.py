"""Python's tracebacks as text: where one begins, and which line is its exception. Pure."""

from __future__ import annotations

import re

#: Whatever stands before the words, ``torchrun``'s table or the bars of an exception group.
BEGINNING = re.compile(r"^(.*?)Traceback \(most recent call last\):")
#: The last line of a traceback: the exception's type, and its text if it has one.
EXCEPTION = re.compile(r"^(?:(?:[A-Za-z_]\w*|<locals>)\.)*[A-Za-z_]\w*(?::(?: .*)?)?$")
#: Carries other exceptions, which are shown themselves.
WRAPPER = re.compile(
    r"^(?:\S+\.)?(?:ChildFailedError|(?:Base)?ExceptionGroup|ProcessRaisedException"
    r"|ProcessExitedException|SystemExit|RemoteTraceback)\b"
)
#: Part of the drawing of an exception group.
_GROUP_BAR = re.compile(r"^ *[|+] ?")


def unbarred(text: str) -> tuple[int, str]:
    """How far a line is indented and what it is, without the bars of an exception group."""
    text = _GROUP_BAR.sub("", text)
    body = text.lstrip()
    return len(text) - len(body), body


def root_error(text: str) -> str:
    """The exception that was raised first, as chained tracebacks show it; empty without one.

    A text without any traceback is an exception's own: its first line is the error.
    """
    lines = text.splitlines()
    indent: int | None = None
    for line in lines:
        if (found := BEGINNING.match(line)) is not None:
            indent = unbarred(found[1])[0]
            continue
        if indent is None:
            continue
        depth, body = unbarred(line)
        if not body or depth > indent:
            continue
        indent = None
        if EXCEPTION.match(body) and not WRAPPER.match(body):
            return body
    return "" if any(BEGINNING.match(line) for line in lines) else "".join(lines[:1])
