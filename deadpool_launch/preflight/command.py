"""``deadpool preflight``: whether hot swap can work on this cluster, allocation or machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from rich.text import Text

from deadpool_launch import terminal
from deadpool_launch.backends.base import Allocation, Check
from deadpool_launch.backends.local import LocalBackend
from deadpool_launch.backends.slurm import SlurmBackend
from deadpool_launch.controller.wording import plural
from deadpool_launch.display import print_table
from deadpool_launch.errors import DeadpoolError, UnsuitableError, UsageError
from deadpool_launch.exits import ExitCode, PreflightCode
from deadpool_launch.operators import RUNS
from deadpool_launch.options import LaunchOptions, Mpi, check_mpi, choose_nproc
from deadpool_launch.plan import make_plan
from deadpool_launch.policy.effective import effective
from deadpool_launch.preflight import room, rules, self_test, slurm_rules, table
from deadpool_launch.preflight.facts import Facts
from deadpool_launch.preflight.world import try_world
from deadpool_launch.prepare import make_backend, make_mover_starter, settle_spares
from deadpool_launch.rehearsal_run import Interrupted, Interrupts
from deadpool_launch.sites import files
from deadpool_launch.sites.cluster import cluster_name
from deadpool_launch.sites.model import SiteConfig
from deadpool_launch.whatif.asking import (
    layout_of,
    model_of,
    model_options,
    parallel_options,
    policy_option,
)
from deadpool_launch.whatif.reading import count_option, size_option, time_option
from deadpool_launch.whatif.replication import Replication
from deadpool_launch.whatif.sizes import Layout
from deadpool_slurm.environ import read_job

#: Options that policies know too, by their keys there.
_KEYS = {
    "spares": "spares.count",
    "mpi": "replication.mpi",
    "agent_start_timeout": "agent_start_timeout",
}
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Found:
    """What there is to tell."""

    checks: tuple[Check, ...]
    options: LaunchOptions
    allocation: Allocation | None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@count_option("--nodes", 1, "Active nodes.  [default: all but the spares]")
@click.option(
    "--spares", type=click.IntRange(min=0), metavar="N", help="Nodes held back.  [default: 0]"
)
@click.option(
    "--nproc-per-node",
    default="auto",
    metavar="auto|gpu|N",
    help="Ranks on each node.  [default: auto]",
)
@click.option("--site", metavar="NAME", help="As for deadpool-launch.")
@policy_option
@click.option("--mpi", type=click.Choice(get_args(Mpi)), help="Try this kind of MPI.")
@click.option("--assume-no-kill", is_flag=True, help="The job was submitted with --no-kill.")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help=f"Where run directories will be.  [default: {RUNS}]",
)
@time_option("--agent-start-timeout", "Time for the nodes to answer.  [default: 60s]")
@size_option("--state-bytes", "State of each rank, such as 12G; or name a model:")
@model_options
@parallel_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--self-test", "tests", is_flag=True, help="Kill a node of a small job, and see it go on."
)
def preflight(as_json: bool, tests: bool, **given: Any) -> int:
    """Say whether hot swap can work here, and what to do where it cannot.

    Inside of an allocation the nodes are asked with one step; on a login node only what Slurm says
    is known. Nothing is left behind.

    Exit codes: 0 it can work, 2 wrong command line, 10 it cannot, 50 nothing speaks against it but
    not all that decides it is known, 51 the self-test failed.
    """
    state, options = _state(given), _options(given)
    outside = options.site == "slurm" and read_job(os.environ) is None
    if outside and tests:
        raise UnsuitableError(
            "--self-test: there are no nodes to test; run it inside of an allocation (salloc "
            "--no-kill --nodes=3), or with --site local"
        )
    if outside:
        found = _look_from_outside(options, given, state)
        return _tell(found, as_json)
    try:
        with Interrupts() as interrupts, _folder(given["run_dir"]) as base:
            options = msgspec.structs.replace(options, run_dir=str(base))
            found = asyncio.run(_interruptible(_look(options, given, state), interrupts))
            if tests:
                found = _test(found, base, interrupts, quiet=as_json)
    except Interrupted as error:
        click.echo("Interrupted; nothing of it runs any more.", err=True)
        return error.exit_code
    return _tell(found, as_json)


# ---------------------------------------------------------------- options


def _state(given: Mapping[str, Any]) -> room.State:
    if given["params"] is not None and given["state_bytes"] is not None:
        raise UsageError("--params and --state-bytes: give one of them")
    if given["params"] is not None:
        return room.State(model=model_of(given))
    if given["state_bytes"] is not None and given["sharding"] == "zero1":
        raise UsageError(
            "--state-bytes: does not say which part of it is sharded with --sharding zero1; give "
            "--params"
        )
    return room.State(rank_nbytes=given["state_bytes"])


def _options(given: Mapping[str, Any]) -> LaunchOptions:
    """As ``deadpool-launch`` would have them, without a script."""
    job = read_job(os.environ)
    at = files.choose(
        given["site"],
        os.environ,
        cluster_name,
        partition=job.partition if job is not None else None,
        qos=job.qos if job is not None else None,
    ).site
    named = {key: given[name] for name, key in _KEYS.items() if given[name] is not None}
    policy = effective(os.environ, given["policy"], named, on_slurm=at.kind == "slurm")
    check_mpi(policy["mpi"], at)
    gpus = job.gpus_on_node if job is not None else None
    return LaunchOptions(
        script="",
        site=at.kind,
        site_config=at,
        nodes=given["nodes"],
        nproc_per_node=choose_nproc(given["nproc_per_node"], gpus or at.gpus_per_node),
        assume_no_kill=given["assume_no_kill"],
        **policy,
    )


def _layout(given: Mapping[str, Any], options: LaunchOptions, active: int, spares: int) -> Layout:
    replicas = Replication(
        options.replication_factor,
        options.replication_interval,
        warm_spares=options.spare_start == "at-start",
    )
    layout = layout_of(given, active, spares, options.nproc_per_node, replicas)
    layout.check(None)
    layout.check_factor()
    return layout


# ---------------------------------------------------------------- looking


def _look_from_outside(
    options: LaunchOptions, given: Mapping[str, Any], state: room.State
) -> Found:
    """On a login node."""
    backend = SlurmBackend(site=options.site_config)
    facts = backend.cluster()
    layout = None
    if options.nodes is not None:
        layout = _layout(given, options, options.nodes, options.spares)
    return Found(tuple(rules.table(options, facts, layout, state)), options, None)


async def _interruptible(looking: Coroutine[Any, Any, Found], interrupts: Interrupts) -> Found:
    task = asyncio.create_task(looking)
    while not task.done():
        await asyncio.wait({task}, timeout=_POLL_S)
        if interrupts.arrived:
            task.cancel()
            await asyncio.wait({task})
            raise Interrupted(interrupts.arrived[0])
    return task.result()


async def _look(options: LaunchOptions, given: Mapping[str, Any], state: room.State) -> Found:
    backend = make_backend(options)
    options = settle_spares(backend, options)
    allocation = backend.discover(options)
    # What is wrong with the numbers of nodes shows before any of them is asked.
    whole = make_plan(allocation.nodes, allocation.batch_host, options)
    layout = _layout(given, options, len(whole.active), len(whole.spares))
    facts = await backend.examine(options, thorough=True)
    facts = await _with_world(backend, allocation, options, facts)
    checks = rules.table(options, facts, layout, state)
    return Found((*checks, _plan_check(allocation, options, checks)), options, allocation)


def _plan_check(allocation: Allocation, options: LaunchOptions, checks: Sequence[Check]) -> Check:
    left_out = [check.leave_out for check in checks if check.leave_out is not None]
    try:
        plan = make_plan(allocation.nodes, allocation.batch_host, options, left_out)
    except DeadpoolError as error:
        return rules.plan_check(None, str(error))
    return rules.plan_check(plan, "")


async def _with_world(
    backend: SlurmBackend | LocalBackend,
    allocation: Allocation,
    options: LaunchOptions,
    facts: Facts,
) -> Facts:
    """Also try an MPI world over the nodes that answered, if anybody named a kind of MPI."""
    answers, site = facts.answers, options.site_config
    if answers is None or len(answers.said) < 2 or answers.own.get("mpi4py") is None:
        return facts
    kind: str | None = options.mpi if options.mpi != "none" else None
    if isinstance(backend, SlurmBackend):
        listed = facts.slurm.mpi_kinds if facts.slurm is not None else None
        kind = slurm_rules.mpi_kind(options.mpi, site.mpi_kinds, listed)
    if kind is None:
        return facts
    starter = make_mover_starter(
        backend, allocation.job_id, msgspec.structs.replace(options, mpi=kind)
    )
    assert starter is not None
    world = await try_world(starter, kind, sorted(answers.said), Path(options.run_dir))
    return Facts(nodes=facts.nodes, slurm=facts.slurm, answers=answers, world=world)


# ---------------------------------------------------------------- the self-test


def _test(found: Found, base: Path, interrupts: Interrupts, *, quiet: bool) -> Found:
    if rules.verdict(found.checks) == ExitCode.UNSUITABLE:
        skipped = Check("self-test", None, "not run, as a check failed", "see above", unknown=True)
        return Found((*found.checks, skipped), found.options, found.allocation)
    allocation, options = found.allocation, found.options
    assert allocation is not None
    left_out = {check.leave_out for check in found.checks}
    usable = sum(node not in left_out for node in allocation.nodes)
    active = self_test.active_nodes(usable, site=options.site)
    slurm = None
    if options.site == "slurm":
        client = SlurmBackend(site=options.site_config).client
        slurm = self_test.Slurm(client, allocation.job_id)
    if not quiet:
        click.echo("Self-test: a small job is started, and loses a node.", err=True)
    run_dir = base / "self-test"
    check = self_test.run(options, active, run_dir, slurm, interrupts)
    if check.ok is False:
        check = _kept(check, run_dir)
    return Found((*found.checks, check), found.options, found.allocation)


def _kept(check: Check, run_dir: Path) -> Check:
    """Its run directory stays, under a name that says what it is."""
    kept = run_dir.parent.with_name(f"self-test-{secrets.token_hex(3)}")
    if not run_dir.exists():
        return Check(check.name, check.ok, check.text)
    run_dir.rename(kept)
    return Check(check.name, check.ok, check.text, f"deadpool events {kept} tells more")


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A folder beside the run directories; it goes away, and so do those that were made for it."""
    parent = (given or Path(RUNS)).absolute()
    base = parent / f"preflight-{secrets.token_hex(4)}"
    made = [folder for folder in (base, *base.parents) if not folder.exists()]
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)
        for folder in made[1:]:
            with contextlib.suppress(OSError):
                folder.rmdir()


