"""Full parameters outside forward and backward: to read, to edit, to save.

`Whole` is one parameter over all ranks. All that reads and writes one walks it: `unsharded()`, and calls by
name (`byname.py`). All that reads the model unit by unit is a `stream` over the parts of a pipeline:
`full_state_dict()`, adapters, exports and live parameters (`hf/live.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeroshard.comm import moves
from zeroshard.comm.collectives import on_all
from zeroshard.comm.mesh import Axes
from zeroshard.comm.messages import Messages
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.warn import first_of
from zeroshard.parameters.parts import gather_ranges, own_value, whole_value
from zeroshard.parameters.sharded import ShardedParameter, carry_attributes
from zeroshard.parameters.state import Moment
from zeroshard.parameters.unsharded import ShownParameter
from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.originals import Original
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit, UnitState

_REMEDY = (
    "add or remove parametrizations, pruning and layers before zeroshard.initialize, or undo it inside the "
    "block (remove_parametrizations, prune.remove)"
)
_CALL = "unsharded(write_back=True)"


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter of the model, of which each rank holds a slice: to read and to write all of it."""

    axes: Axes
    buffer: FlatBuffer
    index: int

    @property
    def sharded(self) -> ShardedParameter:
        """The slice of this rank, as the optimizer has it."""
        return self.buffer.sharded[self.index]

    @property
    def original(self) -> Original:
        """The parameter before sharding."""
        return self.buffer.originals[self.index]

    @property
    def gradient(self) -> Tensor | None:
        """This rank's slice of the gradient."""
        with past_guards():
            return self.sharded.grad

    def gather(self, own: Tensor) -> Tensor:
        """Gather a tensor, in the parameter's shape, from the slices [n] of the ranks; collective.

        The result lies on the device that computes, wherever the slices do, and has memory of its own.
        """
        axis, own, shape = self.axes.dp_shard, own.detach(), self.buffer.shapes[self.index]
        whole = own.to(axis.device)  # the host waits: somebody may write there at once
        if self.buffer.is_partial:
            sizes = [self.buffer.layout.owned(self.index, rank).size for rank in range(axis.size)]
            whole = gather_ranges(axis, whole, sizes, self.buffer.tag, f"'{self.sharded.fqn}'")
        if own.dtype.is_floating_point and not self.buffer.plan.is_packed:
            whole = whole.to(torch.promote_types(own.dtype, torch.float32))
        whole = whole_value(whole.view(shape), self.original, self.axes.tp)
        return whole.clone() if whole.data_ptr() == own.data_ptr() else whole

    def cut(self, values: Tensor) -> Tensor:
        """This rank's slice of a full tensor, [n], on its device."""
        part = own_value(values.detach(), self.original, self.axes.tp).reshape(-1)
        start = self.buffer.start(self.index)
        return moves.beside(part[start : start + self.sharded.numel()], self.buffer.main)

    @property
    def values(self) -> Tensor:
        """This rank's slice of the parameter."""
        with past_guards():
            return self.sharded.detach()

    def write_gradient(self, values: Tensor | None) -> None:
        """Give this rank's slice of the gradient the values of a full tensor; None: it has no gradient."""
        own = None if values is None else self.cut(values).to(self.buffer.plan.main_dtype, copy=True)
        with past_guards():
            self.sharded.grad = own


def wholes_of(axes: Axes, buffers: Iterable[FlatBuffer]) -> Iterator[Whole]:
    """The parameters of buffers."""
    return (Whole(axes, buffer, index) for buffer in buffers for index in range(len(buffer.sharded)))


@torch.no_grad()
def write(runtime: Runtime, pairs: Iterable[tuple[Whole, Tensor]]) -> None:
    """Give parameters the values of full tensors, buffer by buffer; `Unit.refresh` follows."""
    memory = runtime.context.memory
    for buffer, own in groupby(pairs, lambda pair: pair[0].buffer):
        memory.check(buffer.main)
        for whole, values in own:
            whole.values.copy_(whole.cut(values))  # the host waits: it may read them at once
        memory.evict(buffer.main)


