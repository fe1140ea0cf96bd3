"""The user's script, looked at before anything is started or submitted for it."""

from __future__ import annotations

import importlib.util
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadpool_launch.errors import UsageError

#: More than anybody writes; a mistaken path to data must not fill the memory.
_MOST_NBYTES = 16 << 20
#: Largest script arguments, in bytes of UTF-8; they travel to every rank in one packet.
MAX_ARGUMENTS_NBYTES = 64 << 10


def readable_script(given: str) -> Path:
    """Its absolute path. Raises ``UsageError``: it is not there, or cannot be read."""
    path = Path(given).absolute()
    if not os.path.isfile(path):
        if os.path.isdir(path):
            raise UsageError(f"there is no script {given}: it is a folder; name a file in it")
        raise UsageError(f"there is no script {given}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"the script {given} cannot be read")
    return path


def check_python(path: Path) -> None:
    """Raise a ``UsageError`` for a script that every rank would refuse before its first line.

    What it imports is not looked at.
    """
    try:
        with path.open("rb") as file:
            source = file.read(_MOST_NBYTES + 1)
    except OSError as error:
        raise UsageError(f"the script {path} cannot be read ({error.strerror})") from error
    if source.startswith(importlib.util.MAGIC_NUMBER) or zipfile.is_zipfile(path):
        return
    if len(source) > _MOST_NBYTES:
        raise UsageError(
            f"the script {path}: is larger than {_MOST_NBYTES >> 20} MiB; is it a Python script?"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise UsageError(f"the script {path}{line}: is not Python ({error.msg})") from error
    except ValueError as error:
        raise UsageError(f"the script {path}: is not Python ({error})") from error
    except (RecursionError, MemoryError):
        return  # Python's own limits may be others where it runs.


def check_arguments(script_args: Sequence[str]) -> None:
    """Raise a ``UsageError`` for arguments that cannot be passed on to every rank."""
    for argument in script_args:
        if not _is_text(argument):
            raise UsageError(
                f"script argument {argument}: is not UTF-8; write such names into a file and give "
                "the script that file"
            )
    nbytes = sum(len(argument.encode()) + 1 for argument in script_args)
    if nbytes > MAX_ARGUMENTS_NBYTES:
        raise UsageError(
            f"the script's arguments have {nbytes} bytes, and {MAX_ARGUMENTS_NBYTES} at most can "
            "be passed on: write them into a file and give the script that file"
        )


def check_paths(paths: Mapping[str, str | None]) -> None:
    """Raise a ``UsageError`` for a path that other nodes cannot be told. By what each is."""
    for what, path in paths.items():
        if path is not None and not _is_text(path):
            raise UsageError(f"{what} {path}: is not UTF-8; give it another name")


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
