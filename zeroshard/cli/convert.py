"""Checkpoints of format 1 become ones of the present format.

Format 1 had the places of tensors in `.metadata`, a pickle, and other values in `values.pt`, a pickle in an
archive. Nothing is unpickled here either: opcodes are followed with records in the place of objects, and the
few records that format 1 has become plain values. What a pickle repeats is counted each time that it is
visited, so that one of 200 bytes which stands for 2**60 elements is refused.
"""

from __future__ import annotations

import io
import os
import pickletools
import shutil
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.files import (
    MANIFEST,
    check_free,
    check_tag,
    commit,
    discard,
    open_place,
    sync,
    tag_of,
)
from zeroshard.checkpoint.manifest import Manifest, check_sizes, check_sums, parse, read_content
from zeroshard.checkpoint.places import Box, StoredBox, StoredTensor, file_of, to_row
from zeroshard.checkpoint.reader import open_checkpoint
from zeroshard.checkpoint.save import write_values_and_manifest
from zeroshard.checkpoint.tensors import MAX_BOX_BYTES
from zeroshard.checkpoint.values import MAX_DEPTH, to_files
from zeroshard.checkpoint.writer import data_start, find_elements

_INDEX, _VALUES = ".metadata", "values.pt"
_WORK, _WORK_PER_BYTE = 1 << 20, 32
"""Elements that a walk through any pickle may visit, and more for each byte of it: what is written out, not
repeated, takes a byte an element or more."""
_MAX_ARCHIVE = MAX_BOX_BYTES + (1 << 16)
"""Bytes of a box with what torch.save puts around it, some 1500 bytes."""


def convert(directory: Path, folder: Path) -> Path:
    """Write a checkpoint of format 1 into another folder, in the present format.

    The files of tensors and `.metadata` stay as they are: they become hard links, or copies where the file
    system has no links.

    Args:
        directory: of the checkpoint; it does not change.
        folder: of checkpoints; made if it is not there.

    Returns:
        The new directory.

    Raises:
        ValueError: the checkpoint is of another format, or the folder has one of this tag.
        RuntimeError: the checkpoint is damaged, or has values that no file but a pickle can hold.
    """
    content = read_content(directory)
    if content.get("format") != 1:
        raise ValueError(f"'{directory}': expected checkpoint format 1, got {content.get('format')!r:.20}")
    tag = check_tag(tag_of(directory))
    if (folder / tag).exists():
        raise ValueError(f"'{folder}': has a checkpoint of tag '{tag}': expected another folder")
    check_free(folder, tag)
    old = _read_manifest(directory, content)
    manifest = replace(old, tensors=_naming(directory / _INDEX, lambda file: _read_places(file, old)))
    values = _naming(directory / _VALUES, lambda file: to_files(_read_values(file)))
    place = open_place(folder, tag, sum(map(len, values.values())))
    try:
        for name in manifest.files:
            _link(directory / name, place.temporary / name)
        write_values_and_manifest(place.temporary, values, manifest)
        _naming(directory / _INDEX, lambda _: open_checkpoint(place.temporary))  # which checks each place
        commit(place, keep_last=None)
    except BaseException:
        discard(place)
        raise
    return place.final


def _read_manifest(directory: Path, content: Mapping[str, Any]) -> Manifest:
    """Return the manifest without places; all files are as they were written."""
    added = {"rounding": None, "frozen": {}, **content, "format": 2, "tensors": {}}
    old: Manifest = _naming(directory / MANIFEST, lambda _: parse(added))
    check_sizes(directory, old)
    check_sums(directory, old, old.files)
    return replace(old, files={name: record for name, record in old.files.items() if name != _VALUES})


def _naming(file: Path, read: Callable[[Path], Any]) -> Any:
    """Return what is made of a file; whatever error a crafted one ends in becomes one that names it."""
    try:
        return read(file)
    except Exception as error:
        raise RuntimeError(f"{file}: cannot be converted ({type(error).__name__}: {error!s:.300})") from None


def _link(source: Path, target: Path) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
    sync(target)


# -------------------------------------------------------------------------------------- the two files


