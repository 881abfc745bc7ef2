"""The heads of known attention layers, which stay whole when the layer is divided over the tensor ranks.

An attention layer of transformers tells the size of a head in an attribute. Most layers find the number of
heads from the size of their activations. Some keep it in attributes: these are set to the number of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from zeroshard.parallel.tensor.styles import WITHOUT_CUTS, Style, Way
from zeroshard.plan.cuts import Section
from zeroshard.sharding.changes import Changes

_SIZES = ("head_dim", "head_size", "key_value_proj_dim")
"""The names of the size of a head in the attention layers of transformers."""
_IN_ONE = {"query_key_value": 3}
"""Layers whose outputs are, for each head, its query, its key and its value."""
_SIDE_BY_SIDE = {("GPT2Attention", "c_attn"): "embed_dim"}
"""Layers with all queries first, then all keys, then all values: (attention layer, name) -> size of each."""
_LATENT = {
    "q_proj": ("qk_head_dim",),
    "q_b_proj": ("qk_head_dim",),
    "kv_b_proj": ("qk_nope_head_dim", "v_head_dim"),
    "o_proj": ("v_head_dim",),
}
"""Layers of multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1) -> the sizes of what a
head has there."""
_ROTARY = "qk_rope_head_dim"
_COUNTS = {
    "GPT2Attention": ("num_heads", "embed_dim", "split_size"),
    "T5Attention": ("n_heads", "inner_dim"),
    "MT5Attention": ("n_heads", "inner_dim"),
}
"""Attributes that are proportional to the number of heads which the layer computes."""
_WITHOUT_HEADS = (Way.COLUMNS_GATHERED, Way.COLUMNS_LOSS, Way.ROWS_SPLIT, *WITHOUT_CUTS)
"""Ways that may divide a head: what follows has all of them, or none."""


def sections_of(name: str, parent: nn.Module, size: int, *, is_outputs: bool) -> tuple[Section, ...]:
    """Return the sections of a layer of an attention layer, or () if it has no heads.

    Args:
        name: the name of the layer.
        parent: the attention layer that holds it.
        size: the outputs or inputs of the layer.
        is_outputs: True for its outputs, which may be several matrices in one.
    """
    last = name.rpartition(".")[2]
    head = _head_of(parent, last)
    if head is None:
        return ()
    together = _SIDE_BY_SIDE.get((type(parent).__name__, last)) if is_outputs else None
    if together is not None:
        each: int = getattr(parent, together)
        return (Section(each, head),) * (size // each)
    unit = head * _IN_ONE.get(last, 1)
    return () if size % unit else (Section(size, unit),)


def _head_of(parent: nn.Module, last: str) -> int | None:
    """The size of a head in a layer of an attention layer."""
    if hasattr(parent, _ROTARY):
        sizes = [getattr(parent, attribute, 0) for attribute in _LATENT.get(last, ())]
        return sum(sizes) if all(sizes) and sizes else None
    return next((head for head in (getattr(parent, attribute, None) for attribute in _SIZES) if head), None)


def rotary_size(name: str, parent: nn.Module) -> int:
    """Return how many of the outputs of a layer of latent attention are parts of the keys of all heads.

    Raises:
        ValueError: the attention layer does not tell.
    """
    size = getattr(parent, _ROTARY, None)
    if not isinstance(size, int):
        raise ValueError(
            f"tp_plan: '{name}' has the word 'mla_kv_a_proj'; expected '{_ROTARY}' in the "
            f"{type(parent).__name__} that holds it, got {size!r}"
        )
    return size


def set_counts(parents: Iterable[nn.Module], num_ranks: int, changes: Changes) -> None:
    """Tell attention layers how many heads a rank computes; their layers are divided by `sections_of`."""
    for parent in parents:
        for attribute in _COUNTS.get(type(parent).__name__, ()):
            changes.set(parent, attribute, getattr(parent, attribute) // num_ranks)


def with_heads(style: Style, name: str, module: Any, parent: nn.Module, num_ranks: int) -> Style:
    """Return a style that leaves the heads of an attention layer of transformers whole.

    Under grouped-query attention (Ainslie et al. 2023) there may be fewer heads of keys and values than
    ranks. Then several ranks use the same one.
    """
    if style.way is Way.LATENT:
        rotary_size(name, parent)
    if style.sections or style.way in _WITHOUT_HEADS or not is_linear(module):
        return style
    is_outputs = style.way is not Way.ROWS
    total: int = module.weight.shape[dim_of(module, is_outputs)]
    if style.way is Way.PACKED_COLUMNS:
        return Style(Way.COLUMNS, (Section(total // 2),) * 2)
    sections = sections_of(name, parent, total, is_outputs=is_outputs)
    if len(sections) != 1:
        return replace(style, sections=sections)
    unit = sections[0].unit
    num_heads = total // unit
    is_shared = style.way is Way.COLUMNS and num_heads < num_ranks and num_ranks % num_heads == 0
    return Style(Way.SHARED_COLUMNS if is_shared else style.way, sections)


def is_conv1d(module: nn.Module) -> bool:
    """True for the layer of transformers whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def is_linear(module: nn.Module) -> bool:
    """True for a layer of one matrix and perhaps a bias."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def dim_of(module: nn.Module, is_outputs: bool) -> int:
    """Return the dimension of the outputs, or inputs, in the weight."""
    return int(is_outputs == is_conv1d(module))
