"""The ways to divide a layer over the ranks of a tensor group: the words of a plan, its layers, their heads.

An attention layer of transformers has the size of a head in an attribute, and heads stay whole. It finds the
number of heads from the size of its activations.

Experts are divided by their hidden elements, so each rank has a part of every expert:

    tokens  --COPY--> [ gate and up of all experts: columns ] --> [ down of all experts: rows ] --SUM-->
    weights --COPY------------------------------------------------^

Transformers keeps the experts of a layer in one module. Its parameters have the dimensions
[experts, outputs, inputs] or [experts, inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from zeroshard.plan.cuts import Cut, Section
from zeroshard.plan.names import fitting


class Split(Enum):
    """The ways to divide a layer. The values are the words of a plan."""

    COLUMNS = "colwise"
    """By its outputs."""
    COLUMNS_GATHERED = "colwise_gather_output"
    """By its outputs, which are gathered."""
    SHARED_COLUMNS = "colwise_shared_heads"
    """By its outputs, which are fewer heads than ranks: each rank holds them all and computes one."""
    ROWS = "rowwise"
    """By its inputs, which are divided already; an embedding by its tokens."""
    REPLICATE = "replicate"
    """Not at all: each rank computes all of it."""
    SUMMED = "replicated_with_grad_allreduce"
    """Not at all, but each rank uses it for other values: the gradients of its parameters are added up."""
    ROWS_SPLIT = "rowwise_split_input"
    """By its inputs, of which each rank takes its part."""
    PACKED_COLUMNS = "packed_colwise"
    """By its outputs, of which both halves are cut."""
    PACKED_ROWS = "packed_rowwise"
    """By its inputs, of which both halves are cut; for parameters of experts."""
    EXPERTS = "moe_tp_experts"
    """Experts, by the words for their parameters."""
    COLUMNS_LOSS = "colwise_loss"
    """By its outputs; they are gathered, except where a model of transformers computes its loss of them."""
    SEQUENCE = "sequence"
    """A layer between others that are divided, such as a norm, works on a part of the sequence; its output is
    gathered for the next ones."""
    SEQUENCE_PARTS = "sequence_parts"
    """The same, and its output stays a part."""
    SEQUENCE_SPLIT = "sequence_split"
    """The first block: the input is split along the sequence. Without it embeddings give parts."""


_ALIASES = {
    "embedding_rowwise": "rowwise",
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "sequence_parallel": "sequence",
}
"""Words of transformers that mean the same as others."""
BY_ROWS = (Split.ROWS, Split.ROWS_SPLIT)
"""Layers that are divided by their inputs."""
OF_SEQUENCE = (Split.SEQUENCE, Split.SEQUENCE_PARTS)
"""Layers that work on a part of the sequence."""
WITHOUT_CUTS = (Split.SUMMED, Split.SHARED_COLUMNS, Split.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers whose parameters each rank holds whole."""
IN_RANK_ORDER = (Split.COLUMNS_GATHERED, Split.COLUMNS_LOSS, Split.ROWS_SPLIT)
"""Layers whose parts are gathered, or cut, in the order of the ranks."""
_BY_OWN_FORWARD = (Split.SUMMED, Split.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers that compute all of their outputs by their own forward."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A way to divide a layer, and the heads that it must leave whole."""

    way: Split
    sections: tuple[Section, ...] = ()
    """Of the dimension that is divided; () for one section without heads."""

    def __post_init__(self) -> None:
        if self.way in IN_RANK_ORDER and len(self.sections) > 1:
            raise ValueError(
                f"tp_plan: expected one section for '{self.way.value}', whose parts lie in rank order, got "
                f"{len(self.sections)}"
            )

    @staticmethod
    def of(given: str | LayerPlan, pattern: str) -> LayerPlan:
        """Return a style from its word. Raises ValueError for another word."""
        if isinstance(given, LayerPlan):
            return given
        try:
            return LayerPlan(Split(_ALIASES.get(given, given)))
        except (ValueError, TypeError):  # a list cannot be looked up
            words = ", ".join(way.value for way in Split)
            raise ValueError(f"tp_plan: expected one of {words}, got {given!r} for '{pattern}'") from None


Plan = Mapping[str, str | LayerPlan]
"""Styles, or their words, by a pattern of names of modules."""


def named_by(patterns: Iterable[str], model: nn.Module) -> set[str]:
    """Return the names of modules, and of the parameters of experts, that patterns of a plan fit."""
    names = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    return {name for pattern in patterns for name in fitting(pattern, names, inside=False)}


@dataclass(frozen=True, slots=True)
class Divided:
    """A layer of a plan."""

    name: str
    module: nn.Module
    style: LayerPlan
    cuts: Mapping[str, Cut]
    """By the name of the parameter in the module; the others are whole on each rank."""
    parent: nn.Module
    """The module that holds it."""

    @property
    def has_other_forward(self) -> bool:
        """True if a forward of this package takes the place of its own."""
        return self.style.way not in _BY_OWN_FORWARD

    @property
    def is_summed(self) -> bool:
        """True if each rank holds the parameters whole and computes summands of their gradients."""
        return self.style.way in (Split.SUMMED, Split.SHARED_COLUMNS, *OF_SEQUENCE)


_SIZES = ("head_dim", "head_size")
"""The names of the size of a head in the attention layers of transformers."""
_IN_ONE = {"query_key_value": 3}
"""Layers whose outputs are, for each head, its query, its key and its value."""
_WITHOUT_HEADS = (*IN_RANK_ORDER, *WITHOUT_CUTS)
"""Ways that may divide a head: what follows has all of them, or none."""


def with_heads(style: LayerPlan, name: str, module: Any, parent: nn.Module, num_ranks: int) -> LayerPlan:
    """Return a style that leaves the heads of an attention layer of transformers whole.

    Under grouped-query attention (Ainslie et al. 2023) there may be fewer heads of keys and values than
    ranks. Then several ranks use the same one.

    Raises:
        ValueError: it is in latent attention, where parts of keys belong to all heads.
    """
    if hasattr(parent, "qk_rope_head_dim"):
        raise ValueError(
            f"tp_plan: '{name}' is in latent attention, which is not divided: leave the layers of "
            f"{type(parent).__name__} out of the plan"
        )
    if style.sections or style.way in _WITHOUT_HEADS or not isinstance(module, nn.Linear):
        return style
    total: int = module.weight.shape[1 if style.way is Split.ROWS else 0]
    if style.way is Split.PACKED_COLUMNS:
        return LayerPlan(Split.COLUMNS, (Section(total // 2),) * 2)
    head = next((head for head in (getattr(parent, at, None) for at in _SIZES) if head), 0)
    unit = head * _IN_ONE.get(name.rpartition(".")[2], 1)
    if not unit or total % unit:
        return style
    num_heads = total // unit
    is_shared = style.way is Split.COLUMNS and num_heads < num_ranks and num_ranks % num_heads == 0
    return LayerPlan(Split.SHARED_COLUMNS if is_shared else style.way, (Section(total, unit),))


_CUTS = {"colwise": (1, 1), "packed_colwise": (1, 2), "rowwise": (2, 1), "packed_rowwise": (2, 2)}
"""Word of a plan -> the dimension that is cut, and the matrices side by side along it."""


def cuts_of_experts(
    name: str, module: nn.Module, words: Mapping[str, str | None], num_ranks: int
) -> dict[str, Cut]:
    """Return the cuts of the parameters of experts.

    Args:
        name: the name of the module.
        module: the experts of a layer.
        words: the word of the plan for each parameter, by its name in the module; None without one.
        num_ranks: the ranks of a tensor group.

    Raises:
        ValueError: a parameter is not cut, or the output of a rank would not be a summand.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"tp_plan: '{name}' normalizes the output of each expert, which no rank has in whole; expected "
            "'replicate' for it and its parameters"
        )
    cuts = {}
    for attribute, parameter in module.named_parameters():
        where, word, shape = f"{name}.{attribute}", words.get(attribute), tuple(parameter.shape)
        if word not in _CUTS or len(shape) != 3:
            expected = ", ".join(f"'{known}'" for known in _CUTS)
            raise ValueError(
                f"tp_plan: '{name}' is divided by 'moe_tp_experts'; expected parameters of three dimensions "
                f"with one of {expected}, got '{where}' of shape {shape} with {word!r}"
            )
        dim, num_packed = _CUTS[word]
        if num_packed > 1 and not getattr(module, "is_concatenated", True):
            raise ValueError(f"tp_plan: the gate and up of '{name}' alternate; expected no {word!r}, got it")
        sections = (Section(shape[dim] // num_packed),) * num_packed
        cuts[attribute] = Cut(where, shape, dim, num_ranks, sections)
    return cuts
