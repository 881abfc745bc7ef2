"""The ways to divide a layer over the ranks of a tensor group: the words of a plan, and its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from torch import nn

from zeroshard.plan.cuts import Cut, Section


class Way(Enum):
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
    PER_HEAD = "embedding_per_head"
    """An embedding of one element for each head: by these."""
    LATENT = "mla_kv_a_proj"
    """Not at all; the heads of each rank use its last outputs, which are parts of their keys."""
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
BY_ROWS = (Way.ROWS, Way.ROWS_SPLIT)
"""Layers that are divided by their inputs."""
OF_SEQUENCE = (Way.SEQUENCE, Way.SEQUENCE_PARTS)
"""Layers that work on a part of the sequence."""
WITHOUT_CUTS = (Way.SUMMED, Way.SHARED_COLUMNS, Way.LATENT, Way.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers whose parameters each rank holds whole."""
_BY_OWN_FORWARD = (Way.SUMMED, Way.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers that compute all of their outputs by their own forward."""


@dataclass(frozen=True, slots=True)
class Style:
    """A way to divide a layer, and the heads that it must leave whole."""

    way: Way
    sections: tuple[Section, ...] = ()
    """Of the dimension that is divided; () for one section without heads."""

    def __post_init__(self) -> None:
        if self.way in (Way.COLUMNS_GATHERED, Way.COLUMNS_LOSS, Way.ROWS_SPLIT) and len(self.sections) > 1:
            raise ValueError(
                f"tp_plan: expected one section for '{self.way.value}', whose parts lie in rank order, got "
                f"{len(self.sections)}"
            )

    @staticmethod
    def of(given: str | Style, pattern: str) -> Style:
        """Return a style from its word. Raises ValueError for another word."""
        if isinstance(given, Style):
            return given
        try:
            return Style(Way(_ALIASES.get(given, given)))
        except ValueError:
            words = ", ".join(way.value for way in Way)
            raise ValueError(f"tp_plan: expected one of {words}, got {given!r} for '{pattern}'") from None


Plan = Mapping[str, str | Style]
"""Styles, or their words, by a pattern of names of modules."""


@dataclass(frozen=True, slots=True)
class Divided:
    """A layer of a plan."""

    name: str
    module: nn.Module
    style: Style
    cuts: Mapping[str, Cut]
    """By the name of the parameter in the module; the others are whole on each rank."""
    parent: nn.Module
    """The module that holds it, or the adapter around it."""
    adapter: nn.Module | None = None
    """The LoRA module around it."""

    @property
    def has_other_forward(self) -> bool:
        """True if a forward of this package takes the place of its own."""
        return self.style.way not in _BY_OWN_FORWARD

    @property
    def is_summed(self) -> bool:
        """True if each rank holds the parameters whole and computes summands of their gradients."""
        return self.style.way in (Way.SUMMED, Way.SHARED_COLUMNS, *OF_SEQUENCE)
