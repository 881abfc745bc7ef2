"""The gradients of one flat buffer on their way from autograd to the optimizer.

    autograd's gradient  --pack-->  flat [total]  --reduce-scatter-->  reduced [shard]  --deliver-->  p.grad

`flat` holds each gradient times 1/N in the reduce dtype and lives from the first gradient of a backward
to the end of the reduction. Under deferral (no_sync; accumulation where gradients are replicated) it
holds plain sums, at least in float32, and lives on to the next backward; then it is scaled and reduced once.
For a hook of the user `flat` holds plain sums, too, and the hook takes the place of the exchanges.
Reduced gradients are added to the `p.grad` that is there. Where there is none, they wait for the delivery;
they live on if p.grad is narrower than float32 and a later backward of the same step is known to come.
A p.grad never has the loss scale in it; `flat` has.

A plan without exchanges needs no flat buffer: its gradients count as reduced when they arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.comm import moves
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.status import REDUCE
from zeroshard.internals.foreach import foreach_sum_of_squares
from zeroshard.parameters.sharded import ShardedParameter, gradient_of, set_gradients
from zeroshard.plan.exchange import Collective
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Context
from zeroshard.stores.store import GradientStore

_NEAR = GradientStore()


class Role(NamedTuple):
    """The part that a backward has in a step, from its begin to its end."""

    defers: bool = False
    """True if it adds gradients up locally and sends nothing, but for the units in `ending`."""
    has_more: bool = False
    """True if a later backward adds to its gradients."""
    ending: Collection[Any] = ()
    """The units to whose gradients no later backward adds: it reduces them, though it defers the others."""
    scale: float | None = None
    """The loss scale in its gradients; None: nobody gives one, and the scale of the last backward holds."""
    hook: Any = None
    """The `gradient_hooks.GradientHook` that reduces its gradients; None: the exchanges of the plan do."""


class Gradients:
    """Pack, walk through the exchanges of the plan, deliver.

    Args:
        buffer: the buffer of the parameters.
        context: the objects that all buffers share.
        pool: the buffers that gradients are packed into.
        store: where reduced gradients wait for their step.
    """

    def __init__(self, buffer: FlatBuffer, context: Context, pool: BufferPool, store: GradientStore) -> None:
        self.buffer, self._context, self._pool, self._tag = buffer, context, pool, buffer.tag + 1
        plan, num = buffer.plan, len(buffer.sharded)
        self._reduce_dtype, self._wide_dtype = plan.reduce_dtype, plan.wide_dtype
        self._main_size = plan.main_size
        self._exchanges = [(context.axes[one.axis], one.collective) for one in plan.reductions]
        self._role = Role()
        """The part of the backward under way, or of the last one."""
        self._mean = self._scale = 1.0
        """The factor that makes means of gradients, and the part of it that is in the packed buffer."""
        self._factor = torch.tensor(1.0 / context.axes.dp.size, dtype=torch.float64, device="cpu")
        """The value of `_scale` other than 1: a product with a number makes a tensor of it first."""
        self._wide_factor: Tensor | None = None
        """[1], on the device: the same for gradients in another dtype; it takes part in type promotion."""
        self._own_slices = [buffer.sharded_span(index).slice for index in range(num)]
        gaps, total = buffer.layout.gaps, buffer.layout.total
        is_mostly_padding = 2 * sum(gap.size for gap in gaps) > total
        self._gaps = (slice(total),) if is_mostly_padding else tuple(gap.slice for gap in gaps)
        """The parts of `flat` that are cleared: its padding, or all of it in one piece."""
        self.store = self._target = store
        """Where gradients wait for their step; and where they go now: a backward that steps keeps them."""
        packed = range(num) if plan.reductions or not store.is_near else ()
        self._slices = [buffer.layout.parameter(index).slice for index in packed]
        """The places of gradients in the flat buffer; none if they need no such buffer."""
        self.noted: tuple[Tensor, list[tuple[int, int]]] | None = None
        """The sum of squares of the `p.grad` that were set last, if the device took it, and `_places`."""
        self._unscale = 1.0
        """One over the loss scale."""
        self.is_kept = False
        """True while sums stay here until the last micro-batch, because `p.grad` has fewer bits."""
        self._sum_dtype = plan.main_dtype
        """The dtype of reduced gradients where there is no sum yet."""
        self._kept_as: torch.dtype | None = None
        """The dtype of gradients that are kept as they are; None: all are copied, as their step may wait."""
        self._reset()

    def _reset(self) -> None:
        self.used = [False] * len(self.buffer.sharded)
        """Parameters that got a gradient since the last delivery, on this rank."""
        self.missing = set(range(len(self.used)))
        """Parameters whose gradient has not arrived in this backward."""
        self._filled: set[int] = set()
        """Parameters whose places in the flat buffer have been written."""
        self.flat: Tensor | None = None
        """The packed gradients, [total]; None if there are none."""
        self._reduced: dict[int, Tensor] = {}
        """Reduced gradients that are in no `p.grad` yet, by the index of the parameter, [n]."""
        self._squares: Tensor | None = None
        """Of gradients on their way to the host: the sum of squares that this rank counts, 0-dim, float64."""

    @property
    def local_bytes(self) -> int:
        """Bytes of gradients that are not in any p.grad."""
        return sum(one.nbytes for one in (self.flat, *self._reduced.values()) if one is not None)

    def begin(self, role: Role, steps: bool = False) -> None:
        """Begin a backward, which `steps` units or not. New gradients are added to those that exist."""
        self._role = role
        self._mean = 1.0 if role.hook is not None else 1.0 / self._context.axes.dp.size
        if role.scale is not None:
            self._unscale = 1.0 / role.scale
        plan = self.buffer.plan
        self.is_kept = role.has_more and not role.defers and self._wide_dtype != plan.main_dtype
        self._sum_dtype = self._wide_dtype if self.is_kept else plan.main_dtype
        may_wait = self._unscale == 1.0 and not steps and self._context.state.can_wait
        self._kept_as = None if may_wait else self._sum_dtype
        self._target = _NEAR if steps and not self.store.is_near else self.store
        self.missing = set(range(len(self.used)))

    def pack(self, index: int, gradient: Tensor) -> None:
        """Take over this rank's gradient of one parameter.

        Args:
            index: the index of the parameter in the buffer.
            gradient: in the compute dtype and the shape of the original, as autograd made it; nobody else
                uses it.

        Raises:
            RuntimeError: the gradient is sparse.
        """
        if gradient.layout is not torch.strided:
            name = self.buffer.originals[index].fqn
            raise RuntimeError(
                f"the gradient of '{name}' is {gradient.layout}; expected a dense one: build the layer with "
                "sparse=False, or call the function without sparse_grad=True"
            )
        if gradient.requires_grad:
            gradient = gradient.detach()
        if gradient.ndim != 1:
            gradient = gradient.reshape(-1)
        self.missing.discard(index)
        self.used[index] = True
        if not self._slices:
            self._keep(index, gradient)
            return
        flat = self._open() if self.flat is None else self.flat
        target = flat[self._slices[index]]
        if index in self._filled:
            target.add_(gradient, alpha=self._scale)
        elif self._scale == 1.0:
            target.copy_(gradient)
        elif gradient.dtype == target.dtype:
            torch.mul(gradient, self._factor, out=target)
        elif target.is_cpu:  # a product of two dtypes would make a copy first, in new memory
            target.copy_(gradient).mul_(self._factor)
        else:  # one kernel
            if self._wide_factor is None:
                wide = torch.promote_types(gradient.dtype, target.dtype)
                self._wide_factor = torch.full((1,), self._mean, dtype=wide, device=target.device)
            torch.mul(gradient, self._wide_factor, out=target)
        self._filled.add(index)

    def _keep(self, index: int, gradient: Tensor) -> None:
        """Reduce a gradient without exchanges: add it to the sum that is there, or keep it in its dtype.

        It is cast at once: on a CPU its values are still in the cache. If its step may wait, it is copied, as
        it may be a view of the user's memory: of a gradient that was given to backward, or that a hook keeps.
        """
        if self._unscale != 1.0:
            # Autograd may give two parameters views of one memory: nothing is multiplied in place.
            gradient = gradient.to(self._wide_dtype) * self._unscale
        total = self._reduced.get(index)
        if total is None and not self.is_kept:
            total = gradient_of(self.buffer.sharded[index])
        if total is not None:
            total.add_(gradient)
        elif gradient.dtype is self._kept_as:
            self._reduced[index] = gradient
        else:
            self._reduced[index] = gradient.to(self._sum_dtype, copy=True)

    def _open(self) -> Tensor:
        """Take a buffer to pack into; its padding is zero."""
        dtype = self._wide_dtype if self._role.defers else self._reduce_dtype
        self._scale = 1.0 if self._role.defers else self._mean
        self.flat = flat = self._pool.take(dtype, self.buffer.layout.total)
        if self._gaps:
            torch._foreach_zero_([flat[gap] for gap in self._gaps])  # one kernel for all of them
        return flat

    def reduce(self) -> Iterator[None]:
        """Reduce what is packed; parameters without a gradient count zeros.

        Yields:
            While an exchange is under way, and before the second one, when the packed buffer is free.
        """
        if self._slices:
            exchange = self._over_ranks if self._role.hook is None else self._by_hook
            yield from exchange(self._finish_packing())

    def _over_ranks(self, flat: Tensor) -> Iterator[None]:
        """Walk through the exchanges of the plan, from `flat` to the gradients that the optimizer reads."""
        plan = self.buffer.plan
        in_place = self._main_size == plan.layout.total and flat.dtype == self._wide_dtype
        if in_place:
            result = flat
            self._pool.drop(flat)
        else:
            result = torch.empty(self._main_size, dtype=self._wide_dtype, device=flat.device)
            if not plan.reductions:  # it only leaves the device
                result.copy_(flat)
                self._pool.give(flat)
        parts = [result]
        """This rank's parts of `result`, each inside the one before it."""
        of = f"of the gradients of {self.buffer.described}"
        for number, (axis, collective) in enumerate(self._exchanges):
            if number == 1:
                yield
            with self._context.streams.reduce.after_compute():
                if collective is Collective.REDUCE_SCATTER:
                    whole, label = parts[-1] if number else flat, f"reduce-scatter {of}"
                    part = result if plan.is_partial and not number else parts[-1].chunk(axis.size)[axis.rank]
                    parts.append(part)
                    handle = axis.reduce_scatter(whole, part, self._pool, tag=self._tag, label=label)
                else:
                    part, label = parts.pop(), f"all-gather {of}"
                    handle = axis.all_gather(parts[-1], part, tag=self._tag, label=label, channel=REDUCE)
            yield
            handle.wait()
            if not (number or in_place):  # the first exchange is a reduce-scatter
                self._pool.give(flat)
                flat = result  # nothing here keeps its memory
        self._absorb(result)

    def _by_hook(self, flat: Tensor) -> Iterator[None]:
        """Let the hook of the user turn `flat` into means, and take this rank's part of them."""
        with self._context.streams.reduce.after_compute():
            handle = self._role.hook.run(self.buffer, [flat[part] for part in self._slices])
        yield
        handle.wait()
        result = flat[self.buffer.main_span.slice].clone().to(self._wide_dtype)
        self._pool.give(flat)
        self._absorb(result)

    def _finish_packing(self) -> Tensor:
        """The flat gradients, scaled, in the reduce dtype, with zeros where none arrived."""
        flat, self.flat = self._open() if self.flat is None else self.flat, None
        if len(self._filled) < len(self._slices):
            missing = [flat[part] for index, part in enumerate(self._slices) if index not in self._filled]
            torch._foreach_zero_(missing)
        self._filled = set()
        if self._scale != self._mean:
            flat.mul_(self._mean)
        if flat.dtype == self._reduce_dtype:
            return flat
        reduced = self._pool.take(self._reduce_dtype, flat.numel()).copy_(flat)
        self._pool.give(flat)
        return reduced

    def _absorb(self, result: Tensor) -> None:
        """Add reduced gradients to the sums that are there, here or in `p.grad`; others wait for `deliver`.

        The ranks have not agreed yet on which parameters were used.
        """
        if self._unscale != 1.0:  # only now: a reduce dtype of float16 needs the scale as well
            result.mul_(self._unscale)
        own, dtype, target = self._own_slices, self._sum_dtype, self._target
        # Nothing is added to a `p.grad` while sums are kept, since it has fewer bits.
        parameters = () if self.is_kept else enumerate(self.buffer.sharded)
        sums = {index: g for index, p in parameters if (g := gradient_of(p)) is not None} | self._reduced
        # A sum stays in its memory, but for a step here, and at the end of sums that have more bits.
        stay = {index: g for index, g in sums.items() if target is self.store and g.dtype is dtype}
        others = [index for index in range(len(own)) if index not in stay]
        with target.beside(result):
            for index, total in sums.items():
                if target.is_near and index in stay:
                    total.add_(result[own[index]])
                else:
                    result[own[index]].add_(moves.to_device(total, result.device))
            if target is not self.store:
                set_gradients((self.buffer.sharded[index], None) for index in sums)
            if others or not target.is_near:
                result = result.to(dtype)
            if not target.is_near:
                if not (self.is_kept or dtype is torch.float64):
                    counted = [result[part][self.buffer.counted(index)] for index, part in enumerate(own)]
                    self._squares = foreach_sum_of_squares(counted).sum()  # those of float64 overflow
                for index, total in stay.items():
                    total.copy_(result[own[index]], non_blocking=True)
            result = target.store(result) if others else result
        for index in others:
            self._reduced[index] = result[own[index]]

    def deliver(self, used: list[bool]) -> None:
        """Set `p.grad` of the sharded parameters, or add to it, unless sums are kept for a later backward.

        Args:
            used: for each parameter, True if any rank has used it; the others keep their `p.grad`.
        """
        if not self.is_kept:
            for index, part in self._reduced.items() if self._target is not self.store else ():
                with self.store.beside(part):  # of a unit that was not stepped
                    self._reduced[index] = self.store.store(part)
            self.used = used
            self.hand_over()
            self.used = [False] * len(used)

    def hand_over(self, chosen: Set[ShardedParameter] | None = None) -> None:
        """Set `p.grad` of parameters that were used, or add to it; the device follows copies to the host.

        Args:
            chosen: parameters whose unit is stepped before the end of the backward; None: all of the buffer.
        """
        if not self.store.is_near:
            self.store.follow()
            if not self._context.state.steps.wait_later(self.store.wait):
                self.store.wait()
        squares, dtype, adds = self._squares, self.buffer.plan.main_dtype, False
        self.noted = self._squares = None
        new: list[tuple[ShardedParameter, Tensor]] = []
        for index, parameter in enumerate(self.buffer.sharded):
            if index not in self._reduced or not (chosen is None or parameter in chosen):
                continue
            gradient = self._reduced.pop(index)  # nobody else is to keep its memory
            if self.used[index]:
                before = gradient_of(parameter)
                if before is not None or gradient.dtype is not dtype:
                    self.store.wait()  # the host may compute
                if gradient.dtype is not dtype:  # a sum that was kept has more bits
                    gradient = gradient.to(dtype)
                if before is None:
                    new.append((parameter, gradient))
                else:
                    before.add_(gradient)
                    adds = True
        set_gradients(new)
        if squares is not None and not adds:
            self.noted = squares, self._places()

    def noted_squares(self) -> Tensor | None:
        """Return the sum of squares of the gradients, as this rank counts them, if the device took it.

        Returns:
            0-dim, float64. None, too, if somebody has changed, replaced or seen gradients since the backward.
        """
        if self.noted is None or self._context.state.has_shown_gradients:
            return None
        squares, places = self.noted
        return squares if places == self._places() else None

    def _places(self) -> list[tuple[int, int]]:
        """The address of each `p.grad`, and the number of its changes that torch has counted."""
        gradients = map(gradient_of, self.buffer.sharded)
        return [(one.data_ptr(), one._version) for one in gradients if one is not None]

    def drop(self) -> None:
        """Drop all gradients that are in no `p.grad` yet, after the reductions under way have ended."""
        if self.flat is not None:
            self._pool.drop(self.flat)
        for parameter in self.buffer.unsharded:
            parameter.grad = None
        self._reset()
