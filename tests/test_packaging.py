"""What an installation claims in a user's environment, and that no part of the code is left out of
it.
"""

from __future__ import annotations

import configparser
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parent.parent


def _setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_setup_cfg_lists_every_package_on_disk() -> None:
    listed = set(_setup_cfg()["options"]["packages"].split())
    on_disk = {f"deadpool_launch.{name}" for name in find_packages(str(ROOT / "deadpool_launch"))}
    on_disk |= set(find_packages(str(ROOT / "runtime"))) | set(find_packages(str(ROOT / "slurm")))
    assert listed == on_disk | {"deadpool_launch", "deadpool_site_configs"}


@pytest.mark.parametrize("name", ["runtime", "slurm", "site_configs", "tests"])
def test_installation_claims_no_common_name(name: str) -> None:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
    assert subprocess.run([sys.executable, "-I", "-c", code], cwd="/").returncode == 0


def test_both_console_scripts_are_installed() -> None:
    scripts = {
        entry.name
        for entry in importlib.metadata.distribution("deadpool-launch").entry_points
        if entry.group == "console_scripts"
    }
    assert scripts == {"deadpool-launch", "deadpool"}


@pytest.mark.parametrize(
    "module", ["deadpool_launch.cli", "deadpool_launch.main_cli", "deadpool_launch.agent.main"]
)
def test_launcher_and_agent_import_neither_torch_nor_mpi(module: str) -> None:
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'mpi4py'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_importing_the_runtime_does_not_import_torch() -> None:
    code = "import sys, deadpool_runtime; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
