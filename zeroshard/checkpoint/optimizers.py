"""The state of an optimizer by the names of its parameters, and what a checkpoint has in its place.

States become the states of the present optimizer, to the bit or converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.checkpoint.files import MANIFEST, VALUES
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.checkpoint.tensors import (
    States,
    Stored,
    TensorReader,
    TensorSlice,
    blocks_of,
    have_same_blocks,
    is_codes,
    is_scales,
    shape_of,
)
from zeroshard.checkpoint.values import SavedValues
from zeroshard.codec import Damage, naming_damage
from zeroshard.config.pipeline import NOTED_CHANGES
from zeroshard.internals import pytree
from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.adopted import is_bitsandbytes, num_bits, to_common
from zeroshard.optim.eightbit.blocks import ABSMAX, QuantizedState, codebook
from zeroshard.optim.eightbit.rule import Rule
from zeroshard.optim.eightbit.rules import BlockwiseOptimizer, rule_named
from zeroshard.optim.ranges import ChecksRanges
from zeroshard.parameters.sharded import ShardedParameter, only_sharded
from zeroshard.plan.cuts import Cut
from zeroshard.plan.layout import Span
from zeroshard.plan.tiers import Tier
from zeroshard.stores.store import TierMemory

HOW = {"params", "param_names", "fused", "foreach", "capturable", "differentiable", "min_8bit_size"}
HOW |= {"decoupled_weight_decay"}  # by which torch's AdamW differs from Adam
"""Keys of a parameter group that say how a step is computed, not with which numbers."""

PER_GROUP = frozenset(
    ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
)
"""The lists that LR schedulers keep in the order of the parameter groups."""


def read_optimizer(optimizer: Optimizer, to: SavedValues) -> States:
    """Return the states with a value for each element, or each block, of a slice.

    Args:
        optimizer: an optimizer over sharded parameters.
        to: gets hyperparameters, states of one value, and states that belong to no parameter.

    Raises:
        ValueError: a state that is neither element-wise nor one value.
    """
    states: dict[ShardedParameter, dict[str, Tensor]] = {}
    for group in optimizer.param_groups:
        hyperparameters = {key: value for key, value in group.items() if key not in HOW}
        to.groups.append({"names": [p.fqn for p in only_sharded(group["params"])], **hyperparameters})
    saved: Mapping[Any, Any] = optimizer.state
    for parameter, values in saved.items():
        if isinstance(parameter, nn.Parameter) and not isinstance(parameter, ShardedParameter):
            continue  # an ignored one
        if not isinstance(parameter, ShardedParameter):
            _check_key(optimizer, parameter)
            to.other[parameter] = values
            continue
        scalars, tensors = to.scalars.setdefault(parameter.fqn, {}), states.setdefault(parameter, {})
        values = to_common(optimizer, values)
        for key, value in values.items():
            _check_key(optimizer, key)
            if not isinstance(value, Tensor):
                if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                    raise ValueError(
                        f"{type(optimizer).__name__}: state '{key}' of '{parameter.fqn}' is a "
                        f"{type(value).__name__} of tensors; expected tensors, or values without any"
                    )
                scalars[key] = value
            elif not value.dim() or (key == "step" and value.numel() == 1):
                scalars[key] = value.detach().cpu()
            elif value.shape == shape_of(key, values, parameter.shape):
                tensors[key] = value
            else:
                raise ValueError(
                    f"{type(optimizer).__name__}: state '{key}' of '{parameter.fqn}' has shape "
                    f"{tuple(value.shape)}; expected a number, a tensor without dimensions, or one value for "
                    f"each of the {parameter.numel()} elements of this rank's slice"
                )
    return states


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
        ValueError: the optimizer does not have one, or it is out of its range.
    """
    groups: list[dict[str, Any] | None] = []
    for group, source in zip(optimizer.param_groups, matches, strict=True):
        values = None if source is None else _convert_group(optimizer, saved[source], group)
        if isinstance(optimizer, ChecksRanges):
            optimizer.check_group({**group, **(values or {})})
        groups.append(values)
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


