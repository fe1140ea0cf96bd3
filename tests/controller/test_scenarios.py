"""Golden traces: each file in ``scenarios/`` is a story, told in events and answered by actions.

A file is a header (lines with ``#``: the story), then blocks of a command, ``----`` and what the
controller asked for. To add one, write header and commands with ``----`` after each; then run with
``DEADPOOL_REWRITE=1`` and read the diff: it is only right if you can say why each line is there.

Commands (RANKS is like ``0-1,4``)::

    job active=n1,n2 spares=n3 nproc=2 [any field of Config=value]
    at 5.3                     set the clock        start                      JobStarted
    connected n1 n2            warm n1 n2           agents-up                  start, all come up
    agent-failed n3 WORDS      agent-lost n2 seen|inferred WORDS
    say RANKS Message k=v ...  [born=1] [node=n2]: from a process that is no longer current
    exit RANKS code=1|signal=9 [born=1] [node=n2]
    stopped RANKS 5            stop 15              tick   (time passes until the next deadline)
    ranks-up RANKS             done RANKS STEP [digest]    parked RANKS 19,20 (or -)
    rebuilt RANKS              restored RANKS [digest]     train-to STEP

``quietly COMMAND`` shows only how many actions there were.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from workbench import Bench, render

from deadpool_launch.controller.config import Config
from deadpool_launch.controller.events import Action
from deadpool_runtime import protocol

SCENARIOS = sorted(Path(__file__).parent.joinpath("scenarios").glob("*.txt"))
RULE = "----"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_trace_is_as_written(path: Path) -> None:
    written = path.read_text()
    got = replay(written)
    if os.environ.get("DEADPOOL_REWRITE"):
        path.write_text(got)
        return
    assert got == written, "if the change is meant: DEADPOOL_REWRITE=1, then read the diff"


def replay(text: str) -> str:
    """The file with every block's answer as the controller gives it now."""
    header = [line for line in text.splitlines() if line.startswith("#")]
    bench: Bench | None = None
    blocks = []
    for command in commands(text):
        if command.startswith("job "):
            bench = Bench(_config(command.split()[1:]))
            answer = ["ok"]
        else:
            assert bench is not None, "a scenario begins with `job`"
            answer = _answer(bench, command)
        blocks.append("\n".join([command, RULE, *answer]))
    return "\n".join(header) + "\n\n" + "\n\n".join(blocks) + "\n"


def commands(text: str) -> list[str]:
    """The line before each rule."""
    lines = text.splitlines()
    return [lines[i - 1] for i, line in enumerate(lines) if line == RULE]


def _answer(bench: Bench, command: str) -> list[str]:
    quiet = command.startswith("quietly ")
    actions = perform(bench, command.removeprefix("quietly "))
    if quiet:
        return [f"({len(actions)} actions)"]
    return render(actions) or ["(nothing)"]


def _config(words: list[str]) -> Config:
    given = dict(word.split("=", 1) for word in words)
    given["nproc_per_node"] = given.pop("nproc")
    settings: dict[str, Any] = {}
    for field in fields(Config):
        if field.name not in given:
            continue
        value = given.pop(field.name)
        if field.name in ("active", "spares"):
            settings[field.name] = tuple(filter(None, value.split(",")))
        else:
            settings[field.name] = value if field.name == "spare_start" else _number(value)
    assert not given, f"not in Config: {given}"
    # Short, so that the stories are; see the comment at the default.
    settings.setdefault("park_s", 30.0)
    return Config(**settings)


def _number(word: str) -> int | float:
    return float(word) if "." in word else int(word)


def unfold(word: str) -> list[int]:
    """``0-1,4`` as numbers; ``-`` for none."""
    numbers: list[int] = []
    for part in [] if word == "-" else word.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _message(words: list[str]) -> protocol.FromRank:
    kind = getattr(protocol, words[0])
    given = dict(word.split("=", 1) for word in words[1:])
    values: dict[str, Any] = {}
    defaults: dict[str, Any] = {"layout": "ddp", "aborted_s": 0.0, "groups": 1}
    for field in msgspec.structs.fields(kind):
        if field.name not in given:
            values[field.name] = defaults.get(field.name, "")
            continue
        word = given.pop(field.name).replace("_", " ")
        if field.name == "slots":
            values[field.name] = unfold(word)
        else:
            values[field.name] = int(word) if field.type is int else word
    assert not given, f"not in {words[0]}: {given}"
    if kind is protocol.StepDone:
        values.update(own=b"", duration_s=0.1, blocked_s=0.0, loss=None)
    if kind is protocol.ScriptFailed:
        values["exit_code"] = 1
    if kind is protocol.RankUp:
        values["pid"] = 1
    message: protocol.FromRank = kind(**values)
    return message


def _process(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Take ``born=`` and ``node=`` out of the words."""
    which: dict[str, Any] = {}
    rest = []
    for word in words:
        if word.startswith("born="):
            which["born"] = int(word[5:])
        elif word.startswith("node="):
            which["node"] = word[5:]
        else:
            rest.append(word)
    return rest, which


def perform(bench: Bench, command: str) -> list[Action]:
    """Feed the events of one command."""
    name, *words = command.split()
    match name, words:
        case "at", [time]:
            bench.now = float(time)
            return []
        case "start", []:
            return bench.start()
        case "agents-up", []:
            return bench.agents_up()
        case "connected", nodes:
            return [action for node in nodes for action in bench.connected(node)]
        case "warm", nodes:
            return [action for node in nodes for action in bench.warm(node)]
        case "agent-failed", [node, *reason]:
            return bench.agent_failed(node, " ".join(reason))
        case "agent-lost", [node, kind, *evidence]:
            return bench.agent_lost(node, " ".join(evidence), kind)
        case "say", [ranks, *rest]:
            rest, which = _process(rest)
            body = _message(rest)
            return [a for rank in unfold(ranks) for a in bench.said(rank, body, **which)]
        case "exit", [ranks, *rest]:
            rest, which = _process(rest)
            how = dict(word.split("=") for word in rest)
            code = int(how["code"]) if "code" in how else None
            signal = int(how["signal"]) if "signal" in how else None
            return [a for r in unfold(ranks) for a in bench.exited(r, code, signal, **which)]
        case "stopped", [ranks, seconds]:
            return [a for rank in unfold(ranks) for a in bench.stopped(rank, float(seconds))]
        case "stop", [signal]:
            return bench.stop(int(signal))
        case "tick", []:
            return bench.tick()
        case "ranks-up", [ranks]:
            return bench.ranks_up(unfold(ranks))
        case "done", [ranks, step, *digest]:
            return bench.steps_done(unfold(ranks), int(step), *digest)
        case "parked", [ranks, slots]:
            return bench.parked(unfold(ranks), unfold(slots))
        case "rebuilt", [ranks]:
            return bench.rebuilt(unfold(ranks))
        case "restored", [ranks, *digest]:
            return bench.restored(unfold(ranks), *digest)
        case "train-to", [step]:
            return bench.train_to(int(step))
        case _:
            raise AssertionError(f"not a command: {command}")
