"""The commands that read checkpoints: `zeroshard export` and `inspect`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from zeroshard.checkpoint.capture import KIND
from zeroshard.checkpoint.files import MANIFEST, find
from zeroshard.checkpoint.manifest import check_sums
from zeroshard.checkpoint.tensors import Stored, open_checkpoint
from zeroshard.cli.options import ExportOptions, InspectOptions
from zeroshard.codec import dtype_name
from zeroshard.hf.export import MAX_SHARD_BYTES, Format, export_checkpoint
from zeroshard.tables import LINE, format_bytes, render


def export(options: ExportOptions) -> None:
    """Run `zeroshard export`."""
    directory = find(options.checkpoint)
    most = MAX_SHARD_BYTES if options.max_shard_size is None else options.max_shard_size
    how = Format(dtype=options.dtype, max_shard_bytes=most)
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


_MOST_TENSORS = 20
_KINDS = ("parameter", "buffer", "optimizer state", "average")


def describe(stored: Stored) -> str:
    """Return the origin of a checkpoint, totals by kind, and a table of its first tensors."""
    facts = to_json(stored)
    tensors, files = facts.pop("tensors"), facts.pop("files")
    facts["files"] = f"{len(files):,}, {format_bytes(sum(files.values()))}"
    facts["left_out"] = f"{len(facts['left_out']):,} frozen parameters" if facts["left_out"] else ""
    facts["tied"] = "; ".join(" = ".join((name, *others)) for name, others in facts["tied"].items())
    known = {name.replace("_", " "): fact for name, fact in facts.items() if fact not in (None, "", {})}
    kinds = dict.fromkeys(tensor["kind"] for tensor in tensors.values())
    totals = [_total(kind, [one for one in tensors.values() if one["kind"] == kind]) for kind in kinds]
    rows = []
    for name, one in tensors.items():
        shape = "x".join(map(str, one["shape"])) or "scalar"
        rows.append((name, one["kind"], one["dtype"], shape, format_bytes(one["bytes"])))
    first = rows[:_MOST_TENSORS]
    title = f"tensors, {len(first)} of {len(rows):,}: --json has all"
    parts = (
        "\n".join(f"{name + ':':<15}{_text(fact)}" for name, fact in known.items()),
        render(
            "content",
            ("kind", "dtype", "tensors", "elements", "bytes"),
            [*totals, LINE, _total("total", tensors.values())],
        ),
        render(title, ("name", "kind", "dtype", "shape", "bytes"), first),
    )
    return "\n\n".join(parts) + "\n"


def _text(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{name} {_text(value)}" for name, value in fact.items())
    return f"{fact:,}" if isinstance(fact, int) else str(fact)


def _total(kind: str, tensors: Collection[dict[str, Any]]) -> tuple[str, ...]:
    dtypes = [name for name, _ in Counter(tensor["dtype"] for tensor in tensors).most_common()]
    numel = sum(math.prod(tensor["shape"]) for tensor in tensors)
    num_bytes = sum(tensor["bytes"] for tensor in tensors)
    return kind, ", ".join(dtypes), f"{len(tensors):,}", f"{numel:,}", format_bytes(num_bytes)


def to_json(stored: Stored) -> dict[str, Any]:
    """Return the same as plain values: numbers of bytes, lists of sizes. Tensors are in the model's order."""
    manifest = stored.manifest
    place = {name: number for number, name in enumerate(manifest.parameters)}

    def kind_of(name: str) -> str:
        if name in place or name in manifest.buffers:
            return "parameter" if name in place else "buffer"
        return "average" if name.startswith(f"{KIND}/") else "optimizer state"

    def order(name: str) -> tuple[int, int, str]:
        # A state is called optimizer/OWNER/STATE.
        owner = name if name in place else name.partition("/")[2].rpartition("/")[0]
        return _KINDS.index(kind_of(name)), place.get(owner, len(place)), name

    tensors = {
        name: {
            "kind": kind_of(name),
            "dtype": dtype_name(stored.tensors[name].dtype),
            "shape": list(stored.tensors[name].shape),
            "bytes": math.prod(stored.tensors[name].shape) * stored.tensors[name].dtype.itemsize,
        }
        for name in sorted(stored.tensors, key=order)
    }
    # The manifest does not say the time: the same state gives the same bytes. It is written last.
    changed = datetime.fromtimestamp((stored.directory / MANIFEST).stat().st_mtime, UTC)
    return {
        "directory": str(stored.directory),
        "step": manifest.global_step,
        "skipped_steps": manifest.skipped_steps,
        "stage": manifest.config.get("stage"),
        "written_by": manifest.written_by,
        "time_of_file": f"{changed:%Y-%m-%d %H:%M:%S} UTC",
        "model": manifest.model.get("class"),
        "num_params": sum(math.prod(record.shape) for record in manifest.parameters.values()),
        "optimizer": manifest.optimizer,
        "lr_scheduler": manifest.lr_scheduler,
        "left_out": sorted(manifest.frozen),
        "averages": manifest.averages,
        "tied": {name: list(of.aliases) for name, of in manifest.parameters.items() if of.aliases},
        "files": {name: record.num_bytes for name, record in manifest.files.items()},
        "tensors": tensors,
    }
