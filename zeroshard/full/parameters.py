"""Full parameters outside forward and backward: to read, to edit, to save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.full.gradients import ShownGradients
from zeroshard.parameters.attributes import carry_attributes
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.slots import ShownParameter
from zeroshard.sharding.unit import UnitState
from zeroshard.sharding.wholes import gather_wholes, own_value, wholes_in

_REMEDY = (
    "add or remove parametrizations, pruning and layers before zeroshard.initialize, or undo it inside the "
    "block (remove_parametrizations, prune.remove)"
)


class _Opened(NamedTuple):
    """A buffer with its main parameters."""

    buffer: FlatBuffer
    flat: Tensor
    """[total]: this rank's parts."""
    wholes: list[Tensor]
    """Of the original shapes; views of `flat` where this rank's part is all."""


@contextmanager
def unsharded(runtime: Runtime, modules: Sequence[nn.Module], write_back: bool) -> Iterator[None]:
    """Show full parameters in the main dtype, on every rank, in the units that `modules` take part in.

    Their `grad` is the whole gradient, if there is one.

    Args:
        modules: parts of the sharded module.
        write_back: keep the edits of parameters and gradients, which must be the same on every rank.

    Raises:
        RuntimeError: `write_back`, and the ranks made different edits; then none is kept. Or parameters were
            added or removed.
    """
    runtime.settle()
    runtime.check_slots()
    names = _names(runtime)
    members = {member for module in modules for member in module.modules()}
    units = [unit for unit in runtime.units if not members.isdisjoint(unit.slots.owners)]
    if write_back and any(unit.slots.is_shown for unit in units):
        raise RuntimeError("unsharded(write_back=True) inside unsharded() of the same parameters")
    axes = runtime.context.axes
    opened = []
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        flat = buffer.gather_main()
        opened.append(_Opened(buffer, flat, wholes_in(buffer, flat, axes.tp)))
    shown = {
        id(sharded): ShownParameter.over(whole, sharded.requires_grad, sharded.fqn)
        for buffer, _, wholes in opened
        for sharded, whole in zip(buffer.sharded, wholes, strict=True)
    }
    for buffer, *_ in opened:
        for sharded in buffer.sharded:
            carry_attributes(sharded, shown[id(sharded)])
    gradients = ShownGradients([buffer for buffer, *_ in opened], shown, axes)
    before = [unit.slots.stand_in(shown) for unit in units]
    try:
        yield
        moves = _describe_moves(names, _names(runtime))
        if write_back:
            _write_back(runtime, opened, gradients, moves)
        elif moves:
            raise RuntimeError(moves)
        else:
            gradients.warn_of_changes()
        for buffer, *_ in opened:
            for sharded, unsharded in zip(buffer.sharded, buffer.unsharded, strict=True):
                sharded.requires_grad_(shown[id(sharded)].requires_grad)
                carry_attributes(shown[id(sharded)], sharded, unsharded)
    except RuntimeError as error:
        if ShownParameter.__name__ in str(error):  # torch's own message for nn.Parameter(module.weight)
            raise RuntimeError(
                "torch cannot make a Parameter of one that unsharded() shows: make it of "
                f"module.weight.data. If a parametrization has made it: {_REMEDY}"
            ) from error
        raise
    finally:
        for unit, parameters in zip(units, before, strict=True):
            unit.slots.stand_in(parameters)
            unit.refresh()
        # A step may come before anybody waits for these gathers.
        runtime.state.reads_main |= any(unit.state is UnitState.GATHERING for unit in units)


