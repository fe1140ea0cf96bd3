"""What ``--dry-run`` prints: the plan and the exact commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from deadpool_launch.options import LaunchOptions
from deadpool_launch.plan import agent_argv
from deadpool_launch.prepare import look, make_backend


def show(options: LaunchOptions) -> str:
    """The plan for a person, with the command that would start each agent."""
    backend = make_backend(options)
    prepared = look(backend, options)
    allocation, plan = prepared.allocation, prepared.plan
    lines = [
        f"job {allocation.job_id} on {options.site}, run directory {options.run_dir}",
        f"script {shlex.join([options.script, *options.script_args])}",
        "",
        plan.describe(),
        "",
    ]
    spares = plan.spares if options.spare_start == "at-start" else ()
    for node in (*plan.active, *spares):
        argv = agent_argv(sys.executable, node, f"{allocation.launcher_host}:PORT", options.run_dir)
        lines.append(shlex.join(backend.agent_command(node, argv, agent_log_path(options, node))))
    if options.spare_start == "on-failure" and plan.spares:
        lines.append(f"on failure, the same for {', '.join(plan.spares)}")
    return "\n".join(lines)


def agent_log_path(options: LaunchOptions, node: str) -> Path:
    """Where the output of the node's agent goes."""
    return Path(options.run_dir) / "logs" / f"agent-{node}.log"
