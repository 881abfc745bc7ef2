"""Moving averages in a checkpoint: tensors of the shape of parameters, beside the states of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from zeroshard.checkpoint.files import MANIFEST
from zeroshard.checkpoint.tensors import States, Stored, TensorReader, TensorSlice, held_slices, state_name
from zeroshard.internals.warn import warn_user
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.averages import Averages

KIND = "ema"
"""The first part of their names: ema/PARAMETER/NAME."""


def _key(name: str) -> str:
    return f"{KIND}/{name}"


def with_averages(states: States, averages: Mapping[str, Averages]) -> States:
    """Return the states of parameters, and beside them the averages."""
    joined = {parameter: dict(tensors) for parameter, tensors in states.items()}
    for name, own in averages.items():
        for parameter, values in own.parameters.items():
            joined.setdefault(parameter, {})[_key(name)] = values
    return joined


def averaged_buffers(buffers: Mapping[str, Tensor], averages: Mapping[str, Averages]) -> dict[str, Tensor]:
    """Return the copies that averages have of some buffers, by their names in a checkpoint."""
    return {
        state_name(buffer, _key(name)): own.buffers[buffer]
        for name, own in averages.items()
        for buffer in buffers
        if buffer in own.buffers
    }


def check_averages(stored: Stored, averages: Mapping[str, Averages]) -> None:
    """Compare the averages of a checkpoint with the present ones, and warn of those that only one has.

    Raises:
        RuntimeError: one is not of the shape of its parameter.
    """
    saved = stored.manifest.averages
    for name in saved:
        for owner, record in stored.manifest.parameters.items():
            found = stored.tensors.get(state_name(owner, _key(name)))
            if found is not None and found.shape != record.shape:
                raise RuntimeError(
                    f"{stored.directory / MANIFEST}: average '{name}' of '{owner}' has shape {found.shape}; "
                    f"expected {record.shape}"
                )
    if unknown := sorted(saved.keys() - averages.keys()):
        warn_user(
            f"'{stored.directory}' holds the average '{unknown[0]}', and the engine has none of this name: "
            "it is not loaded. Make the zeroshard.EMA of the engine before load_checkpoint()"
        )
    if missing := sorted(averages.keys() - saved.keys()):
        warn_user(
            f"'{stored.directory}' holds no average '{missing[0]}': it begins anew with the loaded values"
        )


@torch.no_grad()
def read_averages(
    reader: TensorReader,
    runtime: Runtime,
    stored: Stored,
    averages: Mapping[str, Averages],
    names: Mapping[str, str],
) -> None:
    """Read averages, after the parameters. Those that the checkpoint does not hold begin anew with these.

    Args:
        reader: of the checkpoint.
        runtime: of the model.
        stored: the checkpoint.
        averages: those of the engine, by name.
        names: the stored name of each parameter.
    """
    for own in averages.values():
        own.begin_anew()
    known = {
        parameter: {k: v for k, v in own.items() if state_name(names[parameter.fqn], k) in stored.tensors}
        for parameter, own in with_averages({}, averages).items()
    }
    for part in held_slices(runtime, known, names):
        if part.name not in stored.manifest.parameters:
            reader.read(part)
    for name, own in averages.items():
        own.num_updates = stored.manifest.averages.get(name, 0)
        for buffer, copy in own.buffers.items():
            title = state_name(buffer, _key(name))
            if title in stored.tensors:
                values = torch.empty(copy.numel(), dtype=copy.dtype, device=copy.device)
                reader.read(TensorSlice(title, tuple(copy.shape), 0, values))
                copy.copy_(values.view(copy.shape))
