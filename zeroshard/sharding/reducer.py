"""The gradients of all units: reduced as they arrive, delivered together at the end of a backward.

[Note: Two packed units] A packed buffer is as large as its unit. At any time of a backward there are packed
buffers of at most two units and the root: one unit is being packed, and the first exchange of another one is
under way. So before a unit is packed, all reductions but the newest wait for their exchange. Further
exchanges of a reduction (between shard groups, or back to all ranks) start only when a reduction starts, so
that their order is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from zeroshard.comm.mesh import Axes
from zeroshard.comm.pool import BufferPool
from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import ModuleState
from zeroshard.sharding.agreed import Agreed, flags_of, read_flags
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.order import UnitOrder
from zeroshard.sharding.pace import Pace
from zeroshard.sharding.post_accumulate import PostAccumulateHooks, has_hooks
from zeroshard.sharding.unit import Unit


class Meaning(NamedTuple):
    """The part that a backward has in a step."""

    defers: bool = False
    """True if it adds gradients up locally and sends nothing."""
    has_more: bool = False
    """True if a later backward adds to its gradients."""


class Reducer:
    """Start reductions, keep a few under way, agree on which parameters were used, deliver.

    Args:
        units: the root unit first.
        axes: the ranks that agree, and those over which gradients are averaged.
        pool: the buffers that gradients are packed into; emptied after each delivery.
        order: the order of the units; agreed on here.
        state: the state of the module.
    """

    def __init__(
        self, units: Sequence[Unit], axes: Axes, pool: BufferPool, order: UnitOrder, state: ModuleState
    ) -> None:
        self._units, self._pool = tuple(units), pool
        self._axis, self._is_averaged = axes.everyone, axes.dp.size > 1
        self._all = tuple(gradients for unit in units for gradients in unit.gradients)
        self._order = order
        self.pace = Pace()
        self._state, self._hooks = state, PostAccumulateHooks()
        self._places: dict[int, tuple[Gradients, int]] = {}
        """The gradients and the index of each parameter, by its id; made when they are asked for."""
        self._must_agree = True
        """True if the next reductions begin with an agreement on the order of units; on all ranks alike."""
        self._to_start: deque[Unit] = deque()
        """The units that this backward has not begun to reduce, in the order of all ranks."""
        self._ready: set[str] = set()
        """Names of units whose reduction may start when those before them have started."""
        self.under_way: list[Unit] = []
        """Units whose reductions are under way, the newest last."""
        self.is_deferring = False
        """True if backward adds gradients up locally and sends nothing."""
        self._has_more = False
        """True if a later backward adds to the gradients of this one."""
        self.leaves_over = False
        """True if gradients that are left to autograd stay there until a backward to which none adds."""
        self._asked, self._announced = Meaning(), Meaning()
        """Set around a backward by `deferring`, and inside one by `announce`."""
        self.is_half = any(b.full.dtype is torch.float16 for unit in units for b in unit.buffers)
        """True if gradients pass through float16, where small ones vanish: the loss must be scaled."""
        self.lacks_scale = self.is_half
        """True if gradients that arrive now belong to an unscaled loss."""
        self.accumulates = True
        """False in a backward that gives no gradients to parameters: deferred sums stay deferred."""
        self.step_unit: Callable[[Unit], None] | None = None
        """Steps a unit whose gradients are reduced, during a backward that is the last one of its step."""
        self._is_open = False
        """True from the beginning of a backward that reduces to the agreement at its end."""
        self._is_agreeing = False
        self._ended: list[Unit] = []
        """The units whose reductions ended during the agreement, which tells if more of them will come."""
        self._is_tainted = False

    @property
    def local_bytes(self) -> int:
        """Bytes of gradients that wait here for a later reduction."""
        return sum(gradients.local_bytes for gradients in self._all)

    @contextmanager
    def deferring(self, more: bool, *, send: bool = False) -> Iterator[None]:
        """Defer reductions while `more` is true: this backward adds up locally, and a later one adds to it.

        Args:
            send: reduce the gradients nevertheless, into p.grad unless that is narrower than float32.
        """
        before = self._asked
        wanted = self._meaning(more, send)
        self._asked = Meaning(before.defers or wanted.defers, before.has_more or wanted.has_more)
        self._follow()
        try:
            yield
        finally:
            self._asked = before
            self._follow()

    def announce(self, more: bool, *, send: bool, loss_scale: float) -> None:
        """Do what `deferring` and `scaled` do, for a backward that has begun and has no gradient yet."""
        self._announced, self.lacks_scale = self._meaning(more, send), False
        self._follow()
        for gradients in self._all:
            gradients.unscale = 1.0 / loss_scale

    def forget_announced(self) -> None:
        """Forget what was announced: the backward is over."""
        self.accumulates = True
        self._announced, self.lacks_scale = Meaning(), self.is_half
        self._follow()

    def _meaning(self, more: bool, send: bool) -> Meaning:
        return Meaning(more and not send and self._is_averaged, more)

    @property
    def has_more(self) -> bool:
        """True if a later backward is to add to the gradients of this one."""
        return self._has_more

    def _follow(self) -> None:
        self.is_deferring = self._asked.defers or self._announced.defers or not self.accumulates
        self._has_more = self._asked.has_more or self._announced.has_more

    @contextmanager
    def scaled(self, loss_scale: float) -> Iterator[None]:
        """Take the loss scale out of gradients: the loss of a backward inside was multiplied by it.

        The scale may change only when there are no gradients.
        """
        self.lacks_scale = False
        for gradients in self._all:
            gradients.unscale = 1.0 / loss_scale
        try:
            yield
        finally:
            self.lacks_scale = self.is_half

    def check_step(self) -> None:
        """Check that no backward has stepped units since the last step.

        Raises:
            RuntimeError: one has; gradients that came now would be stepped with once more.
        """
        if self._state.is_in_step:
            raise RuntimeError(
                "a second backward before step(): units were stepped in the first one. Expected one backward "
                "for each micro-batch, and step() after each; to take several, or to drop gradients, set "
                "offload.step_in_backward=False"
            )

    def begin(self, accumulates: bool, *, leave: bool = False) -> None:
        """Begin a backward.

        Args:
            accumulates: False if it gives no gradients to parameters; then it sends nothing.
            leave: True to leave it to autograd to add gradients up, as nothing else is to be done with them.
        """
        self._state.is_in_step |= self.step_unit is not None and accumulates and not self._has_more
        self.accumulates = accumulates
        self._follow()
        if not accumulates:
            return
        for gradients in self._all:
            gradients.begin(self._has_more, leave=leave and self.step_unit is None and not self.lacks_scale)
        if not self.is_deferring:
            self._open()

    def _open(self) -> None:
        """Begin the reductions of a backward."""
        if self._must_agree:
            self._order.agree(self._axis)
            self._must_agree = False
        self._to_start, self._ready = deque(self._order.of_reductions()), set()
        self._state.finish_scaling()  # of a step that has failed: this backward adds to the gradients
        self._is_open = True
        if self._state.has_shown_gradients:  # whoever holds a `p.grad` may change it later as well
            noted = (one for one in self._all if one.takes_notes)
            gradients = (gradient_of(p) for one in noted for p in one.buffer.sharded)
            self._state.has_shown_gradients = any(gradient is not None for gradient in gradients)

    def start(self, unit: Unit) -> None:
        """Start the reduction of a unit when it is its turn, unless reductions are deferred; repeatable."""
        if self.is_deferring:
            return
        self._ready.add(unit.name)
        while self._to_start and self._to_start[0].name in self._ready:
            self._start(self._to_start.popleft())

    def start_complete(self, unit: Unit) -> bool:
        """Start the reduction of a unit that has all of its gradients.

        Returns:
            True if it has been started, now or before in this backward.
        """
        if unit.name in self._ready:
            return True
        if self.is_deferring or not unit.is_complete:
            return False
        self.start(unit)
        return True

    def make_room(self) -> None:
        """Free the packed buffers of all reductions but the newest, before a buffer is packed."""
        for unit in self.under_way[:-1]:
            unit.settle_reduce()

    def _start(self, unit: Unit) -> None:
        self._progress(but=1)
        unit.start_reduce()
        if unit.is_reducing:
            self.under_way.append(unit)
        else:
            self._end_reduction(unit)

    def _progress(self, but: int) -> None:
        """Bring all reductions under way, but the newest ones, to their next exchange."""
        if self.under_way:
            for unit in self.under_way[: len(self.under_way) - but]:
                unit.progress_reduce()
            ended = [unit for unit in self.under_way if not unit.is_reducing]
            self.under_way = [unit for unit in self.under_way if unit.is_reducing]
            for unit in ended:
                self._end_reduction(unit)

    def _end_reduction(self, unit: Unit) -> None:
        """Step a unit at once, if that is wanted and this rank has had all of its gradients."""
        if self._is_agreeing:
            self._ended.append(unit)
        elif self.step_unit is not None and self._may_step(unit):
            self.step_unit(unit)

    def _may_step(self, unit: Unit) -> bool:
        if not unit.gradients or unit.computes_with_main or self._has_more:
            return False
        if unit.comes_in_parts or unit.has_more:
            return False
        if self._state.has_hooks and any(map(has_hooks, unit.gradients)):
            return False  # they are to see, and may change, the gradients of a whole backward
        return all(all(gradients.used) and not gradients.is_early for gradients in unit.gradients)

    def _finish(self) -> None:
        """Bring all reductions under way to their end."""
        while self.under_way:
            self._progress(but=0)

    def _start_rest(self) -> None:
        """Start the reductions that this backward has not started, the root's last."""
        while self._to_start:
            self._start(self._to_start.popleft())

    def take(self) -> None:
        """Take over the gradients that were left to autograd in the backward that ends.

        Raises:
            RuntimeError: one is sparse.
        """
        if not self._leaves_now:
            for gradients in self._all:
                gradients.take()

    @property
    def _leaves_now(self) -> bool:
        return self.leaves_over and self._has_more

    def end(self) -> None:
        """End a backward: start the reductions that are left and deliver, or keep the sums."""
        if not self.accumulates:
            return
        self.pace.num_backwards += 1
        if self._leaves_now and all(gradients.left_to_autograd for gradients in self._all):
            return
        if self.is_deferring:
            self._state.has_sums = True
            for gradients in self._all:
                gradients.keep_deferred()
        else:
            self._deliver()

    def before_step(self) -> None:
        """Make the gradients ready for an optimizer: reduce what was deferred.

        Raises:
            RuntimeError: an exception left gradients that hold part of a micro-batch.
        """
        if self._is_tainted:
            raise RuntimeError(
                "an exception in backward left gradients that hold only a part of a micro-batch; "
                "call zero_grad() and repeat the micro-batches since the last step"
            )
        if self._state.has_sums:
            for gradients in self._all:
                gradients.is_kept = False
            self._open()
            self._deliver()
        self._hooks.call()

    def call_hooks(self) -> None:
        """Call the hooks of gradients after a backward to which no later one adds."""
        self._hooks.call()

    def forget(self, parameter: ShardedParameter) -> None:
        """Forget the sum of one gradient that was not reduced yet, as `p.grad = None` does."""
        if not self._places:
            for gradients in self._all:
                places = enumerate(gradients.buffer.sharded)
                self._places.update((id(one), (gradients, index)) for index, one in places)
        if (place := self._places.get(id(parameter))) is not None:
            gradients, index = place
            gradients.forget(index)

    def drop_deferred(self) -> None:
        """Forget gradients that were not reduced yet, as zero_grad() does."""
        self._is_tainted = self._state.has_sums = False
        self.pace.num_backwards = 0
        self._hooks.drop()
        for gradients in self._all:
            if gradients.has_deferred:
                gradients.drop()

    def abandon(self) -> None:
        """Forget the gradients that have not been delivered: the backward has ended in an exception.

        Other ranks may have started reductions that this one has not, and may come to their end. So the rest
        is reduced here as well, and the agreement tells the other ranks.
        """
        if self._is_open:
            self._start_rest()
            self._agree(has_failed=True)
            self.pace.num_forwards = 0
        if self.accumulates:
            self._drop()
        self.forget_announced()

    def _drop(self) -> None:
        delivered = any(
            gradient_of(p) is not None for gradients in self._all for p in gradients.buffer.sharded
        )
        self._is_tainted |= delivered or self._state.has_sums
        self._state.has_sums = False
        for unit in self._units:
            unit.drop_gradients()
        self._pool.release()

    def _deliver(self) -> None:
        """Start the reductions that are left, wait, and hand gradients to the parameters.

        Raises:
            RuntimeError: the backward of another rank has ended in an exception; or the ranks have issued
                different collectives, which a communicator may have mixed up.
        """
        self._start_rest()
        agreed = self._agree(has_failed=False)
        if agreed.has_failed:
            self.pace.num_forwards = 0
            self._drop()
            raise RuntimeError(
                "the backward of another rank has ended in an exception: the gradients of this micro-batch "
                "are incomplete and were dropped on all ranks"
            )
        ended, self._ended = self._ended, []
        for unit in ended:
            if unit not in agreed.again:
                self._end_reduction(unit)
        for unit in agreed.again:
            if unit in agreed.early:
                self._drop()
                raise RuntimeError(
                    f"{unit.described} got a gradient in two parts on one rank, and was stepped with the "
                    "first of them: set offload.step_in_backward=False, and load the last checkpoint"
                )
            self._start(unit)
        self._finish()
        for gradients, used in zip(self._all, agreed.used, strict=True):
            gradients.deliver(used)
            if self._state.has_hooks:
                self._hooks.note(gradients, used)
        self._must_agree = agreed.has_changed
        self._pool.release()
        self._state.has_sums = any(gradients.is_kept for gradients in self._all)
        self.pace.compare(agreed.pace)

    def _agree(self, has_failed: bool) -> Agreed:
        """Tell all ranks the end of this backward here; meanwhile reductions come to their end."""
        units = self._order.of_reductions()
        flags = flags_of(self._all, units, self._order.has_changed, has_failed, self.pace.flags())
        answer = self._axis.any(flags, "agreement on which parameters got a gradient", compares=True)
        self._ended, self._is_agreeing = [], True
        try:
            self._finish()
        finally:
            self._is_agreeing = False
        self._is_open = False
        return read_flags(answer(), self._all, units)
