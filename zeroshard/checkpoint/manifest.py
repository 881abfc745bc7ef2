"""The manifest: a JSON file in which a checkpoint describes itself, written last."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from zeroshard.checkpoint import places
from zeroshard.checkpoint.files import MANIFEST
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.plan.cuts import Cut, Section

FORMAT = 2
MAX_STEPS = 1 << 53
"""Float64 can't count further."""
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
    """The other names of a tied parameter."""
    blocks: Cut | None = None
    """The cut whose parts begin with blocks of their own, for 8-bit states; see `blockwise.own_blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All of a checkpoint but the bytes of its tensors and the values of other kinds."""

    format: int = FORMAT
    written_by: dict[str, Any]
    """Versions of zeroshard and torch, and the number of ranks."""
    model: dict[str, Any]
    """The class of the model, and its config if it is a model of transformers."""
    config: dict[str, Any]
    global_step: int
    skipped_steps: int
    loss_scale: dict[str, Any] | None
    rounding: dict[str, Any] | None = None
    seed: int
    """The seed from which ranks without saved generators derive theirs."""
    data: dict[str, Any] | None
    """The position of the DataLoader that `initialize` made."""
    optimizer: str | None
    """The name of its class."""
    lr_scheduler: str | None
    parameters: dict[str, ParameterRecord]
    buffers: tuple[str, ...]
    frozen: dict[str, int] = field(default_factory=dict)
    """The crc32 of each parameter that was frozen and is left out."""
    averages: dict[str, int] = field(default_factory=dict)
    """The number of updates of each moving average; {} in checkpoints of versions that had none."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """The places of parameters, buffers and optimizer states; tied parameters under their first name."""

    def to_bytes(self) -> bytes:
        """Return JSON with a checksum of itself."""
        content = json.loads(json.dumps(asdict(replace(self, tensors={}))))
        content["tensors"] = places.to_json(self.tensors)
        return json.dumps({"crc32": _crc_of(content), "content": content}).encode()


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        RuntimeError: it is damaged, or of another format.
    """
    with _naming_damage(directory / MANIFEST):
        content = read_content(directory)
        if content["format"] != FORMAT:
            writer = content["written_by"].get("zeroshard")
            raise RuntimeError(
                f"{directory / MANIFEST}: expected checkpoint format {FORMAT}, got "
                f"{content['format']!r:.20}, written by zeroshard {writer!s:.20}"
            )
        manifest = parse(content)
        _check_tensors(manifest)
        return manifest


def read_content(directory: Path) -> dict[str, Any]:
    """Return what the manifest of any format holds, if it is as it was written.

    Raises:
        RuntimeError: it is damaged.
    """
    file = directory / MANIFEST
    check_own(file)
    with _naming_damage(file):
        outer = json.loads(file.read_bytes())
        content: dict[str, Any] = outer["content"]
        _expect(isinstance(content, dict), "content")
        if _crc_of(content) != outer["crc32"]:
            raise ValueError("the checksum differs")
        return content


