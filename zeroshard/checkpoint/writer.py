"""Slices of tensors become the files of a torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from zeroshard.checkpoint.files import naming
from zeroshard.checkpoint.manifest import FileRecord
from zeroshard.checkpoint.places import StoredBox, StoredTensor, file_of, tile, to_row
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice
from zeroshard.tiers.places import TierMemory


class WrittenBox(NamedTuple):
    """A part of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    place: StoredBox
    offset: int
    """The first byte of the archive around the elements: for torch.distributed.checkpoint."""
    num_bytes: int
    """The size of this archive."""


class Written(NamedTuple):
    """The boxes and files that one rank has written."""

    boxes: list[WrittenBox]
    files: dict[str, FileRecord]


def write_part(
    directory: Path, slices: Sequence[TensorSlice], rank: int, memory: TierMemory | None = None
) -> Written:
    """Write this rank's slices into a file of its own, fsynced.

    Args:
        directory: the directory of the checkpoint.
        slices: the slices.
        rank: this rank, for the name of the file.
        memory: the memory of the rank, if slices may lie in files.

    Raises:
        OSError: with the name of the file.
        RuntimeError: slices in files are lost; with the name of their file.
    """
    files, boxes, path = _CheckedFiles(), [], directory / file_of(rank)
    with files.create_stream(path, "wb") as file, path.open("rb") as written:
        for part in slices:
            for box, values in part.boxes(MAX_BOX_BYTES):
                offset = file.tell()
                if memory is not None:
                    memory.fetch(values)
                torch.save(_over_own_memory(values), cast(BinaryIO, file))
                file.flush()
                size = file.tell() - offset  # raises if a write has failed
                if memory is not None:
                    memory.rest(values)
                place = StoredBox(box, rank, find_elements(written, offset, values.nbytes))
                boxes.append(WrittenBox(part.name, values.dtype, part.shape, place, offset, size))
        os.fsync(file.fileno())
    return Written(boxes, files.records)


class _Archive(io.RawIOBase):
    """The end of a file as a file of its own.

    Python's zipfile looks for an archive behind other bytes by offsets that count from the start of the file.
    In a file of archives of equal sizes it may find a part of another archive there; newer versions of Python
    take that for a corrupt archive.
    """

    def __init__(self, file: BinaryIO, start: int) -> None:
        self._file, self._start = file, start

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = self._start if whence == io.SEEK_SET else 0
        return self._file.seek(start + offset, whence) - self._start

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


def find_elements(file: BinaryIO, start: int, num_bytes: int) -> int:
    """Return the first byte of the elements of a tensor that torch.save has written as the end of a file.

    Args:
        file: a file that ends with a zip archive by torch.save, which stores the elements as they are.
        start: the first byte of this archive.
        num_bytes: bytes of the elements.

    Raises:
        zipfile.BadZipFile: the file does not end with such an archive.
    """
    archive = cast(BinaryIO, _Archive(file, start))
    with zipfile.ZipFile(archive) as opened:
        records = [record for record in opened.infolist() if record.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].compress_type or records[0].file_size != num_bytes:
        raise zipfile.BadZipFile(f"expected one record of {num_bytes} bytes")
    header = records[0].header_offset
    archive.seek(header + 26)  # the lengths of two fields that follow the 30 bytes of a header
    name_size, extra_size = struct.unpack("<HH", archive.read(4))
    return start + header + 30 + int(name_size) + int(extra_size)


def tensors_of(boxes: Iterable[WrittenBox]) -> dict[str, StoredTensor]:
    """Return the places of all tensors, by name, from the boxes that all ranks have written."""
    places: dict[str, list[WrittenBox]] = {}
    for written in boxes:
        places.setdefault(written.name, []).append(written)
    tensors = {
        name: StoredTensor(parts[0].dtype, parts[0].shape, [to_row(part.place) for part in parts])
        for name, parts in places.items()
    }
    for name, tensor in tensors.items():
        assert tile(tensor), f"the ranks wrote each element of '{name}' once"
    return tensors


def write_index(
    directory: Path, boxes: Iterable[WrittenBox], aliases: Mapping[str, Sequence[str]]
) -> dict[str, FileRecord]:
    """Write `.metadata`, fsynced: what torch.distributed.checkpoint reads, and zeroshard never does.

    Args:
        boxes: that all ranks have written.
        aliases: more names under which a tensor can be read.

    Raises:
        OSError: with the name of the file.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: list[WriteResult] = []
    for written in boxes:
        stored = written.place
        box = ChunkStorageMetadata(torch.Size(stored.box.offsets), torch.Size(stored.box.sizes))
        for name in (written.name, *aliases.get(written.name, ())):
            properties = TensorProperties(dtype=written.dtype)
            tensor = TensorStorageMetadata(properties, torch.Size(written.shape), [])
            tensors.setdefault(name, tensor).chunks.append(box)
            place = _StorageInfo(stored.file, written.offset, written.num_bytes)
            places.append(WriteResult(MetadataIndex(name, box.offsets), written.num_bytes, place))
    writer = _IndexWriter(directory)
    writer.finish(Metadata(cast(dict[str, Any], tensors)), [places])
    return writer.files.records


class _IndexWriter(FileSystemWriter):
    """Torch's own index."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self.fs = self.files = _CheckedFiles()

    def storage_meta(self) -> StorageMeta:
        """Return no path: the checkpoint will not stay under the present one."""
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
        """Open a file for writing; record its size and checksum at the end. Raises OSError with its name."""
        with naming(path), _CheckedFile(path, mode) as file, _Buffered(file) as buffered:
            yield buffered
        self.records[os.path.basename(path)] = FileRecord(file.num_bytes, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written, and its record."""
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
        """Write all of `data` and return its size in bytes. A failure is raised by `tell` and `fileno`."""
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
        """Return the bytes written so far. Raises the OSError of a failed write."""
        self._check()
        return self.num_bytes

    def fileno(self) -> int:
        """Return the file descriptor. Raises the OSError of a failed write."""
        self._check()
        return super().fileno()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
