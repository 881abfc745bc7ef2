"""States in a checkpoint become the states of the present optimizer, to the bit or converted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.checkpoint.codec import naming_damage
from zeroshard.checkpoint.files import MANIFEST, VALUES
from zeroshard.checkpoint.optimizers import check_scalars
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.checkpoint.tensors import (
    Dtypes,
    Stored,
    TensorReader,
    TensorSlice,
    block_numbers,
    blocks_of,
    have_same_blocks,
    is_codes,
    is_scales,
    num_scales,
    shape_of,
    state_name,
)
from zeroshard.config.pipeline import NOTED_CHANGES
from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.adopted import is_bitsandbytes, num_bits, to_common
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.blocks import ABSMAX, QuantizedState, codebook
from zeroshard.optim.eightbit.rule import Rule, rule_named
from zeroshard.parameters.sharded import ShardedParameter, only_sharded
from zeroshard.plan.cuts import Cut
from zeroshard.plan.layout import Span
from zeroshard.plan.tiers import Tier
from zeroshard.stores.store import TierMemory

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
    dtypes: Dtypes
    """The dtypes of the states that are made of `tensors`."""
    converted: Rule | None
    """The family of states that are to have another number of bits, or other blocks; None: they are read as
    they are."""


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
        convert_states: whether states may get another number of bits, or other blocks.
        noted: the state that an asynchronous pipeline adds here to the optimizer's, if it does. Other states
            of that kind are not read; nor is this one if states are converted, so that it begins anew.

    Raises:
        ValueError: states that the optimizer can't have, by their parameter.
        RuntimeError: states that belong together are not all there, or not as they should be.
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
                check_scalars(optimizer, name, saved)
                own = convert_scalars(optimizer, saved, stored.manifest.global_step)
        found = {key: one for key, one in tensors.items() if key not in _OF_PIPELINES}
        converted = None
        if found or "step" in own:
            converted = _check_states(
                optimizer, parameter.fqn, bits, stored, _dtypes_of(found), has_same_blocks
            )
        if converted is not None and not convert_states:
            raise ValueError(
                f"'{stored.directory}': expected states of '{parameter.fqn}' in the {bits} bits that "
                f"{type(optimizer).__name__} keeps, and in the blocks of this layout if these are 8, got "
                "others. Use the same threshold, overrides and mesh.tp as at saving, or convert_states=True, "
                "which rounds values to 8 bits once more"
            )
        states[parameter] = SavedState(
            tensors=tensors if converted is None else found,
            scalars=own,
            dtypes=_new_dtypes(optimizer, parameter, tensors, stored.tensors.get(name), converted, bits),
            converted=converted,
        )
    return states


def _check_states(
    optimizer: Optimizer, name: str, bits: int, stored: Stored, dtypes: Dtypes, has_same_blocks: bool
) -> Rule | None:
    """Return the family to convert from, if the checkpoint has other bits or blocks; None if not."""
    kind, manifest = type(optimizer).__name__, stored.directory / MANIFEST
    family = rule_named(kind)
    if family is None:
        if not has_same_blocks and any(is_scales(key, dtypes) for key in dtypes):
            raise ValueError(
                f"'{stored.directory}': states of '{name}' have scales for blocks of other tensor ranks, and "
                f"states of {kind} cannot be converted: expected the same mesh.tp as at saving"
            )
        return None
    for key, dtype in dtypes.items():
        is_half = dtype == torch.uint8 or key.endswith(ABSMAX)
        if is_half and not is_codes(key, dtypes) and not is_scales(key, dtypes):
            raise RuntimeError(f"{manifest}: '{name}' has codes or scales alone, '{key}'")
    found = {key: 8 if is_codes(key, dtypes) else 32 for key in dtypes if not is_scales(key, dtypes)}
    if missing := sorted(family.states.keys() - found.keys()):
        raise RuntimeError(f"{manifest}: expected state '{missing[0]}' of '{name}', found none")
    is_converted = set(found.values()) != {bits} or (bits == 8 and not has_same_blocks)
    unknown = sorted(found.keys() - family.states.keys())
    if unknown and (is_converted or stored.manifest.optimizer != kind):
        raise ValueError(
            f"'{stored.directory}': holds state '{unknown[0]}' of '{name}', but {kind} has no such state"
        )
    return family if is_converted else None


def _new_dtypes(
    optimizer: Optimizer,
    parameter: ShardedParameter,
    tensors: Mapping[str, StoredTensor],
    main: StoredTensor | None,
    converted: Rule | None,
    bits: int,
) -> Dtypes:
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
    there = _dtypes_of(tensors)
    wide = torch.promote_types((main or parameter).dtype, torch.float32)
    numbers = {key for key in there if not is_codes(key, there) and not is_scales(key, there)}
    changed = {key for key in numbers if keeps_float32 or there[key] == wide}
    return (
        there | dict.fromkeys(changed, plain) | dict.fromkeys(there.keys() & _OF_PIPELINES, parameter.dtype)
    )


def _dtypes_of(tensors: Mapping[str, StoredTensor]) -> dict[str, torch.dtype]:
    return {key: tensor.dtype for key, tensor in tensors.items()}


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
    dtypes, num, device = _dtypes_of(saved.tensors), part.data.numel(), part.data.device
    blocks = reader.stored.manifest.parameters[part.name].blocks
    for key, is_signed in saved.converted.states.items():
        book, has_codes = codebook(is_signed, device), is_codes(key, dtypes)
        scales = torch.empty(num_scales(part.shape, blocks) if has_codes else 0, device=device)
        if has_codes:
            reader.read_into(state_name(part.name, key + ABSMAX), scales)
        for start in range(0, num, _PIECE):
            span = Span(start, min(start + _PIECE, num))
            values = torch.empty(span.size, dtype=torch.uint8 if has_codes else torch.float32, device=device)
            reader.read(part.state(key, values, start))
            if has_codes:
                numbers = block_numbers(part.shape, span.shifted(part.start), part.part, blocks)
                values = book.values.index_select(0, values.int()) * scales[numbers.to(device)]
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
