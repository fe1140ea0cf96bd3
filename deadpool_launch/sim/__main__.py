"""``python -m deadpool_launch.sim``."""

from deadpool_launch.sim.cli import main

main()
