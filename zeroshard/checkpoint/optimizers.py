"""The state of an optimizer by the names of its parameters.

Saved values that take the place of present ones: of the same kind, told before anything is loaded.

Checksums find accidents. But a file that a person or another program wrote, with checksums that fit, may say
lr="x". An optimizer would find out in the middle of its next step, with the old run gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from zeroshard.checkpoint.codec import MAX_STEPS
from zeroshard.checkpoint.tensors import shape_of
from zeroshard.internals.pytree import tree_leaves
from zeroshard.optim.adopted import is_bitsandbytes, to_common
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.rule import rule_named
from zeroshard.optim.layerwise import LayerWise
from zeroshard.parameters.sharded import ShardedParameter, only_sharded

SMALL = 64
"""Elements of a state that older checkpoints may have as a few values for a whole parameter."""
_NONE_IS_A_VALUE = ("t_alpha", "t_beta3")
"""Hyperparameters of AdEMAMix that are numbers or None."""


def _check_group(number: int, saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise ValueError for the first hyperparameter of a group that is of another kind than the present one.

    Args:
        number: of the group.
        saved: under the keys that the present optimizer has for them.
        present: the group that they are for.
    """
    values = {key: one for key, one in saved.items() if one is not None or key not in _NONE_IS_A_VALUE}
    if problem := misfit(values, present, same_length=True):
        raise ValueError(f"hyperparameters of parameter group {number}: {problem}")


def _check_schedule(saved: Mapping[Any, Any], scheduler: Any) -> None:
    """Raise ValueError for a value that an LR scheduler of torch can't go on with. Others check their own."""
    if not isinstance(scheduler, LRScheduler | ReduceLROnPlateau):
        return
    present = scheduler.state_dict()
    is_known = type(scheduler).__module__.startswith(("torch.", "zeroshard."))
    for key in saved:
        if not isinstance(key, str) or (key not in present and _is_in_use(scheduler, key)):
            raise ValueError(f"the LR schedule has {key!r}; expected only keys of the scheduler's state")
    if problem := misfit(saved, present if is_known else {key: present.get(key) for key in _COMMON}):
        raise ValueError(f"the LR schedule: {problem}")
    for key in _COUNTS:
        if key in saved and key in present and not _is_count(saved[key], -1):
            raise ValueError(f"the LR schedule: '{key}': expected a count of steps, got {saved[key]!r}")
    parts, own = saved.get("_schedulers"), getattr(scheduler, "_schedulers", None)
    if isinstance(parts, list | tuple) and isinstance(own, list | tuple):
        for part, child in zip(parts, own, strict=False):
            _check_schedule(part, child)


def _is_in_use(scheduler: Any, name: str) -> bool:
    """True for a method, a property, or an attribute that an LR scheduler keeps out of its state."""
    member = getattr(type(scheduler), name, None)
    return name in vars(scheduler) or callable(member) or hasattr(type(member), "__get__")


_COUNTS = ("last_epoch", "_step_count")
_COMMON = (*_COUNTS, "base_lrs", "_last_lr")
"""The state that all schedulers of torch keep."""


def check_scalars(optimizer: Optimizer, name: str, saved: Mapping[Any, Any]) -> None:
    """Raise ValueError for a state of a parameter that is no value of an optimizer.

    Args:
        optimizer: one that is not torch's, zeroshard's or bitsandbytes' may keep any plain value.
        name: of the parameter.
        saved: what is one value for all of its elements.
    """
    is_known = type(optimizer).__module__.startswith(("torch.", "zeroshard.")) or is_bitsandbytes(optimizer)
    is_counted = is_known or rule_named(type(optimizer).__name__) is not None
    for key, value in saved.items():
        problem = None if isinstance(key, str) else "expected a name"
        if is_known and value is not None:
            problem = problem or misfit(value, 0.0)
        elif isinstance(value, Tensor) and not _is_number(value, SMALL):
            problem = f"expected a number, got {_described(value)}"
        if is_counted and key == "step" and not problem and not (_is_number(value) and _is_count(value, 0)):
            problem = f"expected a count of steps, got {_described(value)}"
        if problem:
            raise ValueError(f"state {key!r} of '{name}': {problem}")


def misfit(saved: Any, present: Any, *, same_length: bool = False) -> str | None:
    """Tell in words why a saved value cannot take the place of a present one; None where it can.

    Args:
        saved: a plain value.
        present: where it is None, or of a kind that is not known here, anything can.
        same_length: whether sequences must have as many elements.
    """
    if _is_number(present) and (not _is_number(saved) or math.isnan(float(saved))):
        return f"expected a number like the present {_described(present)}, got {_described(saved)}"
    for kinds, expected in _EXPECTED:
        if isinstance(present, kinds) and not isinstance(saved, kinds):
            return f"expected {expected}, got {_described(saved)}"
    if isinstance(present, Mapping):
        for key in saved:
            if key in present and (problem := misfit(saved[key], present[key], same_length=same_length)):
                return f"'{key}': {problem}"
    elif isinstance(present, list | tuple):
        if same_length and len(saved) != len(present):
            return f"expected a sequence of {len(present)}, got {_described(saved)}"
        fill = present[-1:] * max(0, len(saved) - len(present))
        pairs = zip(saved, [*present, *fill], strict=False)
        found = (misfit(one, other, same_length=same_length) for one, other in pairs)
        return next((problem for problem in found if problem is not None), None)
    return None


