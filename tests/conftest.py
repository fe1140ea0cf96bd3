"""What all tests share: the mini cluster's and the helpers' modules can be imported."""

import sys
from pathlib import Path

for folder in ("cluster", "support"):
    sys.path.insert(0, str(Path(__file__).with_name(folder)))

pytest_plugins = ["mini_cluster_fixtures"]
