"""The heads of known attention layers, which stay whole when the layer is divided over the tensor ranks.

An attention layer of transformers tells the size of a head in an attribute. Most layers find the number of
heads from the size of their activations. Some keep it in attributes: these are set to the number of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from zeroshard.plan.cuts import Section
from zeroshard.sharding.changes import Changes

_SIZES = ("head_dim", "head_size", "key_value_proj_dim")
"""The names of the size of a head in the attention layers of transformers."""
_IN_ONE = {"query_key_value": 3}
"""Layers whose outputs are, for each head, its query, its key and its value."""
_SIDE_BY_SIDE = {("GPT2Attention", "c_attn"): "embed_dim"}
"""Layers with all queries first, then all keys, then all values: (attention layer, name) -> size of each."""
_COUNTS = {
    "GPT2Attention": ("num_heads", "embed_dim", "split_size"),
    "T5Attention": ("n_heads", "inner_dim"),
    "MT5Attention": ("n_heads", "inner_dim"),
}
"""Attributes that are proportional to the number of heads which the layer computes."""


def sections_of(name: str, parent: nn.Module, size: int, *, is_outputs: bool) -> tuple[Section, ...]:
    """Return the sections of a layer of an attention layer, or () if it has no heads.

    Args:
        name: the name of the layer.
        parent: the attention layer that holds it.
        size: the outputs or inputs of the layer.
        is_outputs: True for its outputs, which may be several matrices in one.
    """
    head = next((head for head in (getattr(parent, attribute, None) for attribute in _SIZES) if head), None)
    if head is None:
        return ()
    last = name.rpartition(".")[2]
    together = _SIDE_BY_SIDE.get((type(parent).__name__, last)) if is_outputs else None
    if together is not None:
        each: int = getattr(parent, together)
        return (Section(each, head),) * (size // each)
    unit = head * _IN_ONE.get(last, 1)
    return () if size % unit else (Section(size, unit),)


def set_counts(parents: Iterable[nn.Module], num_ranks: int, changes: Changes) -> None:
    """Tell attention layers how many heads a rank computes; their layers are divided by `sections_of`."""
    for parent in parents:
        for attribute in _COUNTS.get(type(parent).__name__, ()):
            changes.set(parent, attribute, getattr(parent, attribute) // num_ranks)
