"""A transformers model without memory, built from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.hf.prequantized import read_quantization
from zeroshard.hf.quantize import quantize


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
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = _builder(transformers, config)(config).to(torch.float32)
            if (how := getattr(config, "quantization_config", None)) is not None:
                quantize(model, read_quantization(file, how))
    except ImportError:
        raise ImportError(
            f"'{file}': a model with weights of bitsandbytes needs it: pip install zeroshard[eightbit]"
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