def join_schedules(
    states: Sequence[Mapping[str, Any]], join: Callable[[list[list[Any]]], list[Any]]
) -> dict[str, Any]:
    """Return one state of an LR scheduler, made of states of the same form; all else is from the first one.

    Args:
        states: the states.
        join: makes a list for groups of the lists that the states have for theirs.

    Raises:
        ValueError: a SequentialLR or ChainedScheduler has another number of schedulers.
    """
    joined = dict(states[0])
    for key, value in joined.items():
        found = [state.get(key, value) for state in states]
        if key in PER_GROUP and isinstance(value, list):
            joined[key] = join(found)
        elif key == "_schedulers":
            if len({len(parts) for parts in found}) > 1:
                numbers = " and ".join(str(len(parts)) for parts in found)
                raise ValueError(f"expected LR schedules of the same number of parts, got {numbers}")
            joined[key] = [join_schedules(parts, join) for parts in zip(*found, strict=True)]
    return joined


def reorder_schedule(
    saved: Mapping[str, Any], current: Mapping[str, Any], matches: Sequence[int | None]
) -> dict[str, Any]:
    """Return the saved state of an LR scheduler, with its lists in the order of the present groups.

    Args:
        saved: the state in the checkpoint.
        current: the present state.
        matches: for each present group the index of the saved one; None if there is none.

    Raises:
        ValueError: as `join_schedules`.
    """

    def reorder(lists: list[list[Any]]) -> list[Any]:
        value, kept = lists
        return [kept[at] if home is None else value[home] for at, home in enumerate(matches)]

    return join_schedules([saved, current], reorder)


def place_scalar(key: str, value: Any, parameter: ShardedParameter, group: Mapping[str, Any]) -> Any:
    """One saved value where the optimizer expects it: as torch's Optimizer.load_state_dict has it."""
    if not isinstance(value, Tensor):
        return value
    on_device = key != "step" or group.get("fused") or group.get("capturable")
    return value.to(parameter.device) if on_device else value.clone()


# ------------------------------------------------------------------------------- states that are loaded


_OF_PIPELINES = frozenset(NOTED_CHANGES.values())
"""The states that asynchronous pipelines add to the states of optimizers."""
_PIECE = 1 << 16
"""Elements that are converted together, a multiple of BLOCK: a rank never holds more in both forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The states in a checkpoint for one parameter of the present optimizer."""

    tensors: Mapping[str, StoredTensor]
    scalars: Mapping[str, Any]
    """States of one value, in the form in which the present optimizer keeps them."""
    dtypes: Mapping[str, torch.dtype]
    """The dtypes of the states that are made of `tensors`."""
    converted: Rule | None
    """The family of states that are to have another number of bits; None: they are read as they are."""


SavedStates = dict[ShardedParameter, SavedState]

Targets = dict[ShardedParameter, dict[str, Tensor]]
"""Memory that states are read into, under their common names."""


# -------------------------------------------------------------------------------------------- checking


