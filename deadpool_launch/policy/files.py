"""Where policy files are, and reading them: the only part that touches disk and environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from string import Template

from deadpool_launch.dotted import Problem
from deadpool_launch.errors import UsageError
from deadpool_launch.policy.reading import PolicyFile, read

SITE_FILE = Path("/etc/deadpool/policy.yaml")
#: Names another site file; empty: there is none.
SITE_VARIABLE = "DEADPOOL_SITE_POLICY"
#: Far more than any policy needs; a mistaken path to a log must not fill the memory.
_MOST_NBYTES = 1 << 20


def site_file(environ: Mapping[str, str]) -> PolicyFile | None:
    """The site's policy; ``None`` if the site has none. Raises ``UsageError``."""
    named = environ.get(SITE_VARIABLE)
    if named == "":
        return None
    path = Path(named) if named is not None else SITE_FILE
    if named is None and not is_there(path):
        return None
    return _good(path, may_limit=True, named_by=SITE_VARIABLE if named is not None else "")


def user_file(environ: Mapping[str, str], named: Path | None) -> PolicyFile | None:
    """The user's policy: the file ``named`` by ``--policy``, else that in the home directory."""
    if named is not None:
        return _good(named, may_limit=False, named_by="--policy")
    path = home_file(environ)
    if path is None or not is_there(path):
        return None
    return _good(path, may_limit=False)


def home_file(environ: Mapping[str, str]) -> Path | None:
    """Where the user's own policy stands; ``None`` without a home directory."""
    folder = home_folder(environ)
    return folder / "policy.yaml" if folder is not None else None


def home_folder(environ: Mapping[str, str]) -> Path | None:
    """Where everything stands that a user settles; ``None`` without a home directory."""
    if config := environ.get("XDG_CONFIG_HOME"):
        return Path(config) / "deadpool"
    if home := environ.get("HOME"):
        return Path(home) / ".config" / "deadpool"
    return None


def is_there(path: Path) -> bool:
    """Whether there is something to read. So are a link into nothing and what nobody may look at:
    who reads them says what is wrong, where passing them over would say nothing.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def check(path: Path) -> list[Problem]:
    """Everything that is wrong in a file, be it a site's or a user's."""
    return read(text_of(path), str(path), may_limit=True)[1]


def fill_in(folder: str, key: str, environ: Mapping[str, str]) -> str:
    """A path with ``~`` and variables replaced. Raises ``UsageError``."""
    if folder == "~" or folder.startswith("~/"):
        folder = f"$HOME{folder[1:]}"
    try:
        filled = Template(folder).substitute(environ)
    except (KeyError, ValueError) as error:
        missing = isinstance(error, KeyError)
        why = f"{error.args[0]} is not set" if missing else "a $ stands before no variable's name"
        raise UsageError(f"{key} {folder}: {why}; name the whole path") from error
    if not filled.startswith("/"):
        raise UsageError(f"{key} {folder}: comes to {filled}; it must be an absolute path")
    return filled


def _good(path: Path, *, may_limit: bool, named_by: str = "") -> PolicyFile:
    file, problems = read(text_of(path, named_by), str(path), may_limit=may_limit)
    if problems:
        more = len(problems) - 1
        rest = f" (and {more} more: deadpool policy check {path} lists all)" if more else ""
        raise UsageError(f"{problems[0]}{rest}")
    return file


def content_of(path: Path, most_nbytes: int, named: str, meant: str) -> bytes:
    """The bytes of a file. ``named`` and ``meant``: which file that is and should be, for people.
    Raises ``OSError``, and ``UsageError`` if there are more than so many.
    """
    with path.open("rb") as file:
        content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        raise UsageError(f"{named}: is larger than {most_nbytes >> 20} MiB; is it {meant}?")
    return content


def text_of(path: Path, named_by: str = "", what: str = "policy") -> str:
    """The content of a file; ``what`` it should be, for people. Raises ``UsageError``."""
    by = f"{named_by} " if named_by else ""
    try:
        content = content_of(path, _MOST_NBYTES, f"{by}{path}", f"a {what}")
    except OSError as error:
        raise UsageError(f"{by}{path}: cannot be read ({os.strerror(error.errno or 0)})") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(f"{by}{path}, line {line}: is not UTF-8 text") from error
