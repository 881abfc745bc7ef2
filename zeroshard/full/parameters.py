"""Full parameters outside forward and backward: to read, to edit, to save."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.comm import moves
from zeroshard.comm.collectives import Axis
from zeroshard.comm.mesh import Axes
from zeroshard.comm.messages import Messages
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.parts import own_value
from zeroshard.parameters.sharded import ShardedParameter, carry_attributes
from zeroshard.parameters.unsharded import ShownParameter
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import UnitState

_REMEDY = (
    "add or remove parametrizations, pruning and layers before zeroshard.initialize, or undo it inside the "
    "block (remove_parametrizations, prune.remove)"
)


_CALL = "unsharded(write_back=True)"
_SAME_EDITS = "expected the same on every rank. Nothing was written"


class SharedEdits(NamedTuple):
    """A buffer of parameters that several pipeline ranks hold."""

    holders: tuple[int, ...]
    values: bytes
    """A digest."""
    gradients: tuple[tuple[str, bytes], ...]
    """Of those that were changed, digests."""


class ShownEdits(NamedTuple):
    """A rank's message about the full parameters that it has shown."""

    part: int
    """The rank's place among pipeline ranks."""
    problem: str
    """The reason why its edits cannot be kept; empty if they can."""
    buffers: list[tuple[str, bytes]]
    """Descriptions of the buffers, with digests of their parameters."""
    gradients: list[tuple[str, bytes]]
    """Names of the parameters whose gradients were changed, with digests of the gradients."""
    copies: dict[str, SharedEdits]
    """By name of the first parameter of a buffer."""


def check_edits(everyone: Sequence[ShownEdits]) -> None:
    """Compare the edits of all ranks.

    Raises:
        RuntimeError: they differ, or some cannot be kept.
    """
    for rank, edits in enumerate(everyone):
        if edits.problem:
            raise RuntimeError(f"{edits.problem}. Nothing was written (rank {rank})")
    for part in sorted({edits.part for edits in everyone}):
        _check_part([edits for edits in everyone if edits.part == part])
    for name in sorted({name for edits in everyone for name in edits.copies}):
        copies = {edits.part: edits.copies[name] for edits in everyone if name in edits.copies}
        first, *others = copies.values()
        if set(copies) != set(first.holders):
            raise RuntimeError(
                f"{_CALL}: pipeline ranks {list(first.holders)} share '{name}', and it is shown on "
                f"{sorted(copies)} alone: call unsharded() without modules. Nothing was written"
            )
        if any(other != first for other in others):
            raise RuntimeError(f"{_CALL}: pipeline ranks made different edits to '{name}'; {_SAME_EDITS}")


