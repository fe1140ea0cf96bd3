"""Reads a journal while it is written; ``view.RunView`` says what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from deadpool_launch.journal import JOURNAL_NAME, record_of
from deadpool_launch.view import Record

#: How much of a journal is read at once.
_BATCH_NBYTES = 4 << 20


class JournalTail:
    """Reads what was added to a journal since the last call; the file may not exist yet."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / JOURNAL_NAME
        self._offset = 0

    def records(self) -> list[Record]:
        """The records added since the last call; a line still being written waits for the next."""
        return [record for some in self.batches() for record in some]

    def batches(self) -> Iterator[list[Record]]:
        """The same in parts, of which a long journal's need not be in memory together."""
        nbytes = _BATCH_NBYTES
        while True:
            try:
                with self._path.open("rb") as file:
                    file.seek(self._offset)
                    data = file.read(nbytes)
            except FileNotFoundError:
                return
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            found = map(record_of, whole.splitlines())
            yield [record for record in found if record is not None]
            if len(data) < nbytes:
                return
            # A line that is longer than that is read with more.
            nbytes = _BATCH_NBYTES if whole else 2 * nbytes
