"""Values that torch.load(weights_only=True) can load: nothing that would run code."""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from zeroshard.checkpoint.pickles import check_form

_GLOBALS = {
    *("collections.OrderedDict", "collections.Counter", "_codecs.encode", "builtins.set", "builtins.complex"),
    *("torch.Size", "torch.device", "torch.serialization._get_layout"),
    *("torch.nn.parameter.Parameter", "torch.storage.UntypedStorage"),
    *("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"),
    *("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"),
    *("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_qtensor"),
    *("torch._utils._rebuild_meta_tensor_no_storage",),
    *("torch._utils._rebuild_device_tensor_from_cpu_tensor",),
}
"""What plain values and tensors refer to, beside dtypes and storages.

torch admits more, of which bytearray and torch.Tensor take as much memory as a number in the file says.
"""


def to_bytes(values: Mapping[str, Any]) -> bytes:
    """`values` as torch.save writes them."""
    stream = io.BytesIO()
    torch.save(dict(values), stream)
    return stream.getvalue()


def read(file: Path) -> Any:
    """What `to_bytes` made.

    Raises:
        RuntimeError: the file is damaged, or holds more than plain values and tensors.
    """
    try:
        with file.open("rb") as stream:
            copy = _copy(stream, _checked_records(stream))
        return torch.load(copy, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or crafted pickle ends in
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RuntimeError(
            f"{file}: expected tensors and plain values, could not be read: {reason}"
        ) from None


def _checked_records(stream: BinaryIO) -> list[zipfile.ZipInfo]:
    """The records of an archive of torch.save, whose pickle refers to nothing unexpected.

    Raises:
        zipfile.BadZipFile: they are compressed, or overlap: a small file could fill the memory.
        pickle.UnpicklingError: as `_check_globals` and `check_form`.
    """
    num_bytes = stream.seek(0, os.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
    if any(record.compress_type for record in records):
        raise zipfile.BadZipFile("it is compressed")
    if sum(record.file_size for record in records) > num_bytes:
        raise zipfile.BadZipFile("its records are longer than the file")
    for record in records:
        if record.filename.lower().endswith("data.pkl"):  # torch's reader knows no case
            code = _read_record(stream, record)
            _check_globals(code)
            check_form(code)
    return records


def _read_record(stream: BinaryIO, record: zipfile.ZipInfo) -> bytes:
    """Not by ZipFile.read: torch.save can be told to leave out the checksums of records."""
    stream.seek(record.header_offset + 26)
    name_size, extra_size = struct.unpack("<HH", stream.read(4))
    stream.seek(name_size + extra_size, os.SEEK_CUR)
    return stream.read(record.file_size)


def _copy(stream: BinaryIO, records: Iterable[zipfile.ZipInfo]) -> BinaryIO:
    """An archive of these records: in a crafted one, torch's reader may see others than Python's."""
    copy = io.BytesIO()
    with zipfile.ZipFile(copy, "w") as archive:
        for record in records:
            archive.writestr(record.filename, _read_record(stream, record))
    copy.seek(0)
    return copy


def _check_globals(code: bytes) -> None:
    """True if a pickle refers to nothing but what plain values need, or what the user declared safe.

    Raises:
        pickle.UnpicklingError: naming the first thing else.
    """
    safe = (
        item if isinstance(item, tuple) else (item, None) for item in torch.serialization.get_safe_globals()
    )
    allowed = _GLOBALS | {name or f"{kind.__module__}.{kind.__qualname__}" for kind, name in safe}
    for opcode, argument, _ in pickletools.genops(code):
        if opcode.name != "GLOBAL":
            continue
        module, _, name = str(argument).partition(" ")
        module = "builtins" if module == "__builtin__" else module  # as protocol 2 has it
        if f"{module}.{name}" not in allowed and not (module == "torch" and _is_kind(name)):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _is_kind(name: str) -> bool:
    return name.endswith("Storage") or isinstance(getattr(torch, name, None), torch.dtype | torch.qscheme)


def check_plain(values: Any, name: str) -> None:
    """True if values can be loaded again without running code.

    Args:
        name: of the values, for the message.

    Raises:
        ValueError: naming the first key whose value can't be.
    """
    if (key := _find_foreign(values, "")) is not None:
        path, value = key
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ValueError(
            f"{name}{path}: expected tensors, numbers, strings, None, and lists, tuples and dicts of them, "
            f"which load without running code; came {kind}"
        )


def _without_scalars(value: Any) -> Any:
    """`value` without what loads for sure and takes long to try: an optimizer's step of every parameter."""
    if type(value) is Tensor and not value.dim() and not vars(value):
        return None
    if type(value) is dict:
        return {key: _without_scalars(item) for key, item in value.items()}
    return value


def _find_foreign(value: Any, path: str) -> tuple[str, Any] | None:
    if _loads(_without_scalars(value)):
        return None
    if isinstance(value, Mapping):
        parts = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        parts = []
    found = (_find_foreign(item, path + step) for step, item in parts)
    return next((hit for hit in found if hit is not None), (path, value))


def _loads(value: Any) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        _checked_records(stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception:  # whatever a foreign object's pickling raises
        return False
    return True
