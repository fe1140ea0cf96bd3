"""Crews for the tests of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

# DDP imports this when it is constructed; here once instead of in every worker.
import torch._dynamo
from crew import Crew

from deadpool_runtime.groups import native


@pytest.fixture(scope="session", autouse=True)
def _shim() -> None:
    """Build once, before any worker would."""
    native.ensure_built()
    torch.set_num_threads(1)


@pytest.fixture
def new_crew() -> Iterator[Callable[[], Crew]]:
    """Makes crews; each has a store of its own, so that one can repeat what another did."""
    crews: list[Crew] = []

    def make() -> Crew:
        crews.append(Crew())
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()


@pytest.fixture
def crew(new_crew: Callable[[], Crew]) -> Crew:
    return new_crew()
