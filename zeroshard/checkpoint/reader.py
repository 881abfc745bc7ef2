"""Tensors of a checkpoint, read in part and without unpickling what could run code."""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
from torch import Tensor

from zeroshard.checkpoint.boxes import Box, runs, tiles, whole
from zeroshard.checkpoint.manifest import Manifest, check_sizes, check_sums, read_manifest
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES, TensorSlice

INDEX = ".metadata"


@functools.cache
def _classes() -> dict[tuple[str, str], type]:
    """Return all that the index of a checkpoint of tensors consists of, beside dtypes and layouts.

    torch.distributed.checkpoint takes a third of the time of torch to import: not before an index is read.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    kinds: tuple[type, ...] = (
        *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.ChunkStorageMetadata),
        *(metadata.TensorStorageMetadata, metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING),
        *(filesystem._StorageInfo, torch.Size),
    )
    return {(kind.__module__, kind.__qualname__): kind for kind in kinds}


def _metadata() -> Any:
    from torch.distributed.checkpoint import metadata

    return metadata


_OPCODES = b"".join(
    (
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
        *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
        *(pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
        *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
        *(pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
        *(pickle.STACK_GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
    )
)
"""What pickle writes an index with. Others may take memory by a number in the file, as BYTEARRAY8 does."""


_MAX_DIMS = 64
"""As many dimensions as torch computes with."""


def _refuse(_: Any) -> None:
    raise pickle.UnpicklingError("it holds what no index has")


class _IndexUnpickler(pickle._Unpickler):
    """Admits data classes of torch.distributed.checkpoint only.

    The one in Python: in the one in C, a number in the file decides how much memory is taken.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: load if code in _OPCODES else _refuse for code, load in pickle._Unpickler.dispatch.items()
    }

    def load_build(self) -> None:
        """Set the attributes of an object, but not those of a class or function."""
        state, target = self.stack[-1], self.stack[-2]  # type: ignore[attr-defined]
        if type(target) not in _classes().values():
            raise pickle.UnpicklingError("it changes what is not its own")
        super().load_build()  # type: ignore[misc]
        if isinstance(target, _metadata().MetadataIndex):
            _check_hashable(target, state)

    dispatch[pickle.BUILD[0]] = load_build

    def append_tuple(self, items: Sequence[Any]) -> None:
        """Put a tuple on the stack.

        Raises:
            pickle.UnpicklingError: it is longer or deeper than an index needs. Whoever hashes a tuple that
                holds the one before it twice, 60 times over, never comes to an end.
        """
        inner = [item for item in items if isinstance(item, tuple)]
        if len(items) > _MAX_DIMS or any(isinstance(value, tuple) for item in inner for value in item):
            raise pickle.UnpicklingError("it holds a tuple that is no shape or place")
        self.append(tuple(items))  # type: ignore[attr-defined]

    def load_tuple(self) -> None:
        """Make a tuple of what is above the mark."""
        self.append_tuple(self.pop_mark())  # type: ignore[attr-defined]

    dispatch[pickle.TUPLE[0]] = load_tuple
    for _num, _code in enumerate((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), start=1):

        def load_short_tuple(self, num: int = _num) -> None:
            """Make a tuple of the topmost items."""
            self.append_tuple([self.stack.pop() for _ in range(num)][::-1])  # type: ignore[attr-defined]

        dispatch[_code[0]] = load_short_tuple

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _classes():
            return _classes()[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout):
            return value
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _get_layout
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _get_layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"it refers to a layout {name!r}")
    return layout


def _check_hashable(key: Any, state: Any) -> None:
    """Raise unless the state of a key has what torch gives it, which is hashed in one step."""
    kinds = {"fqn": str, "offset": torch.Size | None, "index": int | None}
    is_plain = isinstance(state, dict) and state.keys() <= kinds.keys()
    if not is_plain or not all(isinstance(getattr(key, name), kind) for name, kind in kinds.items()):
        raise pickle.UnpicklingError("it holds a place of something else than a tensor")


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A part of a tensor in a file: what torch.save made of it."""

    box: Box
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint on disk."""

    directory: Path
    manifest: Manifest
    tensors: dict[str, StoredTensor]


def open_checkpoint(directory: Path) -> Stored:
    """Read what a checkpoint says of itself; no tensor is read.

    Raises:
        RuntimeError: a file is missing, shortened or damaged, or says what cannot be.
    """
    manifest = read_manifest(directory)
    check_sizes(directory, manifest)
    if INDEX not in manifest.files:
        raise RuntimeError(f"{directory / INDEX}: missing in the list of files")
    check_sums(directory, manifest, [INDEX])
    return Stored(directory, manifest, _read_index(directory / INDEX, manifest))


