"""The names of a model, or of a part of it, and those of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from zeroshard.checkpoint.quantized import is_description
from zeroshard.checkpoint.reader import Stored
from zeroshard.sharding.runtime import Runtime


class Found(NamedTuple):
    """The names that a part of the model has."""

    parameters: dict[str, str]
    """The name in the model, by stored name."""
    buffers: set[str]
    extra: set[str]


def union(directory: Path, everyone: Iterable[Found]) -> Found:
    """Return the names that any part has.

    Raises:
        ValueError: two parts have different parameters for one stored name.
    """
    joined = Found({}, set(), set())
    for found in everyone:
        for name, fqn in found.parameters.items():
            if (other := joined.parameters.setdefault(name, fqn)) != fqn:
                raise _separate(directory, other, fqn)
        joined.buffers.update(found.buffers)
        joined.extra.update(found.extra)
    return joined


def check_all_found(stored: Stored, extra: Collection[str], found: Found) -> None:
    """Refuse a checkpoint with more than all parts of the model together have.

    Args:
        stored: the checkpoint.
        extra: the names of its extra states.
        found: the stored names that the parts have.

    Raises:
        ValueError: with the name of the first surplus.
    """
    if unexpected := sorted(stored.manifest.parameters.keys() - found.parameters.keys()):
        raise ValueError(
            f"'{stored.directory}': the checkpoint has parameter '{unexpected[0]}', the model does not"
            + (f", and {len(unexpected) - 1} more" if len(unexpected) > 1 else "")
        )
    for kind, saved, present in (
        ("a buffer", stored.manifest.buffers, found.buffers),
        ("extra state", extra, found.extra),
    ):
        for name in sorted(set(saved) - present):
            raise ValueError(f"'{stored.directory}': only the checkpoint has {kind} '{name}'")


def match_parameters(
    stored: Stored, runtime: Runtime, aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """The stored name of each parameter of the model."""
    records, directory = stored.manifest.parameters, stored.directory
    home = {name: first for first, record in records.items() for name in (first, *record.aliases)}
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for parameter in runtime.parameters:
        known = (parameter.fqn, *aliases.get(parameter.fqn, ()))
        homes = sorted({home[name] for name in known if name in home})
        if not homes:
            raise ValueError(f"'{directory}': expected parameter '{parameter.fqn}' of the model, found none")
        if len(homes) > 1:
            raise ValueError(
                f"'{directory}': the model ties {' and '.join(map(repr, homes))}; the "
                "checkpoint has them as separate parameters"
            )
        if (other := owners.setdefault(homes[0], parameter.fqn)) != parameter.fqn:
            raise _separate(directory, other, parameter.fqn)
        shape, expected = records[homes[0]].shape, tuple(parameter.full_shape)
        if shape != expected:
            raise ValueError(
                f"'{directory}': parameter '{parameter.fqn}' has shape {shape}; the model expects {expected}"
            )
        names[parameter.fqn] = homes[0]
    return names


def _separate(directory: Path, one: str, other: str) -> ValueError:
    return ValueError(
        f"'{directory}': the checkpoint ties '{one}' and '{other}'; the model has them as separate parameters"
    )


def check_names(directory: Path, kind: str, saved: Collection[str], present: Collection[str]) -> None:
    """Raise a ValueError with the first name that the model has and the checkpoint does not."""
    for name in sorted(set(present) - set(saved)):
        raise ValueError(f"'{directory}': only the model has {kind} '{name}'")


def check_buffers(stored: Stored, buffers: Mapping[str, Tensor]) -> None:
    """Raise a ValueError with the first buffer that the checkpoint lacks, or has in another shape."""
    check_names(stored.directory, "a buffer", stored.manifest.buffers, buffers)
    for name, buffer in buffers.items():
        if (shape := stored.tensors[name].shape) != tuple(buffer.shape) and not is_description(name):
            raise ValueError(
                f"'{stored.directory}': buffer '{name}' has shape {shape}; the model expects "
                f"{tuple(buffer.shape)}"
            )
