"""One flat buffer: the parameters of a unit with one dtype and one `requires_grad`.

    full    [total]             compute dtype; the unsharded parameters are views of it; freed and refilled
    main    [shard] or [total]  main dtype; the sharded parameters are views of it; where gathers start
    copy    like main           compute dtype; where `main` lies on a tier that gathers do not read
    second  [total / S]         compute dtype; from forward to backward, where S ranks keep a copy among them

`main` and `copy` are stores, on any tier; the plan says where. `main` is a view of `full`, and costs nothing,
if both would hold the same values all the time: replicated parameters whose main dtype is the compute dtype,
or one rank alone.

[Note: What is current] Values go from `main` to `copy`, from there to `full`, and from `full` to `second`.
`copied` is the version of `main` that `copy` has, and `filled` the version of the values that `full` and
`second` have. They are current as long as this is the present version: a write to `main` tells no other place
of itself. After `MainStore.use` other values, with versions of their own, go to `full`.

[Note: Edits] Edits of parameters in a forward or backward are refused if the next gather would overwrite
them. Addresses, and torch's counts of edits, are compared with the last look's; `.data` of a parameter has
the same count. No value is compared: the answer is the same on all ranks, whose slices differ. Where modules
compute with the main parameters themselves, an edit is kept, as in DistributedDataParallel.
Equal values in other memory are no edit: a recurrent layer on a GPU moves its weights into one piece of
memory for cuDNN, which counts no edit.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Hashable, Sequence
from itertools import compress
from operator import add, attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from zeroshard.comm.collectives import Handle
from zeroshard.comm.streams import Mark, mark_here
from zeroshard.internals.warn import first_of
from zeroshard.lazy.deferred import has_memory, is_stored, read_part, values_of
from zeroshard.parameters.parts import own_value, whole_value
from zeroshard.parameters.sharded import ShardedParameter, carry_attributes, describe_unit, refuse_gradients
from zeroshard.parameters.state import Phase
from zeroshard.parameters.unsharded import UnshardedParameter, equal_values, retire, set_data
from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.layout import Span
from zeroshard.plan.originals import Original, counts
from zeroshard.sharding.context import Context
from zeroshard.stores.storage import allocate, release
from zeroshard.stores.store import Store, Values

_edit_count_of = attrgetter("_version")


class MainStore(Store):
    """The main parameters of one buffer, and what gathers start from: these, a copy of them, or other values.

    Args:
        main: the main parameters.
        plan: the plan of the buffer.
        unsharded: the part of the unsharded parameters that `main` holds, if they are resident; else None.
        context: the objects that all buffers share.
    """

    def __init__(self, main: Tensor, plan: BufferPlan, unsharded: Tensor | None, context: Context) -> None:
        super().__init__(main, context.memory, plan.main_tier)
        self._plan, self._context = plan, context
        self._copies: list[Mark] = []
        """The ends of copies out of host memory, which the host must not write to before."""
        self._stepped: Mark | None = None
        """The end of the copies of stepped values, to their place and into `copy`; then a gather may read."""
        self._others: Values | None = None
        """The values that gathers bring in place of the main parameters, if any."""
        self.copy: Store | None = None
        """The main parameters in the compute dtype, if gathers start from such a copy."""
        if plan.copy_tier is not None:
            memory = unsharded
            if memory is None:
                memory = context.memory.empty(main.numel(), plan.compute_dtype, plan.copy_tier)
                self.load(memory)
            self.copy = Store(memory, context.memory, plan.copy_tier)
        self.copied: Hashable = self.version
        """The version of the main parameters that `copy` has; None: its values are those of no version."""
        context.memory.evict(main)

    # -- values ---------------------------------------------------------------------------------------

    @property
    def gathered_version(self) -> Hashable:
        """The version of the values that a gather brings."""
        return (self._others or self).version

    def use(self, values: Values | None = None) -> None:
        """Let gathers bring other values than the main parameters; None: these again."""
        self._others = values

    def write(self, values: Tensor) -> None:
        """Write main parameters, [n] of any dtype on any device; the host waits: it may read them at once."""
        self.store(values)
        mark_here(self._context.device).synchronize()

    def stepped(self, values: Tensor, start: int, before: Hashable) -> None:
        """Note that a part of the main parameters was written elsewhere; `copy` gets it if it was current.

        Args:
            values: the part where it is now. The current stream copies it.
            start: the first of its elements, counted in `main`.
            before: the version that `main` had before the part was stepped.
        """
        # Of resident parameters the copy is a part, which a backward still reads.
        is_in_use = self._plan.is_resident and self._context.state.phase is Phase.BACKWARD
        self.changed()
        if self.copy is not None and self.copied == before and not is_in_use:
            self.copy.store(values, start)
            self.copied = self.version
        self._stepped = mark_here(self._context.device)

    # -- gathers --------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Check the values that the next gather starts from, as a store does, and have them read ahead."""
        start = self if self.copy is None or self.copied != self.version else self.copy
        self._memory.fetch(start.values)

    def await_stepped(self) -> None:
        """Let the current stream wait for the copy of stepped values, which another stream may do."""
        if self._stepped is not None:
            self._stepped.wait()
            self._stepped = None

    def begin(self, own: Tensor) -> Tensor:
        """Return the present values for a gather: where they are, if it can read them there, or in `own`.

        Args:
            own: this rank's part of the unsharded parameters.
        """
        self.await_stepped()
        values = self._others or self.copy or self
        if values is self.copy and self.copied != self.version:
            if not values.is_near:  # the host copies: stepped values are to be there
                mark_here(self._context.device).synchronize()
            self.load(values.values)
            self.copied = self.version
        if isinstance(values, Store):
            is_readable = self._plan.is_partial and values.is_near and values.values.dtype == own.dtype
            if is_readable or (values is self.copy and self._plan.is_resident):
                return values.values.detach()
        values.load(own)
        if values is not self:
            self._note_copy()
        del self._copies[:-1]  # this stream has begun after them
        return own

    # -- copies ---------------------------------------------------------------------------------------

    def load(self, out: Tensor, start: int = 0) -> None:
        """Copy main parameters from an element on, as a store does; writes by the host wait for it."""
        super().load(out, start)
        self._note_copy()

    def _note_copy(self) -> None:
        mark = Mark(None) if self.is_near else mark_here(self._context.device)
        if mark.event is not None:
            self._copies.append(mark)
            self._context.state.reads_main = True

    def await_copies(self) -> None:
        """Let the host wait for the copies out of host memory, before it writes there."""
        copies, self._copies = self._copies, []
        for mark in copies:
            mark.synchronize()

    def follow_copies(self) -> None:
        """Let the current stream wait for the copies out of host memory, before it writes there."""
        for mark in self._copies:
            mark.wait()

    def release(self) -> None:
        """Drop all values; tensors that others hold keep theirs."""
        self.await_stepped()
        self.await_copies()
        self.values, self.copy, self._others = self.values.new_empty(0), None, None