def _read_index(file: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    try:
        index = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
        if not isinstance(index, _metadata().Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
        return {
            name: _stored_tensor(name, entry, index.storage_data, manifest)
            for name, entry in index.state_dict_metadata.items()
        }
    except Exception as error:  # whatever a crafted index ends in
        reason = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"{file}: not the index of a checkpoint of zeroshard ({reason})") from None


def _stored_tensor(name: Any, entry: Any, places: Any, manifest: Manifest) -> StoredTensor:
    if not isinstance(name, str) or not isinstance(entry, _metadata().TensorStorageMetadata):
        raise ValueError(f"expected tensors by name, came a {type(entry).__name__}")
    shape = _integers(entry.size)
    dtype: Any = entry.properties.dtype
    if not isinstance(dtype, torch.dtype) or not _has_plain_elements(dtype):
        raise ValueError(f"'{name}' is not of a dtype whose elements are plain numbers")
    boxes = []
    for chunk in entry.chunks:
        box = Box(_integers(chunk.offsets), _integers(chunk.sizes))
        if whole(shape).intersect(box) != box and box.numel:
            raise ValueError(f"'{name}' has a part {box} outside of its shape {shape}")
        place = places[_metadata().MetadataIndex(name, torch.Size(box.offsets))]
        offset, num_bytes = _integers((place.offset, place.length))
        file: Any = place.relative_path
        if not isinstance(file, str) or file not in manifest.files:
            raise ValueError(f"'{name}' is said to be in another file than those of the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"'{name}' is said to be transformed")
        if offset + num_bytes > manifest.files[file].num_bytes:
            raise ValueError(f"'{name}' ends behind the end of {file!r}")
        boxes.append(StoredBox(box, file, offset, num_bytes))
    if not tiles([stored.box for stored in boxes], shape):
        raise ValueError(f"the parts of '{name}' do not make up its shape {shape}")
    return StoredTensor(dtype, shape, tuple(boxes))


def _integers(values: Any) -> tuple[int, ...]:
    if not all(isinstance(value, int) and value >= 0 for value in values):
        raise ValueError("expected integers >= 0 for sizes and places")
    return tuple(values)


def _has_plain_elements(dtype: torch.dtype) -> bool:
    """Neither quantized nor bits, whose elements don't say what they mean."""
    return dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS


_INTEGERS = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


class TensorReader:
    """Reads ranges of the tensors of a checkpoint; a context manager, which keeps files open."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, part: TensorSlice) -> None:
        """Fill `part.data`, in its own dtype, on its own device.

        Raises:
            RuntimeError: the checkpoint does not hold all of it, or a file is not as it was written.
        """
        stored, num_read = self._stored.tensors[part.name], 0
        for box, values in part.boxes():
            for source in stored.boxes:
                for run in runs(source.box, box):
                    target = values.view(-1)[run.target : run.target + run.numel]
                    self._read_run(source, stored.dtype, run.source, target)
                    num_read += run.numel
        if num_read != part.data.numel():
            raise RuntimeError(
                f"{self._stored.directory}: expected {part.data.numel()} elements of '{part.name}' from "
                f"{part.start} on, found {num_read}"
            )

    def _read_run(self, source: StoredBox, dtype: torch.dtype, start: int, target: Tensor) -> None:
        file = self._open(source.file)
        begin = source.offset + _data_offset(file, source, dtype) + start * dtype.itemsize
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

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._stored.directory / name).open("rb"))
        return self._files[name]


def _data_offset(file: BinaryIO, source: StoredBox, dtype: torch.dtype) -> int:
    """Where the elements begin inside of what torch.save made: a zip archive that stores them as they are.

    So a part of a box is read without the rest, and nothing is unpickled.
    """
    section = _Section(file, source.offset, source.num_bytes)
    try:
        with zipfile.ZipFile(section) as archive:
            records = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
            expected = source.box.numel * dtype.itemsize
            if len(records) != 1 or records[0].compress_type or records[0].file_size != expected:
                raise zipfile.BadZipFile(f"expected one record of {expected} bytes")
            start = records[0].header_offset
        section.seek(start + 26)
        name_size, extra_size = struct.unpack("<HH", section.read(4))
        begin = int(start + 30 + name_size + extra_size)
        if begin + expected > source.num_bytes:
            raise zipfile.BadZipFile(f"{expected} bytes from {begin} on are not all there")
        return begin
    except (
        zipfile.BadZipFile,
        struct.error,
        OSError,
        ValueError,
        OverflowError,
        NotImplementedError,
    ) as error:
        raise RuntimeError(
            f"{file.name}: no tensor of torch.save at byte {source.offset} ({error})"
        ) from None


class _Section(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def iterate_whole(stored: Stored, names: Iterator[str]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, one at a time."""
    with TensorReader(stored) as reader:
        for name in names:
            tensor = stored.tensors[name]
            values = torch.empty(math.prod(tensor.shape), dtype=tensor.dtype, device="cpu")
            reader.read(TensorSlice(name, tensor.shape, 0, values))
            yield name, values.view(tensor.shape)
