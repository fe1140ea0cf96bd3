"""What killed MPI processes leave in shared memory is deleted, and nothing that is in use."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from deadpool_runtime.replication.mpi_leftovers import remove_leftovers


def leave(folder: Path, name: str, age_s: float = 10.0) -> Path:
    path = folder / name
    path.write_bytes(bytes(4096))
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


def test_only_what_no_process_has_mapped_is_deleted(tmp_path: Path) -> None:
    left = leave(tmp_path, "mpich_shm_1_0")
    used = leave(tmp_path, "mpich_shm_2_0")
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert remove_leftovers(tmp_path) == [left]
    assert used.exists()
    assert remove_leftovers(tmp_path) == [used]


def test_what_was_made_just_now_or_is_no_file_of_mpi_stays(tmp_path: Path) -> None:
    young = leave(tmp_path, "mpich_shm_1_0", age_s=-60.0)
    other = leave(tmp_path, "deadpool-1-a-e0")
    link = tmp_path / "mpich_shm_2_0"
    link.symlink_to(other)
    assert remove_leftovers(tmp_path) == []
    assert young.exists()
    assert other.exists()
    assert link.is_symlink()


def test_a_missing_folder_has_nothing_in_it(tmp_path: Path) -> None:
    assert remove_leftovers(tmp_path / "none") == []
