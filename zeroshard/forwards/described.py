"""Quantized layers of bitsandbytes that can be sharded, described in the same words on all ranks."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from torch import nn

from zeroshard.forwards.quantized import (
    Layer,
    find_scb,
    has_8_bits,
    is_of_bitsandbytes,
    pending_layers,
    quantized_layers,
)

Described = tuple[str, tuple[Any, ...]]
"""The name of a quantized layer, and all that must be the same on all ranks."""


def describe_layers(module: nn.Module, ignored: Container[nn.Parameter]) -> list[Described]:
    """Return the quantized layers of a model, described in the same words on all ranks.

    Args:
        module: the model, before its parameters are taken over.
        ignored: parameters that each rank keeps for itself.

    Raises:
        ValueError: a weight is not quantized yet, is packed for inference, or belongs to a layer that needs
            more than the codes of an unsharded parameter.
    """
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if is_of_bitsandbytes(layer) and weight is not None:
            _check_forward(name, layer)
            if weight not in ignored:
                _check_kind(name, layer, weight)
    pending = {layer.weight for _, layer, _ in pending_layers(module)}
    for name, layer in quantized_layers(module):
        if layer.weight not in pending:
            _check(name, layer)
    return [(name, _describe(layer)) for name, layer in quantized_layers(module)]


def compare_layers(everyone: Sequence[list[Described]], own: list[Described]) -> None:
    """Compare the quantized layers of all ranks.

    Raises:
        RuntimeError: ranks have quantized a weight in other ways.
    """
    for rank, other in enumerate(everyone):
        if other != own:
            name = next((a[0] for a, b in zip(own, other, strict=False) if a != b), own[-1][0])
            raise RuntimeError(
                f"'{name}' is quantized in another way on rank {rank}: expected the same layers, kinds "
                "of codes and sizes of blocks on all ranks"
            )


def _check_forward(name: str, layer: Layer) -> None:
    """Refuse layers with 8 bits whose forward is another one than that which is replaced."""
    if isinstance(layer, nn.Linear) and has_8_bits(layer):
        from bitsandbytes.nn import Linear8bitLt

        if type(layer).forward is not Linear8bitLt.forward:
            raise ValueError(
                f"'{name}' is {_article(layer)} with a forward of its own, which would compute with codes "
                "that it keeps beside its parameter: expected the forward of Linear8bitLt. Put the layer "
                "inside a module with that forward"
            )


def _check_kind(name: str, layer: Layer, weight: Any) -> None:
    """Refuse layers whose forward asks the weight itself for more than its codes."""
    has_codes_of_8_bits = hasattr(weight, "SCB") and not weight.has_fp16_weights
    if not isinstance(layer, nn.Linear) and (has_codes_of_8_bits or hasattr(weight, "quant_state")):
        raise ValueError(
            f"'{name}' is {_article(layer)}, whose forward needs the scales at the parameter itself: "
            f"expected quantized layers of Linear4bit or Linear8bitLt. ignored=['{name}.weight'] keeps "
            "all of it on each rank"
        )


def _article(layer: Layer) -> str:
    name = type(layer).__name__
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _check(name: str, layer: Layer) -> None:
    scales = find_scb(layer) if has_8_bits(layer) else layer.weight.quant_state
    if scales is None:
        raise ValueError(
            f"'{name}.weight' is not quantized yet: a {type(layer).__name__} quantizes it when it is moved "
            "to a device. Call model.to(device), also for the CPU, before initialize"
        )
    if getattr(scales, "packing_format_for_cpu", False):
        raise ValueError(
            f"'{name}.weight' was packed for inference on this CPU by an evaluation, and cannot be trained "
            "in this form: set its support_avx512bf16_for_cpu=False before the evaluation"
        )


def _describe(layer: Layer) -> tuple[Any, ...]:
    quant_state = getattr(layer.weight, "quant_state", None)
    if quant_state is None:
        return type(layer).__name__, tuple(layer.weight.shape)
    return (
        *(type(layer).__name__, quant_state.quant_type, quant_state.blocksize, str(quant_state.dtype)),
        *(tuple(quant_state.shape), layer.weight.compress_statistics, str(layer.weight.dtype)),
    )