def _read_places(file: Path, manifest: Manifest) -> dict[str, StoredTensor]:
    """Return the tensors of an index; their boxes are checked when the new manifest is read."""
    index = _Walk(file.read_bytes()).read()
    names = {alias for record in manifest.parameters.values() for alias in record.aliases}
    ranks = {file_of(rank): rank for rank in range(len(manifest.files)) if file_of(rank) in manifest.files}
    tensors = {}
    for name, entry in index["state_dict_metadata"].items():
        boxes = []
        for chunk in entry["chunks"] if name not in names else ():
            place = index["storage_data"][name, tuple(chunk["offsets"])]
            if place.get("transform_descriptors"):
                raise ValueError(f"'{name}' is transformed")
            rank = ranks[place["relative_path"]]
            box = Box(tuple(chunk["offsets"]), tuple(chunk["sizes"]))
            num_bytes = box.numel * entry["properties"].itemsize
            with (file.parent / file_of(rank)).open("rb") as opened:
                opened.seek(place["offset"])
                archive = io.BytesIO(opened.read(min(place["length"], _MAX_ARCHIVE)))
            boxes.append(to_row(StoredBox(box, rank, place["offset"] + find_elements(archive, 0, num_bytes))))
        if name not in names:
            tensors[name] = StoredTensor(entry["properties"], tuple(entry["size"]), boxes)
    return tensors


def _read_values(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened, zipfile.ZipFile(opened) as archive:
        records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
        if any(record.compress_type for record in records.values()):
            raise ValueError("it is compressed")
        if sum(record.file_size for record in records.values()) > file.stat().st_size:
            raise ValueError("its records are longer than the file")

        def read(name: str) -> bytes:
            opened.seek(data_start(opened, records[name]))
            return opened.read(records[name].file_size)

        values: dict[str, Any] = _Walk(read("data.pkl"), read).read()
    return values


# --------------------------------------------------------------------------------------------- pickles


@dataclass(slots=True, eq=False)
class _Record:
    """An object of a pickle that is not built."""

    kind: str
    """tuple, list, dict, storage (of a tensor), name (of a class or function), or call."""
    items: list[Any]
    """Elements. Of a dict: keys and values in turn. Of a call: a name, arguments, then keys and values."""
    state: Any = None


_ATOMS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"),
        *("NONE", "NEWTRUE", "NEWFALSE"),
    )
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MARKED = -1
_TAKES: dict[str, tuple[str, int]] = {
    **{f"EMPTY_{kind.upper()}": (kind, 0) for kind in ("tuple", "list", "dict")},
    "TUPLE1": ("tuple", 1),
    "TUPLE2": ("tuple", 2),
    "TUPLE3": ("tuple", 3),
    "TUPLE": ("tuple", _MARKED),
    "REDUCE": ("call", 2),
    "NEWOBJ": ("call", 2),
    "BINPERSID": ("storage", 1),
    "STACK_GLOBAL": ("name", 2),
}
"""By opcode: the record that it makes, of how many of the topmost items. _MARKED: those above the mark."""
_PUTS = {"APPEND": 1, "SETITEM": 2, "APPENDS": _MARKED, "SETITEMS": _MARKED}
"""By opcode: how many of the topmost items it puts into the record below them."""


def _follow(code: bytes) -> Any:
    """Return what is left on the stack of a pickle, with records in the place of objects.

    Raises:
        ValueError, LookupError, AttributeError: it is no pickle, or has an opcode that format 1 has not.
    """
    stacks: list[list[Any]] = [[]]  # below each mark, and above the last one
    memo: dict[int, Any] = {}
    opcode: Any
    argument: Any
    for opcode, argument, _ in pickletools.genops(code):
        name = opcode.name
        if name in _ATOMS:
            stacks[-1].append(_CONSTANTS.get(name, argument))
        elif name in _TAKES:
            kind, num = _TAKES[name]
            items = _take(stacks, num)
            stacks[-1].append(_Record(kind, items))
        elif name in _PUTS:
            items = _take(stacks, _PUTS[name])
            stacks[-1][-1].items.extend(items)
        elif name == "MARK":
            stacks.append([])
        elif name == "BUILD":
            [state] = _take(stacks, 1)
            stacks[-1][-1].state = state
        elif name == "GLOBAL":
            stacks[-1].append(_Record("name", argument.split(" ")))
        elif name in ("BINGET", "LONG_BINGET"):
            stacks[-1].append(memo[argument])
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if argument is None else argument] = stacks[-1][-1]
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"it has the opcode {name}, which no checkpoint has")
    return stacks[-1].pop()


def _take(stacks: list[list[Any]], num: int) -> list[Any]:
    """Remove the topmost items, or with _MARKED all above the last mark, and return them."""
    if num == _MARKED:
        return stacks.pop()
    start = len(stacks[-1]) - num
    items = stacks[-1][start:]
    del stacks[-1][start:]
    return items


