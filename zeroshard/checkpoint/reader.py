"""The reading of tensors: any range of their elements, by the places that the manifest tells."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import Manifest, check_sizes, read_manifest
from zeroshard.checkpoint.places import StoredBox, StoredTensor, runs
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint on disk."""

    directory: Path
    manifest: Manifest

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The places of its tensors, by name."""
        return self.manifest.tensors


def open_checkpoint(directory: Path) -> Stored:
    """Read the manifest of a checkpoint; no tensor is read.

    Raises:
        RuntimeError: a file is missing or shortened, or the manifest is damaged or says what cannot be.
    """
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    return Stored(directory, manifest)


class TensorReader:
    """Reads ranges of the tensors of a checkpoint; a context manager, which keeps files open.

    Args:
        stored: the checkpoint.
        rest: called with each piece of memory that was filled; see `TierMemory.rest`.
    """

    def __init__(self, stored: Stored, rest: Callable[[Tensor], None] = lambda _: None) -> None:
        self._stored, self.rest = stored, rest
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, part: TensorSlice) -> None:
        """Fill `part.data`, in its own dtype, on its own device.

        Raises:
            RuntimeError: the checkpoint does not hold all of it, or a file has become shorter.
        """
        stored, num_read = self._stored.tensors[part.name], 0
        for box, values in part.boxes():
            in_order = values if values.is_contiguous() else torch.empty_like(values).contiguous()
            for source in stored.boxes:
                for run in runs(source.box, box):
                    target = in_order.view(-1)[run.target : run.target + run.numel]
                    self._read_run(source, stored.dtype, run.source, target)
                    num_read += run.numel
            if in_order is not values:
                values.copy_(in_order)
                self.rest(part.data)
        if num_read != part.data.numel():
            raise RuntimeError(
                f"{self._stored.directory}: expected {part.data.numel()} elements of '{part.name}' from "
                f"{part.start} on, found {num_read}"
            )

    def _read_run(self, source: StoredBox, dtype: torch.dtype, start: int, target: Tensor) -> None:
        file = self._open(source.file)
        begin = source.start + start * dtype.itemsize
        step = max(1, MAX_BOX_BYTES // dtype.itemsize)
        for at in range(0, target.numel(), step):
            piece = target[at : at + step]
            direct = piece.dtype == dtype and piece.device.type == "cpu"
            raw = piece if direct else torch.empty(piece.numel(), dtype=dtype, device="cpu")
            file.seek(begin + at * dtype.itemsize)
            if file.readinto(raw.view(torch.uint8).numpy().data) != raw.nbytes:  # type: ignore[attr-defined]
                raise RuntimeError(f"{self._stored.directory / source.file}: ends too early")
            if not direct:
                piece.copy_(raw)
            self.rest(piece)

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._stored.directory / name).open("rb"))
        return self._files[name]
