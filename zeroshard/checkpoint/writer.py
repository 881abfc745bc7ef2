"""Slices of tensors become the files of a torch.distributed.checkpoint."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zeroshard.checkpoint.files import naming
from zeroshard.checkpoint.manifest import FileRecord
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice
from zeroshard.comm.collectives import Axis


def write_tensors(
    directory: Path, slices: Sequence[TensorSlice], aliases: Mapping[str, Sequence[str]], axis: Axis
) -> dict[str, FileRecord]:
    """Write this rank's slices, fsynced, and on rank 0 the index of all of them; collective.

    Args:
        directory: there on every rank.
        aliases: more names under which a tensor can be read.

    Returns:
        The files that this rank wrote.

    Raises:
        RuntimeError: a rank could not write, naming it and why, on every rank; or a rank is lost.
    """
    writer = _Writer(directory, aliases)
    try:
        dcp.save({}, storage_writer=writer, planner=_Planner(slices, axis.size), process_group=axis.group)
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"rank {rank} could not write the checkpoint: {cause}") from error
    except RuntimeError as error:
        raise axis.lost("writing of a checkpoint", error) from error
    return writer.checked.records


class _Planner(SavePlanner):
    """Every box of a slice is one entry under the tensor's own name, in its full shape."""

    def __init__(self, slices: Sequence[TensorSlice], num_ranks: int) -> None:
        self._slices, self._num_ranks = slices, num_ranks
        self._values: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = []
        for part in self._slices:
            for box, values in part.boxes(MAX_BOX_BYTES):
                index = MetadataIndex(part.name, torch.Size(box.offsets))
                self._values[index] = values
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
                    properties=TensorProperties(dtype=values.dtype),
                    size=torch.Size(part.shape),
                )
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if len(all_plans) != self._num_ranks:  # then every rank takes itself for the only one
            raise RuntimeError(
                f"expected the parts of {self._num_ranks} ranks, came {len(all_plans)}: the process group "
                "was destroyed before the checkpoint was written"
            )
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._values[write_item.index]


class _Writer(FileSystemWriter):
    """Files with checksums; tied tensors are indexed under each of their names."""

    def __init__(self, directory: Path, aliases: Mapping[str, Sequence[str]]) -> None:
        super().__init__(directory, sync_files=True)
        self.fs = self.checked = _CheckedFiles()
        self._aliases = aliases

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file, box after box. Torch's own way copies each box and keeps the last one of every tensor."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with self.fs.create_stream(Path(self.path) / name, "wb") as file:
            for item in plan.items:
                start = file.tell()
                values = cast(Tensor, planner.resolve_data(item))
                torch.save(_over_own_memory(values), cast(BinaryIO, file))
                size = file.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def storage_meta(self) -> StorageMeta:
        """Without the path, under which the checkpoint will not stay."""
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index."""
        for name, others in self._aliases.items():
            for other in others:
                metadata.state_dict_metadata[other] = metadata.state_dict_metadata[name]
        more = [
            replace(result, index=replace(result.index, fqn=other))
            for result in chain.from_iterable(results)
            for other in self._aliases.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, more])


def _over_own_memory(values: Tensor) -> Tensor:
    """`values` on the CPU, as a tensor whose memory ends where they do: torch.save writes all of it."""
    values = values.cpu().contiguous()
    start = values.storage_offset() * values.element_size()
    memory = values.untyped_storage()[start : start + values.nbytes]
    return torch.empty(0, dtype=values.dtype).set_(memory, 0, values.shape, values.stride())


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