# ---------------------------------------------------------------- telling


def _tell(found: Found, as_json: bool) -> int:
    checks = found.checks
    tested = [check for check in checks if check.name == "self-test"]
    judged = [check for check in checks if check.name != "self-test"]
    code: int = rules.verdict(judged)
    if code == ExitCode.OK and any(check.ok is False for check in tested):
        code = PreflightCode.SELF_TEST_FAILED
    text = (
        "The self-test failed, though no check did."
        if code == PreflightCode.SELF_TEST_FAILED
        else rules.verdict_text(judged)
    )
    if as_json:
        where = found.allocation
        told = {
            "site": found.options.site_config.name,
            "job": None if where is None else where.job_id,
            "nodes": [] if where is None else list(where.nodes),
            "checks": table.as_json(checks),
            "verdict": text,
            "exit_code": int(code),
        }
        click.echo(json.dumps(told, indent=2))
        return code
    console = terminal.console()
    console.print(f"{_where(found)}\n", markup=False, soft_wrap=True)
    print_table(table.draw(checks, console.width), console)
    print_table(Text(f"\n{text}"), console)
    return code


def _where(found: Found) -> str:
    site: SiteConfig = found.options.site_config
    name = "" if site.name == "generic" else f" (site {site.name})"
    if found.allocation is None:
        return f"Outside of an allocation{name}"
    if found.options.site == "local":
        return f"{plural(len(found.allocation.nodes), 'node')} as process trees of this machine"
    return f"Job {found.allocation.job_id}, {len(found.allocation.nodes)} nodes{name}"
