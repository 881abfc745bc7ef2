"""Comparisons of facts over the ranks, and what `initialize` was given on each of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.collectives import Axis
from zeroshard.lazy.deferred import describe_origin, has_memory
from zeroshard.plan.units import UnitSpec

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""The address of an object in its repr(), which differs between ranks."""


def check_agreement(
    axis: Axis,
    model: nn.Module,
    settings: Mapping[str, Any],
    specs: Sequence[UnitSpec],
    optimizer: Optimizer | None,
    overrides: Mapping[Tensor, Mapping[str, Any]],
    training_data: Any = None,
    others: Sequence[object] = (),
) -> None:
    """Compare config, parameters, optimizer and the length of the data over the ranks.

    Args:
        axis: the axis of all ranks, on this rank's device.
        model: the model with its original parameters.
        settings: the values of the config, by key.
        specs: the units to be.
        optimizer: the optimizer over these parameters.
        overrides: hyperparameters of single parameters.
        training_data: a dataset with a length, or None. Its digest is compared if it has one.
        others: further arguments of `initialize`, whose repr() is compared.

    Raises:
        RuntimeError: on every rank, with the first difference and the ranks that have it.
    """
    end = "nothing more"  # of a kind, where another rank has more
    texts = {k: "a predicate" if callable(v) else repr(v) for k, v in settings.items()}
    del texts["device"]  # its index may differ between ranks
    facts = [
        f"a device of type {axis.device.type}",
        *(f"config {key}={value}" for key, value in texts.items()),
        end,
        *(*_model_facts(model, specs), end),
        *(f"unit '{spec.name}' with '{original.fqn}'" for spec in specs for original in spec.originals),
        end,
        *(*_optimizer_facts(optimizer, overrides, model), end),
        *map(repr, others),
    ]
    if training_data is not None:
        digest = getattr(training_data, "digest", None)
        contents = f" with digest {digest}" if isinstance(digest, str) else ""
        facts.append(f"training data of {len(training_data)} samples{contents}")
    problem = "the ranks were given different models, configs, optimizers or data"
    require_same(axis, facts, lambda of: RuntimeError(f"{problem}: {of}"), "agreement on model and config")


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


def _optimizer_facts(
    optimizer: Optimizer | None, overrides: Mapping[Tensor, Mapping[str, Any]], model: nn.Module
) -> Iterator[str]:
    if optimizer is None:
        yield "no optimizer"
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        what = f"optimizer {type(optimizer).__name__} group {number}"
        yield f"{what} of {len(group['params'])} parameters"
        for key in sorted(group.keys() - {"params", "param_names"}):
            yield f"{what} {key}={_ADDRESS.sub('', repr(group[key]))}"
        for p in group["params"]:
            own = (f", {key}={value!r}" for key, value in sorted(overrides.get(p, {}).items()))
            yield f"{what} with '{names[p]}'{''.join(own)}"


_MAX_FACT = 4000
"""Characters of a fact in an error; the list of a schedule may be longer."""


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
    require_equal(axis.all_gather_object(own, label), describe)


def require_equal(versions: Sequence[str | None], describe: Callable[[str], Exception]) -> None:
    """Refuse facts of all ranks, which they have exchanged, that are not the same; as `require_same`.

    None is the version of a rank that the fact does not concern.
    """
    ranks: dict[str, list[str]] = {}
    for rank, version in enumerate(versions):
        if version is not None:
            ranks.setdefault(version, []).append(str(rank))
    if len(ranks) < 2:
        return
    for who in ranks.values():
        who[8:] = [f"... ({len(who)} in all)"] if len(who) > 8 else []
    texts = (f"rank(s) {', '.join(who)} have {what[:_MAX_FACT]}" for what, who in ranks.items())
    raise describe("; ".join(texts))


def require_equal_by_name(
    everyone: Sequence[Mapping[str, str]], describe: Callable[[str, str], Exception]
) -> None:
    """Refuse a fact about a name that is not the same on all ranks with this name; as `require_equal`."""
    for name in dict.fromkeys(chain.from_iterable(everyone)):
        require_equal([facts.get(name) for facts in everyone], partial(describe, name))


def _digest(facts: Sequence[str]) -> bytes:
    """Return a digest, the same in any process."""
    return blake2b(json.dumps(facts).encode(), digest_size=16).digest()
