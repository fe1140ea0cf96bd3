"""``python -m deadpool_launch.agent``: see ``main``."""

from deadpool_launch.agent.main import main

main()
