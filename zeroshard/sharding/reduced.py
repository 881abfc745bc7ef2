"""The gradients of one flat buffer on their way from autograd to the optimizer.

    autograd's gradient  --pack-->  flat [total]  --reduce-scatter-->  reduced [shard]  --deliver-->  p.grad

`flat` holds each gradient times 1/N in the reduce dtype and lives from the first gradient of a backward
to the end of the reduction. Under deferral (no_sync; accumulation where gradients are replicated) it
holds plain sums, at least in float32, and lives on to the next backward; then it is scaled and reduced once.
`reduced` lives on, too, if p.grad is narrower than float32 and a later backward of the same step is known to
come. A p.grad never has the loss scale in it; `flat` has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from zeroshard.comm.collectives import Channel
from zeroshard.comm.pool import BufferPool
from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.parameters.gradient import gradient_of, set_gradient
from zeroshard.plan.exchange import Collective, Exchange
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Context
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.landing import Landing, leaves_device
from zeroshard.sharding.noted import Noted


class GradientState(Enum):
    """The states of the gradients of a buffer within a backward."""

    EMPTY = "empty"
    PACKING = "packing"
    REDUCING = "reducing"
    REDUCED = "reduced"


_MOVES = {
    GradientState.EMPTY: {GradientState.PACKING, GradientState.REDUCING},
    GradientState.PACKING: {GradientState.REDUCING, GradientState.EMPTY},
    # A parameter that is used outside of its unit's forward, too, may get its gradient after the unit was
    # left: this part is packed while the first one is still reduced, and is reduced by itself.
    GradientState.REDUCING: {GradientState.REDUCED, GradientState.PACKING},
    GradientState.REDUCED: {GradientState.EMPTY, GradientState.PACKING, GradientState.REDUCING},
}


class ReducedGradients(Gradients):
    """Pack, walk through the exchanges of the plan, deliver."""

    def __init__(self, buffer: FlatBuffer, context: Context, pool: BufferPool, tag: int) -> None:
        super().__init__(buffer)
        self._context, self._pool, self._tag = context, pool, tag
        self._reduce_dtype = buffer.plan.reduce_dtype
        self._scale = 1.0 / context.axes.dp.size
        self._factor: Tensor | None = None
        """[1], on the device: the value of `_scale`."""
        num = len(buffer.sharded)
        self._slices = [buffer.layout.parameter(index).slice for index in range(num)]
        self._own_slices = [buffer.sharded_span(index).slice for index in range(num)]
        self.state = GradientState.EMPTY
        self._arrived = [False] * num
        self._filled = [False] * num
        self._flat: Tensor | None = None
        self._is_deferred = False
        self._zeros = tuple(gap.slice for gap in buffer.layout.gaps)
        """The padding of `flat`: zeros from the pool, and nothing else is written there."""
        self._reduction: Iterator[bool] | None = None
        self._is_exchanging = False
        self._reduced: Tensor | None = None
        self._holds_sums = False
        """True if `_reduced` holds sums of several micro-batches, to be added to `p.grad`."""
        self._added: set[int] = set()
        """Parameters whose gradients have been added to their `p.grad` as they arrived."""
        self._squares: Tensor | None = None
        """Of gradients on their way to the host: the sum of squares that this rank counts, 0-dim, float64."""
        self.takes_notes = leaves_device(buffer, context)
        self._landing = Landing(context, buffer.plan.main_size) if self.takes_notes else None

    @property
    def has_deferred(self) -> bool:
        return self._is_deferred or self._reduced is not None

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        return self.state is GradientState.PACKING

    @property
    def is_reducing(self) -> bool:  # type: ignore[override]
        return self._reduction is not None

    @property
    def local_bytes(self) -> int:
        return sum(t.nbytes for t in (self._flat, self._reduced) if t is not None)

    def begin(self, more: bool, *, leave: bool = False) -> None:
        self.is_kept, self.is_early = more and self._is_narrow, False

    def pack(self, index: int, gradient: Tensor, defer: bool) -> None:
        gradient = self._flatten(index, gradient)
        if not self._arrived[index]:
            self._arrived[index] = True
            self.num_missing -= 1
        self.used[index] = True
        self._move(GradientState.PACKING)
        if self._flat is None:
            self._is_deferred = defer
            self._flat = self._take(self.buffer.plan.wide_dtype if defer else self._reduce_dtype)
        target = self._flat[self._slices[index]]
        scale = 1.0 if self._is_deferred else self._scale
        if self._filled[index]:
            target.add_(gradient, alpha=scale)
        elif scale == 1.0:
            target.copy_(gradient)
        else:
            self._write_scaled(target, gradient)
        self._filled[index] = True

    def _write_scaled(self, target: Tensor, gradient: Tensor) -> None:
        """Write `gradient` times 1/N into `target`: one kernel on an accelerator, with any dtypes."""
        if gradient.dtype == target.dtype:
            torch.mul(gradient, self._scale, out=target)
        elif target.is_cpu:  # a product of two dtypes would make a copy first, in new memory
            target.copy_(gradient).mul_(self._scale)
        else:
            if self._factor is None:  # with one dimension, unlike a number, it takes part in type promotion
                wide = torch.promote_types(gradient.dtype, target.dtype)
                self._factor = torch.full((1,), self._scale, dtype=wide, device=target.device)
            torch.mul(gradient, self._factor, out=target)

    def start_reduce(self) -> None:
        self.complete()
        self._move(GradientState.REDUCING)
        self._arrived = [False] * len(self._arrived)
        self.num_missing = len(self._arrived)
        self._reduction = self._reduce(self._finish_packing())
        self._advance()

    def _reduce(self, flat: Tensor) -> Iterator[bool]:
        """Walk through the exchanges of the plan, from `flat` to the gradients that the optimizer reads.

        Yields:
            True while an exchange is under way, False before another one.
        """
        plan, axes = self.buffer.plan, self._context.axes
        in_place = plan.main_size == plan.layout.total and flat.dtype == plan.wide_dtype
        if in_place:
            result = flat
            self._pool.forget(flat)
        else:
            result = torch.empty(plan.main_size, dtype=plan.wide_dtype, device=flat.device)
            if not plan.reductions:  # it only leaves the device
                result.copy_(flat)
                self._pool.give(flat, self._zeros)
        scattered: list[Tensor] = []
        """This rank's parts of `result`, each inside the one before it."""
        for number, exchange in enumerate(plan.reductions):
            axis = axes[exchange.axis]
            if number:
                yield False
            if exchange.collective is Collective.REDUCE_SCATTER:
                whole = scattered[-1] if scattered else result
                is_result = plan.is_partial and not scattered
                part = whole if is_result else whole.chunk(axis.size)[axis.rank]
                yield from self._exchange(exchange, flat if not scattered else whole, part)
                if not scattered and not in_place:
                    self._pool.give(flat, self._zeros)
                scattered.append(part)
            else:
                part = scattered.pop()
                yield from self._exchange(exchange, scattered[-1] if scattered else result, part)
        self._absorb(result)

    def _exchange(self, exchange: Exchange, whole: Tensor, part: Tensor) -> Iterator[bool]:
        """Scatter the sums of `whole` into `part`, or gather `whole` from the parts."""
        axis, of = self._context.axes[exchange.axis], f"of the gradients of {self.buffer.describe()}"
        with self._context.streams.reduce.after_compute():
            if exchange.collective is Collective.REDUCE_SCATTER:
                label = f"reduce-scatter {of}"
                handle = axis.reduce_scatter(whole, part, self._pool, tag=self._tag, label=label)
            else:
                handle = axis.all_gather(
                    whole, part, tag=self._tag, label=f"all-gather {of}", channel=Channel.REDUCE
                )
        yield True
        handle.wait()

    def _take(self, dtype: torch.dtype) -> Tensor:
        """A flat buffer whose padding is zero."""
        return self._pool.take(dtype, self.buffer.layout.total, self._zeros)

    def _finish_packing(self) -> Tensor:
        """The flat gradients, scaled, in the reduce dtype, with zeros where none arrived."""
        flat, self._flat = self._take(self._reduce_dtype) if self._flat is None else self._flat, None
        missing = [flat[part] for part, filled in zip(self._slices, self._filled, strict=True) if not filled]
        if missing:
            torch._foreach_zero_(missing)
        self._filled = [False] * len(self._filled)
        if not self._is_deferred:
            return flat
        self._is_deferred = False
        flat.mul_(self._scale)
        if flat.dtype == self._reduce_dtype:
            return flat
        reduced = self._take(self._reduce_dtype).copy_(flat)
        self._pool.give(flat, self._zeros)
        return reduced

    def settle(self) -> None:
        if self._is_exchanging:
            self._advance()

    def progress(self) -> None:
        self.settle()
        self._advance()

    def complete(self) -> None:
        while self.is_reducing:
            self._advance()

    def _advance(self) -> None:
        """Go on to the next `yield` of the reduction, or to its end."""
        if self._reduction is not None:
            state = next(self._reduction, None)
            self._is_exchanging = state is True
            if state is None:
                self._reduction = None
                if self.state is GradientState.REDUCING:
                    self._move(GradientState.REDUCED)

    def _absorb(self, result: Tensor) -> None:
        """Add reduced gradients to what is there, until the ranks have agreed on which parameters were used.

        sums are kept (`p.grad` is narrow)   all of them to `_reduced`, which `deliver` adds to `p.grad`
        there is a `p.grad`                  to it
        there is none                        to `_reduced`, which becomes `p.grad`
        """
        if self.unscale != 1.0:  # only now: a reduce dtype of float16 needs the scale as well
            result.mul_(self.unscale)
        self._holds_sums |= self.is_kept
        sums = self._sums_so_far()
        dtype = result.dtype if self.is_kept else self.buffer.plan.main_dtype
        is_new = self._reduced is None and len(sums) < len(self.buffer.sharded)
        if self._landing is not None:
            is_new |= self._holds_sums and any(total.dtype is not dtype for _, total in sums)
            self._leave(result, dtype, sums, is_new, self._landing)
            return
        for own, total in sums:
            total.add_(result[own])
        if is_new:
            self._reduced = result
        if self._reduced is not None:
            self._reduced = self._reduced.to(dtype)

    def _sums_so_far(self) -> list[tuple[slice, Tensor]]:
        """The tensors that reduced gradients are added to, each with its place in these."""
        if self._holds_sums:
            return [] if self._reduced is None else [(slice(None), self._reduced)]
        sums = []
        for index, (parameter, own) in enumerate(zip(self.buffer.sharded, self._own_slices, strict=True)):
            if self._reduced is not None and index not in self._added:
                sums.append((own, self._reduced[own]))
            elif (gradient := gradient_of(parameter)) is not None:
                self._added.add(index)
                sums.append((own, gradient))
        return sums

    def _leave(
        self,
        result: Tensor,
        dtype: torch.dtype,
        sums: Sequence[tuple[slice, Tensor]],
        is_new: bool,
        landing: Landing,
    ) -> None:
        """Send reduced gradients to the host. Sums come from there, and return: the device adds.

        Args:
            dtype: the dtype on the host.
            sums: as `_sums_so_far` gives them.
            is_new: True if they need memory of their own on the host.
        """
        needs_norm = not (self.is_kept or self._context.setting.steps_in_backward)
        if (
            needs_norm and self._squares is None and result.dtype is not torch.float64
        ):  # whose squares overflow
            # A second part of the gradients writes to the same memory, in the order of the stream.
            self._squares = torch.empty((), dtype=torch.float64, device=result.device)
        with landing.beside(result, *(total for _, total in sums)):
            values = result.to(dtype)
            if sums:
                fetched = landing.fetched(sums)
                for own, _ in sums:
                    fetched[own].add_(result[own])
                    if is_new:
                        values[own].copy_(fetched[own])
                values = values if is_new else fetched
            if self._squares is not None:
                self._squares.copy_(self._squares_of(values))
            for own, target in sums:
                if target.dtype is dtype:  # else it is replaced
                    target.copy_(values[own], non_blocking=True)
            if is_new:
                self._reduced = landing.land(values)

    def _squares_of(self, total: Tensor) -> Tensor:
        """The sum of squares of the elements that this rank counts, 0-dim, float64."""
        own = [total[part][self.buffer.counted(index)] for index, part in enumerate(self._own_slices)]
        return foreach_sum_of_squares(own).sum()

    def keep_deferred(self) -> None:
        self._arrived = [False] * len(self._arrived)
        self.num_missing = len(self._arrived)

    def deliver(self, used: Sequence[bool]) -> None:
        self.complete()
        if not self.is_kept:
            self._move(GradientState.EMPTY)
            deliver = self._detach(used)
            self._wait_on_host()
            deliver()

    def _detach(self, used: Sequence[bool]) -> Callable[[], None]:
        arrives = self._landing.arrival() if self._landing is not None else None
        reduced, squares, added = self._reduced, self._squares, self._added
        self._reduced, self._squares, self._added, self._holds_sums = None, None, set(), False
        self.noted = None
        self.used = [False] * len(self.used)
        chosen = [is_used and at not in added for at, is_used in enumerate(used)] if added else used

        def deliver() -> None:
            nonlocal reduced
            if arrives is not None:
                arrives()
            total, reduced = reduced, None  # nobody else is to keep its memory
            adds = total is not None and self._set(total, chosen)
            if squares is not None and not adds:
                self.noted = Noted.of(self.buffer, squares)

        return deliver

    def _set(self, total: Tensor, chosen: Sequence[bool]) -> bool:
        """Set `p.grad` of chosen parameters; return True if a value was added to one here."""
        adds = False
        for index, parameter in enumerate(self.buffer.sharded):
            if chosen[index]:
                gradient = total[self._own_slices[index]]
                if (before := gradient_of(parameter)) is None:
                    set_gradient(parameter, gradient)
                else:
                    before.add_(gradient)
                    adds = True
        return adds

    def _wait_on_host(self) -> None:
        if self._landing is not None:
            self._landing.wait()

    def drop(self) -> None:
        self.complete()
        self._wait_on_host()
        super().drop()
        num = len(self.used)
        if self._flat is not None:
            self._pool.forget(self._flat)
        self._flat = self._reduced = self._squares = None
        self._holds_sums, self._added = False, set()
        self._is_deferred = False
        self._arrived, self._filled = [False] * num, [False] * num
        self.num_missing = num
        self.state = GradientState.EMPTY

    def forget(self, index: int) -> None:
        super().forget(index)
        self._filled[index] = False
        if self._reduced is not None:
            self._wait_on_host()
            self._reduced[self._own_slices[index]].zero_()
            self._squares = None

    def _move(self, state: GradientState) -> None:
        if state is self.state:
            return
        if state not in _MOVES[self.state]:
            where, now = self.buffer.describe(), self.state.value
            raise RuntimeError(f"the gradients of {where} cannot go from {now} to {state.value}")
        self.state = state


def gradients_of(buffer: FlatBuffer, context: Context, pool: BufferPool) -> Gradients:
    """Make the gradients of a trained buffer; their class follows from the exchanges of the plan."""
    return (
        ReducedGradients(buffer, context, pool, buffer.tag + 1)
        if buffer.plan.reductions or leaves_device(buffer, context)
        else Gradients(buffer)
    )