def match_states(
    optimizer: Optimizer,
    stored: Stored,
    scalars: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
    own_blocks: Mapping[str, Cut | None],
    convert_states: bool,
    noted: str | None = None,
) -> SavedStates:
    """Return the states to be loaded for each parameter of the optimizer; nothing is read.

    Args:
        scalars: by stored name.
        names: the stored name of each parameter.
        own_blocks: the cuts whose parts have the blocks here, by the name of the parameter.
        convert_states: whether states may get another number of bits.
        noted: the state that an asynchronous pipeline adds here to the optimizer's, if it does. Other states
            of that kind are not read; nor is this one if states are converted, so that it begins anew.

    Raises:
        ValueError: states that the optimizer can't have, by their parameter.
        DamageError: states that belong together are not all there, or not as they should be.
    """
    states: SavedStates = {}
    for parameter in (p for group in optimizer.param_groups for p in only_sharded(group["params"])):
        name, bits = names[parameter.fqn], num_bits(optimizer, parameter)
        blocks = stored.manifest.parameters[name].blocks
        has_same_blocks = have_same_blocks(blocks, own_blocks[parameter.fqn])
        tensors = {
            key: one
            for key, one in stored.states.get(name, {}).items()
            if key == noted or (key not in _OF_PIPELINES and "/" not in key)
        }
        own: Mapping[str, Any] = {}
        if (saved := scalars.get(name, {})) or tensors:  # else the parameter has had no step
            with naming_damage(stored.directory / VALUES):
                own = convert_scalars(optimizer, saved, stored.manifest.global_step)
        found = {key: one for key, one in tensors.items() if key not in _OF_PIPELINES}
        converted = None
        if found or "step" in own:
            converted = _check_states(optimizer, parameter.fqn, bits, stored, found, has_same_blocks)
        if converted is not None and not convert_states:
            raise stored.refusal(
                f"expected states of '{parameter.fqn}' in the {bits} bits that {type(optimizer).__name__} "
                "keeps, got others. Use the same thresholds as at saving, or convert_states=True"
            )
        states[parameter] = SavedState(
            tensors=tensors if converted is None else found,
            scalars=own,
            dtypes=_new_dtypes(optimizer, parameter, tensors, stored.tensors.get(name), converted, bits),
            converted=converted,
        )
    return states


def _check_states(
    optimizer: Optimizer,
    name: str,
    bits: int,
    stored: Stored,
    tensors: Mapping[str, StoredTensor],
    has_same_blocks: bool,
) -> Rule | None:
    """Return the family to convert from, if the checkpoint has other bits; None if not."""
    kind, manifest = type(optimizer).__name__, stored.directory / MANIFEST
    if not has_same_blocks and any(is_scales(key, tensors) for key in tensors):
        raise stored.refusal(
            f"states of '{name}' have scales for blocks of other tensor ranks: expected the mesh.tp of "
            "saving. Load them there into an optimizer of 32 bits, with convert_states=True, and save again"
        )
    if (family := rule_named(kind)) is None:
        return None
    for key, tensor in tensors.items():
        is_half = tensor.dtype == torch.uint8 or key.endswith(ABSMAX)
        if is_half and not is_codes(key, tensors) and not is_scales(key, tensors):
            raise Damage.CONTENT.of(manifest, f"codes or scales alone, '{key}' of '{name}'")
    found = {key: 8 if is_codes(key, tensors) else 32 for key in tensors if not is_scales(key, tensors)}
    if missing := sorted(family.states.keys() - found.keys()):
        raise Damage.CONTENT.of(manifest, f"no state '{missing[0]}' of '{name}'")
    is_converted = set(found.values()) != {bits}
    unknown = sorted(found.keys() - family.states.keys())
    if unknown and (is_converted or stored.manifest.optimizer != kind):
        raise stored.refusal(f"holds state '{unknown[0]}' of '{name}', but {kind} has no such state")
    return family if is_converted else None


def _new_dtypes(
    optimizer: Optimizer,
    parameter: ShardedParameter,
    tensors: Mapping[str, StoredTensor],
    main: StoredTensor | None,
    converted: Rule | None,
    bits: int,
) -> dict[str, torch.dtype]:
    """Return the dtypes in which the optimizer gets its states.

    Args:
        tensors: the states in the checkpoint.
        main: the parameter there; None where it was frozen and left out.
        converted: the family, if states are converted.
        bits: the bits that states are to have.
    """
    keeps_float32 = isinstance(optimizer, BlockwiseOptimizer) or is_bitsandbytes(optimizer)
    plain = torch.float32 if keeps_float32 else torch.promote_types(parameter.dtype, torch.float32)
    if converted is not None and bits == 32:
        return dict.fromkeys(converted.states, plain)
    if converted is not None:
        scales = {key + ABSMAX: torch.float32 for key in converted.states}
        return dict.fromkeys(converted.states, torch.uint8) | scales
    there = {key: tensor.dtype for key, tensor in tensors.items()}
    wide = torch.promote_types((main or parameter).dtype, torch.float32)
    numbers = {key for key in there if not is_codes(key, there) and not is_scales(key, there)}
    changed = {key for key in numbers if keeps_float32 or there[key] == wide}
    noted = dict.fromkeys(there.keys() & _OF_PIPELINES, parameter.dtype)
    return there | dict.fromkeys(changed, plain) | noted


