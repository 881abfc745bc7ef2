"""States in a checkpoint become those of the present optimizer, to the bit or converted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.checkpoint.blockwise import Dtypes, blocks_of, find_unpaired, is_codes, is_scales, shape_of
from zeroshard.checkpoint.checks import check_scalars
from zeroshard.checkpoint.conversion import Family, convert_scalars, family_of
from zeroshard.checkpoint.files import MANIFEST, VALUES
from zeroshard.checkpoint.places import StoredTensor
from zeroshard.checkpoint.reader import Stored, TensorReader
from zeroshard.checkpoint.tensors import TensorSlice, state_name
from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.adopt.bitsandbytes import is_bitsandbytes
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.eightbit.blocks import Quantized, num_blocks
from zeroshard.optim.eightbit.codebook import Codebook, codebook
from zeroshard.optim.eightbit.states import ABSMAX
from zeroshard.optim.statenames import num_bits, to_common
from zeroshard.parameters.sharded import ShardedParameter, only_sharded
from zeroshard.plan.layout import Span
from zeroshard.tiers.places import TierMemory

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
    converted: Family | None
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
    convert_states: bool,
) -> SavedStates:
    """Return the states to be loaded for each parameter of the optimizer; nothing is read.

    Args:
        scalars: by stored name.
        names: the stored name of each parameter.
        convert_states: whether states may get another number of bits.

    Raises:
        ValueError: states that can't be those of the optimizer, by their parameter.
        RuntimeError: states that belong together are not all there, or not as they should be.
    """
    by_name = _tensors_by_parameter(stored)
    states: SavedStates = {}
    for parameter in (p for group in optimizer.param_groups for p in only_sharded(group["params"])):
        name, bits = names[parameter.fqn], num_bits(optimizer, parameter)
        tensors = by_name.get(name, {})
        converted = _check_states(optimizer, parameter.fqn, bits, stored, tensors)
        if converted is not None and not convert_states:
            raise ValueError(
                f"'{stored.directory}': expected states of '{parameter.fqn}' in the {bits} bits that "
                f"{type(optimizer).__name__} keeps, got another number of bits. Use the same threshold and "
                "overrides as at saving, or convert_states=True"
            )
        if converted is None:
            main = stored.tensors.get(name)  # none where it was frozen and left out
            main_dtype = parameter.dtype if main is None else main.dtype
            dtypes = _kept_dtypes(optimizer, parameter, tensors, main_dtype)
        else:
            dtypes = _new_dtypes(optimizer, parameter, converted, bits)
        states[parameter] = SavedState(
            tensors=tensors,
            scalars=_match_scalars(optimizer, stored, name, scalars.get(name, {}), bool(tensors)),
            dtypes=dtypes,
            converted=converted,
        )
    return states


def _tensors_by_parameter(stored: Stored) -> dict[str, dict[str, StoredTensor]]:
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.tensors.items():
        prefix, _, rest = name.partition("/")
        fqn, _, key = rest.rpartition("/")
        if prefix == "optimizer" and fqn in stored.manifest.parameters:
            states.setdefault(fqn, {})[key] = tensor
    for fqn, tensors in states.items():
        dtypes = _dtypes_of(tensors)
        for key, tensor in tensors.items():
            expected = shape_of(key, dtypes, stored.manifest.parameters[fqn].shape)
            if tensor.shape != expected or (is_scales(key, dtypes) and tensor.dtype != torch.float32):
                raise RuntimeError(
                    f"{stored.directory / MANIFEST}: state '{key}' of '{fqn}' is {tensor.dtype} of shape "
                    f"{tensor.shape}; expected shape {expected}, and scales in torch.float32"
                )
    return states


def _check_states(
    optimizer: Optimizer, name: str, bits: int, stored: Stored, tensors: Mapping[str, StoredTensor]
) -> Family | None:
    """Return the family to convert from, if the checkpoint has another number of bits; None if not."""
    kind = type(optimizer).__name__
    family, dtypes = family_of(kind), _dtypes_of(tensors)
    if family is None or not tensors:
        return None
    if (problem := find_unpaired(dtypes)) is not None:
        raise RuntimeError(f"{stored.directory / MANIFEST}: '{name}' has {problem}")
    found = {key: 8 if is_codes(key, dtypes) else 32 for key in dtypes if not is_scales(key, dtypes)}
    if missing := sorted(family.states.keys() - found.keys()):
        raise RuntimeError(
            f"{stored.directory / MANIFEST}: expected state '{missing[0]}' of '{name}', found none"
        )
    is_converted = set(found.values()) != {bits}
    unknown = sorted(found.keys() - family.states.keys())
    if unknown and (is_converted or stored.manifest.optimizer != kind):
        raise ValueError(
            f"'{stored.directory}': holds state '{unknown[0]}' of '{name}', but {kind} has no such state"
        )
    return family if is_converted else None


def _match_scalars(
    optimizer: Optimizer, stored: Stored, name: str, saved: Mapping[str, Any], has_tensors: bool
) -> Mapping[str, Any]:
    if not saved and not has_tensors:  # the parameter has had no step
        return {}
    try:
        check_scalars(optimizer, name, saved)
        scalars = convert_scalars(optimizer, saved, stored.manifest.global_step)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise RuntimeError(f"{stored.directory / VALUES}: damaged ({error})") from None
    family = family_of(type(optimizer).__name__)
    if family is not None and "step" in scalars and not has_tensors:
        raise RuntimeError(
            f"{stored.directory / MANIFEST}: expected state '{next(iter(family.states))}' of '{name}', "
            "which has a step count; found none"
        )
    return scalars


def _kept_dtypes(
    optimizer: Optimizer,
    parameter: ShardedParameter,
    tensors: Mapping[str, StoredTensor],
    main_dtype: torch.dtype,
) -> Dtypes:
    """Return the dtypes of states that are read as they are.

    Args:
        main_dtype: of the parameter in the checkpoint.
    """
    there = _dtypes_of(tensors)
    changes = {key for key in there if not is_codes(key, there) and not is_scales(key, there)}
    if not _keeps_float32(optimizer):
        changes = {key for key in changes if there[key] == _wide(main_dtype)}
    return there | dict.fromkeys(changes, _plain_dtype(optimizer, parameter))


def _new_dtypes(optimizer: Optimizer, parameter: ShardedParameter, family: Family, bits: int) -> Dtypes:
    """Return the dtypes of states that are converted."""
    if bits == 32:
        return dict.fromkeys(family.states, _plain_dtype(optimizer, parameter))
    scales = {key + ABSMAX: torch.float32 for key in family.states}
    return dict.fromkeys(family.states, torch.uint8) | scales


def _plain_dtype(optimizer: Optimizer, parameter: ShardedParameter) -> torch.dtype:
    """Return the dtype in which the optimizer makes states that are not quantized."""
    return torch.float32 if _keeps_float32(optimizer) else _wide(parameter.dtype)


def _wide(main_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an optimizer steps and has its states."""
    return torch.promote_types(main_dtype, torch.float32)


