"""An engine's state becomes a checkpoint, at once or during further training.

A thread writes from copies of this rank's slices in host memory, while training goes on. For accelerators
the memory is pinned: copies into it are queued on the caller's stream, so that they have the values of this
moment, and the host goes on at once. On a stream of their own the copies would not delay compute, but a
forward may change buffers.
"""

from __future__ import annotations

import io
import math
import os
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from pickle import dumps
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import MANIFEST, CheckpointPlace, naming, write_synced
from zeroshard.checkpoint.manifest import FileRecord, Manifest, ParameterRecord
from zeroshard.checkpoint.places import StoredBox, StoredTensor, file_of
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice
from zeroshard.comm.collectives import Axis, on_all, on_first
from zeroshard.comm.lifecycle import open_background
from zeroshard.comm.streams import mark_here
from zeroshard.stores.host import HostBuffer
from zeroshard.stores.store import TierMemory

INDEX = ".metadata"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The content of a checkpoint that this rank writes; manifest and values are for rank 0 to write."""

    folder: Path
    tag: str
    keep_last: int | None
    slices: Sequence[TensorSlice]
    manifest: Manifest
    values: Mapping[str, bytes]
    """The files with values of other kinds: written down at once, as further training changes the values."""
    memory: TierMemory
    """The memory of the rank, where slices may lie."""
    wait: Callable[[], None] = lambda: None
    """Lets the host wait until the slices have their values."""


def write(snapshot: Snapshot, axis: Axis) -> None:
    """Write a checkpoint and let it appear; collective. Returns when it is there, on all ranks.

    Raises:
        RuntimeError: a rank could not write its part, and why, on all ranks; nothing of it is left.
    """

    on_all(axis, "copies for a checkpoint", snapshot.wait)  # an error of the device is told to all ranks
    place: CheckpointPlace = on_first(
        axis, "start of a checkpoint", lambda: files.open_place(snapshot.folder, snapshot.tag)
    )
    try:
        sees = on_all(axis, "start of a checkpoint", place.temporary.is_dir)
        if not all(sees):
            raise RuntimeError(
                f"'{place.temporary}': made by rank 0 and not seen by rank {sees.index(False)}: expected a "
                "file system that all ranks share"
            )
        written = on_all(
            axis,
            "writing of a checkpoint",
            lambda: write_part(place.temporary, snapshot.slices, axis.rank, snapshot.memory),
        )
        on_first(axis, "end of a checkpoint", lambda: _finish(snapshot, place, written))
    except RuntimeError:
        if axis.rank == 0:
            files.discard(place)
        raise


def _finish(snapshot: Snapshot, place: CheckpointPlace, written: Sequence[Written]) -> None:
    """Rank 0 writes the small files and lets the checkpoint appear."""
    boxes = [box for part in written for box in part.boxes]
    records = {name: record for part in written for name, record in part.files.items()}
    for name, data in {INDEX: to_index(boxes, snapshot.manifest.parameters), **snapshot.values}.items():
        write_synced(place.temporary / name, data)
        records[name] = FileRecord(len(data), zlib.crc32(data))
    manifest = replace(snapshot.manifest, files=dict(sorted(records.items())), tensors=tensors_of(boxes))
    write_synced(place.temporary / MANIFEST, manifest.to_bytes())  # the last one, as it lists the others
    files.commit(place, snapshot.keep_last)


# ----------------------------------------------------------------------------------------- files


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
    boxes, path, crc = [], directory / file_of(rank), 0
    archive = io.BytesIO()  # torch.save writes from C++, where a disk that fails would end the process
    with naming(path), path.open("wb") as file:
        for part in slices:
            for box, values in part.boxes(MAX_BOX_BYTES):
                memory.fetch(values)
                archive.seek(0)
                torch.save(_over_own_memory(values), archive)
                archive.truncate()
                memory.evict(values)
                offset = file.tell()
                place = StoredBox(box, rank, offset + find_elements(archive))
                crc = zlib.crc32(archive.getbuffer(), crc)
                size = file.write(archive.getbuffer())
                boxes.append(WrittenBox(part.name, values.dtype, part.shape, place, offset, size))
        file.flush()
        os.fsync(file.fileno())
        return Written(boxes, {path.name: FileRecord(file.tell(), crc)})


def find_elements(archive: io.BytesIO) -> int:
    """Return the first byte of the elements of a tensor in the archive that torch.save has made of it."""
    archive.seek(0)
    reader: Any = torch._C.PyTorchFileReader(archive)
    return int(reader.get_record_offset("data/0"))  # it stores elements as they are


def tensors_of(boxes: Iterable[WrittenBox]) -> dict[str, StoredTensor]:
    """Return the places of all tensors, by name, from the boxes that all ranks have written."""
    places: dict[str, list[WrittenBox]] = {}
    for written in boxes:
        places.setdefault(written.name, []).append(written)
    for name, parts in places.items():
        numel = sum(part.place.box.numel for part in parts)
        assert numel == math.prod(parts[0].shape), f"the ranks wrote each element of '{name}' once"
    return {
        name: StoredTensor(parts[0].dtype, parts[0].shape, [part.place.row for part in parts])
        for name, parts in places.items()
    }


def to_index(boxes: Iterable[WrittenBox], parameters: Mapping[str, ParameterRecord]) -> bytes:
    """Return the content of `INDEX`: what torch.distributed.checkpoint reads, and zeroshard never does.

    Args:
        boxes: that all ranks have written.
        parameters: the parameters, whose other names the tensors can be read under, too.
    """
    # At the first save: torch.distributed.checkpoint takes a third of the time of torch to import.
    from torch.distributed.checkpoint import filesystem, metadata

    tensors: dict[str, metadata.TensorStorageMetadata] = {}
    places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
    for written in boxes:
        stored = written.place
        box = metadata.ChunkStorageMetadata(torch.Size(stored.box.offsets), torch.Size(stored.box.sizes))
        aliases = parameters[written.name].aliases if written.name in parameters else ()
        for name in (written.name, *aliases):
            properties = metadata.TensorProperties(dtype=written.dtype)
            tensor = metadata.TensorStorageMetadata(properties, torch.Size(written.shape), [])
            tensors.setdefault(name, tensor).chunks.append(box)
            place = filesystem._StorageInfo(file_of(stored.rank), written.offset, written.num_bytes)
            places[metadata.MetadataIndex(name, box.offsets)] = place
    # No path in the meta: the checkpoint will not stay under the present one.
    meta, version = metadata.StorageMeta(), filesystem.CURRENT_DCP_VERSION
    index = metadata.Metadata(cast(Any, tensors), storage_data=places, storage_meta=meta, version=version)
    return dumps(index)


def _over_own_memory(values: Tensor) -> Tensor:
    """`values` on the CPU, as a tensor whose memory ends where they do: torch.save writes all of it."""
    values = values.cpu().contiguous()
    start = values.storage_offset() * values.element_size()
    memory = values.untyped_storage()[start : start + values.nbytes]
    return torch.empty(0, dtype=values.dtype, device="cpu").set_(memory, 0, values.shape, values.stride())


_FAILED = "the checkpoint that was saved in the background failed"
_ALIGNMENT = 64


class Saver:
    """Writes snapshots in the background, one at a time. A failure is a warning at once, and an error later.

    Args:
        axis: all ranks.
    """

    _last: ClassVar[threading.Thread | None] = None
    """The thread that was started last, of any engine. All ranks start them in the same order, and each waits
    for the one before, so that the collectives of their common group have one order."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._buffer: HostBuffer | None = None
        """Host memory for the slices of one snapshot, used again for the next."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.check: Callable[[], object] = object
        """Sees how the save in the background is getting on; collective. `object` where there is none.

        Raises RuntimeError if it has failed.
        """

    def start(self, snapshot: Snapshot) -> None:
        """Copy what is to be written and write it in a thread. An accelerator copies while the host goes on.

        Raises:
            RuntimeError: there is no memory for the copy, on some rank, or the folder cannot be written to;
                on all of them.
        """

        def copy() -> None:
            nonlocal snapshot
            if self._axis.rank == 0:
                files.make_free(snapshot.folder, snapshot.tag)  # an error is told now, before further steps
            snapshot = self.copied(snapshot)

        # Here: the thread may run when the interpreter ends, and then some modules cannot be imported.
        import torch.distributed.checkpoint  # noqa: F401

        on_all(self._axis, "copy of what is to be saved", copy)

        axis, before = open_background(self._axis), Saver._last

        def run() -> None:
            if before is not None:
                before.join()
            try:
                write(snapshot, axis)
            except Exception as error:  # whatever it is, it is told to whoever trains on
                self._failure = error
                warnings.warn(f"{_FAILED}: {error}", stacklevel=1)  # the engine may be gone by then

        # Not a daemon: the interpreter waits for it, so that the last checkpoint of a run is written.
        self._thread = Saver._last = threading.Thread(target=run, name="zeroshard-checkpoint")
        self._thread.start()
        self.check = self._check

    def copied(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot of the present values, on the CPU, which further training does not change.

        Earlier copies are lost, so the host must have waited for them.

        Raises:
            RuntimeError: there is no memory for them.
        """
        slices, memory = snapshot.slices, snapshot.memory
        sizes = (-(-part.data.nbytes // _ALIGNMENT) * _ALIGNMENT for part in slices)
        *starts, total = accumulate(sizes, initial=0)
        if self._buffer is None or self._buffer.memory.nbytes < total:
            self._buffer = None  # before larger memory is taken
            self._buffer = HostBuffer(memory.host(total))
        copies = []
        for part, start in zip(slices, starts, strict=True):
            place = self._buffer.memory[start : start + part.data.nbytes].view(part.data.dtype)
            copies.append(replace(part, data=place.copy_(part.data, non_blocking=True)))
        self._buffer.last = mark_here(memory.device)
        return replace(snapshot, slices=copies, wait=self._buffer.last.synchronize)

    def _check(self) -> None:
        assert self._thread is not None, "it was started"
        flags = [self._thread.is_alive(), self._failure is not None]
        is_running, has_failed = self._axis.any(flags, "agreement on a save in the background")()
        if has_failed or not is_running:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in the background.

        Raises:
            RuntimeError: it failed.
        """
        thread, self._thread, self.check = self._thread, None, object
        if thread is None:
            return
        thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(f"{_FAILED}: {failure}") from failure
