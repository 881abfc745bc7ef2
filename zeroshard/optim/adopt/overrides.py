"""Hyperparameters of single parameters, as they were registered with bitsandbytes' GlobalOptimManager.

The manager knows parameters by their ids, so it is asked while the original parameters are there, and made to
forget them once they are gone: their ids may be given to others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from zeroshard.optim.adopt import bitsandbytes
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.ranges import RANGES, betas_range, check_ranges
from zeroshard.parameters.sharded import ShardedParameter

Overrides = dict[Tensor, dict[str, Any]]
"""The hyperparameters of single original parameters beside those of their groups.

bitsandbytes' optimizers have the number of bits of each parameter here.
"""


def read_overrides(optimizer: Optimizer | None, names: Mapping[Any, str]) -> Overrides:
    """Read the registered hyperparameters, in the terms of the optimizer.

    Args:
        optimizer: over original parameters.
        names: of the model's parameters.

    Raises:
        ValueError: a hyperparameter is unknown, out of its range, or can't be had on slices.
    """
    if isinstance(optimizer, BlockwiseOptimizer):
        return {**optimizer.overrides, **_own(optimizer, names)}
    if optimizer is not None and bitsandbytes.is_bitsandbytes(optimizer):
        return _theirs(optimizer, names)
    return {}


def forget(optimizer: Optimizer | None, replacements: Mapping[Any, ShardedParameter]) -> None:
    """Take what was registered for parameters that are gone out of the manager.

    Args:
        optimizer: over the sharded parameters.
        replacements: of the original parameters.
    """
    if (manager := _manager()) is None:
        return
    gone = [manager.pid2config.pop(id(parameter), None) for parameter in replacements]
    of_gone, sharded = set(map(id, gone)), set(map(id, replacements.values()))
    places = {place for place, _ in _held(optimizer)}
    manager.index2config = {
        place: config
        for place, config in manager.index2config.items()
        if place not in places and id(config) not in of_gone
    }
    manager.module_weight_config_triple = [
        (module, name, config)
        for module, name, config in manager.module_weight_config_triple
        if id(getattr(module, name, None)) not in sharded
    ]


def _own(optimizer: BlockwiseOptimizer, names: Mapping[Any, str]) -> Overrides:
    overrides: Overrides = {}
    for parameter, config in _registered(optimizer):
        if "optim_bits" in config:
            bitsandbytes.check_options(f"override of '{names[parameter]}'", config)
            if config.pop("optim_bits") == 32:
                config["min_8bit_size"] = sys.maxsize  # more than any parameter has
            else:
                config.setdefault("min_8bit_size", optimizer.defaults["min_8bit_size"])
        optimizer.check_override(config)
        overrides[parameter] = {**optimizer.overrides.get(parameter, {}), **config}
    return overrides


def _theirs(optimizer: Any, names: Mapping[Any, str]) -> Overrides:
    options = bitsandbytes.options_of(optimizer)
    known = sorted({*optimizer.defaults, *options})
    bits = {key: options[key] for key in ("optim_bits", "min_8bit_size")}
    overrides: Overrides = {parameter: dict(bits) for _, parameter in _held(optimizer)}
    for parameter, config in _registered(optimizer):
        where = f"override of '{names[parameter]}'"
        if unknown := sorted(config.keys() - set(known)):
            raise ValueError(
                f"{where}: expected a hyperparameter of {type(optimizer).__name__} ({', '.join(known)}), "
                f"got {unknown[0]!r}"
            )
        bitsandbytes.check_options(where, config)
        try:
            check_ranges(config, {**RANGES, "betas": betas_range(len(optimizer.defaults["betas"]))})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        overrides[parameter] |= config
    return overrides


def _registered(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """The registered hyperparameters that bitsandbytes itself would use.

    They are those of a module, else of a parameter, else of a place in the optimizer. A place counts for a
    parameter that was replaced since. If the parameter that was meant is in the optimizer, it is known by
    itself, and the place is not another's.
    """
    if (manager := _manager()) is None:
        return
    held = list(_held(optimizer))
    meant = {id(manager.pid2config.get(id(parameter))) for _, parameter in held}
    of_modules = {
        id(getattr(module, name, None)): config
        for module, name, config in manager.module_weight_config_triple
    }
    for place, parameter in held:
        by_place = manager.index2config.get(place, {})
        config = {
            **({} if id(by_place) in meant else by_place),
            **manager.pid2config.get(id(parameter), {}),
        }
        if config := dict(of_modules.get(id(parameter), config)):
            yield parameter, config


def _held(optimizer: Optimizer | None) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """The parameters of an optimizer, with their groups and places in these."""
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for at, parameter in enumerate(group["params"]):
            yield (number, at), parameter


def _manager() -> Any:
    """The manager of bitsandbytes; None if the library was not imported or has made none."""
    library = sys.modules.get("bitsandbytes.optim.optimizer")
    return library and library.GlobalOptimManager._instance