def _check_part(ranks: Sequence[ShownEdits]) -> None:
    """Compare the edits of ranks that hold the same part of the model."""
    first, *others = ranks
    for edits in others:
        if different := sorted(name for name, _ in set(edits.gradients) ^ set(first.gradients)):
            raise RuntimeError(
                f"{_CALL}: the ranks made different edits to the gradient of '{different[0]}'; {_SAME_EDITS}"
            )
    for edits in others:
        for (description, digest), (_, wanted) in zip(edits.buffers, first.buffers, strict=True):
            if digest != wanted:
                raise RuntimeError(f"{_CALL}: the ranks made different edits to {description}; {_SAME_EDITS}")


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
    runtime.wait()
    runtime.check_slots()
    names = _names(runtime)
    members = {member for module in modules for member in module.modules()}
    units = [unit for unit in runtime.units if not members.isdisjoint(unit.slots.owners)]
    if write_back and any(unit.slots.stand_ins for unit in units):
        raise RuntimeError("unsharded(write_back=True) inside unsharded() of the same parameters")
    axes = runtime.context.axes
    opened = []
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        flat = buffer.gather_main()
        opened.append(_Opened(buffer, flat, buffer.wholes_in(flat)))
    shown = {
        id(sharded): ShownParameter.of(sharded, whole)
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
    problem = moves or _find_tie(opened)
    if not problem and (misshapen := [name for one in opened for name in _take_replaced(one)]):
        names = ", ".join(map(repr, misshapen))
        problem = f"unsharded(write_back=True): {names} was replaced by a parameter of another shape"
    own = ShownEdits(
        part=axes.pp.rank,
        problem=problem,
        buffers=[(one.buffer.describe(), _digest(one.wholes)) for one in opened],
        gradients=gradients.digests(),
        copies={},
    )
    for one, (_, digest) in zip(opened, own.buffers, strict=True):
        first, names_here = one.buffer.originals[0], {original.fqn for original in one.buffer.originals}
        if first.holders:
            changed = tuple(sorted(pair for pair in own.gradients if pair[0] in names_here))
            own.copies[first.fqn] = SharedEdits(first.holders, digest, changed)
    check_edits(axes.world.all_gather_object(own, "agreement on edited parameters"))
    for buffer, flat, wholes in opened:
        for view, whole, original in zip(buffer.views(flat), wholes, buffer.originals, strict=True):
            if original.cut is not None:
                view.copy_(own_value(whole, original, axes.tp))
        buffer.source.write(flat[buffer.main_span.slice])
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
    if not (moved := sorted(set(before) ^ set(after))):
        return ""
    return (
        f"inside unsharded() the model was changed: {', '.join(map(repr, moved[:4]))} came or went, but an "
        f"engine keeps the parameters that it was made with: {_REMEDY}"
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
    float32 or wider, buffers in their own dtype. Where pipeline ranks hold parts of the model, the names of
    the first part come first, then the names of the second, and so on.
    """
    runtime.wait()
    runtime.check_slots()
    axes = runtime.context.axes
    fqns = {id(parameter): parameter.fqn for parameter in runtime.parameters}
    state = runtime.module.state_dict(keep_vars=True)
    own = _Contents(
        {name: fqns.get(id(value), name) for name, value in state.items()},
        {name: deepcopy(value) for name, value in state.items() if not isinstance(value, Tensor)},
    )
    parts = [own]
    if axes.pp.size > 1:
        parts = axes.pp.all_gather_object(own, "names of all parts")
    before = {source for part in parts[: axes.pp.rank] for source in part.sources.values()}
    wholes = dict(collect(axes, _wholes(runtime, state, set(own.sources.values()) - before)))
    if axes.everyone.rank or axes.pp.rank:
        return {}
    found: dict[str, Tensor] = {}
    for sources, others in parts:
        for name, source in sources.items():
            if name not in found:
                found[name] = others[name] if name in others else wholes[source].cpu()
    return found


class _Contents(NamedTuple):
    """The state_dict of a part of the model, without tensors."""

    sources: dict[str, str]
    """For each name the name of the parameter in the whole model; a buffer has its own."""
    others: dict[str, Any]
    """Results of get_extra_state() that are no tensors."""


def _wholes(runtime: Runtime, state: Mapping[str, Any], wanted: Collection[str]) -> Iterator[Named]:
    """Yield whole tensors on the CPU on the first rank of a part, and nothing on its others; collective."""
    axes, own = runtime.context.axes, set(map(id, runtime.parameters))
    is_first = axes.everyone.rank == 0
    for buffer in runtime.buffers:
        wholes = buffer.gather_wholes()
        for values, sharded in zip(wholes, buffer.sharded, strict=True):
            if is_first and sharded.fqn in wanted:
                # A copy: a view would keep the whole flat buffer alive, padding included.
                yield Named(sharded.fqn, values.to(device="cpu", dtype=buffer.plan.wide_dtype, copy=True))
    for name, value in state.items() if is_first else ():
        if name in wanted and isinstance(value, Tensor) and id(value) not in own:
            yield Named(name, value.detach().to("cpu", copy=True))


class _ShownGradient(NamedTuple):
    """One parameter, and the gradient that it was shown with."""

    buffer: FlatBuffer
    at: int
    parameter: nn.Parameter
    gradient: Tensor | None
    version: int

    @property
    def sharded(self) -> ShardedParameter:
        return self.buffer.sharded[self.at]


class ShownGradients:
    """Gathers the gradients that any rank has, and writes back those that were changed; collective.

    Args:
        buffers: the buffers that are shown.
        shown: the full parameters, by the id of the sharded one.
        axes: the ranks that show them together, and those that share a gradient.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        shown: Mapping[int, nn.Parameter],
        axes: Axes,
    ) -> None:
        self._tp = axes.tp
        trained = [buffer for buffer in buffers if buffer.trainable]
        flags = [gradient is not None for buffer in trained for gradient in _gradients(buffer)]
        used = iter(axes.everyone.any(flags, "agreement on which parameters have a gradient")())
        self._shown: list[_ShownGradient] = []
        for buffer in trained:
            is_used = [next(used) for _ in buffer.sharded]
            flat = _gather(buffer, axes.dp_shard) if any(is_used) else None
            views = [] if flat is None else buffer.wholes_in(flat)
            for index, sharded in enumerate(buffer.sharded):
                parameter = shown[id(sharded)]
                # Through .data it gets a version counter of its own: edits of one do not count for all.
                gradient = views[index].data if is_used[index] else None
                parameter.grad = gradient
                version = gradient._version if gradient is not None else 0
                self._shown.append(_ShownGradient(buffer, index, parameter, gradient, version))

    def _changed(self) -> Iterator[tuple[_ShownGradient, Tensor | None]]:
        """The parameters with another gradient now, or with an edited one; and that gradient."""
        for one in self._shown:
            now = one.parameter.grad
            if now is not one.gradient or (now is not None and now._version != one.version):
                yield one, now

    def digests(self) -> list[tuple[str, bytes]]:
        """The names of the parameters whose gradients were changed, with digests of the gradients."""
        changed = self._changed()
        return [(one.sharded.fqn, b"" if now is None else _digest([now])) for one, now in changed]

    def write_back(self) -> None:
        """Keep the changes, each rank the changes of its slices."""
        for one, now in self._changed():
            with past_guards():
                one.sharded.grad = None if now is None else _slice(one, now, self._tp)

    def warn_of_changes(self) -> None:
        """Warn that changes are dropped."""
        if names := [name for name, _ in self.digests()]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warn_user(
                f"the gradient of '{names[0]}'{more} was changed inside engine.unsharded() and "
                "is dropped: use engine.unsharded(write_back=True) to keep it"
            )


def _gradients(buffer: FlatBuffer) -> list[Tensor | None]:
    with past_guards():
        return [sharded.grad for sharded in buffer.sharded]


def _gather(buffer: FlatBuffer, axis: Axis) -> Tensor:
    """[total], main dtype: the gradients of all ranks; zeros for a parameter without one."""
    whole = torch.zeros(buffer.layout.total, dtype=buffer.plan.main_dtype, device=axis.device)
    own = whole[buffer.main_span.slice]
    for index, gradient in enumerate(_gradients(buffer)):
        if gradient is not None:
            own[buffer.sharded_span(index).slice].copy_(gradient.detach().view(-1))
    if buffer.is_partial:
        label = f"all-gather of the shown gradients of {buffer.describe()}"
        axis.all_gather(whole, own, tag=buffer.tag, label=label).wait()
    return whole


def _slice(one: _ShownGradient, gradient: Tensor, tp: Axis) -> Tensor:
    gradient = own_value(gradient, one.buffer.originals[one.at], tp)
    start = one.buffer.start(one.at)
    size = one.buffer.sharded_span(one.at).size
    part = gradient.detach().reshape(-1)[start : start + size]
    part = part.to(one.buffer.plan.main_dtype, copy=True)
    return moves.beside(part, one.buffer.main)


class Named(NamedTuple):
    """A whole tensor and its name."""

    name: str
    values: Tensor


def collect(axes: Axes, own: Iterator[Named]) -> Iterator[Named]:
    """Yield the tensors of all parts on rank 0, part by part, and nothing on other ranks; collective.

    Rank 0 holds one tensor of another part at a time.

    Args:
        axes: the axes.
        own: the tensors of this rank's part, whole, on the first rank of the part; nothing on its others.
    """
    if axes.pp.rank == 0:
        yield from own
    messages = Messages(axes.pp)
    for part in range(1, axes.pp.size):
        label = f"tensors of pipeline rank {part}"
        if axes.pp.rank == part:
            for piece in own:
                name = torch.frombuffer(bytearray(piece.name.encode()), dtype=torch.uint8)
                tensors = [name.to(messages.device), piece.values.to(messages.device)]
                messages.send(tensors, 0, label, with_forms=True)
                del piece, tensors  # before the next one is gathered
            if axes.everyone.rank == 0:
                messages.send([], 0, label, with_forms=True)
            messages.finish()
        elif axes.world.rank == 0:
            while (received := _receive(messages, part, label)) is not None:
                yield received
                del received  # before the next one arrives


def _receive(messages: Messages, source: int, label: str) -> Named | None:
    """Return the next tensor of a part; None after the last one."""
    tensors = messages.expect(source, label, None).wait()
    if not tensors:
        return None
    name, values = tensors
    return Named(bytes(name.tolist()).decode(), values)


def spread(axes: Axes, part: int, own: Any) -> Any:
    """Return on all ranks a value of the ranks of one part; collective.

    Args:
        axes: the axes.
        part: the pipeline rank of the part.
        own: on its ranks the value, the same on all: a tensor, a dict with tensors among its values, or
            another value that can be pickled. It counts nowhere else.
    """
    if axes.pp.size == 1:
        return own
    label, messages = f"values of pipeline rank {part}", Messages(axes.pp)
    if axes.pp.rank == part:
        items = own if isinstance(own, dict) else {None: own}
        apart = {key: value for key, value in items.items() if _is_on(value, messages.device)}
        plain = {key: None if key in apart else value for key, value in items.items()}
        axes.pp.all_gather_object((plain, list(apart), isinstance(own, dict)), label)
        for target in range(axes.pp.size) if apart else ():
            if target != part:
                messages.send(list(apart.values()), target, label, with_forms=True)
        messages.finish()
        return own
    values, keys, is_dict = axes.pp.all_gather_object(None, label)[part]
    if keys:
        values |= dict(zip(keys, messages.expect(part, label, None).wait(), strict=True))
    return values if is_dict else values[None]


def _is_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device == device