def _keeps_float32(optimizer: Optimizer) -> bool:
    return isinstance(optimizer, BlockwiseOptimizer) or is_bitsandbytes(optimizer)


def _dtypes_of(tensors: Mapping[str, StoredTensor]) -> dict[str, torch.dtype]:
    return {key: tensor.dtype for key, tensor in tensors.items()}


# ------------------------------------------------------------------------------------------- restoring


def make_targets(optimizer: Optimizer, states: SavedStates, memory: TierMemory) -> Targets:
    """Memory for all states of this rank; that of the present ones where they have the same form.

    New memory is on the tier of the parameter.
    """
    targets: Targets = {}
    for parameter, saved in states.items():
        present = to_common(optimizer, optimizer.state.get(parameter, {}))
        targets[parameter] = {
            key: _make_target(
                present.get(key), dtype, shape_of(key, saved.dtypes, parameter.shape), parameter, memory
            )
            for key, dtype in saved.dtypes.items()
        }
    return targets


def _make_target(
    present: Any, dtype: torch.dtype, shape: tuple[int, ...], p: ShardedParameter, memory: TierMemory
) -> Tensor:
    is_fit = isinstance(present, Tensor) and present.shape == shape
    if is_fit and (present.dtype == torch.uint8) == (dtype == torch.uint8):
        assert isinstance(present, Tensor)
        return present
    with past_guards():
        tier = memory.tier_of(p.detach())
    return memory.empty(math.prod(shape), dtype, tier).view(shape)


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
    dtypes, num = _dtypes_of(saved.tensors), part.data.numel()
    for key, is_signed in saved.converted.states.items():
        book = codebook(is_signed, part.data.device)
        for start in range(0, num, _PIECE):
            span = Span(start, min(start + _PIECE, num))
            values = _read_values(reader, part, span, key, book if is_codes(key, dtypes) else None)
            target = targets[key][span.slice]
            if is_codes(key, saved.dtypes):
                Quantized(target, targets[key + ABSMAX][blocks_of(span).slice], book).store(values)
            else:
                target.copy_(values)
            reader.rest(target)


def _read_values(
    reader: TensorReader, part: TensorSlice, span: Span, key: str, book: Codebook | None
) -> Tensor:
    """[n], float32: a state of some elements of a slice, quantized if there is a book."""

    def read(key: str, shape: tuple[int, ...], span: Span, dtype: torch.dtype) -> Tensor:
        values = torch.empty(span.size, dtype=dtype, device=part.data.device)
        reader.read(TensorSlice(state_name(part.name, key), shape, span.start, values))
        return values

    span = span.shifted(part.start)
    if book is None:
        return read(key, part.shape, span, torch.float32)
    scales_shape = (num_blocks(math.prod(part.shape)),)
    scales = read(key + ABSMAX, scales_shape, blocks_of(span), torch.float32)
    return Quantized(read(key, part.shape, span, torch.uint8), scales, book).load()
