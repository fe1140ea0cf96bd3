"""What commands ask about a model, its layout and its replicas, alike for all that ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeVar

import click

from deadpool_launch.errors import UsageError
from deadpool_launch.policy.files import site_file, user_file
from deadpool_launch.policy.merge import settle
from deadpool_launch.whatif.reading import Decorator, count_option, file_option
from deadpool_launch.whatif.replication import FACTOR, INTERVAL, Replication, flag_of, replication
from deadpool_launch.whatif.sizes import DTYPES, OPTIMIZERS, SHARDINGS, Layout, Model

C = TypeVar("C", bound=Callable[..., Any])

_MODEL: tuple[Decorator[Any], ...] = (
    count_option("--params", 1, "Parameters of the model, such as 7B."),
    click.option(
        "--dtype", type=click.Choice(list(DTYPES)), default="fp32", help="Theirs.  [default: fp32]"
    ),
    click.option(
        "--optimizer",
        type=click.Choice(list(OPTIMIZERS)),
        default="adamw",
        help="What it keeps for a parameter counts.  [default: adamw]",
    ),
    click.option(
        "--optimizer-dtype",
        type=click.Choice(list(DTYPES)),
        help="Type of what the optimizer keeps.  [default: that of the parameters]",
    ),
    click.option(
        "--sharding",
        type=click.Choice(SHARDINGS),
        default="ddp",
        help="How data-parallel ranks share the state.  [default: ddp]",
    ),
    count_option("--shard", 2, "With hsdp: ranks over which a replica is sharded."),
)
_PARALLEL: tuple[Decorator[Any], ...] = (
    count_option("--tp", 1, "Tensor-parallel ranks.  [default: 1]"),
    count_option("--pp", 1, "Stages of the pipeline.  [default: 1]"),
)
#: Options that say the same as keys of a policy, with what they mean.
_REPLICAS = {
    FACTOR: "Nodes that keep each replica.",
    INTERVAL: "Steps from one replica to the next.",
}
policy_option = file_option(
    "--policy", "policy", "FILE", "Your policy.  [default: ~/.config/deadpool/policy.yaml]"
)


def model_options(command: C) -> C:
    """How large the state is, and how ranks share it."""
    return _with(command, _MODEL)


def parallel_options(command: C) -> C:
    """How ranks share the model."""
    return _with(command, _PARALLEL)


def replication_options(command: C) -> C:
    """Which policy holds, and what to take instead of what it says of replicas."""
    counts = (
        count_option(flag_of(key), 1, f"{text}  [default: the policy's]")
        for key, text in _REPLICAS.items()
    )
    return _with(command, (policy_option, *counts))


def _with(command: C, options: tuple[Decorator[Any], ...]) -> C:
    return reduce(lambda inner, option: option(inner), reversed(options), command)


def model_of(given: Mapping[str, Any]) -> Model:
    """The model that the options describe; ``params`` is given."""
    return Model(given["params"], given["dtype"], given["optimizer"], given["optimizer_dtype"])


def replication_of(given: Mapping[str, Any], environ: Mapping[str, str]) -> Replication:
    """What a launch with this policy would do. Raises ``UsageError``: a file is wrong."""
    values = {key: given[key.replace(".", "_")] for key in _REPLICAS}
    named = {key: value for key, value in values.items() if value is not None}
    user = user_file(environ, given["policy"])
    return replication(settle(site_file(environ), user, named, on_slurm=True))


def layout_of(
    given: Mapping[str, Any], nodes: int, spares: int, nproc_per_node: int, replicas: Replication
) -> Layout:
    """The layout that they describe. Raises ``UsageError`` for ``--shard`` out of place."""
    if given["shard"] is not None and given["sharding"] != "hsdp":
        raise UsageError("--shard: is for --sharding hsdp only")
    return Layout(
        nodes=nodes,
        spares=spares,
        nproc_per_node=nproc_per_node,
        sharding=given["sharding"],
        tensor=given["tp"] or 1,
        pipeline=given["pp"] or 1,
        shard=given["shard"] or 1,
        factor=replicas.factor,
        interval=replicas.interval,
        warm_spares=replicas.warm_spares,
    )
