"""Slices of tensors become the files of a torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from zeroshard.checkpoint.boxes import Box, tiles
from zeroshard.checkpoint.files import naming
from zeroshard.checkpoint.manifest import FileRecord
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice


class WrittenBox(NamedTuple):
    """A part of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    file: str
    offset: int
    num_bytes: int


class Written(NamedTuple):
    """What one rank has written."""

    boxes: list[WrittenBox]
    files: dict[str, FileRecord]


def write_part(directory: Path, slices: Sequence[TensorSlice], rank: int) -> Written:
    """Write this rank's slices into a file of its own, fsynced.

    Raises:
        OSError: with the name of the file.
    """
    files, boxes = _CheckedFiles(), []
    name = f"__{rank}_0{DEFAULT_SUFFIX}"
    with files.create_stream(directory / name, "wb") as file:
        for part in slices:
            for box, values in part.boxes(MAX_BOX_BYTES):
                start = file.tell()
                torch.save(_over_own_memory(values), cast(BinaryIO, file))
                place = (name, start, file.tell() - start)
                boxes.append(WrittenBox(part.name, values.dtype, part.shape, box, *place))
        os.fsync(file.fileno())
    return Written(boxes, files.records)


def write_index(
    directory: Path, boxes: Iterable[WrittenBox], aliases: Mapping[str, Sequence[str]]
) -> dict[str, FileRecord]:
    """Write the index of what all ranks have written, fsynced.

    Args:
        aliases: more names under which a tensor can be read.

    Raises:
        OSError: with the name of the file.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: list[WriteResult] = []
    for written in boxes:
        box = ChunkStorageMetadata(torch.Size(written.box.offsets), torch.Size(written.box.sizes))
        for name in (written.name, *aliases.get(written.name, ())):
            properties = TensorProperties(dtype=written.dtype)
            tensor = TensorStorageMetadata(properties, torch.Size(written.shape), [])
            tensors.setdefault(name, tensor).chunks.append(box)
            place = _StorageInfo(written.file, written.offset, written.num_bytes)
            places.append(WriteResult(MetadataIndex(name, box.offsets), written.num_bytes, place))
    for name, tensor in tensors.items():
        parts = [Box(tuple(part.offsets), tuple(part.sizes)) for part in tensor.chunks]
        assert tiles(parts, tuple(tensor.size)), f"the ranks wrote each element of '{name}' once"
    writer = _IndexWriter(directory)
    writer.finish(Metadata(cast(dict[str, Any], tensors)), [places])
    return writer.files.records


class _IndexWriter(FileSystemWriter):
    """Torch's own index."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self.fs = self.files = _CheckedFiles()

    def storage_meta(self) -> StorageMeta:
        """Without the path, under which the checkpoint will not stay."""
        return StorageMeta()


def _over_own_memory(values: Tensor) -> Tensor:
    """`values` on the CPU, as a tensor whose memory ends where they do: torch.save writes all of it."""
    values = values.cpu().contiguous()
    start = values.storage_offset() * values.element_size()
    memory = values.untyped_storage()[start : start + values.nbytes]
    return torch.empty(0, dtype=values.dtype, device="cpu").set_(memory, 0, values.shape, values.stride())


class _CheckedFiles(FileSystem):
    """Files whose checksums are computed while they are written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with naming(path), _CheckedFile(path, mode) as file, _Buffered(file) as buffered:
            yield buffered
        self.records[os.path.basename(path)] = FileRecord(file.num_bytes, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[os.path.basename(new_path)] = self.records.pop(os.path.basename(path))


class _Buffered(io.BufferedWriter):
    """Joins the small writes of torch.save, some forty for a box; large ones go through as they are."""

    def fileno(self) -> int:
        """For whoever syncs the file."""
        self.flush()
        return super().fileno()


class _CheckedFile(io.FileIO):
    """An unbuffered file that is written from start to end.

    torch.save writes from C++, which an exception would end the process in. So a failed write is remembered,
    and raised by what torch calls between two tensors and before it syncs the file.
    """

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        super().__init__(path, mode)
        self.num_bytes, self.crc32 = 0, 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            done = 0
            while self._failure is None and done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self._failure = OSError(error.errno, error.strerror, str(self.name))
        self.crc32 = zlib.crc32(view, self.crc32)
        self.num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        self._check()
        return self.num_bytes

    def fileno(self) -> int:
        self._check()
        return super().fileno()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