# ------------------------------------------------------------------------------------------- restoring


def make_targets(
    optimizer: Optimizer, states: SavedStates, memory: TierMemory, tiers: Mapping[Any, Tier]
) -> Targets:
    """Memory for all states of this rank; the memory of the present states where they have the same form.

    Args:
        tiers: the tier of new memory for each parameter; parameters without one have it where they are.
    """
    targets: Targets = {}
    for parameter, saved in states.items():
        present, targets[parameter] = to_common(optimizer, optimizer.state.get(parameter, {})), {}
        for key, dtype in saved.dtypes.items():
            shape = shape_of(key, saved.dtypes, parameter.shape)
            own: Any = present.get(key)
            is_fit = isinstance(own, Tensor) and own.shape == shape
            if not is_fit or (own.dtype == torch.uint8) != (dtype == torch.uint8):
                with past_guards():
                    tier = tiers.get(parameter) or memory.tier_of(parameter.detach())
                own = memory.empty(math.prod(shape), dtype, tier).view(shape)
            targets[parameter][key] = own
    return targets


def read_converted(
    reader: TensorReader, part: TensorSlice, saved: SavedState, targets: Mapping[str, Tensor]
) -> None:
    """Read the states of a slice of a parameter, and quantize or dequantize them.

    Args:
        part: the slice of the parameter itself.
        saved: is to be converted.
        targets: the states of the slice.

    Raises:
        RuntimeError: as `TensorReader.read` does.
    """
    assert saved.converted is not None, "only these are read so"
    num, device = part.data.numel(), part.data.device
    for key, is_signed in saved.converted.states.items():
        book, has_codes = codebook(is_signed, device), is_codes(key, saved.tensors)
        num_scales = blocks_of(Span(0, num)).size if has_codes else 0
        scales = torch.empty(num_scales, dtype=torch.float32, device=device)
        if has_codes:
            reader.read(part.scales(key + ABSMAX, scales))
        for start in range(0, num, _PIECE):
            span = Span(start, min(start + _PIECE, num))
            values = torch.empty(span.size, dtype=torch.uint8 if has_codes else torch.float32, device=device)
            reader.read(part.state(key, values, start))
            if has_codes:
                values = QuantizedState(values, scales[blocks_of(span).slice], book).load()
            target = targets[key][span.slice]
            if is_codes(key, saved.dtypes):
                QuantizedState(target, targets[key + ABSMAX][blocks_of(span).slice], book).store(values)
            else:
                target.copy_(values)
            reader.evict(target)


def convert_scalars(optimizer: Optimizer, saved: Mapping[str, Any], global_step: int) -> dict[str, Any]:
    """Return the scalars of a parameter that has a state, with `step` in the form of the present optimizer.

    Torch's optimizers count in a tensor, others in an integer, and SGD and LARS not at all.

    Args:
        optimizer: the present optimizer.
        saved: the scalars in the checkpoint, by name.
        global_step: the count for an optimizer that counts, if the saved one did not.
    """
    kind = type(optimizer)
    family = rule_named(kind.__name__)
    if family is None:
        return dict(saved)
    scalars = {key: value for key, value in saved.items() if key != "step"}
    step = saved.get("step", global_step)
    if kind in family.without_step:
        return scalars
    if kind.__module__.startswith("torch."):
        return scalars | {
            "step": step if isinstance(step, Tensor) else torch.tensor(float(step), dtype=torch.float32)
        }
    return scalars | {"step": int(step)}
