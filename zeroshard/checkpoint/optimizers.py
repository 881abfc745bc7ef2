"""The state of an optimizer by the names of its parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.checkpoint.checks import SMALL
from zeroshard.checkpoint.tensors import shape_of
from zeroshard.internals.pytree import tree_leaves
from zeroshard.optim.statenames import to_common
from zeroshard.parameters.sharded import ShardedParameter, only_sharded

HOW = frozenset(
    (
        *("params", "param_names", "fused", "foreach", "capturable", "differentiable"),
        "decoupled_weight_decay",  # by which torch tells AdamW from Adam
        "min_8bit_size",
    )
)
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
    few: list[str]
    """Keys of `scalars` that are tensors of one or some elements, none of which is that of a slice."""


def read_optimizer(optimizer: Optimizer) -> OptimizerState:
    """The state of an optimizer over sharded parameters.

    Raises:
        ValueError: a state that is neither element-wise nor one value, or a few.
    """
    state = OptimizerState([], {}, {}, {}, [])
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
            if not isinstance(value, Tensor) and any(isinstance(v, Tensor) for v in tree_leaves(value)):
                raise ValueError(
                    f"{type(optimizer).__name__}: state '{key}' of '{parameter.fqn}' is a "
                    f"{type(value).__name__} of tensors; expected tensors, or values without any"
                )
            if not isinstance(value, Tensor):
                scalars[key] = value
                continue
            is_one = not value.dim() or (key == "step" and value.numel() == 1)
            if not is_one and value.shape == shape_of(key, dtypes, parameter.shape):
                tensors[key] = value
                continue
            if value.dim() and key not in state.few:
                state.few.append(key)
            scalars[key] = _read_few(optimizer, parameter, key, value)
    return state


def keep_few(optimizer: Optimizer, state: OptimizerState, keys: Collection[str]) -> str:
    """Take states for values of whole parameters, not of elements, also where they have as many as a slice.

    Args:
        optimizer: that has the states.
        state: of this rank; changed.
        keys: of the states, on any rank.

    Returns:
        A digest of these values, which is the same on all ranks that have the same.
    """
    digest = blake2b()
    for parameter, tensors in state.tensors.items():
        scalars = state.scalars[parameter.fqn]
        for key in sorted(keys):
            if key in tensors:
                scalars[key] = _read_few(optimizer, parameter, key, tensors.pop(key))
            if isinstance(value := scalars.get(key), Tensor):
                digest.update(
                    f"{parameter.fqn}/{key} {value.dtype} {tuple(value.shape)} {value.tolist()}".encode()
                )
    return digest.hexdigest()


def _read_few(optimizer: Optimizer, parameter: ShardedParameter, key: str, value: Tensor) -> Tensor:
    if value.numel() > SMALL or not value.numel():
        raise ValueError(
            f"{type(optimizer).__name__}: state '{key}' of '{parameter.fqn}' has shape {tuple(value.shape)}; "
            f"expected one value, or up to {SMALL}, or one for each of the {parameter.numel()} elements of "
            "this rank's slice"
        )
    return value.detach().cpu()


def _check_key(optimizer: Optimizer, key: object) -> None:
    if not isinstance(key, str) or "/" in key:
        raise ValueError(f"{type(optimizer).__name__}: expected states with names without '/', got {key!r}")


def match_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> list[int | None]:
    """Return the saved group that each parameter group goes on with: that of its parameters, in any order.

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
                if key != "names" and not _same(one, two):
                    raise ValueError(
                        f"parameter group {number}: in the checkpoint some of its parameters have "
                        f"{key}={one!r} and others {key}={two!r}. Expected the same groups; to keep the "
                        "present hyperparameters, load with restore_hyperparameters=False"
                    )
        matches.append(sources[0] if sources else None)
    empty = [n for n, group in enumerate(optimizer.param_groups) if not only_sharded(group["params"])]
    left = [index for index in range(len(saved)) if index not in matches]
    if len(empty) == len(left):
        for number, index in zip(empty, left, strict=True):
            matches[number] = index
    return matches


def restore_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any] | None]) -> None:
    """Give parameter groups the hyperparameters that were saved, where there are any."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in (saved or {}).items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(float(value))
            else:
                group[key] = float(value) if isinstance(value, Tensor) and key in group else value


def reorder_schedule(
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
                    f"{len(present)}: expected the same number. To keep the present schedule, load with "
                    "restore_hyperparameters=False"
                )
            state[key] = [reorder_schedule(*pair, matches) for pair in zip(value, present, strict=True)]
    return state


def place_scalar(key: str, value: Any, parameter: ShardedParameter, group: Mapping[str, Any]) -> Any:
    """One saved value where the optimizer expects it: as torch's Optimizer.load_state_dict has it."""
    if not isinstance(value, Tensor):
        return value
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return value.to(parameter.device) if on_device else value.clone()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return float(one) == float(other)
    return bool(one == other)
