"""The linear layers of a model become layers of bitsandbytes, with 4 or 8 bits; also without memory.

A folder of transformers may have codes of bitsandbytes already:

    X.weight            codes; each rank reads its own part of them, in `initialize`
    4 bits, with them   X.weight.absmax, .quant_map, .nested_absmax, .nested_quant_map: scales
                        X.weight.quant_state.bitsandbytes__nf4: a description in JSON
    8 bits, with them   X.SCB: scales; X.weight_format: the order of the codes

The tensors that come with the codes are small, and are read whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.forwards.quantized import is_of_bitsandbytes
from zeroshard.hf.adapters import has_adapters
from zeroshard.lazy.deferred import Codes, defer, deferred_of, has_memory
from zeroshard.lazy.recording import guard_copies
from zeroshard.plan.layout import Span
from zeroshard.safetensors import FileTensor


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
        if not has_memory(new.weight):
            guard_copies([new])
        new.train(layer.training)
        for name in names:
            model.set_submodule(name, new)
    name_bits(model, config)
    return model


def name_bits(model: nn.Module, config: Any) -> None:
    """Set the attributes of a model by which peft chooses its layers."""
    for bits in (4, 8):
        object.__setattr__(model, f"is_loaded_in_{bits}bit", bool(getattr(config, f"load_in_{bits}bit")))


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


_BESIDE = re.compile(
    r"(?P<weight>.+\.weight)\."
    r"(?P<key>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
    r"|(?P<layer>.+)\.(?P<key8>SCB|weight_format)"
)


def read_quantization(path: object, config: Any) -> Any:
    """Return the BitsAndBytesConfig of a folder or file, given the `quantization_config` of its config.

    Raises:
        ValueError: the weights are quantized by another library.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    method = config.get("quant_method") if isinstance(config, Mapping) else config.quant_method
    is_known = isinstance(config, Mapping) and any(config.get(f"load_in_{bits}bit") for bits in (4, 8))
    if str(getattr(method, "value", method)) != "bitsandbytes" and not (method is None and is_known):
        raise ValueError(
            f"'{path}': expected weights that are not quantized, or quantized by bitsandbytes, got "
            f"quant_method={str(getattr(method, 'value', method))!r}"
        )
    return AutoQuantizationConfig.from_dict(dict(config)) if isinstance(config, Mapping) else config


class Prequantized:
    """The quantized weights of a folder.

    Args:
        path: the folder, for errors.
        config: the `quantization_config` of its config.json.
        tensors: the tensors of the folder by name; tensors that come with codes are taken out of it.

    Raises:
        ValueError: the weights are quantized by another library.
    """

    def __init__(self, path: object, config: Any, tensors: dict[str, FileTensor]) -> None:
        self._path, self._tensors = path, tensors
        self.config = read_quantization(path, config)
        self._beside: dict[str, dict[str, FileTensor]] = {}
        """By name of a weight in the folder."""
        for name in list(tensors):
            if (found := _BESIDE.fullmatch(name)) is not None:
                weight = found["weight"] or f"{found['layer']}.weight"
                self._beside.setdefault(weight, {})[found["key"] or found["key8"]] = tensors.pop(name)

    def prepare(self, model: Any, dtype: torch.dtype) -> None:
        """Replace the layers that transformers replaces, by layers of bitsandbytes without values.

        Args:
            model: the model, without values.
            dtype: of all that is not quantized.
        """
        from transformers.integrations.bitsandbytes import replace_with_bnb_linear
        from transformers.quantizers.base import HfQuantizer

        skipped = self.config.llm_int8_skip_modules
        left_out = HfQuantizer.get_modules_to_not_convert(model, skipped, model._keep_in_fp32_modules)
        replace_with_bnb_linear(
            model, modules_to_not_convert=left_out, quantization_config=self.config, pre_quantized=True
        )
        for layer in filter(is_of_bitsandbytes, model.modules()):
            if layer.bias is not None:  # bitsandbytes makes it in float32
                layer.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
            if self.config.load_in_4bit:
                storage = layer.weight.dtype
                num_codes = -(-layer.in_features * layer.out_features // (2 * storage.itemsize))
                codes = torch.empty(num_codes, 1, dtype=storage, device="meta")
                layer.weight = nn.Parameter(codes, requires_grad=False)

    def complete(self, model: Any) -> None:
        """Give the layers of a model the weights that were loaded.

        Raises:
            ValueError: a weight has no codes in the folder, or others than its layer.
        """
        names = {(tensor.file, tensor.offset): name for name, tensor in self._tensors.items()}
        for name, layer in model.named_modules():
            if not is_of_bitsandbytes(layer):
                continue
            deferred = deferred_of(layer.weight)
            source = None if deferred is None else deferred.source
            found = names.get((source.file, source.offset)) if isinstance(source, FileTensor) else None
            beside = self._beside.get(found or "")
            if not beside:
                raise ValueError(
                    f"'{self._path}': expected codes of bitsandbytes and their scales for '{name}.weight', "
                    f"got {'none' if found is None else f'a tensor without scales, {found!r}'}"
                )
            values = {key: _read(tensor) for key, tensor in beside.items()}
            try:
                (_set_4_bits if self.config.load_in_4bit else _set_8_bits)(layer, values)
            except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"'{self._path}': '{name}.weight' has other scales than bitsandbytes writes: {error}"
                ) from error
        name_bits(model, self.config)
        model.config.quantization_config = self.config


def _read(tensor: FileTensor) -> Tensor:
    return tensor.read(Span(0, tensor.numel)).view(tensor.shape)


def _set_4_bits(layer: Any, values: dict[str, Tensor]) -> None:
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

    state = QuantState.from_dict(values, device=torch.device("cpu"))
    blocks = -(-layer.in_features * layer.out_features // state.blocksize)
    if prod(state.shape) != layer.in_features * layer.out_features or state.absmax.numel() != blocks:
        raise ValueError(f"expected those of {layer.out_features} x {layer.in_features} elements")
    layer.quant_state = state
    layer.weight = Params4bit(
        layer.weight.detach(),
        requires_grad=False,
        quant_state=state,
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=layer.weight.dtype,
        module=layer,
        bnb_quantized=True,
    )


def _set_8_bits(layer: Any, values: dict[str, Tensor]) -> None:
    from bitsandbytes.nn import Int8Params

    if values["SCB"].shape != (layer.out_features,):
        raise ValueError(f"expected SCB [{layer.out_features}], got {list(values['SCB'].shape)}")
    if (order := values.get("weight_format")) is not None and order.count_nonzero():
        raise ValueError(f"expected codes in rows (weight_format 0), got {order.tolist()}")
    codes = layer.weight.detach()
    layer.weight = Int8Params(codes, has_fp16_weights=False, requires_grad=False, SCB=values["SCB"])
