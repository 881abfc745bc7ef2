"""The config of a part of a model: without the names that other parts of the model have."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from zeroshard.config.sections import Config
from zeroshard.plan.names import find_ignored, find_overrides, find_replicated, fitting


class Chosen(NamedTuple):
    """The parameters of the whole model that patterns fit."""

    overrides: Mapping[nn.Parameter, torch.dtype]
    replicated: Container[nn.Parameter]


def find_chosen(model: nn.Module, config: Config) -> Chosen:
    """Return the parameters of a whole model that a config names. Raises ValueError for unknown names."""
    ignored = find_ignored(model, config.ignored)
    return Chosen(
        find_overrides(model, config.precision.overrides, ignored),
        find_replicated(model, config.frozen, ignored),
    )


def narrowed(config: Config, model: nn.Module, chosen: Chosen) -> Config:
    """Return a config without the names that other parts of the model have; the whole model has all.

    Each parameter that is chosen is named by itself: a tied one may have the name that fits on another rank.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    ignored = [pattern for pattern in config.ignored or () if fitting(pattern, named)]
    units = config.units
    if units is not None and not callable(units):
        kinds = {type(module).__name__ for module in model.modules()}
        units = [unit for unit in units if not isinstance(unit, str) or unit in kinds]
    own = {name: chosen.overrides[p] for name, p in named.items() if p in chosen.overrides}
    return replace(
        config,
        ignored=ignored or None,
        units=units,
        precision=replace(config.precision, overrides=own or None),
        frozen=[name for name, p in named.items() if p in chosen.replicated] or "shard",
    )
