"""One rank's part of a checkpoint as files of ``torch.distributed.checkpoint`` (DCP).

Importing this imports DCP, which takes about a second: do it away from the training thread. No
function here uses a collective.

DCP keeps the names and places of tensors in a pickle, ``.metadata``, which its own reader loads
with ``pickle.load``. Here it is loaded only after its hash was verified, and then only with the few
classes DCP writes into it, so that no other code can run. The tensors themselves DCP loads with
``weights_only=True``.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from deadpool_runtime.durable.hashing import FileSum, SummingFile, sum_of_file
from deadpool_runtime.durable.index import CheckpointDamaged

# What ``no_dist=True`` asks for, DCP warns about on every call.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")

#: What ``.metadata`` may name besides types and sizes of torch's own.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}


# ---------------------------------------------------------------- writing


def save_part(
    path: Path, groups: list[dict[str, torch.Tensor]], before_piece: Callable[[], None]
) -> dict[str, FileSum]:
    """Write tensors (CPU, contiguous) into the empty directory ``path``, each group into a file of
    its own; return the sum of every file. ``before_piece``: see ``SummingFile``.
    """
    writer = _Writer(path, [group.keys() for group in groups], before_piece)
    whole: dict[str, Any] = {key: tensor for group in groups for key, tensor in group.items()}
    try:
        checkpoint.save(whole, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        raise _cause(error) from error
    return writer.files.sums


class _Writer(checkpoint.FileSystemWriter):
    """DCP's writer with files by group, hashed as they are written."""

    def __init__(
        self, path: Path, groups: list[Collection[str]], before_piece: Callable[[], None]
    ) -> None:
        # Copying ahead is for tensors on a GPU; DCP would wait for the device here without need.
        super().__init__(path, per_thread_copy_ahead=0)
        self.files = _SummingFiles(before_piece)
        self.fs = self.files
        self._group_of = {key: index for index, keys in enumerate(groups) for key in keys}

    def storage_meta(self) -> StorageMeta:
        """What DCP notes about the place, without a path object in the pickle."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write each group on its own, with a prefix of its own for the names of files."""
        results: list[WriteResult] = []
        for group in sorted(set(self._group_of.values())):
            items = [item for item in plan.items if self._group_of[item.index.fqn] == group]
            prefix = dataclasses.replace(plan.storage_data, prefix=f"group-{group:03d}-")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


class _SummingFiles(FileSystem):
    """DCP's access to files, with a sum of each file written through it."""

    def __init__(self, before_piece: Callable[[], None]) -> None:
        self._before_piece = before_piece
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file to write it."""
        with Path(path).open("wb") as file:
            stream = SummingFile(file, self._before_piece)
            yield cast(io.IOBase, stream)
            stream.close()
        self.sums[Path(path).name] = stream.sum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


# ---------------------------------------------------------------- reading


def load_part(
    path: Path, step: int, sums: Mapping[str, FileSum], into: Mapping[str, torch.Tensor]
) -> None:
    """Fill the tensors of ``into`` from a rank's directory, whose files must have these sums.

    Raises ``CheckpointDamaged`` before it uses anything of a file that differs.
    """
    whole: dict[str, Any] = dict(into)
    try:
        reader = _Reader(path, step, sums, into)
        checkpoint.load(whole, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, CheckpointDamaged) or not isinstance(cause, Exception):
            raise cause from error
        raise CheckpointDamaged(path, step, f"cannot be read ({cause})") from error


class _Reader(checkpoint.FileSystemReader):
    """DCP's reader, for verified files and expected tensors only."""

    def __init__(
        self,
        path: Path,
        step: int,
        sums: Mapping[str, FileSum],
        expected: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__(path)
        self._step = step
        self._expected = expected
        self._metadata_path = path / ".metadata"
        self.fs = _VerifiedFiles(path, step, sums)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What ``.metadata`` says."""
        with self.fs.create_stream(self._metadata_path, "rb") as file:
            try:
                metadata = _MetadataUnpickler(cast(Any, file)).load()
            except (pickle.UnpicklingError, AttributeError, TypeError, EOFError) as error:
                raise self._damaged(f"is not what DCP writes ({error})") from error
        if not isinstance(metadata, Metadata):
            raise self._damaged("is not what DCP writes")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Refuse tensors of another shape or type, which DCP would convert without a word."""
        for key, tensor in self._expected.items():
            found = metadata.state_dict_metadata.get(key)
            if not isinstance(found, TensorStorageMetadata) or (
                found.size,
                found.properties.dtype,
            ) != (tensor.shape, tensor.dtype):
                raise self._damaged(
                    f"does not have {key} as {str(tensor.dtype).removeprefix('torch.')} of shape "
                    f"{tuple(tensor.shape)}"
                )
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def _damaged(self, what: str) -> CheckpointDamaged:
        return CheckpointDamaged(self._metadata_path, self._step, what)


class _VerifiedFiles(FileSystem):
    """DCP's access to files, which hashes each before the first byte of it is used."""

    def __init__(self, root: Path, step: int, sums: Mapping[str, FileSum]) -> None:
        self._root = root
        self._step = step
        self._sums = sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file of the rank's directory to read it."""
        path = Path(path)
        expected = self._sums.get(path.name) if path.parent == self._root else None
        try:
            with path.open("rb") as file:
                if expected is None or sum_of_file(file) != expected:
                    raise CheckpointDamaged(path, self._step, "is not the file that was committed")
                yield file
        except FileNotFoundError as error:
            raise CheckpointDamaged(path, self._step, "is missing") from error
        except OSError as error:
            what = f"cannot be read ({error.strerror})"
            raise CheckpointDamaged(path, self._step, what) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of DCP's metadata and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function that the pickle names."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype) or value is torch.Size:
            return value
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _cause(error: CheckpointException) -> BaseException:
    """What happened inside DCP, which wraps every exception into one that is no ``Exception``."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    # torch.save closes its archive while an error passes through and may fail a second time.
    while isinstance(cause, RuntimeError) and cause.__context__ is not None:
        cause = cause.__context__
    return cause
