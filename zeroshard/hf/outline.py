"""The layers of well-known decoders of transformers, without transformers, whose import takes seconds.

All of them have the modules of Llama, with other biases and norms:

    model.embed_tokens
    model.layers.*.self_attn    q_proj, k_proj, v_proj, o_proj, and perhaps q_norm and k_norm
    model.layers.*.mlp          gate_proj, up_proj, down_proj
    model.layers.*              two norms
    model.norm
    lm_head                     perhaps with the weight of embed_tokens

A config must tell all sizes, as those do that transformers writes. A default that differs between
architectures or versions is left to transformers. `tests/test_outline.py` compares each architecture with the
model of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """The differences between an architecture and Llama. A bias is a bool, or the key of a config."""

    prefix: str
    """The begin of the names of its classes."""
    inputs: bool | str = "attention_bias"
    """The biases of queries, keys and values."""
    output: bool | str = "attention_bias"
    """The bias of the projection after attention."""
    mlp: bool | str = False
    """The biases of the MLP."""
    norms: tuple[str, str] = _NORMS
    """The norms of a block."""
    norm_of_heads: str = ""
    """Queries and keys have a norm over each "head", or over "all" heads; "" without one."""
    divides_width: bool = True
    """True if a head has the width by the number of heads where a config leaves its size out."""


_FAMILIES = {
    "granite": _Family(prefix="Granite", mlp="mlp_bias"),
    "llama": _Family(prefix="Llama", mlp="mlp_bias"),
    "mistral": _Family(prefix="Mistral", inputs=False, output=False),
    "olmo2": _Family(
        prefix="Olmo2", norms=("post_attention_layernorm", "post_feedforward_layernorm"), norm_of_heads="all"
    ),
    "qwen2": _Family(prefix="Qwen2", inputs=True, output=False),
    "qwen3": _Family(prefix="Qwen3", norm_of_heads="head", divides_width=False),
    "smollm3": _Family(prefix="SmolLM3", mlp="mlp_bias"),
}
"""The architectures by `model_type`."""

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads")
_ANOTHER_MODEL = ("quantization_config", "auto_map", "per_layer_config")
"""Keys of configs of models with other layers."""


def build_outline(config: Mapping[str, Any]) -> nn.Module | None:
    """Return the float32 model of a config on the meta device; it has layers, but no forward.

    Args:
        config: the content of a `config.json`.

    Returns:
        A model with the names, shapes and units of that of transformers; None for a config that only
        transformers reads.
    """
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None or not _is_complete(config, family):
        return None
    prefix, width, vocabulary = family.prefix, config["hidden_size"], config["vocab_size"]
    table = torch.empty(vocabulary, width, device="meta")
    model = _part(
        f"{prefix}Model",
        embed_tokens=nn.Embedding(vocabulary, width, _weight=table),
        layers=nn.ModuleList(_block(config, family) for _ in range(config["num_hidden_layers"])),
        norm=_norm(prefix, width),
    )
    head = nn.Linear(width, vocabulary, bias=False, device="meta")
    if config["tie_word_embeddings"]:
        head.weight = model.get_parameter("embed_tokens.weight")
    whole = _part(f"{prefix}ForCausalLM", model=model, lm_head=head)
    whole._no_split_modules = [f"{prefix}DecoderLayer"]  # type: ignore[assignment]
    return whole


def _is_complete(config: Mapping[str, Any], family: _Family) -> bool:
    """True for a config of the plain architecture that tells all sizes, and sizes that fit together."""
    if config.get("architectures") != [f"{family.prefix}ForCausalLM"] or config.keys() & _ANOTHER_MODEL:
        return False
    sizes = [config.get(key) for key in (*_SIZES, *_HEADS)]
    sizes += [config.get("head_dim")] if "head_dim" in config or not family.divides_width else []
    if not all(type(size) is int and size > 0 for size in sizes):
        return False
    heads, groups = (config[key] for key in _HEADS)
    biases = (family.inputs, family.output, family.mlp)
    flags = [config.get("tie_word_embeddings"), *(_has(config, bias) for bias in biases)]
    return config["hidden_size"] % heads == heads % groups == 0 and all(type(flag) is bool for flag in flags)


def _block(config: Mapping[str, Any], family: _Family) -> nn.Module:
    prefix, width, inner = family.prefix, config["hidden_size"], config["intermediate_size"]
    heads, groups = (config[key] for key in _HEADS)
    size = config.get("head_dim", width // heads)
    attention = _part(
        f"{prefix}Attention",
        q_proj=_linear(config, width, heads * size, family.inputs),
        k_proj=_linear(config, width, groups * size, family.inputs),
        v_proj=_linear(config, width, groups * size, family.inputs),
        o_proj=_linear(config, heads * size, width, family.output),
    )
    if family.norm_of_heads:
        is_each = family.norm_of_heads == "head"
        attention.add_module("q_norm", _norm(prefix, size if is_each else heads * size))
        attention.add_module("k_norm", _norm(prefix, size if is_each else groups * size))
    mlp = _part(
        f"{prefix}MLP",
        gate_proj=_linear(config, width, inner, family.mlp),
        up_proj=_linear(config, width, inner, family.mlp),
        down_proj=_linear(config, inner, width, family.mlp),
    )
    norms = {name: _norm(prefix, width) for name in family.norms}
    return _part(f"{prefix}DecoderLayer", self_attn=attention, mlp=mlp, **norms)


def _linear(config: Mapping[str, Any], num_in: int, num_out: int, bias: bool | str) -> nn.Module:
    return nn.Linear(num_in, num_out, bias=_has(config, bias), device="meta")


def _has(config: Mapping[str, Any], bias: bool | str) -> Any:
    return config.get(bias, False) if isinstance(bias, str) else bias


def _norm(prefix: str, size: int) -> nn.Module:
    norm = _class(f"{prefix}RMSNorm")()
    norm.weight = nn.Parameter(torch.empty(size, device="meta"))
    return norm


def _part(name: str, **children: nn.Module) -> nn.Module:
    part = _class(name)()
    for key, child in children.items():
        part.add_module(key, child)
    return part


@cache
def _class(name: str) -> type[nn.Module]:
    return type(name, (nn.Module,), {})
