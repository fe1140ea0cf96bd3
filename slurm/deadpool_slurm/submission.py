"""What ``sbatch`` and ``salloc`` were told when a job was submitted. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

#: ``--no-kill`` and the abbreviations that getopt takes for it.
_NO_KILL = re.compile(r"--no-k(i(ll?)?)?")
#: Options of ``sbatch`` that take no value as a word of its own.
_FLAGS = frozenset(
    {
        "-H",
        "--hold",
        "-h",
        "--help",
        "-I",
        "--immediate",
        "-k",
        "--no-kill",
        "-O",
        "--overcommit",
        "-Q",
        "--quiet",
        "-s",
        "--oversubscribe",
        "-v",
        "--verbose",
        "-W",
        "--wait",
        "--contiguous",
        "--exclusive",
        "--get-user-env",
        "--ignore-pbs",
        "--nice",
        "--no-requeue",
        "--parsable",
        "--propagate",
        "--reboot",
        "--requeue",
        "--spread-job",
        "--stepmgr",
        "--test-only",
        "--use-min-nodes",
    }
)


@dataclass(frozen=True, slots=True)
class SubmitText:
    """How a job was submitted; what Slurm does not keep or show is ``None``."""

    batch_script: str | None
    submit_line: str | None
    #: Why the batch script is missing, in Slurm's words; empty if it is not.
    problem: str = ""

    def asks_no_kill(self) -> bool:
        """Whether script or submit line ask for ``--no-kill``; the line has the last word."""
        words: list[str] = []
        if self.batch_script is not None:
            words += sbatch_options(self.batch_script)
        if self.submit_line is not None:
            words += submit_line_options(self.submit_line)
        return asks_no_kill(words)


def sbatch_options(script: str) -> list[str]:
    """The words of the ``#SBATCH`` lines that ``sbatch`` heeds: those before the first command."""
    words: list[str] = []
    for number, line in enumerate(script.splitlines()):
        if line.startswith("#SBATCH"):
            words += _words(line.removeprefix("#SBATCH"))
        elif number and line.strip() and not line.lstrip().startswith("#"):
            break
    return words


def submit_line_options(submit_line: str) -> list[str]:
    """The words of the options in a submit line: between the command and the script's name."""
    words = _words(submit_line)
    while words and words[0].rpartition("/")[2] not in ("sbatch", "salloc"):
        words.pop(0)
    options: list[str] = []
    expects_value = False
    for word in words[1:]:
        if not word.startswith("-") and not expects_value:
            break
        options.append(word)
        takes_next = (word.startswith("--") and "=" not in word) or len(word) == 2
        expects_value = word.startswith("-") and takes_next and word not in _FLAGS
    return options


def asks_no_kill(words: Iterable[str]) -> bool:
    """Whether these options keep the job alive when a node fails; the last one counts."""
    asked = False
    for word in words:
        name, _, value = word.partition("=")
        if _NO_KILL.fullmatch(name) or re.fullmatch(r"-[HhIOQsvW]*k.*", word):
            asked = value not in ("off", "no") and not word.endswith(("koff", "kno"))
    return asked


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # an unclosed quote
        return text.split()
