"""The figures for Prometheus: their format, their names, and who serves them."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from journals import record, recorded, swap, view_of, write

from deadpool_launch.errors import UsageError
from deadpool_launch.journal import Journal
from deadpool_launch.status.beside import figures_served, read_address
from deadpool_launch.status.metrics import METRICS, exposition, names_in

DOCS = Path(__file__).parents[2] / "docs" / "watching.md"
_LINE = re.compile(r'^[a-z_]+(\{([a-z_]+="(\\.|[^"\\\n])*",?)+\})? (NaN|[+-]Inf|-?[0-9.e+-]+)$')


def test_page_is_in_prometheus_format() -> None:
    lines = exposition(view_of(swap())).splitlines()
    for line in lines:
        assert line.startswith(("# HELP ", "# TYPE ")) or _LINE.match(line), line
    assert 'deadpool_incidents_total{verdict="continued"} 1' in lines
    assert "deadpool_step 4" in lines
    assert 'deadpool_nodes{role="lost"} 1' in lines
    assert "deadpool_steps_run_again_total 1" in lines


def test_each_name_is_served_documented_and_has_a_fitting_kind() -> None:
    records = swap()
    for each in records:
        if each["kind"] == "step":
            each["confirmed"] = each["step"] - 1
    records.insert(-1, record(9.1, "checkpoint", step=2, epoch=2, directory="/x", kept=[2]))
    assert names_in(exposition(view_of(records))) == set(METRICS)
    documented = DOCS.read_text()
    for name, metric in METRICS.items():
        assert f"`{name}`" in documented
        assert (metric.kind == "counter") == name.endswith("_total")


def test_labels_are_escaped() -> None:
    records = swap()
    records[0]["script"] = 'a"b\\c\nd\x00'
    (line,) = [
        x for x in exposition(view_of(records)).splitlines() if x.startswith("deadpool_info")
    ]
    assert r'script="a\"b\\c\nd' in line
    assert _LINE.match(line)


def test_page_of_nothing_is_a_page() -> None:
    assert "deadpool_step 0" in exposition(view_of([]))


def test_record_of_another_shape_changes_nothing() -> None:
    records = swap()
    opened = next(i for i, each in enumerate(records) if each.get("phase") == "opened")
    odd = {**records[opened], "phase": ["c"]}
    both = [*records[: opened + 1], odd, *records[opened + 1 :]]
    assert exposition(view_of(both)) == exposition(view_of(records))


@pytest.mark.parametrize("name", ["swap", "kill"])
def test_counters_never_go_back(name: str) -> None:
    records = recorded(name)
    before: dict[str, float] = {}
    for end in range(0, len(records) + 1, 3):
        for line in exposition(view_of(records[:end])).splitlines():
            key, _, value = line.rpartition(" ")
            if "_total" in key and not line.startswith("#"):
                assert float(value) >= before.get(key, 0.0)
                before[key] = float(value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:80", ("::1", 80)),
        ("n1:0", ("n1", 0)),
    ],
)
def test_where_figures_are_served(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "x", ":9400", "99999", "::1:80", "-1", "n1:", "n1:٣"])
def test_what_is_no_address_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(UsageError, match="must be a port, such as 9400"):
        read_address(text)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as answer:
        body: bytes = answer.read()
    return body.decode()


def test_figures_are_served_while_the_job_lasts_and_follow_its_journal(tmp_path: Path) -> None:
    write(tmp_path, swap()[:-1], torn='{"at":1')
    said: list[str] = []

    async def scrape() -> str:
        journal = Journal(tmp_path, said.append)
        async with figures_served(("127.0.0.1", 0), tmp_path, journal):
            while not said:
                await asyncio.sleep(0.02)
            url = said[0].rpartition(" ")[2]
            assert "deadpool_ended 0" in await asyncio.to_thread(_get, url)
            journal.write("end", verdict="done", exit_code=3, reason="")
            assert "deadpool_exit_code 3" in await asyncio.to_thread(_get, url)
            with pytest.raises(urllib.error.HTTPError):
                await asyncio.to_thread(_get, url.removesuffix("metrics"))
        journal.close()
        return url

    url = asyncio.run(asyncio.wait_for(scrape(), 240))
    assert "figures for Prometheus are at http://127.0.0.1:" in said[0]
    with pytest.raises(urllib.error.URLError):
        _get(url)


def test_port_that_is_taken_costs_a_line(tmp_path: Path) -> None:
    said: list[str] = []

    async def attempt(port: int) -> None:
        journal = Journal(tmp_path, said.append)
        async with figures_served(("127.0.0.1", port), tmp_path, journal):
            while not said:
                await asyncio.sleep(0.02)
        journal.close()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(asyncio.wait_for(attempt(taken.getsockname()[1]), 240))
    assert "no figures are served at 127.0.0.1:" in said[0]
    assert "in use" in said[0]
