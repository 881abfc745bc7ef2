"""A model on the meta device: its tensors get values and memory, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.lazy.deferred import deferred_of, has_memory, is_changed, is_known, values_of
from zeroshard.lazy.recording import recording, release_copies


def record_resets(root: nn.Module) -> None:
    """Give values to a model that was built on the meta device, by the resets of its modules.

    A module's `reset_parameters()` is recorded, or `_init_weights(module)` of a transformers model. A model
    with some deferred values is left alone: its other values were lost, and a reset would hide that.
    """
    tensors = [*root.parameters(), *root.buffers()]
    if all(map(has_memory, tensors)) or any(deferred_of(tensor) is not None for tensor in tensors):
        return
    with torch.no_grad(), recording(draw=True):
        _record_resets(root, None)


def _record_resets(module: nn.Module, init_weights: Callable[[nn.Module], None] | None) -> None:
    init_weights = getattr(module, "_init_weights", init_weights)
    for child in module.children():
        _record_resets(child, init_weights)
    tensors = (*module._parameters.values(), *module._buffers.values())
    own = [tensor for tensor in tensors if tensor is not None]
    if not own or any(is_known(tensor) for tensor in own):
        return  # a reset would change what has values
    reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
    if init_weights is not None:
        init_weights(module)
    elif reset is not None:
        reset()


def check_values(root: nn.Module) -> None:
    """Refuse parameters and buffers whose values are unknown.

    Raises:
        ValueError: naming the first one.
    """
    for prefix, module in root.named_modules():
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for attribute, tensor in tensors.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                if not is_known(tensor):
                    raise ValueError(
                        f"{kind} '{name}' is on the meta device; expected values. Build the model, and what "
                        "changes it (adapters, resized embeddings), under zeroshard.deferred_init() "
                        f"without device='meta', or give {type(module).__name__} a reset_parameters() that "
                        "sets all its parameters and buffers"
                    )
                if is_changed(tensor):
                    raise ValueError(
                        f"{kind} '{name}' was changed after zeroshard.deferred_init() had ended; expected "
                        "weights to be initialized inside the block"
                    )


def materialize_others(root: nn.Module) -> None:
    """Give memory to deferred buffers, and to tensors that modules hold as plain attributes.

    Parameters have a place in buffers of units by now, so torch copies them again.
    """
    release_copies(root)
    made: dict[int, Tensor] = {}

    def materialize(tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and deferred_of(tensor) is not None:
                if id(tensor) not in made:
                    made[id(tensor)] = values_of(tensor)
                tensors[name] = made[id(tensor)]

    for module in root.modules():
        materialize(module._buffers)
        materialize(vars(module))


@torch.no_grad()
def place_ignored(ignored: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move ignored parameters to the device; each rank computes the values of deferred ones."""
    for parameter in ignored:
        if parameter.device == device:
            continue
        if has_memory(parameter):
            parameter.data = parameter.detach().to(device)
        else:  # an optimizer may hold the object
            made = nn.Parameter(values_of(parameter.detach()).to(device), requires_grad=False)
            made.__class__ = type(parameter)
            vars(made).update(vars(parameter))
            torch.utils.swap_tensors(parameter, made.requires_grad_(parameter.requires_grad))
