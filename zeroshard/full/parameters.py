"""Full parameters outside forward and backward: to read, to edit, to save.

`Whole` is one parameter over all ranks. All that reads and writes one walks it: `unsharded()`, and calls by
name (`byname.py`). All that reads the model unit by unit is a `stream` over the parts of a pipeline:
`full_state_dict()`, adapters, exports and live parameters (`hf/live.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.agreement import require_equal_by_name
from zeroshard.comm import moves
from zeroshard.comm.collectives import on_all
from zeroshard.comm.mesh import Axes
from zeroshard.comm.messages import Messages
from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.parts import gather_ranges, own_value, whole_value
from zeroshard.parameters.sharded import ShardedParameter, carry_attributes
from zeroshard.parameters.state import Moment
from zeroshard.parameters.unsharded import ShownParameter
from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.originals import Original
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime

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

    def digest(self, values: Any) -> str:
        """Return dtype and checksum of a full tensor, in words, which ranks compare.

        Raises:
            ValueError: it is not a tensor, or has another shape.
        """
        shape = tuple(self.buffer.whole_shapes[self.index])
        if not isinstance(values, Tensor) or tuple(values.shape) != shape or values.is_meta:
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"'{self.sharded.fqn}': expected a full tensor of shape {shape}, got {got}")
        raw = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return f"{values.dtype} with checksum {blake2b(raw.numpy().data, digest_size=16).hexdigest()}"


def wholes_of(axes: Axes, buffers: Iterable[FlatBuffer]) -> Iterator[Whole]:
    """The parameters of buffers."""
    return (Whole(axes, buffer, index) for buffer in buffers for index in range(len(buffer.sharded)))


@torch.no_grad()
def write(runtime: Runtime, pairs: Iterable[tuple[Whole, Tensor]]) -> None:
    """Give parameters the values of full tensors, buffer by buffer; `Unit.refresh` follows."""
    memory = runtime.context.memory
    runtime.state.num_edits += 1
    torch.clear_autocast_cache()
    for buffer, own in groupby(pairs, lambda pair: pair[0].buffer):
        memory.fetch(buffer.main)
        for whole, values in own:
            whole.values.copy_(whole.cut(values))  # the host waits: it may read them at once
            if not isinstance(values, ShownParameter) or values.is_edited:
                buffer.count_edits({whole.sharded})
        memory.evict(buffer.main)


# ------------------------------------------------------------------------------------ to show and to edit


@contextmanager
def unsharded(runtime: Runtime, modules: Collection[nn.Module], write_back: bool) -> Iterator[None]:
    """Show full parameters in the main dtype, on every rank, in the units that `modules` take part in.

    Args:
        modules: parts of the sharded module.
        write_back: keep the edits of parameters, which must be the same on every rank.

    Raises:
        RuntimeError: `write_back`, and the ranks made different edits; then none is kept. Or parameters were
            added, replaced or removed.
    """
    runtime.wait("unsharded()", Moment.FAILED)
    runtime.check_slots()
    members = {member for module in modules for member in module.modules()}
    units = [unit for unit in runtime.units if not members.isdisjoint(unit.slots.owners)]
    outer = runtime.state.moments.copy()
    if write_back and any(unit.slots.stand_ins for unit in units):
        raise RuntimeError("unsharded(write_back=True) inside unsharded() of the same parameters")
    buffers = [buffer for unit in units for buffer in unit.buffers]
    gathered = (values for buffer in buffers for values in buffer.gather_wholes())
    pairs = zip(wholes_of(runtime.context.axes, buffers), gathered, strict=True)
    shown = [(whole, ShownParameter.of(whole.sharded, values)) for whole, values in pairs]
    stand_ins = {id(whole.sharded): parameter for whole, parameter in shown}
    before = [unit.slots.stand_in(stand_ins) for unit in units]
    runtime.state.moments.add(Moment.SHOWN)
    try:
        yield
        if write_back:
            _write_back(runtime, shown, is_of_all=runtime.module in modules)
        else:
            runtime.check_slots()
        for whole, parameter in shown:
            whole.sharded.requires_grad_(parameter.requires_grad)
            carry_attributes(parameter, whole.sharded, whole.buffer.unsharded[whole.index])
    finally:
        if Moment.SHOWN not in outer:
            runtime.state.moments.remove(Moment.SHOWN)
        for _, parameter in shown:
            parameter.fqn = ""  # so `check_additions` finds one that was given to another module
        for unit, parameters in zip(units, before, strict=True):
            unit.slots.stand_in(parameters)
        runtime.passes.refresh()  # a step may come before anybody waits for these gathers


@torch.no_grad()
def _write_back(runtime: Runtime, shown: Sequence[tuple[Whole, ShownParameter]], *, is_of_all: bool) -> None:
    """Give this rank's slices the values of parameters that are shown; collective.

    Args:
        is_of_all: True if all parameters of this rank's part of the model are shown.
    """

    def look() -> dict[str, str]:
        runtime.check_slots()
        held = (original for buffer in runtime.buffers for original in buffer.originals if original.holders)
        if not is_of_all and (shared := next(held, None)) is not None:
            raise RuntimeError(
                f"{_CALL}: pipeline ranks {list(shared.holders)} share '{shared.fqn}': call unsharded() "
                "without modules. Nothing was written"
            )
        return {whole.sharded.fqn: whole.digest(parameter) for whole, parameter in shown}

    require_equal_by_name(
        on_all(runtime.context.axes.savers, "agreement on edited parameters", look),
        lambda name, found: RuntimeError(
            f"{_CALL}: the ranks made different edits to '{name}': {found}. Nothing was written"
        ),
    )
    write(runtime, shown)


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
