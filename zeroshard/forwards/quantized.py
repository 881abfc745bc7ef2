"""Layers of bitsandbytes, whose frozen weights are codes.

    weight                codes, which are sharded like any frozen parameter, and never cast
    scales                kept whole on each rank, where bitsandbytes keeps them:
                            4 bits    the `quant_state` of the weight, which the layer has, too
                            8 bits    `state.SCB` of the layer
    further references    `CB` of the weight, or of `state`: the codes again. They would keep the whole
                          weight in memory, so they are taken away, and come for the time of a forward and
                          its backward

The layers with 4 bits may pack a weight in another way for inference on a CPU, and then write it back into
the parameter. Shards know only one way, so sharded layers do not do this.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Axis
from zeroshard.sharding.changes import Changes

Layers = dict[str, nn.Module]
"""Layers by their names."""


def take_over_quantized(module: nn.Module, everyone: Axis, device: torch.device, changes: Changes) -> None:
    """Make the quantized layers of a model ready to be sharded; all ranks get rank 0's scales.

    Args:
        module: the model, before its parameters are taken over.
        everyone: all ranks that hold the same part of the model.
        device: the device of the scales from now on.
        changes: undoes the changes of the layers.

    Raises:
        ValueError: a weight is not quantized yet, or is packed for inference.
        RuntimeError: ranks have quantized a weight in other ways.
    """
    layers = dict(_quantized(module))
    if not layers:
        return
    _check(layers)
    own = [(name, _describe(layer)) for name, layer in layers.items()]
    for rank, other in enumerate(everyone.all_gather_object(own, "agreement on quantized weights")):
        if other != own:
            name = next((a[0] for a, b in zip(own, other, strict=False) if a != b), own[-1][0])
            raise RuntimeError(
                f"'{name}' is quantized in another way on rank {rank}: expected the same layers, kinds of "
                "codes and sizes of blocks on all ranks"
            )
    moved: dict[int, Tensor] = {}
    for name, layer in layers.items():
        for owner, attribute in _scales(layer):
            scale = getattr(owner, attribute)
            if id(scale) not in moved:
                values = moved[id(scale)] = scale.detach().to(device).contiguous()
                everyone.broadcast(values, f"first broadcast of the scales of '{name}'")
            setattr(owner, attribute, moved[id(scale)])
        if _has_8_bits(layer):
            _let_go_of_codes(layer, changes)
        else:
            changes.set(layer, "support_avx512bf16_for_cpu", False)


def _quantized(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in module.named_modules():
        if any(base.__module__.startswith("bitsandbytes.nn") for base in type(layer).__mro__):
            weight = layer._parameters.get("weight")
            if weight is not None and (hasattr(weight, "quant_state") or _has_8_bits(layer)):
                yield name, layer


def _has_8_bits(layer: nn.Module) -> bool:
    """True for Linear8bitLt with codes of 8 bits; it may also keep its weight in float16."""
    state = getattr(layer, "state", None)
    return state is not None and hasattr(state, "SCB") and not state.has_fp16_weights


def _check(layers: Layers) -> None:
    for name, layer in layers.items():
        weight: Any = layer.weight
        scales = _find_scb(layer) if _has_8_bits(layer) else weight.quant_state
        if scales is None:
            raise ValueError(
                f"'{name}.weight' is not quantized yet: a {type(layer).__name__} quantizes it when it is "
                "moved to a device. Call model.to(device), also for the CPU, before initialize"
            )
        if getattr(scales, "packing_format_for_cpu", False):
            raise ValueError(
                f"'{name}.weight' was packed for inference on this CPU by an evaluation, and cannot be "
                "trained in this form: set its support_avx512bf16_for_cpu=False before the evaluation"
            )


def _describe(layer: nn.Module) -> tuple[Any, ...]:
    quant_state = getattr(layer.weight, "quant_state", None)
    if quant_state is None:
        return (type(layer).__name__, tuple(layer.weight.shape))
    inner = quant_state.state2
    return (
        *(type(layer).__name__, quant_state.quant_type, quant_state.blocksize, str(quant_state.dtype)),
        *(tuple(quant_state.shape), None if inner is None else inner.blocksize, str(layer.weight.dtype)),
    )


def _scales(layer: nn.Module) -> Iterator[tuple[Any, str]]:
    """The tensors beside the codes: (the object that holds it, its attribute)."""
    if _has_8_bits(layer):
        yield layer.state, "SCB"
        return
    quant_state = layer.weight.quant_state
    for owner in (quant_state, quant_state.state2):
        for attribute in ("absmax", "code", "offset"):
            if isinstance(getattr(owner, attribute, None), Tensor):
                yield owner, attribute


def _find_scb(layer: nn.Module) -> Tensor | None:
    """The scales of 8-bit codes: of the weight until the first forward, of the layer after it."""
    weight, state = layer.weight, layer.state
    if weight.SCB is not None:
        state.SCB, weight.SCB = weight.SCB, None
    found: Tensor | None = state.SCB
    return found


def _let_go_of_codes(layer: nn.Module, changes: Changes) -> None:
    layer.weight.CB = layer.state.CB = None
    changes.set(layer, "forward", functools.partial(_forward, layer))
    changes.when_undone(functools.partial(_take_codes_back, layer))


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The forward of Linear8bitLt, with the codes of the unsharded parameter."""
    import bitsandbytes

    state, bias = layer.state, layer.bias
    state.is_training = layer.training
    state.CB = layer.weight.detach()  # its memory is that of the backward, too
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    output: Tensor = bitsandbytes.matmul(x, layer.weight, bias=bias, state=state)
    if not torch.is_grad_enabled():
        state.CB = None
    return output


def _take_codes_back(layer: Any) -> None:
    """Give a layer its codes as it has them before its first forward, which then moves them."""
    layer.weight.CB, layer.weight.SCB = layer.weight.data, layer.state.SCB
    layer.state.CB = layer.state.SCB = None
