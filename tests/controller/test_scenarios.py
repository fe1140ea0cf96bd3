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
    drain NODE [WORDS]         slurm NODE STATE HEALTH [WORDS]
    limit SECONDS [ending] WORDS                   holding RANKS STEP         at-boundary RANKS STEP
    stopped RANKS 5            stop 15              tick   (time passes until the next deadline)
    ranks-up RANKS             attached RANKS              done RANKS STEP (with its copies)
    brings-state RANKS (attached, with a state that steps were made in)
    snapshotted RANKS STEP DIGEST                          protected RANKS
    parked RANKS               inventory [n1 n2]           uncopied RANKS STEP (its copies are gone)
    rebuilt RANKS              restored RANKS [digest]     restore-failed RANK WORDS
    copied RANKS STEP EPOCH    replicator-up n1            small NBYTES NODE (warm, little memory)
    train-to STEP              damaged RANK STEP (its own copy is)
    stands NODE [asked=N] [moved=RANKS] [late=RANK:STEP:SECONDS[/GROUP:ENTERED[:WAITED]] ...]
    paces NODE MS MS ... [epoch=1] (own time of its ranks)
    no-stack RANK WORDS        tried NODE [NODES...] (it does not reach these)
    free NODE (an unused one that the job gets)
    ready NODE WORDS           NodeReady
    saved RANKS STEP [epoch=1] committed STEP [KEPT...] [epoch=1]   not-committed STEP WORDS

``quietly COMMAND`` shows only how many actions there were.
"""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from workbench import Bench, in_group, render

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
        if field.name in ("active", "spares", "extras"):
            settings[field.name] = tuple(filter(None, value.split(",")))
        elif field.name in ("shrink", "resume"):
            settings[field.name] = value == "1"
        elif field.name == "checkpoints":
            settings[field.name] = tuple(unfold(value))
        else:
            words_only = field.name in ("spare_start", "checkpoint_dir", "on_drain", "straggler")
            settings[field.name] = value if words_only else _number(value)
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
    defaults: dict[str, Any] = {"aborted_s": 0.0, "groups": 1, "unprotected": 0, "confirmed": -1}
    for field in msgspec.structs.fields(kind):
        if field.name not in given:
            values[field.name] = defaults.get(field.name, "")
            continue
        word = given.pop(field.name).replace("_", " ")
        values[field.name] = int(word) if field.type is int else word
    assert not given, f"not in {words[0]}: {given}"
    if kind is protocol.StepDone:
        values.update(duration_s=0.1, blocked_s=0.0, loss=None)
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


def _epoch(words: list[str]) -> dict[str, int]:
    return {word[:5]: int(word[6:]) for word in words if word.startswith("epoch=")}


def _standing(bench: Bench, word: str) -> protocol.Standing:
    """``3:21:150/a:117`` is past no. 117 of group a, ``2:21:150/a:118:140`` waits in no. 118."""
    place, *groups = word.split("/")
    rank, step, step_s = place.split(":")
    found = []
    for group in groups:
        name, entered, waited, *_ = f"{group}:0".split(":")
        found.append(in_group(int(entered), float(waited), name))
    return bench.standing(int(rank), int(step), float(step_s), *found)


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
        case "free", [node]:
            bench.free(node)
            return bench.tick_now()
        case "stopped", [ranks, seconds]:
            return [a for rank in unfold(ranks) for a in bench.stopped(rank, float(seconds))]
        case "stop", [signal]:
            return bench.stop(int(signal))
        case "tick", []:
            return bench.tick()
        case "ranks-up", [ranks]:
            return bench.ranks_up(unfold(ranks))
        case "attached", [ranks]:
            return bench.attached(unfold(ranks))
        case "brings-state", [ranks]:
            return [
                action
                for rank in unfold(ranks)
                for action in bench.said(
                    rank, msgspec.structs.replace(bench.attaching(rank), brings_state=True)
                )
            ]
        case "done", [ranks, step]:
            return bench.steps_done(unfold(ranks), int(step))
        case "snapshotted", [ranks, step, digest]:
            return bench.snapshotted(unfold(ranks), int(step), digest)
        case "protected", [ranks]:
            return bench.protected(unfold(ranks))
        case "parked", [ranks]:
            return bench.parked(unfold(ranks))
        case "inventory", nodes:
            return bench.inventory(*nodes)
        case "uncopied", [ranks, step]:
            for rank in unfold(ranks):
                bench.uncopied(rank, int(step))
            return []
        case "damaged", [rank, step]:
            bench.damaged(int(rank), int(step))
            return []
        case "copied", [ranks, step, epoch]:
            for rank in unfold(ranks):
                bench.copied(rank, int(step), int(epoch))
            return []
        case "small", [nbytes, node]:
            return bench.warm(node, int(nbytes))
        case "restore-failed", [rank, *reason]:
            return bench.restore_failed(int(rank), " ".join(reason))
        case "stands", [node, *rest]:
            given = [word.split("=", 1) for word in rest]
            late = [_standing(bench, word) for name, word in given if name == "late"]
            moved = [rank for name, word in given if name == "moved" for rank in unfold(word)]
            asked = sum(int(word) for name, word in given if name == "asked")
            return bench.standings(node, late, moved, asked)
        case "paces", [node, *rest]:
            own = [float(word) / 1000 for word in rest if not word.startswith("epoch=")]
            return bench.paces(node, own, **_epoch(rest))
        case "tried", [node, *unreached]:
            return bench.tried(node, *unreached)
        case "no-stack", [rank, *reason]:
            return bench.no_stack(int(rank), " ".join(reason))
        case "saved", [ranks, step, *rest]:
            return bench.saved(unfold(ranks), int(step), **_epoch(rest))
        case "committed", [step, *rest]:
            kept = [int(word) for word in rest if not word.startswith("epoch=")]
            return bench.committed(int(step), *kept, **_epoch(rest))
        case "not-committed", [step, *reason]:
            return bench.not_committed(int(step), " ".join(reason))
        case "ready", [node, *why]:
            return bench.ready(node, " ".join(why))
        case "replicator-up", [node]:
            return bench.replicator_up(node)
        case "rebuilt", [ranks]:
            return bench.rebuilt(unfold(ranks))
        case "restored", [ranks, *digest]:
            return bench.restored(unfold(ranks), *digest)
        case "drain", [node, *words]:
            return bench.drain(node, "is drained (" + (" ".join(words) or "asked for") + ")")
        case "slurm", [node, state, health, *reason]:
            return bench.node_state(node, state, health, " ".join(reason))
        case "limit", [left_s, "ending", *why]:
            return bench.limit_near(float(left_s), " ".join(why), ending=True)
        case "limit", [left_s, *why]:
            return bench.limit_near(float(left_s), " ".join(why))
        case "holding", [ranks, step]:
            return bench.holding(unfold(ranks), int(step))
        case "at-boundary", [ranks, step]:
            return bench.at_boundary(unfold(ranks), int(step))
        case "train-to", [step]:
            return bench.train_to(int(step))
        case _:
            raise AssertionError(f"not a command: {command}")
