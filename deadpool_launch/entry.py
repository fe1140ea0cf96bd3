"""How both commands are called: arguments in, exit code out, every error told in one sentence."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from difflib import SequenceMatcher

import click

from deadpool_launch.errors import DeadpoolError, UsageError
from deadpool_launch.exits import ExitCode

#: How alike a typo and the option that was meant are; `--steps` is not meant to be `--spares`.
_ALIKE = 0.8
#: So many letters of the beginning of an option are taken for it, dashes included.
_BEGINNING = 5


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


def run_command(command: click.Command, arguments: Sequence[str], program: str) -> int:
    """Run the command; returns its exit code."""
    try:
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
    click.echo(f"{program}: {sentence}", err=True)
    return code
