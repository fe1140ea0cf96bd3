"""``python -m deadpool_launch`` is ``deadpool-launch``."""

from deadpool_launch.supervisor import main

if __name__ == "__main__":
    main()
