"""The words of a plan, and the layers that it names."""

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
    COLUMNS_LOSS = "colwise_loss"
    """By its outputs; they are gathered, except where a model of transformers computes its loss of them."""
    SEQUENCE = "sequence"
    """A layer between others that are divided, such as a norm, works on a part of the sequence; its output is
    gathered for the next ones."""
    SEQUENCE_PARTS = "sequence_parts"
    """The same, and its output stays a part."""
    SEQUENCE_SPLIT = "sequence_split"
    """The first block: the input is split along the sequence. Without it embeddings give parts."""


_ALIASES = {"embedding_rowwise": "rowwise", "sequence_parallel": "sequence"}
"""Words of transformers that mean the same as others."""
OF_SEQUENCE = (Way.SEQUENCE, Way.SEQUENCE_PARTS)
"""Layers that work on a part of the sequence."""
WITHOUT_CUTS = (Way.SUMMED, Way.SHARED_COLUMNS, Way.SEQUENCE_SPLIT, *OF_SEQUENCE)
"""Layers whose parameters each rank holds whole."""


@dataclass(frozen=True, slots=True)
class Style:
    """A way to divide a layer, and the heads that it must leave whole."""

    way: Way
    sections: tuple[Section, ...] = ()
    """Of the dimension that is divided; () for one section without heads."""

    @staticmethod
    def of(given: str | Style) -> Style:
        """Return a style from its word. Raises ValueError for another word."""
        if isinstance(given, Style):
            return given
        try:
            return Style(Way(_ALIASES.get(given, given)))
        except ValueError:
            words = ", ".join(way.value for way in Way)
            raise ValueError(f"tp_plan: expected one of {words}, got {given!r}") from None


@dataclass(frozen=True, slots=True)
class Divided:
    """A layer of a plan."""

    name: str
    module: nn.Module
    style: Style
    cuts: Mapping[str, Cut]
    """By the name of the parameter in the module; the others are whole on each rank."""
    parent: nn.Module
    """The module that holds it."""

    @property
    def is_summed(self) -> bool:
        """True if each rank holds the parameters whole and computes summands of their gradients."""
        return self.style.way in (Way.SUMMED, Way.SHARED_COLUMNS, *OF_SEQUENCE)
