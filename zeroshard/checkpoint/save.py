"""An engine's state becomes a checkpoint, at once or beside further training."""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import MANIFEST, Place, write_synced
from zeroshard.checkpoint.hostcopies import HostCopies
from zeroshard.checkpoint.manifest import FileRecord, Manifest
from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.agreed import on_all, on_first
from zeroshard.comm.background import BackgroundGroup, open_background_group
from zeroshard.comm.collectives import Axis
from zeroshard.tiers.places import TierMemory

if TYPE_CHECKING:
    from zeroshard.checkpoint.writer import Written

_MARGIN = 1 << 20
"""Bytes for the small files, and what each box takes beside its elements."""
_PER_BOX = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The content of a checkpoint that this rank writes; manifest and values are for rank 0 to write."""

    folder: Path
    tag: str
    keep_last: int | None
    slices: Sequence[TensorSlice]
    aliases: Mapping[str, Sequence[str]]
    manifest: Manifest
    values: Mapping[str, bytes]
    """The files with values of other kinds: written down at once, as further training changes the values."""
    wait: Callable[[], None] = lambda: None
    """Lets the host wait until the slices have their values."""
    memory: TierMemory | None = None
    """The memory of the rank, if slices may lie in files."""

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
    place: Place = on_first(
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


def _check_shared(place: Place) -> None:
    if not place.temporary.is_dir():
        raise RuntimeError(
            f"'{place.temporary}': made by rank 0 and not seen by another rank: expected a file system that "
            "all ranks share"
        )


def _finish(snapshot: Snapshot, place: Place, written: Sequence[Written]) -> None:
    """Rank 0 writes the small files and lets the checkpoint appear."""
    from zeroshard.checkpoint.writer import tensors_of, write_index

    boxes = [box for part in written for box in part.boxes]
    records = write_index(place.temporary, boxes, snapshot.aliases)
    for part in written:
        records |= part.files
    manifest = replace(snapshot.manifest, files=records, tensors=tensors_of(boxes))
    write_values_and_manifest(place.temporary, snapshot.values, manifest)
    files.commit(place, snapshot.keep_last)


def write_values_and_manifest(directory: Path, values: Mapping[str, bytes], manifest: Manifest) -> None:
    """Write the files of values, fsynced, and last the manifest, which lists them beside its other files."""
    records = dict(manifest.files)
    for name, data in values.items():
        write_synced(directory / name, data)
        records[name] = FileRecord(len(data), zlib.crc32(data))
    manifest = replace(manifest, files=dict(sorted(records.items())))
    write_synced(directory / MANIFEST, manifest.to_bytes())


class Saver:
    """Writes snapshots, one at a time.

    Args:
        axis: all ranks.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._copies = HostCopies()
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
            slices, wait = self._copies.copy(snapshot.slices)
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

    def leave_alone(self) -> None:
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
