"""The table of reported failures names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NAMED = re.compile(r"`((?:tests/[\w/.]+)?)(?:::(\w+))?`")


def test_every_test_that_is_named_exists() -> None:
    file, count = "", 0
    for found in _NAMED.finditer((ROOT / "docs" / "known-failures.md").read_text()):
        if not any(found.groups()):
            continue
        file = found[1] or file
        assert (ROOT / file).exists(), file
        if found[2]:
            assert f"def {found[2]}(" in (ROOT / file).read_text(), found[0]
        count += 1
    assert count > 20
