"""Load a transformers checkpoint; each rank reads its own part of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.config.checked import parse_dtype
from zeroshard.config.sections import Config, GivenConfig
from zeroshard.hf.quantize import quantize, read_quantization
from zeroshard.lazy.deferred import defer
from zeroshard.lazy.recording import recording
from zeroshard.memory.typical import typical_sizes
from zeroshard.safetensors import FileTensor, find_tensors


def from_pretrained(
    auto_class: Any, path: str | os.PathLike[str], config: GivenConfig = None, **kwargs: Any
) -> nn.Module:
    """Return a transformers model whose weights stay in their files until `initialize` reads them.

    Names, renamed names, ties, dtypes and the report of missing and unexpected weights are transformers' own.
    Missing weights get the values of the model's own initialization.

    Args:
        auto_class: transformers.AutoModelForCausalLM or its like, or a model class.
        path: a folder with config.json and model.safetensors, or model.safetensors.index.json and its files.
            Every rank reads its copy.
        config: the zeroshard config that `initialize` will get; checked here, before anything is built.
        kwargs: dtype (default "auto": as the checkpoint says), attn_implementation, and fields of the model's
            config, as for transformers' `from_pretrained`. With `quantization_config`, a BitsAndBytesConfig,
            each rank quantizes its own part of the weights as it reads them; see `zeroshard.quantize`.

    Returns:
        The model on the meta device, in eval mode as transformers gives it.

    Raises:
        ValueError: no safetensors checkpoint at `path`, or one of another model, or of quantized weights.
        RuntimeError: a file of it is missing, shortened or damaged.
    """
    Config.parse(config)
    tensors = find_tensors(path)
    from transformers import AutoConfig, GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    for name in ("local_files_only", "low_cpu_mem_usage", "use_safetensors"):
        kwargs.pop(name, None)  # always so
    quantization = kwargs.pop("quantization_config", None)
    asked, torch_dtype = kwargs.pop("dtype", None), kwargs.pop("torch_dtype", None)
    options = {key: kwargs.pop(key) for key in ("attn_implementation", "trust_remote_code") if key in kwargs}
    trust = {key: options[key] for key in ("trust_remote_code",) if key in options}
    model_config, unknown = AutoConfig.from_pretrained(
        path, local_files_only=True, return_unused_kwargs=True, **trust, **kwargs
    )
    if unknown:
        raise ValueError(
            f"from_pretrained: expected fields of {type(model_config).__name__}, got {unknown}. Every rank "
            "reads its own part of the safetensors files on this machine, onto its own device"
        )
    if getattr(model_config, "quantization_config", None) is not None:
        raise ValueError(
            f"'{path}' has codes of quantized weights: expected a folder without, from which each rank "
            "quantizes its own part by quantization_config=. Or load codes of bitsandbytes on "
            "each rank by from_pretrained of transformers, and give initialize that model"
        )
    dtype = _resolve_dtype(asked or torch_dtype or "auto", model_config, tensors)
    build = getattr(auto_class, "from_config", None) or auto_class._from_config
    with recording("from_pretrained", loads=True), torch.no_grad():
        model: Any = build(model_config, dtype=dtype, **options)
        _load(model, tensors, path, dtype)
    if (Path(path) / GENERATION_CONFIG_NAME).is_file() and hasattr(model, "generation_config"):
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if quantization is not None:
        quantize(model, quantization)
    module: nn.Module = model.eval()
    return module


class _Lazy:
    """A stand-in for a slice of an open safetensors file, as transformers reads it."""

    def __init__(self, source: FileTensor) -> None:
        self._source = source

    def get_shape(self) -> list[int]:
        return list(self._source.shape)

    def __getitem__(self, key: EllipsisType) -> _Lazy:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a deferred tensor on the meta device, for any `device`."""
        source = self._source.cast(dtype or self._source.dtype)
        tensor = torch.empty(source.shape, dtype=source.dtype, device="meta")
        defer(tensor, source)
        return tensor


