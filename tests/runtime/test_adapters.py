"""The adapters of frameworks that are not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_an_adapter_without_its_framework_says_what_to_install(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = f"deadpool_runtime.integrations.{framework}"
    monkeypatch.delitem(sys.modules, adapter, raising=False)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ImportError, match=rf"pip install 'deadpool-launch\[{framework}\]'"):
        importlib.import_module(adapter)
