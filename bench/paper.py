"""The published 100,000-step job, simulated: ``deadpool simulate --paper``, kept with the figures.

``python bench/paper.py``; writes ``bench/results/paper.json``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import records

from deadpool_launch.whatif import paper, published
from deadpool_launch.whatif.reading import NODE_MTBF_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=paper.SEEDS)
    parser.add_argument("--out", type=Path, default=records.RESULTS / "paper.json")
    options = parser.parse_args()
    seeds = range(options.seeds)
    _, _, told = published.compare(paper.Assumptions(), NODE_MTBF_S, seeds, as_json=True)
    command = f"python bench/paper.py --seeds {options.seeds}"
    records.keep(options.out, command, json.loads(told), beside=False)
    print(told)


if __name__ == "__main__":
    main()