# ------------------------------------------------------------------------------------ to show and to edit


class _Shown(NamedTuple):
    """A parameter that is shown whole."""

    whole: Whole
    values: Tensor
    """Of the original shape, a view of the gathered buffer if it is not cut."""
    parameter: ShownParameter
    gradient: Tensor | None
    """The gradient that it was shown with."""
    version: int
    """The version of that."""

    def has_other_gradient(self) -> bool:
        """True if the gradient was replaced or edited."""
        now = self.parameter.grad
        return now is not self.gradient or (now is not None and now._version != self.version)


class Edit(NamedTuple):
    """A rank's message about a parameter that it has shown."""

    holders: tuple[int, ...]
    """The pipeline ranks that hold it, if these are several."""
    values: bytes
    """A digest."""


def check_edits(everyone: Sequence[tuple[int, Mapping[str, Edit]]]) -> None:
    """Compare the edits of all ranks.

    Args:
        everyone: the pipeline rank of each rank, and its edits by name.

    Raises:
        RuntimeError: they differ, or a copy of a parameter was not shown.
    """
    firsts: dict[str, Edit] = {}
    for _, edits in everyone:
        for name, edit in edits.items():
            if firsts.setdefault(name, edit) != edit:
                raise RuntimeError(
                    f"{_CALL}: the ranks made different edits to '{name}'; expected the same on every rank. "
                    "Nothing was written"
                )
    for name, first in firsts.items():
        shown = {part for part, edits in everyone if name in edits}
        if not shown.issuperset(first.holders):
            raise RuntimeError(
                f"{_CALL}: pipeline ranks {list(first.holders)} share '{name}', and it is shown on "
                f"{sorted(shown)} alone: call unsharded() without modules. Nothing was written"
            )


@contextmanager
def unsharded(runtime: Runtime, modules: Sequence[nn.Module], write_back: bool) -> Iterator[None]:
    """Show full parameters in the main dtype, on every rank, in the units that `modules` take part in.

    Their `grad` is the whole gradient, if there is one: to read.

    Args:
        modules: parts of the sharded module.
        write_back: keep the edits of parameters, which must be the same on every rank.

    Raises:
        RuntimeError: `write_back`, and the ranks made different edits; then none is kept. Or parameters were
            added or removed, or a gradient was changed.
    """
    runtime.wait("unsharded()", Moment.FAILED)
    runtime.check_slots()
    names = _names(runtime)
    members = {member for module in modules for member in module.modules()}
    units = [unit for unit in runtime.units if not members.isdisjoint(unit.slots.owners)]
    outer = runtime.state.moments.copy()
    if write_back and any(unit.slots.stand_ins for unit in units):
        raise RuntimeError("unsharded(write_back=True) inside unsharded() of the same parameters")
    shown = list(_show(runtime, units))
    stand_ins = {id(one.whole.sharded): one.parameter for one in shown}
    before = [unit.slots.stand_in(stand_ins) for unit in units]
    runtime.state.moments.add(Moment.SHOWN)
    try:
        yield
        problem = _describe_changes(names, _names(runtime), shown)
        if write_back:
            _write_back(runtime, shown, problem)
        elif problem:
            raise RuntimeError(problem)
        for one in shown:
            sharded = one.whole.sharded
            sharded.requires_grad_(one.parameter.requires_grad)
            carry_attributes(one.parameter, sharded, one.whole.buffer.unsharded[one.whole.index])
    finally:
        if Moment.SHOWN not in outer:
            runtime.state.moments.remove(Moment.SHOWN)
        for unit, parameters in zip(units, before, strict=True):
            unit.slots.stand_in(parameters)
            unit.refresh()
        # A step may come before anybody waits for these gathers.
        runtime.state.reads_main |= any(unit.state is UnitState.GATHERING for unit in units)


