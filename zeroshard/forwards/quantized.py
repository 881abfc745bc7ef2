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
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.agreement import require_same
from zeroshard.comm.collectives import on_all
from zeroshard.comm.mesh import Axes
from zeroshard.lazy.deferred import Codes, deferred_of
from zeroshard.parameters.parts import gather_ranges
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Changes, Context
from zeroshard.stores.host import return_freed_memory

_BLOCK_OF_SCALES = 256
"""Scales that have one scale, where they are quantized themselves."""

_SCALE_BYTES = 4
"""Scales, and the values in the tables of codes, are float32."""

_TABLE_4_BITS, _TABLE_8_BITS = 16, 256
"""Values in the table of a weight's codes, and in the table of its scales' codes."""

Layer = Any
"""A layer of bitsandbytes, whose attributes have no types."""


class QuantizedLayers:
    """The quantized layers of a model that is sharded.

    Args:
        module: the model, before its parameters are taken over.
        context: the objects that its buffers share.
        changes: undoes the changes of the layers.
        ignored: parameters that each rank keeps for itself, and so their scales.

    Raises:
        ValueError, RuntimeError: see `_agree_on_layers`.
    """

    def __init__(
        self, module: nn.Module, context: Context, changes: Changes, ignored: Container[nn.Parameter]
    ) -> None:
        _agree_on_layers(module, context.axes, ignored)
        _refuse_merges(module, changes)
        self._context = context
        self._pending = {layer.weight: (name, layer, codes) for name, layer, codes in pending_layers(module)}
        """By weight: the layers that are quantized as their weights are read."""
        if self._pending:  # large pieces of weights come and go
            return_freed_memory()
        for name, layer in quantized_layers(module):
            if layer.weight not in self._pending and layer.weight not in ignored:
                self._share_scales(name, layer)
            if has_8_bits(layer):
                layer.weight.CB = layer.state.CB = None
                changes.when_undone(functools.partial(_take_codes_back, layer))
            else:
                changes.set(layer, "support_avx512bf16_for_cpu", False)

    def _share_scales(self, name: str, layer: Layer) -> None:
        """Give all ranks the scales of rank 0, on the device."""
        for owner, attribute in _scales(layer):
            values = getattr(owner, attribute).detach().to(self._context.device).contiguous()
            for axis in (self._context.axes.everyone, self._context.axes.outer):
                axis.broadcast(values, f"first broadcast of the scales of '{name}'")
            setattr(owner, attribute, values)

    def finish(self, buffers: Iterable[FlatBuffer]) -> None:
        """Give layers that were quantized by parts their scales, once the buffers have the codes."""
        for buffer in buffers:
            for index, original in enumerate(buffer.originals):
                if original.parameter in self._pending:
                    name, layer, codes = self._pending.pop(original.parameter)
                    self._give_scales(layer, self._collect(name, codes, buffer, index), original.parameter)
        for weight, (_, layer, codes) in self._pending.items():  # it is ignored: this rank has read all of it
            self._give_scales(layer, codes.scales, weight)

    def _give_scales(self, layer: Layer, scales: Tensor, weight: nn.Parameter) -> None:
        scales = scales.to(self._context.device)
        if has_8_bits(layer):
            layer.state.SCB = scales
        else:
            _describe_codes(layer.quant_state, scales, weight)

    def _collect(self, name: str, codes: Codes, buffer: FlatBuffer, index: int) -> Tensor:
        """[blocks]: the scales of a whole weight, from the ranks that have quantized parts of it."""
        axes, device, scales = self._context.axes, self._context.device, codes.scales
        if not buffer.is_read:  # rank 0 has quantized all of it
            scales = scales.to(device)
            for axis in (axes.dp, axes.outer):
                axis.broadcast(scales, f"first broadcast of the scales of '{name}'")
        elif buffer.is_partial:
            ranges = [codes.blocks_of(buffer.layout.owned(index, rank)) for rank in range(axes.dp_shard.size)]
            own = scales[ranges[axes.dp_shard.rank].slice].to(device)
            sizes = [blocks.size for blocks in ranges]
            everyone = gather_ranges(axes.dp_shard, own, sizes, buffer.tag, f"the scales of '{name}'").cpu()
            for blocks, values in zip(ranges, everyone.split(sizes), strict=True):
                scales[blocks.slice] = values
        return scales


