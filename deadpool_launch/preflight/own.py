"""What the launcher puts where all nodes must see it, and what a machine says that is all nodes."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from deadpool_launch.backends.base import Check
from deadpool_launch.options import LaunchOptions
from deadpool_launch.preflight import node_rules
from deadpool_launch.preflight.facts import Answers, Directories, ProbeTask
from deadpool_launch.preflight.probe import probe, token_path


def share(options: LaunchOptions, token: str) -> tuple[Directories, list[Check]]:
    """Put the token into the directories that all nodes must see; also says where it could not be
    put. Raises ``OSError`` for the run directory.
    """
    run_dir = Path(options.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    token_path(run_dir, token).write_text(token)
    if options.checkpoint_dir is None:
        return Directories(options.run_dir), []
    checkpoint_dir = Path(options.checkpoint_dir)
    try:
        token_path(checkpoint_dir, token).write_text(token)
    except OSError as error:
        return Directories(options.run_dir), [node_rules.not_looked_at(checkpoint_dir, error)]
    return Directories(options.run_dir, options.checkpoint_dir), []


def unshare(directories: Directories, token: str) -> None:
    """The opposite."""
    for directory in (directories.run_dir, directories.checkpoint_dir):
        if directory:
            with contextlib.suppress(OSError):
                token_path(Path(directory), token).unlink()


def local_answers(nodes: Sequence[str], options: LaunchOptions) -> Answers:
    """All nodes are this machine. Blocks."""
    token = secrets.token_hex(8)
    try:
        shared, problems = share(options, token)
    except OSError as error:
        return Answers(problems=(node_rules.run_dir_problem(Path(options.run_dir), error),))
    try:
        own = probe(
            ProbeTask(
                run_dir=options.run_dir,
                token=token,
                checkpoint_dir=shared.checkpoint_dir,
                launcher_host="127.0.0.1",
            )
        )
    finally:
        unshare(shared, token)
    said = {node: {**own, "node": node, "received_at": own["clock"]} for node in nodes}
    return Answers(
        own={**own, "node": nodes[0]},
        asked=tuple(nodes),
        said=said,
        directories=shared,
        problems=tuple(problems),
    )
