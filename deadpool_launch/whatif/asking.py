"""What commands ask about a model and its layout, alike for ``plan`` and ``preflight``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeVar

import click

from deadpool_launch.errors import UsageError
from deadpool_launch.whatif.reading import Decorator, count_option
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


def model_options(command: C) -> C:
    """How large the state is, and how ranks share it."""
    return _with(command, _MODEL)


def parallel_options(command: C) -> C:
    """How ranks share the model."""
    return _with(command, _PARALLEL)


def _with(command: C, options: tuple[Decorator[Any], ...]) -> C:
    return reduce(lambda inner, option: option(inner), reversed(options), command)


def model_of(given: Mapping[str, Any]) -> Model:
    """The model that the options describe; ``params`` is given."""
    return Model(given["params"], given["dtype"], given["optimizer"], given["optimizer_dtype"])


def layout_of(
    given: Mapping[str, Any], nodes: int, spares: int, nproc_per_node: int, factor: int = 1
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
        factor=factor,
    )
