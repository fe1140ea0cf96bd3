"""What a case of the reliability table is: how a fault is brought about, and what must follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from chaos_trial import Trial

ONE_SPARE = ("--spares=1",)


@dataclass(frozen=True)
class Expect:
    """What must come of a case."""

    #: None: there is no verdict within the case's time.
    exit_code: int | None = 0
    #: Verdicts that incidents must have, each at least once and no others.
    verdicts: tuple[str, ...] = ("continued",)
    #: Rungs that incidents may take.
    rungs: tuple[int, ...] = ()
    #: Completed steps that one incident may run again.
    most_replayed: int = 1


@dataclass(frozen=True)
class Case:
    """One fault. In ``launch`` and ``files`` ``@base@`` stands for the shared directory and
    ``@name@`` for the case's name.
    """

    name: str
    fault: str
    how: str
    act: Callable[[Trial], None]
    expect: Expect
    #: Orders that are there before the first step; see ``chaos_train.py``.
    orders: tuple[tuple[int, int, str, str], ...] = ()
    nodes: int = 4
    launch: tuple[str, ...] = ONE_SPARE
    layout: str = "zero"
    steps: int = 40
    step_s: float = 0.05
    #: Options of ``sbatch``.
    sbatch: tuple[str, ...] = ()
    #: Files in the shared directory.
    files: Mapping[str, str] = field(default_factory=dict)
    #: Whether the run directory is on a small file system of its own.
    small_disk: bool = False
    #: How long the job may take to end after the fault.
    end_s: float = 120.0


SWAP = Expect(rungs=(2,))
LOCAL = Expect(rungs=(1,))
RETRY = Expect(rungs=(0,))
#: Nothing happens to the job.
UNHARMED = Expect(verdicts=())


def stopped(code: int) -> Expect:
    """The job ends with this code; an incident may have been open."""
    return Expect(exit_code=code, verdicts=("stopped",), rungs=(6,))
