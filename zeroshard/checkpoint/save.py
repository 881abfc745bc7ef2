"""An engine's state becomes a checkpoint, at once or during further training.

A thread writes from copies of this rank's slices in host memory, while training goes on. For accelerators
the memory is pinned: copies into it are queued on the caller's stream, so that they have the values of this
moment, and the host goes on at once. On a stream of their own the copies would not delay compute, but a
forward may change buffers.
"""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import MANIFEST, CheckpointPlace, write_synced
from zeroshard.checkpoint.manifest import FileRecord, Manifest
from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.collectives import Axis, on_all, on_first
from zeroshard.comm.lifecycle import BackgroundGroup, open_background_group
from zeroshard.comm.streams import mark_here
from zeroshard.stores.host import HostBuffer
from zeroshard.stores.store import TierMemory

if TYPE_CHECKING:
    from zeroshard.checkpoint.writer import Written

_MARGIN = 1 << 20
"""Bytes for the small files, and what each box takes in addition to its elements."""
_PER_BOX = 2048


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

    @property
    def num_bytes(self) -> int:
        """The bytes that this rank writes, estimated: its slices, and the archive around each box."""
        boxes = sum(1 for part in self.slices for _ in part.boxes(1 << 24))
        return sum(part.data.nbytes for part in self.slices) + boxes * _PER_BOX


def write(snapshot: Snapshot, axis: Axis) -> None:
    """Write a checkpoint and let it appear; collective. Returns when it is there, on all ranks.

    Raises:
        RuntimeError: a rank could not write its part, and why, on all ranks; nothing of it is left.
    """
    # At the first save: torch.distributed.checkpoint takes a third of the time of torch to import.
    from zeroshard.checkpoint.writer import write_part

    def size() -> int:
        snapshot.wait()  # here, so that an error of the device is told to all ranks
        return snapshot.num_bytes

    total = sum(on_all(axis, "agreement on the size of a checkpoint", size))
    place: CheckpointPlace = on_first(
        axis,
        "start of a checkpoint",
        lambda: files.open_place(snapshot.folder, snapshot.tag, total + _MARGIN),
    )
    try:
        on_all(axis, "start of a checkpoint", lambda: _check_shared(place))
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


def _check_shared(place: CheckpointPlace) -> None:
    if not place.temporary.is_dir():
        raise RuntimeError(
            f"'{place.temporary}': made by rank 0 and not seen by another rank: expected a file system that "
            "all ranks share"
        )


def _finish(snapshot: Snapshot, place: CheckpointPlace, written: Sequence[Written]) -> None:
    """Rank 0 writes the small files and lets the checkpoint appear."""
    from zeroshard.checkpoint.writer import INDEX, tensors_of, to_index

    boxes = [box for part in written for box in part.boxes]
    records = {name: record for part in written for name, record in part.files.items()}
    for name, data in {INDEX: to_index(boxes, snapshot.manifest.parameters), **snapshot.values}.items():
        write_synced(place.temporary / name, data)
        records[name] = FileRecord(len(data), zlib.crc32(data))
    manifest = replace(snapshot.manifest, files=dict(sorted(records.items())), tensors=tensors_of(boxes))
    write_synced(place.temporary / MANIFEST, manifest.to_bytes())  # the last one, as it lists the others
    files.commit(place, snapshot.keep_last)


class Saver:
    """Writes snapshots, one at a time.

    Args:
        axis: all ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._copies = SnapshotMemory()
        self._background: BackgroundGroup | None = None
        """The process group of a thread that saves; None before the first save in the background."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._is_alone = False
        """True when nobody will ask any more how a save in the background has ended."""

    def save(self, snapshot: Snapshot) -> None:
        """Write and return when it is done. Raises what `write` raises."""
        write(snapshot, self._axis)

    def start(self, snapshot: Snapshot) -> None:
        """Copy what is to be written and write it in a thread. An accelerator copies while the host goes on.

        Raises:
            RuntimeError: there is no memory for the copy, on some rank, or the folder cannot be written to;
                on all of them.
        """

        def copy() -> None:
            nonlocal snapshot
            if self._axis.rank == 0:
                files.make_folder(snapshot.folder)  # an error is told now, before further steps
            slices, wait = self._copies.copy(snapshot.slices, snapshot.memory)
            snapshot = replace(snapshot, slices=slices, wait=wait)

        # Here: the thread may run when the interpreter ends, and then some modules cannot be imported.
        from zeroshard.checkpoint import writer  # noqa: F401

        on_all(self._axis, "copy of what is to be saved", copy)
        background = self._background = self._background or open_background_group(self._axis)

        def run() -> None:
            try:
                write(snapshot, background.axis)
            except Exception as error:  # whatever it is, it is told to whoever trains on
                self._failure = error
                if self._is_alone or not threading.main_thread().is_alive():
                    self._warn()

        self._thread = background.start(run, "zeroshard-checkpoint")

    def run_alone(self) -> None:
        """Let the save in the background go on when its engine is gone; a failure becomes a warning."""
        self._is_alone = True
        self._warn()

    def _warn(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            warnings.warn(f"the checkpoint that was saved in the background failed: {failure}", stacklevel=1)

    def check(self, axis: Axis) -> None:
        """See how the save in the background is getting on, if there is one; collective over `axis`.

        Raises:
            RuntimeError: it has failed.
        """
        if self._thread is not None:
            is_running, has_failed = axis.any(
                [self._thread.is_alive(), self._failure is not None], "agreement on a save in the background"
            )()
            if has_failed or not is_running:
                self.finish()

    def finish(self) -> None:
        """Wait for the save in the background.

        Raises:
            RuntimeError: it failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise RuntimeError(
                f"the checkpoint that was saved in the background failed: {failure}"
            ) from failure


_ALIGNMENT = 64


class SnapshotMemory:
    """Host memory for the slices of one snapshot, used again for the next."""

    def __init__(self) -> None:
        self._buffer: HostBuffer | None = None

    def copy(
        self, slices: Sequence[TensorSlice], memory: TierMemory
    ) -> tuple[list[TensorSlice], Callable[[], None]]:
        """Copy the present values. Earlier copies are lost, so the host must have waited for them.

        Returns:
            Slices on the CPU whose values further training does not change, and a function that lets the
            host wait until the values are there.

        Raises:
            RuntimeError: there is no memory for them.
        """
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
        return copies, self._buffer.last.synchronize
