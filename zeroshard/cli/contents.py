"""The content of a checkpoint, in words and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.checkpoint.reader import Stored
from zeroshard.checkpoint.tensors import dtype_name
from zeroshard.tables import format_bytes, render

_WIDTH = 400  # characters, so that names stay on one line


def describe(stored: Stored) -> str:
    """Return the origin of a checkpoint, a table of every tensor, and totals by kind."""
    kinds = _by_kind(stored)
    rows = [
        (name, kind, dtype_name(tensor.dtype), _shape(tensor), format_bytes(_num_bytes(tensor)))
        for kind, tensors in kinds.items()
        for name, tensor in tensors.items()
    ]
    return "\n".join(
        [
            *_lines(stored),
            render("tensors", ("name", "kind", "dtype", "shape", "bytes"), rows, _WIDTH),
            render(
                "in all",
                ("kind", "tensors", "elements", "bytes"),
                [_total(kind, tensors.values()) for kind, tensors in kinds.items()],
            ),
        ]
    )


def _lines(stored: Stored) -> list[str]:
    manifest = stored.manifest
    facts = {
        "checkpoint": stored.directory,
        "model": manifest.model.get("class"),
        "written by": _list(manifest.written_by),
        "stage": manifest.config.get("stage"),
        "step": f"{manifest.global_step}, {manifest.skipped_steps} skipped",
        "optimizer": manifest.optimizer or "none",
        "LR scheduler": manifest.lr_scheduler or "none",
        "files": f"{len(manifest.files)}, {format_bytes(sum(f.num_bytes for f in manifest.files.values()))}",
    }
    return [
        *(f"{key + ':':<14}{value}" for key, value in facts.items()),
        *([f"{'left out:':<14}{len(manifest.frozen)} frozen parameters"] if manifest.frozen else []),
        *(f"{'tied:':<14}{' = '.join((name, *names))}" for name, names in _tied(manifest)),
    ]


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _tied(manifest: Manifest) -> list[tuple[str, tuple[str, ...]]]:
    return [(name, record.aliases) for name, record in manifest.parameters.items() if record.aliases]


def _by_kind(stored: Stored) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors by kind and name; each tensor once, under its first name."""
    manifest = stored.manifest
    kinds = {
        "parameter": manifest.parameters.keys(),
        "buffer": set(manifest.buffers),
        "optimizer state": stored.tensors.keys() - manifest.parameters.keys() - set(manifest.buffers),
    }
    tensors = {
        kind: {name: tensor for name, tensor in stored.tensors.items() if name in names}
        for kind, names in kinds.items()
    }
    return {kind: found for kind, found in tensors.items() if found}


def _total(kind: str, tensors: Iterable[StoredTensor]) -> tuple[str, ...]:
    tensors = list(tensors)
    numel = sum(math.prod(tensor.shape) for tensor in tensors)
    return kind, f"{len(tensors):,}", f"{numel:,}", format_bytes(sum(map(_num_bytes, tensors)))


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _shape(tensor: StoredTensor) -> str:
    return "x".join(map(str, tensor.shape)) or "scalar"
