"""The ways to divide a layer over the ranks of a tensor group, and the words of a plan for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeroshard.plan.cuts import Section


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


_ALIASES = {
    "embedding_rowwise": "rowwise",
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
}
"""Words of transformers that mean the same as others."""


@dataclass(frozen=True, slots=True)
class Style:
    """A way to divide a layer, and the heads that it must leave whole."""

    way: Way
    sections: tuple[Section, ...] = ()
    """Of the dimension that is divided; () for one section without heads."""

    def __post_init__(self) -> None:
        if self.way in (Way.COLUMNS_GATHERED, Way.ROWS_SPLIT) and len(self.sections) > 1:
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