@torch.no_grad()
def _write_back(runtime: Runtime, opened: Sequence[_Opened], gradients: ShownGradients, moves: str) -> None:
    axes = runtime.context.axes
    moves = moves or _find_tie(opened)
    misshapen = [] if moves else [name for one in opened for name in _take_replaced(one)]
    digests = [_digest(one.wholes) for one in opened]
    changed = gradients.digests()
    facts = axes.everyone.all_gather_object(
        (misshapen, digests, changed, moves), "agreement on edited parameters"
    )
    for rank, (names, _, _, moves) in enumerate(facts):
        if moves:
            raise RuntimeError(f"{moves}. Nothing was written (rank {rank})")
        if names:
            raise RuntimeError(
                f"unsharded(write_back=True): rank {rank} replaced {', '.join(map(repr, names))} by "
                "parameters of another shape. Nothing was written"
            )
    for _, _, others, _ in facts:
        if different := sorted(name for name, _ in set(others) ^ set(changed)):
            raise RuntimeError(
                f"unsharded(write_back=True): the ranks made different edits to the gradient of "
                f"'{different[0]}'; expected the same on every rank. Nothing was written"
            )
    everyone = [digests for _, digests, _, _ in facts]
    for (buffer, *_), *sums in zip(opened, *everyone, strict=True):
        if len(set(sums)) > 1:
            raise RuntimeError(
                f"unsharded(write_back=True): the ranks made different edits to {buffer.describe()}; "
                "expected the same on every rank. Nothing was written"
            )
    for buffer, flat, wholes in opened:
        for view, whole, original in zip(buffer.main_views(flat), wholes, buffer.originals, strict=True):
            if original.cut is not None:
                view.copy_(own_value(whole, original, axes.tp))
        buffer.write(flat[buffer.main_span.slice])
    gradients.write_back()


def _digest(wholes: Sequence[Tensor]) -> bytes:
    digest = blake2b()
    for whole in wholes:
        digest.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _names(runtime: Runtime) -> list[str]:
    return [name for name, _ in runtime.module.named_parameters(remove_duplicate=False)]


def _describe_moves(before: Sequence[str], after: Sequence[str]) -> str:
    """The message about parameters that were added, removed or replaced inside the block."""
    removed = [name for name in before if name not in set(after)]
    added = [name for name in after if name not in set(before)]
    if not removed and not added:
        return ""
    parts = [
        f"{what} {', '.join(map(repr, names[:4]))}{' ...' if len(names) > 4 else ''}"
        for what, names in (("removed", removed), ("added", added))
        if names
    ]
    return (
        f"inside unsharded() the model was changed ({' and '.join(parts)}), but an engine keeps the "
        f"parameters that it was made with: {_REMEDY}"
    )


def _find_tie(opened: Sequence[_Opened]) -> str:
    """The message about one object in the slots of two parameters."""
    names: dict[int, str] = {}
    for original in (original for buffer, *_ in opened for original in buffer.originals):
        for current in {id(owner._parameters.get(attribute)) for owner, attribute in original.owners}:
            if current != id(None) and names.setdefault(current, original.fqn) != original.fqn:
                return (
                    f"unsharded(write_back=True): '{original.fqn}' was tied to '{names[current]}', which are "
                    "sharded apart: tie parameters before initialize"
                )
    return ""


def _take_replaced(opened: _Opened) -> list[str]:
    """Copy parameters that were replaced, not edited; return the names of those that do not fit."""
    misshapen = []
    for original, view in zip(opened.buffer.originals, opened.wholes, strict=True):
        for owner, attribute in original.owners:
            current = owner._parameters[attribute]
            if current is None or current.shape != view.shape:
                misshapen.append(original.fqn)
            elif current.data_ptr() != view.data_ptr():
                view.copy_(current)
    return misshapen


def full_state_dict(runtime: Runtime) -> dict[str, Tensor]:
    """Return the whole model under the original names, on rank 0's CPU; {} on other ranks. Collective.

    One unit is gathered at a time. Tensors have their original shapes. Floating-point parameters come in
    float32 or wider, buffers in their own dtype.
    """
    runtime.settle()
    runtime.check_slots()
    axes = runtime.context.axes
    is_first = axes.everyone.rank == 0
    whole: dict[int, Tensor] = {}
    for buffer in runtime.buffers:
        wholes = gather_wholes(buffer, axes.tp)
        for values, sharded in zip(wholes, buffer.sharded, strict=True):
            if is_first:  # a copy: a view would keep the whole flat buffer alive, padding included
                dtype = torch.promote_types(values.dtype, torch.float32)
                whole[id(sharded)] = values.to(device="cpu", dtype=dtype, copy=True)
    if not is_first:
        return {}
    state = runtime.module.state_dict(keep_vars=True)
    return {name: whole[id(value)] if id(value) in whole else _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    """A copy of a buffer, or of the result of a module's get_extra_state()."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)