def change_forwards(module: nn.Module, changes: Changes) -> None:
    """Let the quantized layers of a model compute with unsharded parameters; before other forwards go around.

    Args:
        module: the model, before its parameters are taken over.
        changes: undoes the changes of the layers.
    """
    for layer in module.modules():
        if not is_quantized(layer):
            continue
        if has_8_bits(layer):
            forward: Callable[..., Tensor] = _forward_of_8_bits
        elif isinstance(layer, nn.Linear) and layer.bias is not None:
            forward = _forward_of_4_bits
        else:
            continue
        changes.around(layer, "codes", functools.partial(functools.partial, forward, layer))


def _refuse_merges(module: nn.Module, changes: Changes) -> None:
    """Have adapters of peft around codes refuse to merge: a merge assigns other codes, and other scales."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            "merge() or unmerge() of an adapter around codes would put other codes and scales in their "
            "place: engine.save_pretrained(folder, merge_adapters=True) and "
            "engine.named_full_parameters(merge_adapters=True) give dequantized weights with adapters "
            "merged; or merge after engine.close()"
        )

    for layer in module.modules():
        base = layer._modules.get("base_layer")
        if isinstance(base, nn.Module) and is_quantized(base):
            changes.set(layer, "merge", refuse)
            changes.set(layer, "unmerge", refuse)


def is_of_bitsandbytes(layer: Layer) -> bool:
    """True for a layer whose class, or a base of it, is one of bitsandbytes."""
    return any(base.__module__.startswith("bitsandbytes.nn") for base in type(layer).__mro__)


def is_quantized(layer: Layer) -> bool:
    """True for a layer of bitsandbytes whose weight holds codes, or will when it is quantized."""
    if not is_of_bitsandbytes(layer):
        return False
    weight = layer._parameters.get("weight")
    return weight is not None and (hasattr(weight, "quant_state") or has_8_bits(layer))


def is_wrapper(tensor: Tensor) -> bool:
    """True for a tensor that wraps others, as torchao's do; a DTensor belongs to other ranks, too."""
    return hasattr(tensor, "__tensor_flatten__") and not hasattr(tensor, "placements")


def dequantized(layer: Layer, codes: Tensor) -> Tensor:
    """Return the weight that codes of a layer stand for, as bitsandbytes computes with it; of its shape.

    With 4 bits it has the dtype of the weight before it was quantized, with 8 bits float32. Codes of other
    libraries are returned as they are.
    """
    if not is_quantized(layer):
        return codes
    if has_8_bits(layer):
        return codes.float().mul_(layer.state.SCB.unsqueeze(1).mul(1.0 / 127.0))
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(codes, layer.weight.quant_state)
    return weight