_EXPECTED: tuple[tuple[Any, str], ...] = (
    (bool, "True or False"),
    (str, "a string"),
    (Mapping, "a dict"),
    (list | tuple, "a sequence"),
)


def _is_number(value: Any, most: int = 1) -> bool:
    """True for a real number, and for a tensor of some of them."""
    if isinstance(value, Tensor):
        is_plain = value.layout is torch.strided and not (value.is_meta or value.is_quantized)
        return is_plain and 0 < value.numel() <= most and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any, least: int) -> bool:
    return bool(least <= value < MAX_STEPS and value == int(value))


def _described(value: Any) -> str:
    """A value in an error: what a file says may be long."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


HOW = frozenset(
    ("params", "param_names", "fused", "foreach", "capturable", "differentiable", "min_8bit_size")
)
HOW |= {"decoupled_weight_decay"}  # by which torch's AdamW differs from Adam
"""Keys of a parameter group that say how a step is computed, not with which numbers."""

PER_GROUP = frozenset(
    ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
)
"""The lists that LR schedulers keep in the order of the parameter groups."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer, by kind."""

    groups: list[dict[str, Any]]
    """Hyperparameters of each parameter group, and under "names" its parameters."""
    scalars: dict[str, dict[str, Any]]
    """States with one value for all elements of a parameter, such as "step", by the name of the parameter."""
    tensors: dict[ShardedParameter, dict[str, Tensor]]
    """States with a value for each element, or each block, of the slice, by parameter and common name."""
    other: dict[str, Any]
    """States that belong to no parameter."""