@contextmanager
def _naming_damage(file: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RuntimeError(f"{file}: damaged ({error!s:.400})") from None


def parse(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest with this content.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: no manifest has it.
    """
    content = {"averages": {}, **content}
    _check_kinds(content)
    made = {option.name: content[option.name] for option in fields(Manifest)}
    made["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
    made["parameters"] = {
        name: ParameterRecord(
            tuple(record["shape"]),
            record["dtype"],
            tuple(record["aliases"]),
            _parse_blocks(name, record.get("blocks"), tuple(record["shape"])),
        )
        for name, record in content["parameters"].items()
    }
    made["buffers"] = tuple(content["buffers"])
    sizes = {name: record.num_bytes for name, record in made["files"].items()}
    made["tensors"] = places.from_json(content["tensors"], sizes)
    return Manifest(**made)


def _parse_blocks(name: str, content: Any, shape: tuple[int, ...]) -> Cut | None:
    """Return the cut of a parameter. Raises ValueError, KeyError or TypeError for what is none."""
    if content is None:
        return None
    sections = tuple(Section(section["size"], section["unit"]) for section in content["sections"])
    numbers = [content["dim"], content["num_ranks"], *(size for s in sections for size in (s.size, s.unit))]
    _expect(all(type(number) is int for number in numbers), f"blocks of '{name}'")
    return Cut(name, shape, content["dim"], content["num_ranks"], sections)


def _check_tensors(manifest: Manifest) -> None:
    """Raise ValueError unless each parameter that is not left out, and each buffer, is among the tensors."""
    for name, record in manifest.parameters.items():
        found = manifest.tensors.get(name)
        if found is None and name in manifest.frozen:
            continue
        expected, got = f"{record.dtype} of shape {record.shape}", "none"
        if found is not None:
            got = f"{str(found.dtype).removeprefix('torch.')} of shape {found.shape}"
        if got != expected:
            raise ValueError(f"expected parameter '{name}' in {expected}, got {got}")
    for name in manifest.buffers:
        _expect(name in manifest.tensors, f"buffer '{name}'")


_KINDS: dict[type, tuple[str, ...]] = {
    int: ("global_step", "skipped_steps", "seed"),
    dict: ("written_by", "model", "config", "parameters", "frozen", "averages", "files", "tensors"),
    list: ("buffers",),
}
_KINDS_OR_NONE: dict[type, tuple[str, ...]] = {
    dict: ("loss_scale", "rounding", "data"),
    str: ("optimizer", "lr_scheduler"),
}


def _check_kinds(content: Mapping[str, Any]) -> None:
    """Raise ValueError for what is not of the kind that readers take for granted, or a file elsewhere."""
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
            raise ValueError(f"expected names of files in the directory of the checkpoint, got {name!r}")
        _expect(all(type(record[key]) is int and record[key] >= 0 for key in ("num_bytes", "crc32")), name)
    for name, crc in content["frozen"].items():
        _expect(name in content["parameters"] and type(crc) is int, name)
    for name, num_updates in content["averages"].items():
        _expect(name.isidentifier() and type(num_updates) is int and 0 <= num_updates < MAX_STEPS, name)
    for name, record in content["parameters"].items():
        _expect(all(isinstance(size, int) and size >= 0 for size in record["shape"]), name)
        _expect(all(isinstance(other, str) for other in (record["dtype"], *record["aliases"])), name)


def _are_names(values: Any) -> bool:
    """Return True for strings in a sequence or as the keys of a dict."""
    return isinstance(values, list | tuple | dict) and all(isinstance(name, str) for name in values)


def _expect(is_so: bool, name: str) -> None:
    if not is_so:
        raise ValueError(f"the entry '{name}' is missing or has a wrong type or value")


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def check_own(file: Path) -> None:
    """Raise unless a file lies in the checkpoint itself: a link may lead to any file of the machine."""
    if file.is_symlink():
        raise RuntimeError(
            f"{file}: is a symbolic link to '{os.readlink(file)}'; expected the file itself. Only the "
            "directory of a checkpoint may be a link"
        )


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise RuntimeError for the first file that is not there, has another size, or is a link."""
    for name, record in manifest.files.items():
        file = directory / name
        check_own(file)
        if not file.is_file():
            raise RuntimeError(f"{file}: missing; the checkpoint is incomplete")
        if (size := file.stat().st_size) != record.num_bytes:
            raise RuntimeError(f"{file}: expected {record.num_bytes} bytes, found {size}")


def check_sums(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise RuntimeError for the first file of these names that does not hold what was written."""
    for name in names:
        file, crc = directory / name, 0
        buffer = memoryview(bytearray(_CHUNK))
        with file.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:num_read], crc)
        if crc != manifest.files[name].crc32:
            raise RuntimeError(f"{file}: damaged (its checksum is not the one in the manifest)")


def describe_model(module: Any) -> dict[str, Any]:
    """Describe a model for the manifest: its class, and what an export by transformers or peft needs.

    Args:
        module: the model; one of transformers or peft adds the contents of its config files, and the names
            that its file of weights leaves out or ties.
    """
    described: dict[str, Any] = {"class": type(module).__name__}
    for key in ("config", "generation_config"):
        if callable(to_json := getattr(getattr(module, key, None), "to_json_string", None)):
            described[key] = json.loads(to_json())
    if "config" in described:
        described["config"]["architectures"] = [type(module).__name__]
    if callable(tied := getattr(module, "get_expanded_tied_weights_keys", None)):
        described["tied"] = tied(all_submodels=True)
    if not_saved := getattr(module, "_keys_to_ignore_on_save", None):
        described["not_saved"] = sorted(not_saved)
    if adapters := getattr(module, "peft_config", None):
        described["adapters"] = sorted(adapters)
    return described


def saved_names(model: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The names under which others expect a parameter in a file.

    Args:
        model: what `describe_model` gave.
        names: all of the parameter's, the first one first.
    """
    wanted = [name for name in names if name not in model.get("not_saved", ())]
    if "tied" not in model:
        return wanted[:1]
    # transformers ties these again; a name that the user tied would be missing.
    return [name for name in wanted if name not in model["tied"]] or wanted[:1]
