"""What the launcher makes of Slurm's answers, of none, and of the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from deadpool_launch import watch
from deadpool_launch.backends.base import Backend, Sight, Sighting, SiteError
from deadpool_launch.controller import events

WELL = Sighting("IDLE", "ok", "")
DRAINED = Sighting("IDLE+DRAIN", "cordoned", "fan 3")
DOWN = Sighting("DOWN", "dead", "Not responding")


def test_only_what_changes_is_news() -> None:
    busy = Sighting("ALLOCATED", "ok", "")
    assert watch.news({}, {"n1": WELL, "n2": DRAINED}, 5.0) == [
        events.NodeStateSeen(5.0, "n2", "IDLE+DRAIN", "cordoned", "fan 3")
    ]
    assert not watch.news({"n1": WELL, "n2": DRAINED}, {"n1": busy, "n2": DRAINED}, 5.0)
    (back,) = watch.news({"n2": DRAINED}, {"n2": WELL}, 5.0)
    assert back.health == "ok"
    assert not watch.news({"n2": DRAINED}, {}, 5.0), "a node that is not told of is as it was"


@pytest.mark.parametrize(("errors", "factor"), [(0, 1), (1, 2), (3, 8), (9, 16), (99, 16)])
def test_pauses_grow_with_errors(errors: int, factor: int) -> None:
    assert watch.pause_s(60.0, errors) == 60.0 * factor


def test_time_that_an_end_has_leaves_the_launcher_its_own() -> None:
    assert watch.left_s(1120.0, 1000.0) == 110.0
    assert watch.left_s(1005.0, 1000.0) == 1.0
    assert watch.left_s(99999.0, 1000.0) == watch.MOST_LEFT_S
    assert watch.left_s(None, 1000.0) == watch.UNKNOWN_LEFT_S
    assert watch.is_at_limit(1030.0, 1000.0)
    assert not watch.is_at_limit(1090.0, 1000.0)
    assert not watch.is_at_limit(None, 1000.0)


class Site:
    """Answers with the next of these; then with nothing new."""

    def __init__(self, *answers: Sight | SiteError) -> None:
        self.answers = list(answers)
        self.asked = 0

    def look(self, nodes: Sequence[str]) -> Sight | None:
        self.asked += 1
        answer = self.answers.pop(0) if self.answers else SiteError("gone")
        if isinstance(answer, SiteError):
            raise answer
        return answer


def seen(site: Site, count: int, **given: Any) -> tuple[list[events.Event], list[str]]:
    """What the watch emits and says until it has done so many things in all."""
    emitted: list[events.Event] = []
    said: list[str] = []
    settings: dict[str, Any] = {"poll_s": 0.001, "reserve_s": 0.0, "ends_at": None, **given}

    async def until_then() -> None:
        watching = watch.Watch(
            cast(Backend, site), ["n1"], emit=emitted.append, say=said.append, **settings
        )
        running = asyncio.create_task(watching.run())
        async with asyncio.timeout(60):
            while len(emitted) + len(said) < count and not running.done():
                await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(until_then())
    return emitted, said


def test_errors_are_no_news_and_told_once() -> None:
    lost = SiteError("scontrol did not answer within 10 s")
    site = Site(Sight({"n1": DRAINED}, None), lost, lost, lost, Sight({"n1": DRAINED}, None))
    emitted, said = seen(site, 3)
    assert [type(event).__name__ for event in emitted] == ["NodeStateSeen"]
    assert said[0].startswith("Slurm does not answer (scontrol did not answer within 10 s); ")
    assert said[1] == "Slurm answers again"
    assert len(said) == 2


def test_node_that_was_resumed_while_there_was_no_launcher_is_news() -> None:
    emitted: list[events.Event] = []
    watching = watch.Watch(
        cast(Backend, Site(Sight({"n1": WELL, "n2": WELL}, None))),
        ["n1", "n2"],
        0.001,
        0.0,
        None,
        emitted.append,
        print,
    )
    watching.was_told({"n1": "IDLE+DRAIN"})

    async def until_told() -> None:
        running = asyncio.create_task(watching.run())
        async with asyncio.timeout(60):
            while not emitted:
                await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(until_told())
    (back,) = emitted
    assert isinstance(back, events.NodeStateSeen)
    assert (back.node, back.health) == ("n1", "ok")


def test_reserve_begins_by_the_clock_with_nobody_to_ask() -> None:
    site = Site()
    emitted, _ = seen(site, 1, poll_s=0.0, reserve_s=50.0, ends_at=time.time() + 50.2)
    (near,) = emitted
    assert isinstance(near, events.LimitNear)
    assert near.why == "50 s before the time limit"
    assert 30 < near.left_s <= 41
    assert not site.asked


def test_reserve_follows_a_limit_that_is_changed() -> None:
    site = Site(Sight({}, time.time() + 5000), Sight({}, time.time() + 40))
    emitted, _ = seen(site, 1, reserve_s=50.0, ends_at=time.time() + 9000)
    assert [type(event).__name__ for event in emitted] == ["LimitNear"]


def test_second_sigterm_at_the_limit_is_not_put_down_to_it() -> None:
    emitted: list[events.Event] = []
    watching = watch.Watch(
        cast(Backend, Site()), [], 0.0, 0.0, time.time() + 20, emitted.append, print
    )
    assert watching.terminated()
    assert not watching.terminated()
    (near,) = emitted
    assert isinstance(near, events.LimitNear)
    assert near.ending
