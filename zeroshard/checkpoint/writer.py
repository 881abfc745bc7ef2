"""Slices of tensors become the files of a torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import dumps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from zeroshard.checkpoint.files import naming
from zeroshard.checkpoint.manifest import FileRecord, ParameterRecord
from zeroshard.checkpoint.places import StoredBox, StoredTensor, file_of, tile
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice
from zeroshard.stores.store import TierMemory

INDEX = ".metadata"


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


def write_part(directory: Path, slices: Sequence[TensorSlice], rank: int, memory: TierMemory) -> Written:
    """Write this rank's slices into a file of its own, fsynced.

    Args:
        directory: the directory of the checkpoint.
        slices: the slices.
        rank: this rank, for the name of the file.
        memory: the memory of the rank, where slices may lie.

    Raises:
        OSError: with the name of the file.
        RuntimeError: slices in files are lost; with the name of their file.
    """
    boxes, path = [], directory / file_of(rank)
    archive = io.BytesIO()  # torch.save writes from C++, where a disk that fails would end the process
    with naming(path), _CheckedFile(path, "wb") as file:
        for part in slices:
            for box, values in part.boxes(MAX_BOX_BYTES):
                memory.fetch(values)
                archive.seek(0)
                torch.save(_over_own_memory(values), archive)
                archive.truncate()
                memory.evict(values)
                offset = file.tell()
                place = StoredBox(box, rank, offset + find_elements(archive, values.nbytes))
                size = file.write(archive.getbuffer())
                boxes.append(WrittenBox(part.name, values.dtype, part.shape, place, offset, size))
        os.fsync(file.fileno())
    return Written(boxes, {path.name: FileRecord(file.num_bytes, file.crc32)})


def find_elements(archive: io.BytesIO, num_bytes: int) -> int:
    """Return the first byte of the elements of a tensor that torch.save has written.

    Args:
        archive: a zip archive by torch.save, which stores the elements as they are.
        num_bytes: bytes of the elements.

    Raises:
        zipfile.BadZipFile: it is no such archive.
    """
    with zipfile.ZipFile(archive) as opened:
        records = [record for record in opened.infolist() if record.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].compress_type or records[0].file_size != num_bytes:
        raise zipfile.BadZipFile(f"expected one record of {num_bytes} bytes")
    header = records[0].header_offset
    archive.seek(header + 26)  # the lengths of two fields that follow the 30 bytes of a header
    name_size, extra_size = struct.unpack("<HH", archive.read(4))
    return header + 30 + int(name_size) + int(extra_size)


def tensors_of(boxes: Iterable[WrittenBox]) -> dict[str, StoredTensor]:
    """Return the places of all tensors, by name, from the boxes that all ranks have written."""
    places: dict[str, list[WrittenBox]] = {}
    for written in boxes:
        places.setdefault(written.name, []).append(written)
    tensors = {
        name: StoredTensor(parts[0].dtype, parts[0].shape, [part.place.row for part in parts])
        for name, parts in places.items()
    }
    for name, tensor in tensors.items():
        assert tile(tensor), f"the ranks wrote each element of '{name}' once"
    return tensors


def to_index(boxes: Iterable[WrittenBox], parameters: Mapping[str, ParameterRecord]) -> bytes:
    """Return the content of `INDEX`: what torch.distributed.checkpoint reads, and zeroshard never does.

    Args:
        boxes: that all ranks have written.
        parameters: the parameters, whose other names the tensors can be read under, too.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for written in boxes:
        stored = written.place
        box = ChunkStorageMetadata(torch.Size(stored.box.offsets), torch.Size(stored.box.sizes))
        aliases = parameters[written.name].aliases if written.name in parameters else ()
        for name in (written.name, *aliases):
            properties = TensorProperties(dtype=written.dtype)
            tensor = TensorStorageMetadata(properties, torch.Size(written.shape), [])
            tensors.setdefault(name, tensor).chunks.append(box)
            place = _StorageInfo(stored.file, written.offset, written.num_bytes)
            places[MetadataIndex(name, box.offsets)] = place
    # No path in the meta: the checkpoint will not stay under the present one.
    meta, version = StorageMeta(), CURRENT_DCP_VERSION
    index = Metadata(cast(Any, tensors), storage_data=places, storage_meta=meta, version=version)
    return dumps(index)


def _over_own_memory(values: Tensor) -> Tensor:
    """`values` on the CPU, as a tensor whose memory ends where they do: torch.save writes all of it."""
    values = values.cpu().contiguous()
    start = values.storage_offset() * values.element_size()
    memory = values.untyped_storage()[start : start + values.nbytes]
    return torch.empty(0, dtype=values.dtype, device="cpu").set_(memory, 0, values.shape, values.stride())


class _CheckedFile(io.FileIO):
    """An unbuffered file that is written from start to end."""

    num_bytes = crc32 = 0

    def write(self, data: Any) -> int:
        """Write all of `data` and return its size in bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += super().write(view[done:])
        self.crc32 = zlib.crc32(view, self.crc32)
        self.num_bytes += done
        return done
