"""What ``--dry-run`` prints: the plan and the exact commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from deadpool_launch import movers
from deadpool_launch.channel import SECRET_NAME
from deadpool_launch.classify.rules import all_rules
from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import agent_argv
from deadpool_launch.prepare import (
    carriers,
    choose_folder,
    command_of,
    look,
    make_backend,
    make_mover_starter,
    movers_argv,
    settle_spares,
)


def show(options: LaunchOptions) -> str:
    """The plan for a person, with the command that would start each agent.

    Raises ``DeadpoolError`` for a file of rules that the job would not start with.
    """
    backend = make_backend(options)
    all_rules(None if options.rules is None else Path(options.rules))
    options = settle_spares(backend, options)
    prepared = look(backend, options)
    allocation, plan = prepared.allocation, prepared.plan
    lines = [
        f"job {allocation.job_id} on {_where(options)}, run directory {options.run_dir}",
        f"script {shlex.join([options.script, *options.script_args])}",
        "",
        plan.describe(),
        "",
    ]
    if options.checkpoint_dir is not None:
        folder, _ = choose_folder(options, allocation, command_of(options, plan))
        lines.insert(2, f"a durable checkpoint every {options.checkpoint_every} steps in {folder}")
    spares = plan.spares if options.spare_start == "at-start" else ()
    for node in (*plan.active, *spares):
        connect = f"{allocation.launcher_host}:PORT"
        argv = agent_argv(sys.executable, node, connect, options.run_dir, 1, carriers(options))
        lines.append(shlex.join(backend.agent_command(node, argv, agent_log_path(options, node))))
    if options.spare_start == "on-failure" and plan.spares:
        lines.append(f"on failure, the same for {', '.join(plan.spares)}")
    if plan.extras:
        lines.append(f"when no spare is left, the same for {', '.join(plan.extras)}")
    starter = make_mover_starter(backend, allocation.job_id, options)
    nodes = [*plan.active, *spares]
    if starter is not None and len(nodes) >= 2:
        argv = movers_argv(allocation.job_id, Path(options.run_dir) / SECRET_NAME, 1)
        log_path = Path(options.run_dir) / "logs" / movers.log_name(1, 1)
        lines.append("once these have answered, and again whenever the nodes change:")
        lines.append(shlex.join(starter.command(nodes, argv, movers.world_name(1), log_path)))
    return "\n".join(lines)


def _where(options: LaunchOptions) -> str:
    named = options.site_config.name
    return options.site if named in ("generic", "local") else f"{options.site} (site {named})"


def agent_log_path(options: LaunchOptions, node: str) -> Path:
    """Where the output of the node's agent goes."""
    return Path(options.run_dir) / "logs" / f"agent-{node}.log"
