"""A transformers model without memory, built from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn


def build_skeleton(path: Path) -> nn.Module:
    """Return the float32 model of a transformers config on the meta device; no code of the folder is run.

    Weights that the config tells to be codes of bitsandbytes are such codes.

    Args:
        path: a `config.json`, or a folder that has one. Weights are not looked at.

    Raises:
        ImportError: transformers is not installed, or bitsandbytes for a model that needs it.
        ValueError: there is no config at `path`, or transformers builds no model of it.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"expected a config of transformers or a folder with config.json, got '{path}'")
    try:
        import transformers
    except ImportError:
        raise ImportError(
            f"'{path}': a model's config needs transformers: pip install zeroshard[hf]"
        ) from None
    from zeroshard.hf.quantize import quantize, read_quantization

    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = _builder(transformers, config)(config).to(torch.float32)
            if (how := getattr(config, "quantization_config", None)) is not None:
                quantize(model, read_quantization(file, how))
    except ImportError as error:
        raise ImportError(
            f"'{file}': {error}; its quantized weights need bitsandbytes: pip install zeroshard[eightbit]"
        ) from None
    except Exception as error:  # whatever the file makes it raise
        raise ValueError(f"'{file}': transformers builds no model of it: {error}") from None
    return model


def _builder(transformers: Any, config: Any) -> Any:
    """Return the function that builds the model: its own class, or the one for causal language models."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            build: Any = named._from_config  # type: ignore[attr-defined]
            return build
    return transformers.AutoModelForCausalLM.from_config


def typical_skeleton(depth: int, width: int, num_heads: int, vocabulary: int, *, is_tied: bool) -> nn.Module:
    """Return the float32 model of a Llama on the meta device, whose blocks have 12 * width**2 parameters."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=depth,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        tie_word_embeddings=is_tied,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def with_codes(model: nn.Module, bits: int) -> nn.Module:
    """Quantize the linear layers of a model without memory as bitsandbytes does, and freeze all of it.

    Args:
        model: the model, which changes.
        bits: 4, with scales that are quantized, too (QLoRA, Dettmers et al. 2023, section 3); or 8.
    """
    from transformers import BitsAndBytesConfig

    from zeroshard.hf.quantize import quantize

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
