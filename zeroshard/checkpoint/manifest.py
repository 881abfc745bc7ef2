"""The manifest: a JSON file in which a checkpoint describes itself, written last."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES
from zeroshard.checkpoint.places import StoredTensor, check_places
from zeroshard.codec import Count, Damage, Size, naming_damage, to_json, typed
from zeroshard.data.loader import DataPosition
from zeroshard.plan.cuts import Cut
from zeroshard.safetensors import is_file_name
from zeroshard.stepping.rounding import Rounding

FORMAT = 2
NUM_PARTS = "num_parts"
"""The key of `written_by` for the number of pipeline ranks, if there were several."""
_Parts = Annotated[int, range(1, 1 << 31).__contains__]
_Crc = Annotated[int, range(1 << 32).__contains__]


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the checkpoint."""

    num_bytes: Size
    crc32: _Crc


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """A parameter of the model."""

    shape: tuple[Size, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...]
    """The other names of a tied parameter."""
    blocks: Cut | None = None
    """The cut whose parts begin with blocks of their own, for 8-bit states; see `own_blocks`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedScale:
    """The loss scale in a checkpoint."""

    value: float
    is_dynamic: bool
    num_steps: Count
    num_spared: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All of a checkpoint but the bytes of its tensors and the values of other kinds."""

    format: int = FORMAT
    written_by: dict[str, Any]
    """Versions of zeroshard and torch, and the number of ranks."""
    model: dict[str, Any]
    """The class of the model, and its config if it is a model of transformers."""
    config: dict[str, Any]
    global_step: Count
    skipped_steps: Count
    loss_scale: SavedScale | None
    rounding: Rounding | None = None
    """The place in the random bits of stochastic rounding."""
    seed: int
    """The seed from which ranks without saved generators derive theirs."""
    data: DataPosition | None
    """The position of the DataLoader that `initialize` made."""
    optimizer: str | None
    """The name of its class."""
    lr_scheduler: str | None
    parameters: dict[str, ParameterRecord]
    buffers: tuple[str, ...]
    frozen: dict[str, _Crc] = field(default_factory=dict)
    """The crc32 of each parameter that was frozen and is left out."""
    averages: dict[Annotated[str, str.isidentifier], Count] = field(default_factory=dict)
    """The number of updates of each moving average."""
    files: dict[Annotated[str, is_file_name], FileRecord] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """The places of parameters, buffers and optimizer states; tied parameters under their first name."""

    def to_bytes(self) -> bytes:
        """Return JSON with a checksum of itself."""
        return json.dumps({"crc32": _crc_of(self), "content": self}, default=to_json).encode()


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        DamageError: it is damaged, or of another format.
    """
    file = directory / MANIFEST
    _check_own(file)
    with naming_damage(file):
        outer = json.loads(file.read_bytes())
        content: dict[str, Any] = typed(dict[str, Any], outer["content"], "content")
        if (crc := _crc_of(content)) != outer["crc32"]:
            raise Damage.SUM.of(file, outer["crc32"], crc)
        if (found := content.get("format")) != FORMAT:
            raise Damage.FORMAT.of(file, FORMAT, found, content.get("written_by"))
        return parse(content)


def parse(content: Mapping[str, Any]) -> Manifest:
    """Return the manifest with this content.

    Raises:
        ValueError, TypeError, KeyError: no manifest has it.
    """
    manifest: Manifest = typed(Manifest, content, "content")
    tensors = manifest.tensors
    typed(_Parts, manifest.written_by.get(NUM_PARTS, 1), f"written_by.{NUM_PARTS}")
    check_places(tensors, {name: record.num_bytes for name, record in manifest.files.items()})
    missing = {VALUES, TENSORS} - manifest.files.keys()
    missing |= {*manifest.buffers, *(manifest.parameters.keys() - manifest.frozen.keys())} - tensors.keys()
    if missing:
        raise ValueError(f"expected {sorted(missing)} among the files and tensors, got none")
    for name, record in manifest.parameters.items():
        expected = record.dtype, record.shape
        if name in tensors and (found := (tensors[name].dtype, tensors[name].shape)) != expected:
            raise ValueError(f"expected parameter '{name}' in {expected}, got {found}")
    return manifest


def _crc_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, default=to_json).encode())


def _check_own(file: Path) -> None:
    """Raise unless a file lies in the checkpoint itself: a link may lead to any file of the machine."""
    if file.is_symlink():
        raise Damage.LINK.of(file, os.readlink(file))


def check_sizes(directory: Path, manifest: Manifest) -> None:
    """Raise DamageError for the first file that is not there, has another size, or is a link."""
    for name, record in manifest.files.items():
        file = directory / name
        _check_own(file)
        if not file.is_file():
            raise Damage.MISSING.of(file)
        if (size := file.stat().st_size) != record.num_bytes:
            raise Damage.SIZE.of(file, record.num_bytes, size)


def check_sums(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise DamageError for the first file of these names that does not hold what was written."""
    for name in names:
        file, crc = directory / name, 0
        buffer = memoryview(bytearray(1 << 20))
        with file.open("rb", buffering=0) as stream:
            while num_read := stream.readinto(buffer):
                crc = zlib.crc32(buffer[:num_read], crc)
        if crc != (expected := manifest.files[name].crc32):
            raise Damage.SUM.of(file, expected, crc)


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
