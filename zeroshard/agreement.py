"""All ranks must have been given the same: checked once, before anything is exchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.collectives import Axis
from zeroshard.config.sections import Config
from zeroshard.lazy.deferred import describe_origin, has_memory
from zeroshard.plan.ignored import find_ignored
from zeroshard.plan.wrapping import UnitSpec

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Of an object that its repr() tells; other on every rank."""


def check_agreement(
    axis: Axis,
    model: nn.Module,
    config: Config,
    specs: Sequence[UnitSpec],
    optimizer: Optimizer | None,
    overrides: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Compare config, parameters and optimizer over the ranks.

    Args:
        axis: of all ranks, on this rank's device.
        model: with its original parameters.
        config: as it was given.
        specs: the units to be.
        optimizer: over these parameters.
        overrides: hyperparameters of single parameters.

    Raises:
        RuntimeError: on every rank, with the first difference and the ranks that have it.
    """
    sections = [
        [f"a device of type {axis.device.type}"],
        [*_config_facts(config)],
        [*_model_facts(model, config)],
        [*_unit_facts(specs)],
        [*_optimizer_facts(optimizer, model)],
        [*_override_facts(overrides, model)],
    ]
    everyone = axis.all_gather_object(sections, "agreement on model and config")
    for section in zip(*everyone, strict=True):
        for versions in zip_longest(*section, fillvalue="nothing more"):
            if len(set(versions)) > 1:
                raise RuntimeError(
                    f"the ranks were given different models, configs or optimizers: {_tell(versions)}"
                )


def _tell(versions: Sequence[str]) -> str:
    """Which ranks have which version of a fact."""
    ranks: dict[str, list[int]] = {}
    for rank, version in enumerate(versions):
        ranks.setdefault(version, []).append(rank)
    return "; ".join(f"rank(s) {_numbers(who)} have {what}" for what, who in ranks.items())


def _config_facts(config: Config) -> Iterator[str]:
    for section, value in vars(config).items():
        if section == "device":
            continue  # its index may be another one on each rank
        yield f"config {section}={'a predicate' if callable(value) else value!r}"


def _model_facts(model: nn.Module, config: Config) -> Iterator[str]:
    first_names: dict[int, str] = {}
    ignored = find_ignored(model, config.ignored)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in ignored:  # each rank's own
            yield f"ignored parameter '{name}'"
            continue
        first = first_names.setdefault(id(parameter), name)
        tied = f" tied to '{first}'" if first != name else ""
        trained = "" if parameter.requires_grad else " frozen"
        origin = "" if has_memory(parameter) else f" {describe_origin(parameter)}"
        yield f"parameter '{name}' {tuple(parameter.shape)} {parameter.dtype}{trained}{tied}{origin}"
    for name, buffer in model.named_buffers():
        yield f"buffer '{name}' {tuple(buffer.shape)} {buffer.dtype}"


def _unit_facts(specs: Sequence[UnitSpec]) -> Iterator[str]:
    for spec in specs:
        yield f"unit '{spec.name}' of {[original.fqn for original in spec.originals]}"


def _optimizer_facts(optimizer: Optimizer | None, model: nn.Module) -> Iterator[str]:
    if optimizer is None:
        yield "no optimizer"
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        name, num = type(optimizer).__name__, len(group["params"])
        yield f"optimizer {name} group {number} of {num} parameters"
        for key in sorted(group.keys() - {"params", "param_names"}):
            value = _ADDRESS.sub("", repr(group[key]))
            yield f"optimizer {name} group {number} {key}={value}"
        yield f"optimizer {name} group {number} over {[names[p] for p in group['params']]}"


def _override_facts(overrides: Mapping[Tensor, Mapping[str, Any]], model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        own = [f"{key}={value!r}" for key, value in sorted(overrides.get(parameter, {}).items())]
        yield f"optimizer override of '{name}': {', '.join(own) or 'none'}"


def _numbers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