def _load(model: Any, tensors: dict[str, FileTensor], path: Any, dtype: torch.dtype) -> None:
    """Replace the model's weights by deferred tensors, with transformers' own rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils.loading_report import log_state_dict_report

    conversions: Any = get_model_conversion_mapping(model)
    how = LoadStateDictConfig(
        pretrained_model_name_or_path=str(path),
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=conversions,
    )
    found = {name: _Lazy(tensor) for name, tensor in tensors.items()}
    info, _ = convert_and_load_state_dict_in_model(model, found, how)
    if info.mismatched_keys:
        name, found, expected = min(info.mismatched_keys)
        raise ValueError(
            f"'{path}': parameter '{name}' has shape {tuple(found)}; the model expects {tuple(expected)}"
        )
    model.mark_tied_weights_as_initialized(info)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    log_state_dict_report(
        model=model, pretrained_model_name_or_path=str(path), ignore_mismatched_sizes=False, loading_info=info
    )


def _resolve_dtype(asked: Any, model_config: Any, tensors: dict[str, FileTensor]) -> torch.dtype:
    """Return the dtype that transformers means by its argument `dtype`."""
    if asked != "auto":
        return parse_dtype(asked)
    stated = getattr(model_config, "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    floating = (tensor.file_dtype for tensor in tensors.values() if tensor.file_dtype.is_floating_point)
    return next(floating, torch.float32)


# --------------------------------------------------------------------------------- models without memory


def build_skeleton(path: Path) -> nn.Module:
    """Return the float32 model of a transformers config on the meta device; no code of the folder is run.

    If the config says that weights are codes of bitsandbytes, they are such codes.

    Args:
        path: a `config.json`, or a folder that has one. Weights are not looked at.

    Raises:
        ImportError: transformers is not installed, or bitsandbytes for a model that needs it.
        ValueError: there is no config at `path`, or transformers builds no model of it.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"expected a config of transformers or a folder with config.json, got '{path}'")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = _builder(transformers, config)(config).to(torch.float32)
            if (how := getattr(config, "quantization_config", None)) is not None:
                quantize(model, read_quantization(file, how))
    except ImportError:
        raise
    except Exception as error:  # whatever the file makes it raise
        raise ValueError(f"'{file}': transformers builds no model of it: {error}") from None
    return model


def build_typical(num_params: int) -> nn.Module:
    """Return a Llama of a typical shape with about so many parameters, on the meta device.

    Raises:
        ImportError: transformers is not installed.
        ValueError: see `typical_sizes`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = typical_sizes(num_params)
    heads = next(num for num in (64, 32, 16, 8, 4, 2, 1) if sizes.width >= 128 * num)
    config = LlamaConfig(
        hidden_size=sizes.width,
        intermediate_size=round(sizes.width / 3) * 8,
        num_hidden_layers=sizes.depth,
        num_attention_heads=heads,
        vocab_size=sizes.vocabulary,
        tie_word_embeddings=sizes.is_tied,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def _builder(transformers: Any, config: Any) -> Any:
    """Return the function that builds the model: its own class, or the one for causal language models."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            build: Any = named._from_config  # type: ignore[attr-defined]
            return build
    return transformers.AutoModelForCausalLM.from_config


def with_codes(model: nn.Module, bits: int) -> nn.Module:
    """Quantize the linear layers of a model without memory as bitsandbytes does, and freeze all of it.

    Args:
        model: the model, which changes.
        bits: 4, with scales that are quantized, too (QLoRA, Dettmers et al. 2023, section 3); or 8.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_use_double_quant=True
    )
    return quantize(model.requires_grad_(False), config)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Add adapters of LoRA to all linear layers of a model without memory but the head, and freeze the rest.

    Raises:
        ValueError: peft cannot add them.
    """
    from peft import LoraConfig, get_peft_model

    try:
        with torch.device("meta"):
            adapted: Any = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    except Exception as error:  # of any kind
        raise ValueError(f"peft adds no adapters of rank {rank} to {type(model).__name__}: {error}") from None
    whole: nn.Module = adapted
    return whole
