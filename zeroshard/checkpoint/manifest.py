"""What a checkpoint says of itself: one JSON file, written last."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.checks import MAX_STEPS
from zeroshard.checkpoint.files import MANIFEST

FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the checkpoint."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter of the model."""

    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...]
    """Its other names, where it is tied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that is neither a tensor nor a value of the user's."""

    format: int = FORMAT
    written_by: dict[str, Any]
    """Versions of zeroshard and torch, and the number of ranks."""
    model: dict[str, Any]
    """Its class, and the model config of transformers where there is one."""
    config: dict[str, Any]
    """Of zeroshard."""
    global_step: int
    skipped_steps: int
    loss_scale: dict[str, Any] | None
    """Of float16."""
    rounding: dict[str, Any] | None = None
    """Of updates into bfloat16."""
    seed: int
    """From which ranks without saved generators derive theirs."""
    data: dict[str, Any] | None
    """The position of the DataLoader that `initialize` made."""
    optimizer: str | None
    """The name of its class."""
    lr_scheduler: str | None
    parameters: dict[str, ParameterRecord]
    buffers: tuple[str, ...]
    frozen: dict[str, int] = field(default_factory=dict)
    """The crc32 of each parameter that was frozen and is left out."""
    files: dict[str, FileRecord] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """JSON with a checksum of itself."""
        content = json.loads(json.dumps(asdict(self)))
        return json.dumps({"crc32": _crc_of(content), "content": content}, indent=1).encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        RuntimeError: it is damaged, or written by a newer zeroshard.
    """
    file = directory / MANIFEST
    _check_own(file)
    try:
        outer = json.loads(file.read_bytes())
        content = outer["content"]
        if _crc_of(content) != outer["crc32"]:
            raise ValueError("the checksum differs")
        if content["format"] != FORMAT:
            raise RuntimeError(
                f"{file}: expected checkpoint format {FORMAT}, came {content['format']}, written by "
                f"zeroshard {content['written_by'].get('zeroshard')}"
            )
        content.setdefault("rounding", None)  # of checkpoints that were written before there was any
        content.setdefault("frozen", {})  # the same
        _check_kinds(content)
        content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
        content["parameters"] = {
            name: ParameterRecord(tuple(record["shape"]), record["dtype"], tuple(record["aliases"]))
            for name, record in content["parameters"].items()
        }
        content["buffers"] = tuple(content["buffers"])
        return Manifest(**{option.name: content[option.name] for option in fields(Manifest)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RuntimeError(f"{file}: damaged ({error})") from None


_KINDS: dict[type, tuple[str, ...]] = {
    int: ("global_step", "skipped_steps", "seed"),
    dict: ("written_by", "model", "config", "parameters", "frozen", "files"),
    list: ("buffers",),
}
_KINDS_OR_NONE: dict[type, tuple[str, ...]] = {
    dict: ("loss_scale", "rounding", "data"),
    str: ("optimizer", "lr_scheduler"),
}


def _check_kinds(content: Mapping[str, Any]) -> None:
    """True if everything is of the kind that readers take for granted, and every file is inside.

    Raises:
        ValueError: naming the first thing that is not.
    """
    for kinds, others in ((_KINDS, ()), (_KINDS_OR_NONE, (type(None),))):
        for kind, names in kinds.items():
            for name in names:
                _expect(type(content[name]) in (kind, *others), name)
    for name in ("global_step", "skipped_steps"):
        _expect(0 <= content[name] < MAX_STEPS, name)
    model = content["model"]
    _expect(isinstance(model.get("class", ""), str), "model")
    _expect(all(isinstance(model.get(key, {}), dict) for key in ("config", "generation_config")), "model")
    _expect(all(_are_names(model.get(key, ())) for key in ("not_saved", "tied", "adapters")), "model")
    _expect(_are_names(content["buffers"]), "buffers")
    for name, record in content["files"].items():
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"it lists {name!r}, which is not in its directory")
        _expect(isinstance(record["num_bytes"], int) and isinstance(record["crc32"], int), name)
    for name, crc in content["frozen"].items():
        _expect(name in content["parameters"] and type(crc) is int, name)
    for name, record in content["parameters"].items():
        _expect(all(isinstance(size, int) and size >= 0 for size in record["shape"]), name)
        _expect(all(isinstance(other, str) for other in (record["dtype"], *record["aliases"])), name)


def _are_names(values: Any) -> bool:
    """True for strings in a sequence or as the keys of a dict."""
    return isinstance(values, list | tuple | dict) and all(isinstance(name, str) for name in values)


def _expect(is_so: bool, name: str) -> None:
    if not is_so:
        raise ValueError(f"{name} is not as expected")


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check_own(file: Path) -> None:
    """Raise unless a file lies in the checkpoint itself: a link may lead to any file of the machine."""
    if file.is_symlink():
        raise RuntimeError(
            f"{file}: a symbolic link, to '{os.readlink(file)}': expected the file itself. "
            "The directory of a checkpoint may be a link, what is in it may not"
        )


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """True if all files are there, whole, and no links.

    Raises:
        RuntimeError: naming the first one that is not.
    """
    for name, record in manifest.files.items():
        file = directory / name
        _check_own(file)
        if not file.is_file():
            raise RuntimeError(f"{file}: missing; the checkpoint is incomplete")
        if (size := file.stat().st_size) != record.num_bytes:
            raise RuntimeError(f"{file}: expected {record.num_bytes} bytes, found {size}")


def check_sums(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """True if files hold what was written.

    Raises:
        RuntimeError: naming the first one that does not.
    """
    for name in names:
        file, crc = directory / name, 0
        buffer = memoryview(bytearray(_CHUNK))
        with file.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:num_read], crc)
        if crc != manifest.files[name].crc32:
            raise RuntimeError(f"{file}: damaged (the checksum differs from the one that was written)")
