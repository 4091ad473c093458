"""Tensors to files and back by torch.distributed.checkpoint; each process writes and reads for itself.

Its planners, writer and reader are called one after the other instead of through its `save` and `load`: those warn on
every call without a process group and print tracebacks of errors that we say in a line. Importing it takes a second, so
this module is imported when the first checkpoint is written or read.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from .checkpoint_parts import Wanted
from .checkpoint_tree import PIECE

Files = dict[str, dict[str, Any]]
"""Size and digest of files by name, as they were meant to be written."""


class Synced(io.RawIOBase):
    """A new file that digests what is written to it, is on disk when it is closed, and remembers why a write failed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.digest = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        left = memoryview(content).cast("B")
        total = len(left)
        self.digest.update(left)
        try:
            while len(left):
                left = left[os.write(self.handle, left) :]
        except OSError as error:
            self.error = error
            raise
        self.size += total
        return total

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        return self.handle

    def close(self) -> None:
        if not self.closed:
            super().close()
            try:
                if self.error is None:
                    os.fsync(self.handle)
            finally:
                os.close(self.handle)

    @property
    def facts(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    with Synced(path) as file:
        file.write(content)
    return file.facts


class _Files(FileSystem):
    """Where the writer's files go. It syncs them itself: the writer would sync its metadata before that is flushed."""

    def __init__(self) -> None:
        self.written: Files = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with Path(path).open(mode) as reading:
                yield reading
            return
        file = Synced(Path(path))
        try:
            with file:
                yield file
        except RuntimeError:
            # When a write fails, torch goes on to complain of its own position in the file.
            raise file.error or OSError(errno.EIO, "torch could not write the state") from None
        self.written[Path(path).name] = file.facts

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta | None:
        """Nothing: it would be the folder's path and a random number."""
        return None


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a process wrote of a checkpoint."""

    files: Files
    metadata: Metadata
    """What its tensors are."""
    places: list[list[WriteResult]]
    """Where they are."""


def write_blocks(folder: Path, blocks: dict[str, Tensor], writer_name: str = "") -> Written:
    """Write tensors into a folder, synced; processes that write into the same one have names."""
    writer, files = _writer(folder)
    planner = DefaultSavePlanner()
    planner.set_up_planner(cast(dict[str, Any], blocks), None, True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    final = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    written = []
    for number, items in enumerate(_in_files(final.items, blocks)):
        # The writer holds on to what it copies until a file is done, so files are no larger than a piece.
        prefix = type(final.storage_data)(f"__{writer_name}{number}_")
        written.append(writer.write_data(replace(final, items=items, storage_data=prefix), planner).wait())
    return Written(files=files.written, metadata=metadata, places=written)


def write_metadata(folder: Path, parts: Sequence[Written]) -> Files:
    """Write what was written, by however many processes; the files of all."""
    tensors: dict[str, Any] = {}
    for part in parts:
        tensors.update(part.metadata.state_dict_metadata)
    writer, files = _writer(folder)
    merged = Metadata(state_dict_metadata=tensors, planner_data={name: (name,) for name in tensors})
    writer.finish(merged, [places for part in parts for places in part.places])
    return {name: facts for part in parts for name, facts in part.files.items()} | files.written


def _writer(folder: Path) -> tuple[FileSystemWriter, _Files]:
    # Nothing is copied ahead: blocks are pieces of bounded size, or in host memory already.
    writer = _Writer(folder, sync_files=False, per_thread_copy_ahead=0, overwrite=False)
    writer.fs = files = _Files()
    return writer, files


def _in_files(items: list[WriteItem], blocks: dict[str, Tensor]) -> list[list[WriteItem]]:
    """Items in their order, as many to a file as a piece has bytes, and at least one."""
    found: list[list[WriteItem]] = []
    room = 0
    for item in items:
        size = blocks[item.index.fqn].nbytes
        if size > room or not found:
            found.append([])
            room = PIECE
        found[-1].append(item)
        room -= size
    return found


_KNOWN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    """Knows the names that a description of tensors needs, so that reading one cannot run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError("it describes no tensors")
        return found


class _Planner(DefaultLoadPlanner):
    """Reads pieces of tensors to where they are wanted."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        super().__init__()
        self.wanted = wanted

    def items(self, metadata: Metadata) -> list[ReadItem]:
        found = []
        for number, piece in enumerate(self.wanted):
            about = metadata.state_dict_metadata[piece.name]
            if not isinstance(about, TensorStorageMetadata) or tuple(about.size) != piece.stored:
                raise ValueError(f"{piece.name} is not of the shape {piece.stored}")
            found.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(str(number)),
                    dest_offsets=torch.Size([0] * len(piece.lengths)),
                    storage_index=MetadataIndex(piece.name, torch.Size([0] * len(piece.stored))),
                    storage_offsets=torch.Size(piece.offsets),
                    lengths=torch.Size(piece.lengths),
                )
            )
        return found

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.wanted[int(read_item.dest_index.fqn)].into


def read_blocks(folder: Path, wanted: Sequence[Wanted]) -> None:
    """Read pieces of tensors from a folder whose digests hold."""
    reader, planner = _Reader(folder), _Planner(wanted)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(LoadPlan(planner.items(metadata)), planner).wait()
