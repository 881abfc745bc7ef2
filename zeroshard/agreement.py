"""Comparisons of facts over the ranks, and what `initialize` was given on each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.collectives import Axis
from zeroshard.config.checked import flat
from zeroshard.config.sections import Config
from zeroshard.lazy.deferred import describe_origin, has_memory
from zeroshard.plan.units import UnitSpec

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object in its repr(), which differs between ranks."""


def check_agreement(
    axis: Axis,
    model: nn.Module,
    config: Config,
    specs: Sequence[UnitSpec],
    optimizer: Optimizer | None,
    overrides: Mapping[Tensor, Mapping[str, Any]],
    training_data: Any = None,
) -> None:
    """Compare config, parameters, optimizer and the length of the data over the ranks.

    Args:
        axis: the axis of all ranks, on this rank's device.
        model: the model with its original parameters.
        config: the config as it was given.
        specs: the units to be.
        optimizer: the optimizer over these parameters.
        overrides: hyperparameters of single parameters.
        training_data: a dataset with a length, or None. Its digest is compared if it has one.

    Raises:
        RuntimeError: on every rank, with the first difference and the ranks that have it.
    """
    end = "nothing more"  # of a kind, where another rank has more
    facts = [
        f"a device of type {axis.device.type}",
        *(*_config_facts(config), end),
        *(*_model_facts(model, specs), end),
        *(*_unit_facts(specs), end),
        *(*_optimizer_facts(optimizer, model), end),
        *(*_override_facts(overrides, model), end),
        *_data_facts(training_data),
    ]
    problem = "the ranks were given different models, configs, optimizers or data"
    require_same(axis, facts, lambda of: RuntimeError(f"{problem}: {of}"), "agreement on model and config")


def _config_facts(config: Config) -> Iterator[str]:
    for key, value in flat(config).items():
        if key != "device":  # its index may differ between ranks
            yield f"config {key}={'a predicate' if callable(value) else value!r}"


def _model_facts(model: nn.Module, specs: Sequence[UnitSpec]) -> Iterator[str]:
    first_names: dict[int, str] = {}
    sharded = {original.parameter for spec in specs for original in spec.originals}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in sharded:  # ignored: each rank's own
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
    return (f"unit '{spec.name}' with '{original.fqn}'" for spec in specs for original in spec.originals)


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
        yield from (f"optimizer {name} group {number} with '{names[p]}'" for p in group["params"])


def _override_facts(overrides: Mapping[Tensor, Mapping[str, Any]], model: nn.Module) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        own = [f"{key}={value!r}" for key, value in sorted(overrides.get(parameter, {}).items())]
        yield f"optimizer override of '{name}': {', '.join(own) or 'none'}"


def _data_facts(training_data: Any) -> Iterator[str]:
    if training_data is not None:
        digest = getattr(training_data, "digest", None)
        contents = f" with digest {digest}" if isinstance(digest, str) else ""
        yield f"training data of {len(training_data)} samples{contents}"


_MAX_FACT = 4000
"""Characters of a fact that a rank sends; the list of a schedule may be longer."""


def require_same(
    axis: Axis, facts: Sequence[str], describe: Callable[[str], Exception], label: str = "comparison of ranks"
) -> None:
    """Refuse facts that are not the same on all ranks; collective.

    Ranks exchange a digest. Only if these differ, they look for the first difference, by digests of single
    facts. The facts of a model of 1,000 parameters would be 100 MB on each of 1,000 ranks.

    Args:
        facts: sentences without a subject, in the same words on ranks that agree.
        describe: makes the error of "rank(s) 0, 2 have ...; rank(s) 1 have ...".
        label: the name of the exchange in errors.

    Raises:
        Exception: the error that `describe` has made, on all ranks.
    """
    if len(set(axis.all_gather_object(_digest(facts), label))) == 1:
        return
    everyone = axis.all_gather_object([_digest([fact]) for fact in facts], label)
    index = next(n for n, versions in enumerate(zip_longest(*everyone)) if len(set(versions)) > 1)
    own = facts[index] if index < len(facts) else "nothing more"
    # Also if what is sent of the facts is the same.
    raise describe(describe_versions(axis.all_gather_object(own[:_MAX_FACT], label)))


def require_equal(versions: Sequence[str], describe: Callable[[str], Exception]) -> None:
    """Refuse facts of all ranks, which they have exchanged, that are not the same; as `require_same`."""
    if len(set(versions)) > 1:
        raise describe(describe_versions(versions))


def _digest(facts: Sequence[str]) -> bytes:
    """Return a digest, the same in any process."""
    return blake2b(json.dumps(facts).encode(), digest_size=16).digest()


def describe_versions(versions: Sequence[str]) -> str:
    """Describe the versions of all ranks, in rank order, each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, version in enumerate(versions):
        ranks.setdefault(version, []).append(rank)
    return "; ".join(f"rank(s) {_numbers(who)} have {what}" for what, who in ranks.items())


def _numbers(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