def _show(runtime: Runtime, units: Sequence[Unit]) -> Iterator[_Shown]:
    """Gather parameters, and the gradients that any rank has; collective."""
    axes, buffers = runtime.context.axes, [buffer for unit in units for buffer in unit.buffers]
    flags = [whole.gradient is not None for whole in wholes_of(axes, buffers)]
    used = iter(axes.everyone.any(flags, "agreement on which parameters have a gradient")())
    for buffer in buffers:
        for whole, values in zip(wholes_of(axes, [buffer]), buffer.gather_wholes(), strict=True):
            parameter = ShownParameter.of(whole.sharded, values)
            carry_attributes(whole.sharded, parameter)
            gradient = None
            if next(used):
                own = torch.zeros_like(whole.values) if whole.gradient is None else whole.gradient
                gradient = parameter.grad = whole.gather(own).to(buffer.plan.main_dtype)
            yield _Shown(whole, values, parameter, gradient, 0 if gradient is None else gradient._version)


@torch.no_grad()
def _write_back(runtime: Runtime, shown: Sequence[_Shown], problem: str) -> None:
    axes = runtime.context.axes

    def look() -> tuple[int, dict[str, Edit]]:
        if found := problem or next(_take_replaced(shown), ""):
            raise RuntimeError(f"{found}. Nothing was written")
        edits = {o.whole.sharded.fqn: Edit(o.whole.original.holders, digest(o.values)) for o in shown}
        return axes.pp.rank, edits

    check_edits(on_all(axes.world, "agreement on edited parameters", look))
    write(runtime, ((one.whole, one.values) for one in shown))


def digest(values: Tensor) -> bytes:
    """A digest of the values of a tensor."""
    raw = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return blake2b(raw.numpy().data, digest_size=16).digest()


def _names(runtime: Runtime) -> list[str]:
    return [name for name, _ in runtime.module.named_parameters(remove_duplicate=False)]


def _describe_changes(before: Sequence[str], after: Sequence[str], shown: Sequence[_Shown]) -> str:
    """The message about parameters that came or went inside the block, or about a changed gradient."""
    if moved := sorted(set(before) ^ set(after)):
        return (
            f"inside unsharded() the model was changed: {', '.join(map(repr, moved[:4]))} came or went, but "
            f"an engine keeps the parameters that it was made with: {_REMEDY}"
        )
    changed = [one.whole.sharded.fqn for one in shown if one.has_other_gradient()]
    if not changed:
        return ""
    return (
        f"the gradient of {first_of(changed)} was changed inside engine.unsharded(), where gradients are "
        "shown to be read: call engine.set_full_gradient(name, gradient) on all ranks after the block"
    )


def _take_replaced(shown: Sequence[_Shown]) -> Iterator[str]:
    """Copy parameters that were replaced, not edited; yield a message about one that cannot be."""
    names: dict[int, str] = {}
    for one in shown:
        name = one.whole.original.fqn
        for owner, attribute in one.whole.original.owners:
            current = owner._parameters[attribute]
            if current is None or current.shape != one.values.shape:
                yield f"{_CALL}: '{name}' was replaced by a parameter of another shape"
            elif (other := names.setdefault(id(current), name)) != name:
                yield (
                    f"{_CALL}: '{name}' was tied to '{other}', which are sharded apart: tie parameters "
                    "before initialize"
                )
            elif current.data_ptr() != one.values.data_ptr():
                one.values.copy_(current)


# --------------------------------------------------------------------------- over the parts of a pipeline


Read = Callable[[], dict[str, Any]]
"""Reads some tensors of a part by name, all of a unit for example; collective in the part."""


