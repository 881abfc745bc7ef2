"""Muon over the matrices of a case, in groups with hyperparameters of their own; AdamW over all else."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from torch import nn

from zeroshard.optim import Muon

MUON = "Muon"
"""The name of the optimizer."""
SHARE = 0.2
"""Of the cases."""


def draws_muon(seed: int) -> bool:
    """True if a case has Muon, whatever optimizer it would have had."""
    return Random(f"muon {seed}").random() < SHARE


def make_muon(seed: int, parameters: Sequence[nn.Parameter], decay: float) -> Muon:
    """Build the same groups for the same seed and shapes.

    Args:
        seed: of the case.
        parameters: those of the whole model.
        decay: the weight decay of matrices.
    """
    random = Random(f"groups of Muon {seed}")
    kinds = [_draw(random) for _ in range(random.randint(1, 3))]
    members: dict[tuple[int, Any], list[nn.Parameter]] = {}
    others: list[nn.Parameter] = []
    for parameter in parameters:
        kind, is_chosen, way = random.randrange(len(kinds)), random.random() < 0.9, random.random()
        if is_chosen and parameter.dim() in (2, 3):
            members.setdefault((kind, _split(way, parameter.shape[-2])), []).append(parameter)
        else:
            others.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": own, "split": split, "weight_decay": decay, **kinds[kind]}
        for (kind, split), own in members.items()
    ]
    plain = {"params": others, "use_muon": False, "lr": 1e-2, "weight_decay": 0.0}
    return Muon([*groups, plain] if others else groups)


def _draw(random: Random) -> dict[str, Any]:
    """Hyperparameters of a group."""
    return {
        "lr": random.choice((0.005, 0.02)),
        "momentum": random.choice((0.0, 0.9, 0.95)),
        "nesterov": random.random() < 0.7,
        "ns_steps": random.choice((1, 5, 5)),
        "adjust_lr_fn": random.choice((None, "original", "match_rms_adamw", "spectral_unclamped")),
    }


def _split(way: float, rows: int) -> int | tuple[int, ...] | None:
    """The matrices that the rows of one consist of."""
    if way < 0.7 or rows < 3:
        return None
    if way < 0.85:
        return 3 if rows % 3 == 0 else 1
    return (1, rows - 2, 1) if way < 0.95 else (rows - 1, 1)
