"""How both commands are called: arguments in, exit code out, every error told in one sentence."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import click

from deadpool_launch.errors import DeadpoolError, UsageError
from deadpool_launch.exits import ExitCode

#: How alike a typo and the option that was meant are; `--steps` is not meant to be `--spares`.
_ALIKE = 0.8
#: So many letters of the beginning of an option are taken for it, dashes included.
_BEGINNING = 5
#: What word processors and web pages make of a - at the beginning of an option.
_DASHES = tuple("\u2010\u2011\u2012\u2013\u2014\u2015\u2212")
_NOT_REPLACED = re.compile(r"~|\$[A-Za-z_{]")


class ScriptCommand(click.Command):
    """A command ``[OPTIONS] SCRIPT [-- SCRIPT ARGS]``.

    What the script gets stands after ``--``; click itself would take it anywhere. The parameter
    with the script's arguments is the one with ``nargs=-1``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        after = len(args) - args.index("--") - 1 if "--" in args else 0
        rest = super().parse_args(ctx, args)
        for parameter in self.params:
            if isinstance(parameter, click.Argument) and parameter.nargs == -1:
                extra: Sequence[str] = ctx.params.get(parameter.name or "") or ()
                if len(extra) > after and not ctx.resilient_parsing:
                    raise UsageError(f"{extra[0]} is one argument too many; {_separator_hint(ctx)}")
        return rest


class NamedGroup(click.Group):
    """A group that lists its commands to those who name none of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            known = f"{', '.join(names[:-1])} and {names[-1]}"
            raise UsageError(f"{args[0]} is not a command of {ctx.command_path}; those are {known}")
        return super().resolve_command(ctx, args)


class FolderToMake(click.Path):
    """A folder that is made if it is not there; so it must not be one that the shell left as it
    stood, as ``bash`` does with a ``~`` behind ``=``.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if _NOT_REPLACED.match(str(value)):
            self.fail(
                f"the shell has not replaced the beginning of {value}; write the whole path, or "
                f"./{value} for a folder of that name",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def run_command(command: click.Command, arguments: Sequence[str], program: str) -> int:
    """Run the command; returns its exit code."""
    try:
        _check_words(arguments)
        _check_folder()
        result = command.main(list(arguments), prog_name=program, standalone_mode=False)
        return int(result or 0)
    except click.exceptions.NoSuchOption as error:
        return _fail(program, _unknown_option(error), ExitCode.USAGE)
    except click.exceptions.MissingParameter as error:
        return _fail(program, _missing(error), ExitCode.USAGE)
    except click.ClickException as error:
        return _fail(program, one_line(error.format_message()), ExitCode.USAGE)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except DeadpoolError as error:
        return _fail(program, str(error), error.exit_code)
    except Exception as error:
        if isinstance(error, OSError) and _output_is_full():
            sentence = f"what there is to say cannot be written ({error.strerror})"
            return _fail(program, sentence, ExitCode.USAGE)
        # The user gets one sentence whatever happens; the traceback is for the report of the
        # defect.
        if os.environ.get("DEADPOOL_TRACEBACK"):
            traceback.print_exc()
        return _fail(
            program,
            f"internal error: {type(error).__name__}: {one_line(str(error))} "
            "(DEADPOOL_TRACEBACK=1 shows where)",
            ExitCode.INTERNAL,
        )


def one_line(text: str) -> str:
    """Text of several lines as a part of a sentence."""
    return " ".join(text.split()).rstrip(".")


def printable(text: str) -> str:
    """Text on one line, in which everything is written out that a terminal would not show."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _check_words(arguments: Sequence[str]) -> None:
    """Words that no one means to write are refused, before anything makes something else of them:
    of a variable that is not set, of a document, of a script from Windows.
    """
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    for before, word in zip(["", *own], own, strict=False):
        option, equals, value = word.partition("=")
        if not word or (equals and not value and option.startswith("--")):
            option = option or (before if before.startswith("-") else "an argument")
            raise UsageError(
                f"{option}: is empty; is a variable of the shell not set? Give a value, or leave "
                "it out"
            )
        if word.startswith(_DASHES):
            raise UsageError(
                f"{word}: does not begin with - but with a dash that looks like it; type it anew"
            )
    for word in (*own, *arguments[-1:]):
        if word.endswith("\r"):
            raise UsageError(
                f"{word}: ends with a carriage return, as lines of Windows do; dos2unix mends the "
                "script that it stands in"
            )


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            "the folder in which this was called is not there any more; cd into another one"
        ) from error


def _output_is_full() -> bool:
    """Whether standard output takes nothing more. Then nothing is tried with it at the end of the
    process.
    """
    try:
        out = sys.stdout.fileno()
        os.write(out, b"\n")
    except (AttributeError, ValueError):
        return False  # It is closed, or none of the system's files.
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            os.dup2(os.open(os.devnull, os.O_WRONLY), out)
            return True
    return False


def _unknown_option(error: click.exceptions.NoSuchOption) -> str:
    ctx = error.ctx
    if ctx is None:
        return one_line(error.format_message())
    text = f"{error.option_name} is not an option of {ctx.command_path}"
    if meant := _meant(error.option_name, ctx.command):
        return f"{text}; did you mean {meant}?"
    takes_script = isinstance(ctx.command, ScriptCommand)
    return f"{text}; {_separator_hint(ctx)}" if takes_script else text


def _meant(given: str, command: click.Command) -> str | None:
    """The listed option that ``given`` is a typo or the beginning of, if there is one."""
    names = [
        name
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in (*parameter.opts, *parameter.secondary_opts)
    ]
    likeness = {name: SequenceMatcher(None, given, name).ratio() for name in names}
    if len(given) >= _BEGINNING:
        likeness |= {name: 1.0 for name in names if name.startswith(given)}
    best = max(names, key=likeness.__getitem__, default=None)
    return best if best is not None and likeness[best] >= _ALIKE else None


def _missing(error: click.exceptions.MissingParameter) -> str:
    ctx, parameter = error.ctx, error.param
    if ctx is None or not isinstance(parameter, click.Argument):
        return one_line(error.format_message())
    usage = " ".join([ctx.command_path, *ctx.command.collect_usage_pieces(ctx)])
    return f"no {parameter.human_readable_name.lower()} given: {usage}"


def _separator_hint(ctx: click.Context) -> str:
    return (
        f"arguments for the script go after --: {ctx.command_path} train.py --spares 1 -- --lr 3e-4"
    )


def _fail(program: str, sentence: str, code: ExitCode) -> int:
    click.echo(printable(f"{program}: {sentence}"), err=True)
    return code