def stream(
    axes: Axes, reads: Sequence[Read], *, to_all: bool, check: Callable[[], object] = object
) -> Iterator[tuple[str, Any]]:
    """Yield the results of all parts of the model, part by part; collective.

    A rank holds those of one read at a time, if the caller keeps none.

    Args:
        axes: the axes.
        reads: the reads of this rank's part, each called when its first result is asked for.
        to_all: False yields them on rank 0 alone.
        check: called on all ranks before each read of any part.
    """
    is_given = to_all or axes.everyone.rank == 0

    def read(number: int) -> dict[str, Any]:
        own = reads[number]()
        if axes.pp.size > 1:  # messages have tensors of this device
            own = {name: v.to(axes.pp.device) if isinstance(v, Tensor) else v for name, v in own.items()}
        return own if is_given else {}

    for part, count in enumerate(axes.pp.all_gather_object(len(reads), "reads of all parts")):
        for number in range(count):
            check()
            found = spread(axes, part, read(number) if part == axes.pp.rank else {}, to_all=to_all)
            while found:
                name = next(iter(found))
                yield name, found.pop(name)


def spread(axes: Axes, part: int, own: dict[str, Any], *, to_all: bool = True) -> dict[str, Any]:
    """Return on all ranks the values of the ranks of one part; collective.

    Args:
        axes: the axes.
        part: the pipeline rank of the part.
        own: on its ranks the values, the same on all: tensors, and others that can be pickled. They count
            nowhere else.
        to_all: False returns them on the first pipeline rank alone, and an empty dict on others.
    """
    if axes.pp.size == 1:
        return own
    label, messages = f"values of pipeline rank {part}", Messages(axes.pp)
    if axes.pp.rank == part:
        apart = {k: v for k, v in own.items() if isinstance(v, Tensor) and v.device == messages.device}
        axes.pp.all_gather_object(({**own, **dict.fromkeys(apart)}, list(apart)), label)
        for target in range(axes.pp.size if to_all else 1) if apart else ():
            if target != part:
                messages.send(list(apart.values()), target, label, with_forms=True)
        messages.finish()
        return own if to_all or part == 0 else {}
    values, keys = axes.pp.all_gather_object(None, label)[part]
    if not to_all and axes.pp.rank:
        return {}
    if keys:
        values |= zip(keys, messages.expect(part, label, None)(), strict=True)
    found: dict[str, Any] = values
    return found


def full_state_dict(
    runtime: Runtime,
    dtype_of: Callable[[BufferPlan], torch.dtype] = attrgetter("wide_dtype"),
    wanted: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the whole model under the original names, on rank 0's CPU; {} on other ranks. Collective.

    One unit is gathered at a time. Tensors have their original shapes, buffers of the model their own dtype.
    Where pipeline ranks hold parts of the model, the names of the first part come first, then the names of
    the second, and so on.

    Args:
        runtime: the runtime of this rank's part of the model.
        dtype_of: chooses the dtype of parameters; the default is float32 or wider.
        wanted: the names in this rank's part that are returned; None: all.
    """
    runtime.wait("full_state_dict()", Moment.FAILED)
    runtime.check_slots()
    axes = runtime.context.axes
    state = runtime.module.state_dict(keep_vars=True)
    state = {name: value for name, value in state.items() if wanted is None or name in wanted}
    fqns = {id(parameter): parameter.fqn for parameter in runtime.parameters}
    sources = {name: fqns.get(id(value), name) for name, value in state.items()}
    chosen = {*sources.values()}

    def read(buffer: FlatBuffer) -> dict[str, Tensor]:
        wholes, dtype = zip(buffer.sharded, buffer.gather_wholes(), strict=True), dtype_of(buffer.plan)
        # A copy: a view would keep the whole flat buffer alive, padding included.
        return {p.fqn: values.to("cpu", dtype, copy=True) for p, values in wholes if p.fqn in chosen}

    def read_others() -> dict[str, Any]:
        others = {name: value for name, value in state.items() if id(value) not in fqns}
        return {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)
            for name, value in others.items()
        }

    buffers = [buffer for buffer in runtime.buffers if any(p.fqn in chosen for p in buffer.sharded)]
    found: dict[str, Any] = {}
    for name, value in stream(axes, [*(partial(read, one) for one in buffers), read_others], to_all=False):
        found.setdefault(name, value.cpu() if isinstance(value, Tensor) else value)
    parts = axes.pp.all_gather_object(sources, "names of all parts")
    return {name: found[source] for part in parts for name, source in part.items() if found}
