"""The linear layers of a model become layers of bitsandbytes, with 4 or 8 bits; also without memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.lazy.deferred import Codes, defer, has_memory


def count_elements(parameters: Iterable[nn.Parameter], *, only_trainable: bool = False) -> int:
    """Count the elements of whole parameters, and of the weights that codes stand for.

    Args:
        parameters: parameters, sharded or not.
        only_trainable: leave out frozen parameters.
    """
    counted = (p for p in parameters if p.requires_grad or not only_trainable)
    whole = [(getattr(p, "quant_state", None), getattr(p, "full_shape", p.shape)) for p in counted]
    return sum(math.prod(getattr(coded, "shape", None) or shape) for coded, shape in whole)


@torch.no_grad()
def quantize(model: nn.Module, config: Any) -> nn.Module:
    """Replace the linear layers of a model by layers of bitsandbytes, with frozen weights, in place.

    Weights without memory (`deferred_init`, `from_pretrained`) stay so: `initialize` has each rank read and
    quantize its own part of them, on the CPU. bitsandbytes gives the whole weight the same codes
    and scales there, to the bit. Other weights are quantized at once, where they are.

    Args:
        model: the model. Layers that transformers leaves out stay as they are, such as its output embedding
            or the head of its classifier. So do layers whose weight another module has, too.
        config: a BitsAndBytesConfig of transformers. `llm_int8_skip_modules` names layers that stay as they
            are in place of these.

    Returns:
        The model.

    Raises:
        ValueError: the config asks for neither 4 nor 8 bits, or for weights that stay in float16; the model
            has no layer to quantize, or adapters of peft.
    """
    if not (config.load_in_4bit or config.load_in_8bit) or config.llm_int8_has_fp16_weight:
        raise ValueError(f"quantization_config: expected load_in_4bit or load_in_8bit, got {config}")
    from zeroshard.hf.adapters import has_adapters  # it is loaded for no other estimate

    if any(map(has_adapters, model.modules())):
        raise ValueError(
            f"quantize: {type(model).__name__} has adapters of peft, which would become codes and frozen: "
            "expected a model without. Quantize it before peft adds adapters"
        )
    chosen = list(_chosen(model, config.llm_int8_skip_modules))
    if not chosen:
        raise ValueError(
            f"quantize: expected layers of torch.nn.Linear in {type(model).__name__}, got none but those "
            "that are skipped or tied"
        )
    for layer, names in chosen:
        new = (_with_4_bits if config.load_in_4bit else _with_8_bits)(layer, config)
        new.bias = layer.bias
        new.train(layer.training)
        for name in names:
            model.set_submodule(name, new)
    for bits in (4, 8):  # by which peft chooses its layers
        object.__setattr__(model, f"is_loaded_in_{bits}bit", bool(getattr(config, f"load_in_{bits}bit")))
    return model


def _chosen(model: Any, skipped: list[str] | None) -> Iterator[tuple[nn.Linear, list[str]]]:
    """The layers to quantize, with all their names: those that transformers chooses, but for tied ones."""
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    if hasattr(model, "all_tied_weights_keys"):
        left_out = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
    else:  # it is no model of transformers
        left_out = skipped or []
    owners = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    names: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear and owners[module.weight] == 1:
            names.setdefault(module, []).append(name)
    for layer, of_layer in names.items():
        if all(should_convert_module(name, left_out) for name in of_layer):
            yield layer, of_layer


def _with_4_bits(layer: nn.Linear, config: Any) -> Any:
    from bitsandbytes.functional import QuantState, quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    kind, storage = config.bnb_4bit_quant_type, config.bnb_4bit_quant_storage
    weight, is_nested = layer.weight.detach(), config.bnb_4bit_use_double_quant
    with torch.device("meta"):
        new = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=is_nested,
            quant_type=kind,
            quant_storage=storage,
        )
    options = {"quant_type": kind, "compress_statistics": is_nested, "quant_storage": storage, "module": new}
    if has_memory(weight):
        new.weight = Params4bit(weight, requires_grad=False, **options).to(weight.device)
        return new
    block_size = new.weight.blocksize

    def codes_of(values: Tensor) -> tuple[Tensor, Tensor]:
        codes, state = quantize_4bit(values, blocksize=block_size, quant_type=kind, quant_storage=storage)
        return codes, state.absmax

    codes = Codes(weight, block_size, 2 * storage.itemsize, codes_of)
    data = torch.empty(codes.numel, 1, dtype=storage, device="meta")
    defer(data, codes)
    state = QuantState(
        None,  # the scales, and all that follows from them, come when the codes are there
        shape=weight.shape,
        blocksize=block_size,
        quant_type=kind,
        dtype=weight.dtype,
    )
    new.weight = Params4bit(data, requires_grad=False, quant_state=state, bnb_quantized=True, **options)
    new.quant_state = state
    return new


def _with_8_bits(layer: nn.Linear, config: Any) -> Any:
    from bitsandbytes.functional import int8_vectorwise_quant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    weight, width = layer.weight.detach(), layer.in_features
    with torch.device("meta"):
        new = Linear8bitLt(
            width, layer.out_features, bias=False, has_fp16_weights=False, threshold=config.llm_int8_threshold
        )
    if has_memory(weight):
        # It quantizes on the way from the CPU to a device, and nowhere else.
        on_host = Int8Params(weight.cpu(), has_fp16_weights=False, requires_grad=False)
        new.weight = on_host.to(weight.device)
        return new

    def codes_of(values: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales, _ = int8_vectorwise_quant(values.view(-1, width).to(torch.float16))
        return codes, scales

    data = torch.empty(layer.out_features, width, dtype=torch.int8, device="meta")
    defer(data, Codes(weight, width, 1, codes_of))
    new.weight = Int8Params(data, has_fp16_weights=False, requires_grad=False)
    return new


def read_quantization(path: object, config: Any) -> Any:
    """Return the BitsAndBytesConfig of a folder or file, given the `quantization_config` of its config.

    Raises:
        ValueError: the weights are quantized by another library.
    """
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoQuantizationConfig

    read = AutoQuantizationConfig.from_dict(dict(config)) if isinstance(config, Mapping) else config
    if not isinstance(read, BitsAndBytesConfig):
        raise ValueError(
            f"'{path}': expected weights that are not quantized, or quantized by bitsandbytes, got a "
            f"{type(read).__name__}"
        )
    return read
