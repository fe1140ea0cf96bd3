"""What all tests share: the mini cluster's modules can be imported and its fixtures are known."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("cluster")))

pytest_plugins = ["mini_cluster_fixtures"]
