"""Bytes of state: against what the runtime used when it was measured, and against themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_launch.errors import UsageError
from deadpool_launch.whatif.sizes import OWN_NBYTES, Layout, Model, sizes

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "overhead.json"


def recorded(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text())["results"][case]
    return found


@pytest.mark.parametrize("layout", ["ddp", "zero1", "fsdp"])
def test_bytes_are_those_that_were_measured(layout: str) -> None:
    """A model of float32 and AdamW on two nodes with a rank each."""
    model = Model(recorded("ddp, 6 layers of 512, 512 tokens")["d2h_nbytes_a_step"] // 12)
    found = sizes(model, Layout(nodes=2, spares=0, nproc_per_node=1, sharding=layout))
    measured = recorded(f"{layout}, 6 layers of 512, 512 tokens")
    assert found.copied_nbytes == pytest.approx(measured["d2h_nbytes_a_step"], rel=0.002)
    assert found.sent_nbytes == pytest.approx(measured["h2h_nbytes_a_step"], abs=3 * OWN_NBYTES)
    assert found.need.nbytes == pytest.approx(measured["arena_nbytes_a_node"], rel=0.005)
    assert found.alone is (layout != "ddp")


def test_types_and_optimizers_count() -> None:
    def copied(**of: str) -> float:
        layout = Layout(nodes=2, spares=0, nproc_per_node=1, sharding="ddp")
        return (sizes(Model(10**9, **of), layout).copied_nbytes - OWN_NBYTES) / 1e9

    assert copied() == 12
    assert copied(dtype="bf16") == 6
    assert copied(dtype="bf16", optimizer_dtype="fp32") == 10
    assert copied(optimizer="sgd") == 4
    assert copied(optimizer="sgd-momentum") == 8


def test_a_mesh_with_a_replicated_dimension_sends_nothing_but_the_own_part() -> None:
    layout = Layout(nodes=4, spares=1, nproc_per_node=4, sharding="hsdp", shard=4)
    found = sizes(Model(10**9), layout)
    assert not found.alone
    assert found.sent_nbytes == 4 * 2 * OWN_NBYTES
    assert found.copied_nbytes == pytest.approx(12e9, rel=1e-3)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.integers(2, 6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["ddp", "zero1", "fsdp"]),
)
def test_the_state_of_the_job_is_the_models_whatever_the_layout(
    nodes: int, per_node: int, tensor: int, pipeline: int, sharding: str
) -> None:
    layout = Layout(nodes, 1, per_node, sharding, tensor, pipeline)
    if layout.world % (tensor * pipeline):
        with pytest.raises(UsageError, match="not a multiple"):
            layout.check(None)
        return
    layout.check(layout.data)
    found = sizes(Model(10**8), layout)
    assert found.state_nbytes == pytest.approx(12e8, rel=0.01)
    least = 12e8 / (tensor * pipeline * (layout.data if sharding == "fsdp" else 1))
    assert found.copied_nbytes >= 0.3 * least
    assert found.memory_nbytes >= found.need.nbytes >= 3 * found.copied_nbytes


def test_many_ranks_are_planned_too() -> None:
    layout = Layout(nodes=256, spares=4, nproc_per_node=8, sharding="fsdp", tensor=8)
    found = sizes(Model(70 * 10**9), layout)
    assert found.copied_nbytes == pytest.approx(8 * 12 * 70e9 / 2048, rel=0.02)


@pytest.mark.parametrize(
    ("layout", "data", "part"),
    [
        (Layout(3, 0, 2, "ddp", tensor=4), None, "not a multiple of 4"),
        (Layout(4, 0, 2, "ddp", tensor=2), 8, "--dp 8: must be 4"),
        (Layout(4, 0, 2, "hsdp"), None, "--shard 1: must be 2 or more"),
        (Layout(4, 0, 2, "hsdp", shard=3), None, "divide the 8"),
    ],
)
def test_layouts_that_do_not_come_out_even_are_refused(
    layout: Layout, data: int | None, part: str
) -> None:
    with pytest.raises(UsageError, match=part):
        layout.check(data)
