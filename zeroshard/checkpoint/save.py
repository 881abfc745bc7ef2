"""An engine's state becomes a checkpoint, at once or during further training.

A thread writes from copies of this rank's slices in host memory, while training goes on:

    slices       |--- p1 ---|-- p2 --|-------- p3 --------|
    blocks       |-------------------------|------------|..|
    copies       |--- p1 ---|-- p2 --|- p3 -|-- p3 ------|       a slice is cut where a block ends

On a CPU there is one block of the size that is needed. For accelerators, blocks are pinned: copies into them
are queued on the caller's stream, so that they have the values of this moment, and the host goes on at once.
Torch rounds pinned memory up to a power of two, so blocks are powers of two that add up to little more than
is needed. On a stream of their own the copies would not delay compute, but a forward may change buffers.
"""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zeroshard.checkpoint import files
from zeroshard.checkpoint.files import MANIFEST, CheckpointPlace, write_synced
from zeroshard.checkpoint.manifest import FileRecord, Manifest
from zeroshard.checkpoint.tensors import TensorSlice
from zeroshard.comm.collectives import Axis, on_all, on_first
from zeroshard.comm.lifecycle import BackgroundGroup, open_background_group
from zeroshard.comm.streams import mark_here
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
    for name, data in {INDEX: to_index(boxes, snapshot.aliases), **snapshot.values}.items():
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


# ------------------------------------------------------------------------------------------ host copies


_ALIGNMENT = 64
_LEAST_BLOCK = 32 << 20
"""Bytes of the smallest pinned block, and so the most that is taken in vain."""


class SnapshotMemory:
    """Host memory for the slices of one snapshot, used again for the next."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def copy(self, slices: Sequence[TensorSlice]) -> tuple[list[TensorSlice], Callable[[], None]]:
        """Copy the present values. Earlier copies are lost, so the host must have waited for them.

        Returns:
            Slices on the CPU whose values further training does not change, more than were copied where some
            had to be cut; and a function that lets the host wait until the values are there.

        Raises:
            RuntimeError: there is no memory for them.
        """
        cpu = torch.device("cpu")
        device = next((part.data.device for part in slices if part.data.device != cpu), cpu)
        self._reserve(sum(_padded(part.data.nbytes) for part in slices), pinned=device != cpu)
        copies = []
        for part, block, start in place(slices, [block.numel() for block in self._blocks]):
            data = part.data
            if data.numel():
                memory = self._blocks[block][start : start + data.nbytes].view(data.dtype)
                copies.append(replace(part, data=memory.copy_(data, non_blocking=True)))
            else:
                copies.append(replace(part, data=data.cpu()))
        return copies, mark_here(device).synchronize

    def _reserve(self, total: int, *, pinned: bool) -> None:
        if sum(block.numel() for block in self._blocks) >= total:
            return
        self._blocks = []  # before larger ones are taken
        sizes = pinned_sizes(total) if pinned else [total]
        self._blocks = [
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes
        ]


def pinned_sizes(total: int) -> list[int]:
    """Powers of two, in bytes, that add up to `total` and less than `_LEAST_BLOCK` more; falling."""
    sizes = []
    while total > 0:
        sizes.append(max(_LEAST_BLOCK, 1 << (total.bit_length() - 1)))
        total -= sizes[-1]
    return sizes


class SlicePlace(NamedTuple):
    """A slice, or a part of one, and its place in memory."""

    part: TensorSlice
    block: int
    start: int
    """Bytes from the beginning of the block; a multiple of the alignment."""


def place(slices: Sequence[TensorSlice], sizes: Sequence[int]) -> Iterator[SlicePlace]:
    """Lay slices one after the other into blocks; a slice is cut where a block ends.

    Args:
        slices: which need no more bytes than there are, each rounded up to the alignment.
        sizes: bytes of each block, multiples of the alignment.
    """
    block = start = 0
    for part in slices:
        done, num, itemsize = 0, part.data.numel(), part.data.element_size()
        if not num:
            yield SlicePlace(part, 0, 0)
        while done < num:
            if start == sizes[block]:
                block, start = block + 1, 0
            taken = min(num - done, (sizes[block] - start) // itemsize)
            data = part.data[done : done + taken]
            yield SlicePlace(replace(part, start=part.start + done, data=data), block, start)
            done, start = done + taken, start + _padded(taken * itemsize)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