class _Walk:
    """Makes plain values of what `_follow` gave."""

    def __init__(self, code: bytes, read: Callable[[str], bytes] = lambda name: b"") -> None:
        self._code, self._read = code, read
        self._work = _WORK + _WORK_PER_BYTE * len(code)
        self._storages: dict[str, bytearray] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "collections.Counter": Counter,
            "torch.Size": torch.Size,
            "torch.device": torch.device,
            "torch.serialization._get_layout": str,
            "_codecs.encode": lambda text, encoding: text.encode("latin1"),
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor,
            "torch._utils._rebuild_sparse_tensor": _sparse,
            "torch._utils._rebuild_parameter": lambda data, needs, hooks: nn.Parameter(data, needs),
            f"{_DCP}.metadata._MEM_FORMAT_ENCODING": int,
        }
        for module in ("builtins", "__builtin__"):
            self._calls |= {f"{module}.set": set, f"{module}.complex": complex}

    def read(self) -> Any:
        """Return the value. Raises errors of any kind for what is no value of format 1."""
        return self._value(_follow(self._code), 0)

    def _value(self, record: Any, depth: int) -> Any:
        if not isinstance(record, _Record):
            return record
        self._spend(1 + len(record.items))
        if depth > 2 * MAX_DEPTH:  # an object of the index takes two: a call, and its state
            raise ValueError("it is nested too deeply")
        if record.kind == "name":
            return _named(".".join(record.items))
        if record.kind == "call":
            return self._call(record, depth)
        items = [self._value(item, depth + 1) for item in record.items]
        if record.kind == "dict":
            return dict(zip(items[::2], items[1::2], strict=True))
        return items if record.kind == "list" else tuple(items)

    def _call(self, record: _Record, depth: int) -> Any:
        function, arguments, *pairs = record.items
        if function.kind != "name":
            raise ValueError("it calls an object that it does not name")
        name = ".".join(function.items)
        given = self._value(arguments, depth + 1)
        state = self._value(record.state, depth + 1)
        if name == "collections.OrderedDict":
            items = [self._value(item, depth + 1) for item in pairs]
            return OrderedDict(zip(items[::2], items[1::2], strict=True))
        if name == f"{_DCP}.metadata.MetadataIndex":
            return state["fqn"], tuple(state["offset"])
        if name == f"{_DCP}.metadata.TensorProperties":
            return state[0]  # the dtype
        if name in _OBJECTS:
            return state
        if name not in self._calls:
            raise ValueError(f"it refers to {name}")
        return self._calls[name](*given)

    def _tensor(
        self,
        storage: tuple[Any, ...],
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
        _hooks: Any,
        dtype: torch.dtype | None = None,
        _metadata: Any = None,
    ) -> Tensor:
        ((_, stored_dtype, key, _, _),) = storage
        if key not in self._storages:
            self._storages[key] = bytearray(self._read(f"data/{key}"))
            self._work += len(self._storages[key])
        memory, dtype = self._storages[key], dtype or stored_dtype
        whole = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)
        view = whole.as_strided(size, stride, offset)
        self._spend(view.nbytes)  # an expanded tensor has more elements than the file
        return view.clone().requires_grad_(requires_grad)

    def _spend(self, work: int) -> None:
        self._work -= work
        if self._work < 0:
            raise ValueError("it repeats its elements too often to be walked through")


_DCP = "torch.distributed.checkpoint"
_OBJECTS = frozenset(
    (
        *(f"{_DCP}.metadata.{name}" for name in ("Metadata", "StorageMeta", "ChunkStorageMetadata")),
        *(f"{_DCP}.metadata.TensorStorageMetadata", f"{_DCP}.filesystem._StorageInfo"),
    )
)
"""Data classes whose attributes are what is of interest."""


def _named(name: str) -> torch.dtype:
    """Return the dtype that is meant, by its own name or that of a storage."""
    kind, dtype = name.removeprefix("torch."), getattr(torch, name.removeprefix("torch."), None)
    if kind in _STORAGES:
        return _STORAGES[kind]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it refers to {name}")
    return dtype


_STORAGES = {
    "storage.UntypedStorage": torch.uint8,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


def _sparse(layout: str, data: tuple[Any, ...]) -> Tensor:
    if layout == "torch.sparse_coo":
        indices, values, size, *coalesced = data
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=coalesced[0] if coalesced else None
        )
    kind = getattr(torch, layout.removeprefix("torch."))
    return torch.sparse_compressed_tensor(*data, layout=kind, check_invariants=True)