class FlatBuffer:
    """Allocate, view, gather, free.

    Args:
        plan: the plan of the buffer.
        originals: the parameters. Their data is taken over: broadcast from rank 0, cut, and released; or each
            rank reads its part from a file.
        unit_name: the name of the unit, for errors.
        tag: the exchange tag of the gathers.
        context: the objects that all buffers share.
    """

    def __init__(
        self, plan: BufferPlan, originals: Sequence[Original], unit_name: str, tag: int, context: Context
    ) -> None:
        self.plan, self.originals = plan, tuple(originals)
        self.unit_name, self.tag, self._context = unit_name, tag, context
        self.described = describe_unit(unit_name)
        """The name of its unit, for error messages."""
        self.layout, self.trainable = plan.layout, plan.trainable
        axes = context.axes
        self._counts = [counts(original, axes.tp.rank, axes.pp.rank) for original in originals]
        self.shapes = tuple(original.shape for original in originals)
        self.whole_shapes = tuple(original.whole_shape for original in originals)
        self.is_resident, self.is_partial = plan.is_resident, plan.is_partial
        self.main_span = plan.main_span(context.axes.dp_shard.rank)
        """The flat range that `main` holds."""
        self.is_read = all(is_stored(original.parameter) for original in originals)
        """True if each rank has read its own part of the first values; else they are rank 0's values."""
        self.full, main = self._read() if self.is_read else self._take_over()
        self.full_bytes = self.full.nbytes
        """The bytes of the unsharded parameters, padding included."""
        self._own = self.full.detach()[self.main_span.slice]
        self.store = MainStore(main, plan, self._own if self.is_resident else None, context)
        """The main parameters, where gathers start."""
        self.filled: Hashable = self.store.version
        """The version of the values that `full` has; None: it is to be filled anew."""
        pairs = [self._make_pair(index, view) for index, view in enumerate(self.views(self.full))]
        self.sharded = tuple(sharded for sharded, _ in pairs)
        self.unsharded = tuple(unsharded for _, unsharded in pairs)
        self._edit_counts = [*map(_edit_count_of, self.unsharded)]
        """The edits of each unsharded parameter up to the last look, as torch counts them: [Note: Edits]."""
        item, offsets = self.full.element_size(), self.layout.offsets
        self._starts = {p: at * item for p, at in zip(self.unsharded, offsets, strict=True) if p.numel()}
        """The unsharded parameters that have elements, and the first byte in `full` of each."""
        self._axis = axes[plan.gathers[0].axis] if plan.gathers else None
        """The ranks that gather; None: this one has all values."""
        self.has_second = bool(plan.regathers) and plan.regathers != plan.gathers
        """True if a few ranks may keep a copy among them between forward and backward."""
        self._second: Tensor | None = None
        shown = first_of([original.fqn for original in originals])
        self._freed = (
            f"a parameter of {self.described}, or a view of one ({shown}), was kept from the forward and "
            "read where the parameters are freed: keep a copy (parameter.detach().clone()), return it from "
            "the forward, or read values, without gradients, under engine.unsharded()"
        )
        if not self.is_resident:
            release(self.full, self._freed)

    @property
    def main(self) -> Tensor:
        """[shard] or [total], main dtype: the main parameters."""
        return self.store.values

    def _make_pair(self, index: int, view: Tensor) -> tuple[ShardedParameter, UnshardedParameter]:
        """Retire an original; make its sharded and unsharded parameter, with the user's attributes."""
        original = self.originals[index]
        # peft asks for the name of the class before it dequantizes codes.
        kind = type(original.parameter).__name__ if self.plan.is_packed else None
        retire(original.parameter, original.fqn)
        sharded = ShardedParameter.wrap(
            self.main[self.sharded_span(index).slice],
            self.trainable,
            fqn=original.fqn,
            unit_name=self.unit_name,
            full_shape=self.whole_shapes[index],
            is_partial=self.is_partial or original.cut is not None,
            cut=original.cut,
            tp_rank=self._context.axes.tp.rank,
            state=self._context.state,
        )
        unsharded = UnshardedParameter.over(view, original.fqn, kind)
        if not self.trainable and unsharded.requires_grad:
            refuse_gradients(
                unsharded,
                f"'{original.fqn}' was frozen at initialize and got a gradient, but has no memory for one: "
                "set requires_grad=True before initialize",
            )
            unsharded.requires_grad_(False)
        # Weak: a slice need not keep the whole alive.
        sharded.unsharded, unsharded.sharded = weakref.ref(unsharded), weakref.ref(sharded)
        carry_attributes(original.parameter, sharded, unsharded)
        return sharded, unsharded

    def sharded_span(self, index: int) -> Span:
        """The part of `main`, and of the reduced gradient, that a sharded parameter is a view of."""
        return self.layout.parameter(index).intersect(self.main_span).shifted(-self.main_span.start)

    def start(self, index: int) -> int:
        """The first element of a sharded parameter, counted in the whole one."""
        whole = self.layout.parameter(index)
        return whole.intersect(self.main_span).start - whole.start

    def counted(self, index: int) -> slice:
        """The part of a sharded parameter that this rank counts: each element once in a copy of the model."""
        return self.owned(index) if self._counts[index] else slice(0, 0)

    def owned(self, index: int) -> slice:
        """The part of a sharded parameter that the layout gives to this rank of a shard group."""
        rank = self._context.axes.dp_shard.rank
        return slice(None) if self.is_partial else self.layout.owned(index, rank).slice

    # -- full parameters ------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """True if a gather would bring other values than `full` has."""
        return self.filled != self.store.gathered_version

    def has_edits(self) -> bool:
        """True if an unsharded parameter was edited since the last look, or lies elsewhere than in `full`.

        Called past the guards of parameters.
        """
        if [*map(_edit_count_of, self.unsharded)] != self._edit_counts:
            return True
        if not (self.is_resident or self.full.untyped_storage().nbytes()):
            return False
        first = self.full.data_ptr()
        return [*map(Tensor.data_ptr, self._starts)] != [first + start for start in self._starts.values()]

    def count_edits(self, edited: Container[nn.Parameter]) -> None:
        """Count a step, or another edit, of some sharded parameters as an edit of the unsharded ones.

        So torch refuses the backward of a forward that has saved values from before.
        """
        flags = [*map(edited.__contains__, self.sharded)]
        increment_version([*compress(self.unsharded, flags)])
        self._edit_counts = [*map(add, self._edit_counts, flags)]

    def take_edits(self) -> list[str]:
        """Look at the edits, and bring parameters that lie elsewhere back to `full`.

        Returns:
            The names of parameters whose edits are lost; they will be gathered anew.
        """
        lost: list[str] = []
        before, self._edit_counts = self._edit_counts, [*map(_edit_count_of, self.unsharded)]
        views = self.views(self.full) if self.full.untyped_storage().nbytes() else ()
        for index, parameter in enumerate(self.unsharded):
            is_lost = before[index] != self._edit_counts[index] and not self.plan.is_alias
            if views and parameter.data_ptr() != (view := views[index]).data_ptr():
                is_lost |= not equal_values(parameter.detach(), view)
                set_data(parameter, view)
            if is_lost:
                self.filled = self.store.copied = None  # of resident parameters the copy is a part
                lost.append(parameter.fqn)
        return lost

    def begin_gather(self, label: str) -> Handle | None:
        """Allocate `full` and write this rank's part, on the current stream.

        Returns:
            The exchange that fills the rest, with this label; None if there is none.
        """
        if not self.is_resident:
            allocate(self.full, self.full_bytes)
            self._context.meter.add(self.full_bytes)
        if self.has_second and self.is_stale:
            self.keep_second(False)
        if self._second is None:
            axis, own = self._axis, self.store.begin(self._own)
            self.filled = self.store.gathered_version
        else:
            axis, own = self._context.axes.dp_inner, self._second
        return None if axis is None else axis.all_gather(self.full, own, tag=self.tag, label=label)

    def free(self, keep_second: bool) -> None:
        """Give the storage of `full`, which is not resident, back; nothing may still be writing to it.

        Args:
            keep_second: True if the next gather of the same values is the plan's `regathers`.
        """
        if self.has_second:
            self.keep_second(keep_second)
        release(self.full, self._freed)
        self._context.meter.add(-self.full_bytes)

    def keep_second(self, keep: bool) -> None:
        """Keep the copy that a few ranks keep among them, or drop it."""
        meter = self._context.meter
        if keep and self._second is None:
            axis = self._context.axes.dp_inner
            self._second = self.full.detach().chunk(axis.size)[axis.rank].clone()
            meter.add(self._second.nbytes)
        elif not keep and self._second is not None:
            meter.add(-self._second.nbytes)
            self._second = None

    def release(self) -> None:
        """Drop all values; tensors that others hold keep theirs."""
        self.keep_second(False)
        self.store.release()
        self.full = self._own = self.main
        self.sharded, self.unsharded, self.originals = (), (), ()
        self._edit_counts, self._starts = [], {}

    def gather_wholes(self) -> list[Tensor]:
        """Gather the main parameters, as the model had them; collective.

        Returns:
            A tensor for each parameter, in memory of their own: a view of one if tensor ranks hold all of it.
        """
        whole = torch.empty(self.layout.total, dtype=self.main.dtype, device=self._context.device)
        own = whole[self.main_span.slice]
        self.store.load(own)
        if self.is_partial:
            label = f"all-gather of the main parameters of {self.described}"
            self._context.axes.dp_shard.all_gather(whole, own, tag=self.tag, label=label).wait()
        pairs, tp = zip(self.views(whole), self.originals, strict=True), self._context.axes.tp
        return [whole_value(view, original, tp) for view, original in pairs]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters inside `full` or other memory like it, in the shapes of the originals."""
        parts = (flat[self.layout.parameter(index).slice] for index in range(len(self.shapes)))
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    # -- first values ---------------------------------------------------------------------------------

    def _take_over(self) -> tuple[Tensor, Tensor]:
        """Make `full` and `main` with rank 0's values; padding is zero; the originals are emptied."""
        plan, context, layout = self.plan, self._context, self.layout
        values = torch.zeros(layout.total, dtype=plan.main_dtype, device=context.device)
        for index, original in enumerate(self.originals):
            _take_part(values[layout.parameter(index).slice], original, context)
            original.parameter.data = original.parameter.new_empty(0)
        for axis in (context.axes.dp, context.axes.outer):
            axis.broadcast(values, f"first broadcast of {self.described}")
        main = values[self.main_span.slice]
        return values.to(plan.compute_dtype), main if plan.is_alias else self._empty_main().copy_(main)

    def _read(self) -> tuple[Tensor, Tensor]:
        """Make `full` and `main` of stored values: each rank reads its own part, a parameter at a time."""
        plan, own, context = self.plan, self.main_span, self._context
        # A `full` that is freed at once is never written: on a CPU it takes no memory at all.
        make = torch.zeros if plan.is_resident else torch.empty
        full = make(plan.layout.total, dtype=plan.compute_dtype, device=context.device)
        main = full[own.slice] if plan.is_alias else self._empty_main().zero_()
        context.memory.evict(main)
        kept = Span(0, plan.layout.total) if plan.is_resident else own
        for index, original in enumerate(self.originals):
            whole = plan.layout.parameter(index)
            place = whole.intersect(kept)
            if place.size:
                inside = place.shifted(-whole.start)
                runs = (inside,) if original.cut is None else original.cut.runs(context.axes.tp.rank, inside)
                data = read_part(original.parameter, *runs)
                if plan.main_dtype.itemsize < plan.compute_dtype.itemsize:
                    data = data.to(plan.main_dtype)  # gathered values will have this precision
                if plan.is_resident:
                    full[place.slice].copy_(data)
                if not plan.is_alias:
                    part = place.intersect(own)
                    main[part.shifted(-own.start).slice].copy_(data[part.shifted(-place.start).slice])
            original.parameter.data = original.parameter.new_empty(0)
            context.memory.evict(main)
        return full, main

    def _empty_main(self) -> Tensor:
        return self._context.memory.empty(self.main_span.size, self.plan.main_dtype, self.plan.main_tier)


def _take_part(target: Tensor, original: Original, context: Context) -> None:
    """Write this rank's part of the values that the first of its tensor ranks has.

    The parts of the first data-parallel ranks are those that count, but all ranks issue the same collectives.
    """
    axes, data = context.axes, original.parameter.detach()
    if axes.tp.rank == 0 and (has_memory(data) or axes.dp.rank == 0):  # others need no deferred values
        whole = values_of(data).reshape(-1).to(context.device)
    else:
        whole = torch.empty(data.numel(), dtype=data.dtype, device=context.device)
    axes.tp.broadcast(whole, f"first broadcast of '{original.fqn}' over the tensor ranks")
    target.copy_(own_value(whole.view(original.whole_shape), original, axes.tp).reshape(-1))
