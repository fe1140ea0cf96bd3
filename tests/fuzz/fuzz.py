"""Mutated inputs for every reader of bytes or text from outside.

For each input the reader must return or raise what it documents: no other exception, no hang, no
memory beyond a bound. The same seed gives the same inputs.

``python tests/fuzz/fuzz.py [--parser NAME] [--inputs 100000] [--seed N]``
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from mutate import mutated
from parsers import Parser, all_parsers

#: Processor time for one input.
MOST_S = 2.0
#: Address space beyond what the process has at the start.
MOST_NBYTES = 512 << 20
#: So many failures of one parser are shown.
SHOWN = 5


class TookTooLong(BaseException):
    """A reader did not come to an end."""


def fuzz(parser: Parser, inputs: int, seed: int) -> list[str]:
    """What was wrong, a line for each failing input; at most ``SHOWN``."""
    failures: list[str] = []
    for number in range(inputs):
        # Each input from a number of its own: one that fails is made again without the others.
        dice = random.Random(f"{parser.name} {seed} {number}")
        data = mutated(dice.choice(parser.seeds), parser.seeds, dice)
        if dice.random() < 0.98:
            data = data[: parser.usual_nbytes]
        if parser.seal is not None and dice.random() < 0.6:
            data = parser.seal(data)
        wrong = _wrong(parser, data)
        if wrong:
            failures.append(
                f"{parser.name} seed {seed} input {number}: {wrong} from {data[:200]!r}"
            )
            if len(failures) >= SHOWN:
                break
    return failures


def _wrong(parser: Parser, data: bytes) -> str:
    """What the reader did that it must not do; empty if it did as documented."""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
        try:
            parser.run(data)
        except parser.raises:
            pass
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    # The time may be over in any line.
    except (Exception, TookTooLong) as error:
        return f"{type(error).__name__}: {error}"[:160]
    return ""


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TookTooLong(f"more than {MOST_S:g} s")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    """Fuzz one parser or all; 1 if any fails."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--parser", help="One of them, instead of all.")
    options.add_argument("--inputs", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    signal.signal(signal.SIGVTALRM, _too_long)
    bad = 0
    with tempfile.TemporaryDirectory() as directory:
        parsers = all_parsers(Path(directory))
        if given.parser is not None and given.parser not in parsers:
            options.error(f"--parser {given.parser}: not one of {', '.join(parsers)}")
        _limit_memory()
        for name, parser in parsers.items():
            if given.parser in (None, name):
                began_at = time.process_time()
                failures = fuzz(parser, given.inputs, given.seed)
                took_s = time.process_time() - began_at
                word = f"{len(failures)} FAILED" if failures else "ok"
                print(f"{name:<30} {given.inputs:>7} inputs {took_s:>7.1f} s  {word}", flush=True)
                for line in failures:
                    print(f"  {line}")
                bad += bool(failures)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
