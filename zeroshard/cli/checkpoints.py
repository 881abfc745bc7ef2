"""The commands that read checkpoints: `zeroshard export` and `inspect`."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.capture import KIND
from zeroshard.checkpoint.files import MANIFEST, find
from zeroshard.checkpoint.manifest import Manifest, check_sums
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.checkpoint.tensors import Stored, dtype_name, open_checkpoint
from zeroshard.cli.options import ExportOptions, InspectOptions
from zeroshard.hf.export import MAX_SHARD_BYTES, Format, export_checkpoint
from zeroshard.tables import LINE, format_bytes, format_count, render


def export(options: ExportOptions) -> None:
    """Run `zeroshard export`."""
    directory = find(options.checkpoint)
    tokenizer = None if options.tokenizer is None else _load_tokenizer(options.tokenizer)
    max_bytes = MAX_SHARD_BYTES if options.max_shard_size is None else options.max_shard_size
    how = Format(dtype=options.dtype, max_shard_bytes=max_bytes, tokenizer=tokenizer)
    export_checkpoint(directory, options.directory, how, verify=not options.no_verify)


def inspect(options: InspectOptions) -> None:
    """Run `zeroshard inspect`."""
    directory = find(options.checkpoint)
    stored = open_checkpoint(directory)
    if not options.json:
        print(describe(stored), flush=True)  # before the checksums, which take long for large files
    if not options.no_verify:
        check_sums(directory, stored.manifest, stored.manifest.files)
    if options.json:
        print(json.dumps(to_json(stored) | {"verified": not options.no_verify}, indent=2))
    elif options.no_verify:
        print("not verified: all files are there; checksums were not compared")
    else:
        print("intact: all files are there and as they were written")


def _load_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ImportError("--tokenizer needs transformers: pip install zeroshard[hf]") from None
    if not folder.is_dir():
        raise ValueError(f"--tokenizer: expected a folder, got '{folder}'")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the files make it raise
        raise ValueError(f"--tokenizer: '{folder}' has none that transformers loads: {error}") from None


_WIDTH = 400  # characters of a line in a file or a pipe, so that names stay on one line
_KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer state": "optimizer states",
    "average": "moving averages",
}


def describe(stored: Stored) -> str:
    """Return the origin of a checkpoint, totals by kind, and a table of every tensor."""
    kinds = _by_kind(stored)
    totals = [_total(_KINDS[kind], tensors.values()) for kind, tensors in kinds.items()]
    whole = _total("total", [tensor for tensors in kinds.values() for tensor in tensors.values()])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    lines = [
        *(f"{key + ':':<15}{value}" for key, value in _facts(stored)),
        "",
        render("content", ("kind", "dtype", "tensors", "elements", "bytes"), [*totals, LINE, whole], width),
        "",
    ]
    for kind, tensors in kinds.items():
        is_state = kind in ("optimizer state", "average")
        rows = [
            (*(_owner_and_state(name) if is_state else (name,)), dtype_name(tensor.dtype), *_sizes(tensor))
            for name, tensor in tensors.items()
        ]
        columns = ("name", *(["state"] if is_state else []), "dtype", "shape", "bytes")
        lines += [render(_KINDS[kind], columns, rows, width), ""]
    return "\n".join(lines)


def to_json(stored: Stored) -> dict[str, Any]:
    """Return the same as plain values: numbers of bytes, lists of sizes."""
    manifest = stored.manifest
    return {
        "directory": str(stored.directory),
        "step": manifest.global_step,
        "skipped_steps": manifest.skipped_steps,
        "stage": manifest.config.get("stage"),
        "written_by": manifest.written_by,
        "time_of_file": _time(stored),
        "model": manifest.model.get("class"),
        "optimizer": manifest.optimizer,
        "lr_scheduler": manifest.lr_scheduler,
        "left_out": sorted(manifest.frozen),
        "averages": manifest.averages,
        "tied": {name: list(aliases) for name, aliases in _tied(manifest)},
        "files": {name: record.num_bytes for name, record in manifest.files.items()},
        "tensors": {
            name: {
                "kind": kind,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "bytes": _num_bytes(tensor),
            }
            for kind, tensors in _by_kind(stored).items()
            for name, tensor in tensors.items()
        },
    }


def _facts(stored: Stored) -> list[tuple[str, Any]]:
    manifest = stored.manifest
    skipped = f", {manifest.skipped_steps:,} skipped" if manifest.skipped_steps else ""
    writer = manifest.written_by
    num = sum(math.prod(record.shape) for record in manifest.parameters.values())
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    return [
        ("checkpoint", stored.directory),
        ("step", f"{manifest.global_step:,}{skipped}"),
        ("model", f"{manifest.model.get('class')}, {num:,} parameters{_in_words(num)}"),
        ("optimizer", manifest.optimizer or "none"),
        ("LR scheduler", manifest.lr_scheduler or "none"),
        ("ranks", f"{writer.get('num_ranks')}, stage {manifest.config.get('stage')}"),
        ("written by", f"zeroshard {writer.get('zeroshard')}, torch {writer.get('torch')}"),
        ("time of file", _time(stored)),
        ("files", f"{len(manifest.files):,}, {format_bytes(num_bytes)}"),
        *([("left out", f"{len(manifest.frozen):,} frozen parameters")] if manifest.frozen else []),
        *(("tied", " = ".join((name, *names))) for name, names in _tied(manifest)),
    ]


def _in_words(num: int) -> str:
    return f" ({format_count(num)})" if num >= 10**6 else ""


def _time(stored: Stored) -> str:
    """Return the time of the manifest's file, which is written last.

    The manifest does not tell the time: the same state gives the same bytes.
    """
    changed = datetime.fromtimestamp((stored.directory / MANIFEST).stat().st_mtime, UTC)
    return f"{changed:%Y-%m-%d %H:%M:%S} UTC"


def _tied(manifest: Manifest) -> list[tuple[str, tuple[str, ...]]]:
    return [(name, record.aliases) for name, record in manifest.parameters.items() if record.aliases]


def _by_kind(stored: Stored) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors by kind and name, in the order of the model; a tied one under its first name."""
    manifest = stored.manifest
    place = {name: number for number, name in enumerate(manifest.parameters)}
    kinds: dict[str, dict[str, StoredTensor]] = {kind: {} for kind in _KINDS}
    last = len(place)
    for name in sorted(stored.tensors, key=lambda n: place.get(n, place.get(_owner_and_state(n)[0], last))):
        if name in place or name in manifest.buffers:
            kind = "parameter" if name in place else "buffer"
        else:
            kind = "average" if name.startswith(f"{KIND}/") else "optimizer state"
        kinds[kind][name] = stored.tensors[name]
    return {kind: found for kind, found in kinds.items() if found}


def _owner_and_state(name: str) -> tuple[str, str]:
    """Divide the name of an optimizer state or an average: optimizer/PARAMETER/STATE."""
    owner, _, state = name.partition("/")[2].rpartition("/")
    return owner, state


def _total(kind: str, tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    tensors = list(tensors)
    dtypes = [name for name, _ in Counter(dtype_name(tensor.dtype) for tensor in tensors).most_common()]
    numel = sum(math.prod(tensor.shape) for tensor in tensors)
    num_bytes = sum(map(_num_bytes, tensors))
    return kind, ", ".join(dtypes), f"{len(tensors):,}", f"{numel:,}", format_bytes(num_bytes)


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _sizes(tensor: StoredTensor) -> tuple[str, str]:
    return "x".join(map(str, tensor.shape)) or "scalar", format_bytes(_num_bytes(tensor))