def read_optimizer(optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer over sharded parameters.

    Raises:
        ValueError: a state that is neither element-wise nor one value.
    """
    state = OptimizerState([], {}, {}, {})
    for group in optimizer.param_groups:
        hyperparameters = {key: value for key, value in group.items() if key not in HOW}
        state.groups.append({"names": [p.fqn for p in only_sharded(group["params"])], **hyperparameters})
    saved: Mapping[Any, Any] = optimizer.state
    for parameter, values in saved.items():
        if isinstance(parameter, nn.Parameter) and not isinstance(parameter, ShardedParameter):
            continue  # an ignored one
        if not isinstance(parameter, ShardedParameter):
            _check_key(optimizer, parameter)
            state.other[parameter] = values
            continue
        scalars = state.scalars.setdefault(parameter.fqn, {})
        tensors = state.tensors.setdefault(parameter, {})
        values = to_common(optimizer, values)
        dtypes = {key: value.dtype for key, value in values.items() if isinstance(value, Tensor)}
        for key, value in values.items():
            _check_key(optimizer, key)
            if not isinstance(value, Tensor):
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                    raise ValueError(
                        f"{type(optimizer).__name__}: state '{key}' of '{parameter.fqn}' is a "
                        f"{type(value).__name__} of tensors; expected tensors, or values without any"
                    )
                scalars[key] = value
            elif not value.dim() or (key == "step" and value.numel() == 1):
                scalars[key] = value.detach().cpu()
            elif value.shape == shape_of(key, dtypes, parameter.shape):
                tensors[key] = value
            else:
                raise ValueError(
                    f"{type(optimizer).__name__}: state '{key}' of '{parameter.fqn}' has shape "
                    f"{tuple(value.shape)}; expected a number, a tensor without dimensions, or one value for "
                    f"each of the {parameter.numel()} elements of this rank's slice"
                )
    return state


def _check_key(optimizer: Optimizer, key: object) -> None:
    if not isinstance(key, str) or "/" in key:
        raise ValueError(f"{type(optimizer).__name__}: expected states with names without '/', got {key!r}")


def match_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> list[int | None]:
    """Return the saved group of each parameter group: the group that holds its parameters, in any order.

    Groups without sharded parameters go on with the saved groups that are left, if these are as many.

    Args:
        names: what each parameter is called in `saved`.

    Raises:
        ValueError: its parameters were in groups with different hyperparameters.
    """
    home = {name: index for index, group in enumerate(saved) for name in group["names"]}
    matches: list[int | None] = []
    for number, group in enumerate(optimizer.param_groups):
        held = [names[p.fqn] for p in only_sharded(group["params"])]
        sources = sorted({home[name] for name in held if name in home})
        for other in sources[1:]:
            for key in sorted(saved[sources[0]].keys() | saved[other].keys()):
                one, two = saved[sources[0]].get(key), saved[other].get(key)
                if key != "names" and one != two:
                    raise ValueError(
                        f"parameter group {number}: in the checkpoint some of its parameters have "
                        f"{key}={one!r} and others {key}={two!r}; expected the same groups"
                    )
        matches.append(sources[0] if sources else None)
    empty = [n for n, group in enumerate(optimizer.param_groups) if not only_sharded(group["params"])]
    left = [index for index in range(len(saved)) if index not in matches]
    if len(empty) == len(left):
        for number, index in zip(empty, left, strict=True):
            matches[number] = index
    return matches


def convert_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], matches: Sequence[int | None]
) -> list[dict[str, Any] | None]:
    """Return the hyperparameters for each parameter group; None: they stay.

    Args:
        saved: the saved groups.
        matches: the saved group of each present one.

    Raises:
        ValueError: one is of another kind than the present one, or the optimizer does not have it.
    """
    groups: list[dict[str, Any] | None] = []
    for number, (group, source) in enumerate(zip(optimizer.param_groups, matches, strict=True)):
        values = {} if source is None else _convert_group(optimizer, saved[source], group)
        _check_group(number, values, group)
        if isinstance(optimizer, BlockwiseOptimizer | LayerWise):
            optimizer.check_group({**group, **values})
        groups.append(None if source is None else values)
    return groups


_NEUTRAL = {"maximize": False, "alpha": 0.0, "eps": 0.0, "t_alpha": None, "t_beta3": None}
"""Hyperparameters that torch or bitsandbytes has for all optimizers, with the value that has no effect."""


def _convert_group(
    optimizer: Optimizer, saved: Mapping[str, Any], present: Mapping[str, Any]
) -> dict[str, Any]:
    """Saved hyperparameters under the keys that a present group has for them.

    Raises:
        ValueError: one that changes the steps, and that the optimizer does not have.
    """
    values = {key: value for key, value in saved.items() if key != "names"}
    family = rule_named(type(optimizer).__name__)
    if family is None:
        return values
    if "betas" in values and "betas" not in present:
        first, *_ = values.pop("betas")
        values |= {} if family.beta is None else {family.beta: first}
    elif family.beta in values and family.beta not in present and "betas" in present:
        values["betas"] = (values.pop(family.beta), *present["betas"][1:])
    for key, absent in {**_NEUTRAL, **family.neutral}.items():
        if key in present:
            values.setdefault(key, absent)
        elif value := values.pop(key, absent):
            raise ValueError(
                f"the checkpoint has {key}={value!r}, and {type(optimizer).__name__} has no such "
                "hyperparameter: expected an optimizer with it"
            )
    return values


def restore_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any] | None]) -> None:
    """Give parameter groups the hyperparameters that were saved, where there are any."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in (saved or {}).items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(float(value))
            else:
                group[key] = float(value) if isinstance(value, Tensor) and key in group else value


def match_schedule(scheduler: Any, saved: dict[str, Any], matches: Sequence[int | None]) -> dict[str, Any]:
    """Return the state for an LR scheduler. Raises ValueError if it can't go on with what was saved."""
    state = _reorder_schedule(saved, scheduler.state_dict(), matches)
    _check_schedule(state, scheduler)
    return state


def _reorder_schedule(
    saved: dict[str, Any], current: Mapping[str, Any], matches: Sequence[int | None]
) -> dict[str, Any]:
    """Return the saved state of an LR scheduler, with its lists in the order of the present groups.

    Args:
        saved: the state in the checkpoint.
        current: the present state.
        matches: for each present group the index of the saved one; None if there is none.

    Raises:
        ValueError: a SequentialLR or ChainedScheduler has another number of schedulers.
    """
    state = dict(saved)
    for key, value in saved.items():
        present = current.get(key)
        if key in PER_GROUP and isinstance(value, list):
            kept: list[Any] = present if isinstance(present, list) else value
            state[key] = [kept[at] if home is None else value[home] for at, home in enumerate(matches)]
        elif key == "_schedulers" and isinstance(present, list | tuple):
            if len(value) != len(present):
                raise ValueError(
                    f"the checkpoint has an LR schedule of {len(value)} parts, the engine has one of "
                    f"{len(present)}: expected the same number"
                )
            state[key] = [_reorder_schedule(*pair, matches) for pair in zip(value, present, strict=True)]
    return state


def place_scalar(key: str, value: Any, parameter: ShardedParameter, group: Mapping[str, Any]) -> Any:
    """One saved value where the optimizer expects it: as torch's Optimizer.load_state_dict has it."""
    if not isinstance(value, Tensor):
        return value
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return value.to(parameter.device) if on_device else value.clone()