def scales_in(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that the quantized layers of a sharded module keep along with their codes."""
    for layer in filter(is_quantized, module.modules()):
        for owner, attribute in _scales(layer):
            if isinstance(values := getattr(owner, attribute), Tensor):
                yield values


def num_scale_bytes(layer: Layer) -> int:
    """Bytes of these for a layer, quantized already or as its weight is read; 0 for any other module."""
    if not is_quantized(layer):
        return 0
    if has_8_bits(layer):
        return int(layer.out_features) * _SCALE_BYTES
    weight = layer.weight
    blocks = -(-int(layer.in_features * layer.out_features) // int(weight.blocksize))
    table = _TABLE_4_BITS * _SCALE_BYTES
    if not weight.compress_statistics:
        return blocks * _SCALE_BYTES + table
    offset, outer = 1, -(-blocks // _BLOCK_OF_SCALES)
    return blocks + (outer + offset + _TABLE_8_BITS) * _SCALE_BYTES + table


def names_beside(module: nn.Module) -> set[str]:
    """The names of the tensors that quantized layers have along with their codes in a state_dict."""
    found = set()
    for name, layer in module.named_modules(remove_duplicate=False):
        if is_quantized(layer):
            prefix = f"{name}." if name else ""
            names = layer.state_dict(keep_vars=True)
            found |= {prefix + key for key in names if key.startswith(("weight.", "weight_format", "SCB"))}
    return found


def dequantized_form(
    layer: Layer, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of `dequantized`, for codes of some dtype and shape."""
    if not is_quantized(layer):
        return dtype, shape
    if has_8_bits(layer):
        return torch.float32, shape
    quant_state = layer.weight.quant_state
    return quant_state.dtype, tuple(quant_state.shape)


def is_transposed(layer: Layer) -> bool:
    """True for a layer that transformers has made of its Conv1D (GPT-2), whose weight is [in, out]."""
    return getattr(vars(layer).get("source_cls"), "__name__", "") == "Conv1D"


def has_8_bits(layer: Layer) -> bool:
    """True for Linear8bitLt with codes of 8 bits; it may also keep its weight in float16."""
    state = getattr(layer, "state", None)
    return state is not None and hasattr(state, "SCB") and not state.has_fp16_weights


def quantized_layers(module: nn.Module) -> Iterator[tuple[str, Layer]]:
    """The quantized layers of a module, with their names."""
    return ((name, layer) for name, layer in module.named_modules() if is_quantized(layer))


def pending_layers(module: nn.Module) -> Iterator[tuple[str, Layer, Codes]]:
    """The layers that are quantized as their weights are read, with these codes."""
    for name, layer in quantized_layers(module):
        deferred = deferred_of(layer.weight)
        if deferred is not None and isinstance(deferred.source, Codes):
            yield name, layer, deferred.source


def _scales(layer: Layer) -> Iterator[tuple[Any, str]]:
    """The tensors that come with the codes: (the object that holds it, its attribute)."""
    if has_8_bits(layer):
        yield layer.state, "SCB"
        return
    quant_state = layer.weight.quant_state
    for owner in (quant_state, quant_state.state2):
        for attribute in ("absmax", "code", "offset"):
            if isinstance(getattr(owner, attribute, None), Tensor):
                yield owner, attribute


def _describe_codes(quant_state: Any, scales: Tensor, weight: Any) -> None:
    """Complete the description of a weight with 4 bits, as bitsandbytes does for a whole weight."""
    from bitsandbytes.functional import get_4bit_type, quantize_blockwise

    quant_state.code = get_4bit_type(quant_state.quant_type, device=scales.device)
    quant_state.absmax = scales
    if weight.compress_statistics:
        quant_state.offset = scales.mean()
        quant_state.absmax, quant_state.state2 = quantize_blockwise(
            scales - quant_state.offset, blocksize=_BLOCK_OF_SCALES
        )
        quant_state.nested = True


def _forward_of_4_bits(layer: Layer, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The forward of Linear4bit, which would round the bias itself to the compute dtype."""
    if not layer.compute_type_is_set:
        layer.set_compute_type(x)
        layer.compute_type_is_set = True
    dtype = layer.compute_dtype or x.dtype
    if layer.bias.dtype == dtype:
        return forward(x)
    layer.__dict__["bias"] = layer.bias.to(dtype)  # hides the parameter
    try:
        return forward(x)
    finally:
        del layer.__dict__["bias"]


def _forward_of_8_bits(layer: Layer, _: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The forward of Linear8bitLt, with the codes of the unsharded parameter."""
    import bitsandbytes

    state, bias = layer.state, layer.bias
    state.is_training = layer.training
    before, state.CB = state.CB, layer.weight.detach()  # the backward has the same memory
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    output: Tensor = bitsandbytes.matmul(x, layer.weight, bias=bias, state=state)
    if not torch.is_grad_enabled():
        state.CB = before  # the backward of an earlier forward may be yet to come
    return output


def _take_codes_back(layer: Layer) -> None:
    """Give a layer its codes as it has them before its first forward, which then moves them."""
    if isinstance(layer.weight, ShardedParameter):  # closed with restore=False: the model cannot be used
        return
    layer.weight.CB, layer.weight.SCB = layer.weight.data, layer.state.SCB
    layer.state.CB = layer.state.SCB = None


def _agree_on_layers(module: nn.Module, axes: Axes, ignored: Container[nn.Parameter]) -> None:
    """Compare the quantized layers of all ranks that hold the same part of the model; collective.

    Args:
        module: the model, before its parameters are taken over.
        axes: the axes of the mesh.
        ignored: parameters that each rank keeps for itself.

    Raises:
        ValueError: a weight is not quantized yet, is packed for inference, or belongs to a layer that needs
            more than the codes of an unsharded parameter.
        RuntimeError: ranks have quantized a weight in other ways.
    """
    if not any(map(is_of_bitsandbytes, module.modules())):
        return
    label = "agreement on quantized weights"
    layers = on_all(axes.everyone, label, functools.partial(_describe_layers, module, ignored))

    def differing(found: str) -> RuntimeError:
        return RuntimeError(
            "a weight is quantized in another way on some ranks: expected the same layers, kinds of codes "
            f"and sizes of blocks on all ranks; {found}"
        )

    require_same(axes.everyone, layers[axes.everyone.rank], differing, label)


def _describe_layers(module: nn.Module, ignored: Container[nn.Parameter]) -> list[str]:
    """Return the quantized layers of a model, described in the same words on all ranks."""
    pending = {layer.weight for _, layer, _ in pending_layers(module)}
    for name, layer in module.named_modules():
        weight = layer._parameters.get("weight")
        if is_of_bitsandbytes(layer) and weight is not None:
            _check_layer(name, layer, weight, is_ignored=weight in ignored)
            if is_quantized(layer) and weight not in pending:
                _check_codes(name, layer)
    return [
        f"'{name}' as {_describe(layer)}" for name, layer in module.named_modules() if is_quantized(layer)
    ]


def _check_layer(name: str, layer: Layer, weight: Any, *, is_ignored: bool) -> None:
    """Refuse a forward of 8 bits that is not the one that is replaced, or that asks for more than codes."""
    if isinstance(layer, nn.Linear) and has_8_bits(layer):
        from bitsandbytes.nn import Linear8bitLt

        if type(layer).forward is not Linear8bitLt.forward:
            raise ValueError(
                f"'{name}' (a layer of {type(layer).__name__}) has a forward of its own, which would compute "
                "with codes that it keeps apart from its parameter: expected the forward of Linear8bitLt. "
                "Put the layer inside a module with that forward"
            )
    has_codes = hasattr(weight, "quant_state") or (hasattr(weight, "SCB") and not weight.has_fp16_weights)
    if has_codes and not is_ignored and not isinstance(layer, nn.Linear):
        raise ValueError(
            f"'{name}' (a layer of {type(layer).__name__}) needs the scales at the parameter itself: "
            f"expected quantized layers of Linear4bit or Linear8bitLt. ignored=['{name}.weight'] keeps "
            "all of it on each rank"
        )


def _check_codes(name: str, layer: Layer) -> None:
    weight = layer.weight
    if has_8_bits(layer) and weight.SCB is not None:  # the layer has them from its first forward on
        layer.state.SCB, weight.SCB = weight.SCB, None
    scales = layer.state.SCB if has_8_bits(layer) else weight.quant_state
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
