"""Experts whose hidden elements are divided over the tensor ranks: each rank has a part of every expert.

    tokens  --COPY--> [ gate and up of all experts: columns ] --> [ down of all experts: rows ] --SUM-->
    weights --COPY------------------------------------------------^

Transformers keeps the experts of a layer in one module. Its parameters have the dimensions
[experts, outputs, inputs] or [experts, inputs, outputs]. The routing weights multiply the output of a rank,
which is a summand. So each rank finds a summand of their gradient, and the router needs the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zeroshard.comm.activations import Activations
from zeroshard.parallel.tensor.moves import Move, move
from zeroshard.plan.cuts import Cut, Section

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


def compute_experts(module: Any, over: Activations, name: str, *values: Any, **named: Any) -> Tensor:
    """Compute the output of the experts of a layer from their parts."""

    def copied(value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return move(value, Move.COPY, over, name) if is_real else value

    summand = type(module).forward(
        module, *map(copied, values), **{key: copied(value) for key, value in named.items()}
    )
    return move(summand, Move.SUM, over, name)
