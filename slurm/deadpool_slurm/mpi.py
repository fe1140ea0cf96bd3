"""Which kinds of MPI ``srun`` can start (``srun --mpi=list``). Pure."""

from __future__ import annotations

#: Needs neither a job nor an answer of the controller, only Slurm's configuration.
LIST_ARGV = ("srun", "--mpi=list")
_HEADING = "types are"


def parse_kinds(text: str) -> tuple[str, ...] | None:
    """The kinds, without ``none``; ``None`` if this is no such list.

    One to a line below a heading; before 22.05 each line begins with ``srun:``.
    """
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    heads = [at for at, line in enumerate(lines) if _HEADING in line]
    if not heads:
        return None
    words = [line for line in lines[heads[0] + 1 :] if line and len(line.split()) == 1]
    return tuple(word for word in words if word != "none")
