"""The gradients of all units: reduced as they arrive, delivered together at the end of a backward.

    due  --start-->  sending  --first exchange-->  further  --other exchanges-->  ended  --deliver-->

Units pass through these queues. Each move is a call of `Unit.reduce`, which goes on to the next `yield` of
`Gradients.reduce`; a reduction with one exchange has ended after it.

[Note: Packed units] A packed buffer is as large as its unit. At any time of a backward there are packed
buffers of the root, of the unit that is being packed, and of at most `num_prefetch` units (at least one)
whose first exchange is under way. So before a unit is packed, older reductions wait for their exchange.
Further exchanges of a reduction (between shard groups, or back to all ranks) start only when a reduction
starts in a backward that does not defer, so that their order is the same on all ranks.

[Note: Reductions ahead of the last backward] A backward that defers its gradients may still reduce gradients
of some units, to which no later backward of the step adds. They are packed like all that it defers, so that
bits do not depend on the time of a reduction. Their sums have packed buffers anyway: at the end of the
backward, and between backwards, the reductions that are left start together and nobody waits for them: they
go on during whatever comes next. A rank that has left out a unit starts it here, and others have started it
before; so further exchanges start in the last backward. That waits for all, agrees with all ranks and
delivers; without one, the step does. A gradient that comes to such a unit nevertheless is reduced by itself.

[Note: The order of units] The order in which units run gives the units that are gathered ahead in forward,
and the order of reductions. A rank learns it from its own forwards. Reductions must start in one order on all
ranks, or two ranks would each wait for a reduction that the other has not begun. If parameters are gathered
in a forward, all ranks make the same calls and know the order in which a backward leaves units. At other
stages ranks may take different branches and leave out different units. They agree on one order before the
first reduction, and again after a rank has met a new unit or another order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, islice, pairwise
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from zeroshard.comm.collectives import Axis
from zeroshard.comm.pool import BufferPool
from zeroshard.internals.dispatch import past_guards
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.parameters.state import Moment
from zeroshard.sharding.context import Context
from zeroshard.sharding.gradients import Gradients, Role
from zeroshard.sharding.unit import Unit

T = TypeVar("T", bound=Hashable)


def merge(orders: Iterable[Sequence[T]]) -> list[T]:
    """Make one order of all elements: a new element goes right after its predecessor in its own order."""
    merged: list[T] = []
    for order in orders:
        place = 0
        for element in dict.fromkeys(order):
            if element in merged:
                place = merged.index(element) + 1
            else:
                merged.insert(place, element)
                place += 1
    return merged


class UnitOrder:
    """The units in the order of their forwards, without the root.

    Args:
        units: the root unit first.
        context: the objects that all buffers share.
    """

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        setting = context.setting
        self.is_common = bool(setting.placements.parameter) and context.axes.dp_replicate.size == 1
        """True if all ranks make the same calls; then they need no agreement."""
        is_late = setting.steps_in_backward is False
        walked = (u for u in units if u is units[0] or u.plan.needs_turns or not is_late)
        self._by_name = {unit.name: unit for unit in walked}
        # The next one after those that are gathered ahead is read ahead from files.
        self._num_ahead = context.num_prefetch + any(unit.in_files for unit in units)
        self._set([])
        self.has_changed = False
        """True if this rank has met a new unit or another order since the ranks last agreed."""
        self.scope = tuple(units)
        """The units that may be gathered ahead."""
        self.reductions: list[Unit] = []
        """All units in the order in which they are reduced, the same on all ranks; the root comes last."""
        self.reduce_first([])

    def follow(self, called: Sequence[Unit], has_backward: bool) -> None:
        """Take in the units of a forward, in the order of their calls; without a backward, only new ones."""
        positions = [unit.position for unit in dict.fromkeys(called)]
        is_other = has_backward and any(a > b for a, b in pairwise(positions))
        if is_other or -1 in positions:
            self._set(merge([called, self.units] if is_other else [self.units, called]))
            self.has_changed = not self.is_common

    def agree(self, axis: Axis) -> None:
        """Make one order of the orders of all ranks, which is not `is_common`; collective."""
        everyone = axis.all_gather_object([u.name for u in self.units], "agreement on the order of units")
        merged = [self._by_name[name] for name in merge(everyone)]
        self.reduce_first(merged[::-1])
        self._set(merged)
        self.has_changed = False

    def reduce_first(self, units: Sequence[Unit]) -> None:
        """Reduce these units first from now on: the order is agreed on, or follows from a backward."""
        root, *others = self._by_name.values()
        ordered = dict.fromkeys((*units, *reversed(others)))
        ordered.pop(root, None)
        self.reductions = [*ordered, root]

    def _set(self, units: list[Unit]) -> None:
        self.units = units
        for position, unit in enumerate(units):
            unit.position = position

    def following(self, unit: Unit) -> list[Unit]:
        """The next units of `scope` in forward that are gathered; of the root, the first ones.

        A unit that is new has none.
        """
        if unit.position < 0 and unit.name:
            return []
        later = islice(self.units, unit.position + 1, None)
        found = (one for one in later if one in self.scope and not one.is_resident)
        return list(islice(found, self._num_ahead))


class Reducer:
    """Start reductions, keep a few under way, agree on which parameters were used, deliver.

    Args:
        units: the root unit first.
        context: the objects that all buffers share: the ranks that agree, and the state of the module.
        pool: the buffers that gradients are packed into; emptied after each delivery.
    """

    _scaling: ClassVar[Reducer | None] = None
    """The reducer whose loss scale, other than 1, is in the backward that this process runs."""

    def __init__(self, units: Sequence[Unit], context: Context, pool: BufferPool) -> None:
        axes = context.axes
        self._all = tuple(gradients for unit in units for gradients in unit.gradients)
        self._num_summands = axes.dp.size
        self._num_ahead = max(1, context.num_prefetch)
        """The reductions that may be under way while another unit is packed."""
        is_half = any(b.full.dtype is torch.float16 for unit in units for b in unit.buffers)
        self.is_half = any(axes.pp.all_gather_object(is_half, "dtypes of parameters"))
        """True if gradients pass through float16, where small ones vanish: the loss must be scaled. Pipeline
        ranks agree on it: some may have no parameter of float16."""
        self.asked = Role()
        """The role of the next backward, as `next_backward` sets it around it."""
        self._role: Role | None = None
        """The role of the last backward; None: it gives no gradients to parameters."""
        self._units, self.pool, self._axis = dict.fromkeys(units), pool, axes.everyone
        self.order = UnitOrder(units, context)
        """The order of the units; agreed on here."""
        self._state = context.state
        self.delivered: dict[ShardedParameter, None] = {}
        """The parameters whose gradients have been delivered and whose hooks have not been called."""
        self._must_agree = not self.order.is_common
        """True if the next reductions begin with an agreement on the order of units; on all ranks alike."""
        self._due: deque[Unit] = deque()
        """The units that this backward has not begun to reduce, in the order of all ranks."""
        self._ready: set[Unit] = set()
        """Units whose reduction may start when those before them have started."""
        self.sending: deque[Unit] = deque()
        """Units whose packed buffers are in an exchange, the newest last; see [Note: Packed units]."""
        self._further: deque[Unit] = deque()
        """Units with further exchanges, under way or to come."""
        self.started: set[Unit] = set()
        """Units whose reduction has been started since the last delivery."""
        self.num_late: int | None = None
        """The units that got a gradient after their reduction, on any rank; None before any backward."""
        self._late: list[tuple[Unit, Gradients, int, Tensor]] = []
        """Gradients that came after the reduction of their unit, as `receive` got them."""
        self.step_unit: Callable[[Unit], None] | None = None
        """Steps a unit whose gradients are reduced, during a backward that is the last one of its step."""
        self._ended: deque[Unit] = deque()
        """Units whose reductions have ended, and which may be stepped in this backward."""

    @contextmanager
    def next_backward(
        self, more: bool, *, send: bool = False, but: Collection[Unit] = (), scale: float | None = None
    ) -> Iterator[None]:
        """Give the backward inside its role: while `more` is true it adds up locally for a later one.

        Args:
            send: reduce the gradients nevertheless, into p.grad unless that is narrower than float32.
            but: units to whose gradients no later backward of the step adds: these are reduced, and arrive in
                p.grad with the others. All ranks name the same ones.
            scale: the factor in the loss, which is taken out of gradients; None: nobody has scaled it. It may
                change only when there are no gradients.
        """
        before, scaling = self.asked, Reducer._scaling
        defers = before.defers or (more and not send and self._num_summands > 1)
        ending = before.ending if before.defers else but  # to what is deferred around it, more is added
        self.asked = Role(defers, before.has_more or more, ending if defers else (), scale)
        if scale is not None:
            Reducer._scaling = self if scale != 1.0 else None
        try:
            yield
        finally:
            self.asked, Reducer._scaling = before, scaling

    @property
    def local_bytes(self) -> int:
        """Bytes of gradients that wait here for a later reduction."""
        return sum(gradients.local_bytes for gradients in self._all)

    @property
    def has_delivered(self) -> bool:
        """True if there is a `p.grad`."""
        return any(gradient_of(p) is not None for gradients in self._all for p in gradients.buffer.sharded)

    def check_begin(self) -> None:
        """Check that a backward that begins may add to the gradients of this step.

        Raises:
            RuntimeError: a backward has stepped units since the last step: gradients that came now would be
                stepped with once more. Or it is a backward of another engine, whose loss scale would be
                in the gradients; or the loss has no loss scale and needs one.
        """
        if not any(p.requires_grad for gradients in self._all for p in gradients.buffer.unsharded):
            return
        if Reducer._scaling not in (None, self):
            raise RuntimeError(
                "the backward of one engine, whose loss is multiplied by a loss scale, comes to the "
                "trained parameters of another engine, which does not know the scale: call backward(loss) of "
                "each engine on a loss of its own; for one loss over two models, put both into one module, "
                "with one engine"
            )
        if self.is_half and self.asked.scale is None:
            raise RuntimeError(
                "a loss without loss scale in float16: call engine.backward(loss), not loss.backward()"
            )
        self._state.refuse("a backward", Moment.STEPPED)

    def begin(self, role: Role | None) -> None:
        """Begin a backward.

        Args:
            role: its part in the step; None: it gives no gradients to parameters, and sends nothing.
        """
        self._role = role
        if role is None:
            return
        hook = self._state.hook
        if hook is not None and not hook.begin():
            hook = None
        steps = self.step_unit is not None and not role.has_more
        if steps:
            self._state.moments.add(Moment.STEPPED)
        own = role._replace(ending=(), hook=hook)  # with units in it there would be a cycle
        for gradients in self._all:
            gradients.begin(own, steps)
        self._ended.clear()
        self._list_due(role.ending if role.defers else self._units)

    def _list_due(self, units: Collection[Unit]) -> None:
        """List units that have not been started as those to start, in the order of all ranks."""
        if self.started.issuperset(units):
            return
        if self._must_agree:
            self.order.agree(self._axis)
            self._must_agree = False
        ordered = (unit for unit in self.order.reductions if unit in units and unit not in self.started)
        self._due, self._ready = deque(ordered), set()
        # Whoever holds a `p.grad` may change it later as well.
        self._state.has_shown_gradients &= self.has_delivered

    def receive(self, unit: Unit, gradients: Gradients, index: int, gradient: Tensor) -> None:
        """Pack a gradient of a buffer that holds none yet, or keep it for a reduction at the end.

        A parameter that is used outside of its unit's forward, or in a forward before the last backward, may
        get its gradient after the reduction of its unit.

        Raises:
            RuntimeError: the unit is stepped already.
        """
        if unit not in self.started:
            self._wait(self._num_ahead)
            gradients.pack(index, gradient)
        elif self.step_unit is None:
            gradients.used[index] = True
            self._late.append((unit, gradients, index, gradient))
        else:
            raise RuntimeError(
                f"{gradients.buffer.described} got a gradient after it was stepped in this backward: "
                "load the last checkpoint, and set offload.step_in_backward=False"
            )

    def start(self, unit: Unit | None = None) -> None:
        """Start the reduction of a unit when it is its turn, unless it is deferred; repeatable.

        Args:
            unit: the unit; None: all that this backward has not started, the root last.
        """
        self._ready.update(self._due if unit is None else (unit,))
        while self._due and self._due[0] in self._ready:
            self._wait(self._num_ahead)
            if self._role and not self._role.defers:
                for _ in range(len(self._further)):
                    self._reduce(self._further, self._further)
            self._reduce(self._due, self.sending)
            if step := self.step_unit:
                self._step_ended(step, but=1)

    def start_ahead(self, units: Collection[Unit] = ()) -> None:
        """Start the reductions that are left of this backward, and wait for none; repeatable.

        Args:
            units: others to whose gradients no later backward of the step adds; all ranks name the same ones.
                Nothing happens where no gradients are averaged.
        """
        if self._num_summands > 1:
            self._list_due(units)
            while self._due:
                self._reduce(self._due, self.sending)
            self._state.has_sums = True
            self.pool.release()

    def _reduce(self, queue: deque[Unit], under_way: deque[Unit]) -> None:
        """Start the reduction of the first unit of a queue, or go on with it, and move the unit on."""
        unit = queue.popleft()
        self.started.add(unit)
        (under_way if unit.reduce() else self._ended).append(unit)

    def _wait(self, but: int = 0) -> None:
        """Wait for first exchanges, so that their packed buffers are free.

        Args:
            but: the newest ones that go on; 0: all reductions come to their end.
        """
        while len(self.sending) > but:
            self._reduce(self.sending, self._further)
        while self._further and not but:
            self._reduce(self._further, self._further)

    def _step_ended(self, step: Callable[[Unit], None], but: int) -> None:
        """Step units whose reductions have ended, if this rank has had all gradients.

        Args:
            step: steps a unit.
            but: the newest ones that wait for the next unit if they compute with main parameters: hooks in
                the backward may read these.
        """
        if self._role is None or self._role.has_more or self._state.has_hooks:
            return  # hooks are to see, and may change, the gradients of a whole backward
        while len(self._ended) > but or (
            self._ended and not any(buffer.plan.is_alias for buffer in self._ended[0].buffers)
        ):
            unit = self._ended.popleft()
            if unit.gradients and all(all(one.used) for one in unit.gradients):
                step(unit)

    def end(self) -> bool:
        """End a backward: start the reductions that are left and deliver, or keep the sums.

        Returns:
            True if `call_hooks` is to be called: hooks may see the gradients of the step, which are complete.
        """
        role = self._role
        if role is None:
            return False
        if role.defers:
            self.start_ahead()
        else:
            self._deliver()
        return bool(self.delivered) and not role.has_more

    def pack_sums(self) -> None:
        """Pack the sums of a batch that was left to autograd."""
        for gradients in self._all:
            for index, parameter in enumerate(gradients.buffer.unsharded):
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:
                    gradients.pack(index, gradient)

    def call_hooks(self) -> None:
        """Call the hooks of delivered gradients: no later micro-batch adds to them."""
        delivered, self.delivered = self.delivered, {}
        for parameter in delivered:
            with past_guards():
                hooks = parameter._post_accumulate_grad_hooks
            for hook in tuple(hooks.values()) if hooks and gradient_of(parameter) is not None else ():
                with torch.no_grad():
                    hook(parameter)

    def drop_backward(self) -> None:
        """Drop the gradients that have not been delivered: the backward has ended in an exception.

        Other ranks may have started reductions that this one has not, and may come to their end. So the rest
        is reduced here as well, and the agreement shows the exception to the other ranks.
        """
        if self._role is None:
            return
        self.start()
        if not self._role.defers:
            self._agree(has_failed=True)
        self._fail()

    def taint(self) -> None:
        """Refuse a step with the gradients that there are, if any: an exception has ended their batch."""
        if self._state.has_sums or self.has_delivered:
            self._state.moments.add(Moment.TAINTED)

    def _fail(self) -> None:
        self.taint()
        if self._state.hook is not None:
            self._state.hook.drop()
        self.drop()
        for unit in self._units:
            unit.graph_calls.clear()

    def drop(self) -> None:
        """Drop all gradients that are in no `p.grad` yet, and call no hooks of the others."""
        self._wait()
        for gradients in self._all:
            gradients.drop()
        self._late.clear()
        self.started.clear()
        self.delivered = {}
        self._state.has_sums = False
        self.pool.release()

    def _deliver(self) -> None:
        """Start the reductions that are left, wait, and hand gradients to the parameters.

        Raises:
            RuntimeError: the backward of another rank has ended in an exception; or the ranks have issued
                different collectives, which a communicator may have mixed up.
        """
        self.start()
        used, again = self._agree(has_failed=False)
        if used is None:
            self._fail()
            if again:
                raise RuntimeError(
                    "a gradient came on some rank after another had stepped its unit in this backward: load "
                    "the last checkpoint, and set offload.step_in_backward=False"
                )
            raise RuntimeError(
                "the backward of another rank has ended in an exception: the gradients of this micro-batch "
                "are incomplete and were dropped on all ranks"
            )
        for _, gradients, index, gradient in self._late:
            gradients.pack(index, gradient)
        self._late.clear()
        self._due.extend(again)
        self.start()
        self._wait()
        if step := self.step_unit:
            self._step_ended(step, but=0)
        for gradients, own in zip(self._all, used, strict=True):
            gradients.deliver(own)
            if self._state.has_hooks:
                self.delivered |= dict.fromkeys(compress(gradients.buffer.sharded, own))
        self.started.clear()
        self.pool.release()
        self._state.has_sums = any(gradients.is_kept for gradients in self._all)

    def _agree(self, has_failed: bool) -> tuple[list[list[bool]] | None, list[Unit]]:
        """Agree on the end of a backward with all ranks; meanwhile all reductions end.

        Returns:
            True where any rank has a gradient, for each buffer and parameter; None if the backward of any
            rank has ended in an exception, or has stepped units that have late gradients. And the units that
            have late gradients on any rank.
        """
        late, units = {unit for unit, *_ in self._late}, self.order.reductions
        flags = [flag for gradients in self._all for flag in gradients.used]
        flags += [unit in late for unit in units]
        flags += [self.order.has_changed, has_failed, self.step_unit is not None]
        answer = self._axis.any(flags, "agreement on which parameters got a gradient", compares=True)
        self._wait()  # steps wait for the answer
        flag = iter(answer())
        used = [list(islice(flag, len(gradients.used))) for gradients in self._all]
        again = [unit for unit, is_late in zip(units, islice(flag, len(units)), strict=True) if is_late]
        self._must_agree, any_failed, any_steps = flag
        # After a failure, perhaps of a gradient that came late, no `train_batch` steps in its backward.
        self.num_late = (self.num_late or 0) + len(again) + (any_steps and any_failed)
        if any_failed:
            return None, []
        return None if any_steps and again else used, again
