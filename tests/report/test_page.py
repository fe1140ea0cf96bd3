"""The page of a report: whole, self-contained, and harmless whatever a journal has in it."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from datetime import UTC
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journals import Records, record, recorded, step, swap, two_nodes_and_a_spare, view_of

from deadpool_launch.report.facts import document
from deadpool_launch.report.page import page

_VOID = {"meta", "br"}


class _Reader(HTMLParser):
    """Notes every tag, and whether they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _page(records: Records, alive: bool | None = None) -> str:
    return page(document(view_of(records), alive), UTC)


def _read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def _require_harmless(text: str) -> _Reader:
    """Nothing is fetched, nothing is run."""
    reader = _read(text)
    names = {name for _, attributes in reader.tags for name in attributes}
    assert not names & {"src", "href", "srcset", "data", "action", "style"}
    assert not [name for name in names if name.startswith("on")]
    assert {tag for tag, _ in reader.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "main", "div", "span", "p", "h1", "h2"),
        *("h3", "b", "br", "code", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"),
        *("details", "summary", "svg", "g", "rect", "path", "text", "circle", "polygon"),
    }
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(picture)
    return reader


@pytest.mark.parametrize("name", ["swap", "kill"])
def test_page_of_a_real_job_has_every_part_of_its_story(name: str) -> None:
    reader = _require_harmless(_page(recorded(name)))
    for word in (
        *("Where the time went", "Step time", "Incidents", "Protection", "Nodes"),
        *("detected", "attributed", "new epoch", "groups rebuilt", "state restored"),
        *("first step", "redundancy back", "steps that count", "completed"),
    ):
        assert word in reader.text, word


@pytest.mark.parametrize("name", ["swap", "kill"])
def test_page_can_be_made_wherever_the_journal_ends(name: str) -> None:
    records = recorded(name)
    for end in range(0, len(records) + 1, 7):
        _require_harmless(_page(records[:end], alive=False))


def test_document_goes_through_json_unchanged() -> None:
    facts = document(view_of(recorded("swap")))
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


_NASTY = """<script>alert(1)</script>"'&<!-- \x00\x1b[31m \ud800 \u202e"""


def test_text_of_users_stays_text() -> None:
    records = swap()
    records[0] |= {"job_id": _NASTY, "script": f"/x/{_NASTY}", "script_args": [_NASTY]}
    records[0]["active"] = ["a", "b", _NASTY]
    for each in records:
        if each["kind"] in ("incident", "end"):
            each |= {"detail": _NASTY, "reason": _NASTY, "phase": each.get("phase", "") + _NASTY}
    records.insert(-1, record(9.2, "node", node=_NASTY, role="lost", why=_NASTY, lasting=True))
    records.insert(-1, record(9.2, "event", name="AgentStartFailed", node=_NASTY, reason=_NASTY))
    records.insert(-1, record(9.2, "launcher", term=_NASTY, node=_NASTY, ended=_NASTY))
    records.insert(-1, record(9.2, "checkpoint", step=3, failed=_NASTY))
    records[-1]["exclude"] = [_NASTY]
    text = _page(records)
    reader = _require_harmless(text)
    assert reader.text.count("<script>alert(1)</script>") > 8
    text.encode()
    assert not set("\x00\x1b\u202e") & set(text)


def test_a_job_that_runs_and_one_that_was_killed_are_told_apart() -> None:
    records = [*two_nodes_and_a_spare(), step(3.0, 0, 1, 1.0)]
    assert "running" in _read(_page(records, alive=True)).text
    assert "ended without a word" in _read(_page(records, alive=False)).text
    assert "no end in the journal" in _read(_page(records)).text


def test_nodes_to_leave_out_are_those_of_the_end_or_those_known_so_far() -> None:
    records = swap()
    sick = record(6.25, "node", node="b", role="lost", why="is given up", lasting=True)
    records.insert(9, sick)
    assert document(view_of(records[:-1]))["exclude"] == ["b"]
    assert document(view_of(records))["exclude"] == []
    records[-1]["exclude"] = ["b"]
    assert "--exclude=b" in _read(_page(records)).text


def test_long_jobs_have_pages_of_moderate_size() -> None:
    records = two_nodes_and_a_spare()
    records += [
        step(3.0 + number, rank, number, 1.0) for number in range(1, 5000) for rank in (0, 1)
    ]
    facts = document(view_of(records))
    assert len(facts["series"]) <= 600
    assert facts["series"][-1][1] == 4999
    assert facts["steps"]["runs"] == 4999


def test_lag_is_that_of_the_oldest_replica() -> None:
    records = two_nodes_and_a_spare()
    records += [
        step(4.0, 0, 5, 1.0) | {"confirmed": 4},
        step(4.0, 1, 5, 1.0) | {"confirmed": 2},
        step(5.0, 0, 6, 1.0) | {"confirmed": 5},
        step(5.0, 1, 6, 1.0) | {"confirmed": -1},
    ]
    assert [point[6] for point in document(view_of(records))["series"]] == [3, None]


_ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_records_that_are_not_as_they_should_be_are_counted_and_cost_no_page(
    data: st.DataObject,
) -> None:
    records = swap()
    for _ in range(data.draw(st.integers(1, 4))):
        chosen = data.draw(st.sampled_from(records))
        key = data.draw(st.sampled_from(sorted(chosen)))
        if data.draw(st.booleans()):
            chosen[key] = data.draw(_ANY)
        elif len(chosen) > 1:
            del chosen[key]
    _require_harmless(_page(records))
