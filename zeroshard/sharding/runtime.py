"""The hooks: gather a unit just before it is used, free it right after, reduce its gradients.

    before forward    unshard this, prefetch the next, wait for this
    after forward     put the sharded parameters back; the storage goes when the next unit begins
    before backward   take the turns of the backward up to this unit, wait for it. It begins with the first
                      gradient of an output, or of a layer inside whose values have left beside the outputs
    a gradient        pack it; when the unit has all of its gradients and it is its turn, start the reduction
    end of backward   take the turns that are left, agree on which parameters were used, deliver, free

`calls.py` notes the calls of a forward, `backward.py` makes the turns of a backward of them.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.pool import BufferPool
from zeroshard.comm.watch.ledger import REDUCE, STEP
from zeroshard.plan.originals import computes_in_own_dtype
from zeroshard.sharding.autograd import (
    at_end_of_backward,
    is_in_backward,
    is_transformed,
    outside_transforms,
    will_accumulate,
)
from zeroshard.sharding.backward import Backward
from zeroshard.sharding.buffer import Context, FlatBuffer
from zeroshard.sharding.calls import CallLog
from zeroshard.sharding.changes import Changes
from zeroshard.sharding.fastpaths import allows_no_hooks, layers_without_hooks, show_first_layers, surround
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.hooks import redirect_hooks
from zeroshard.sharding.nested import cast_inputs, cast_outputs, find_tensors, view_tensors
from zeroshard.sharding.order import UnitOrder
from zeroshard.sharding.parameter import ShardedParameter, describe_unit
from zeroshard.sharding.reducer import Reducer
from zeroshard.sharding.storage import share_storage
from zeroshard.sharding.tracers import refuse_tracers
from zeroshard.sharding.unit import ForwardCall, Unit, UnitInfo, UnitState
from zeroshard.sharding.unsharded import UnshardedParameter

DRAIN_S = 5.0
"""Seconds to wait for exchanges under way when nobody needs them any more."""


def _drain(context: Context) -> None:
    context.axes.drain(DRAIN_S)
    context.streams.join()


class _Token:
    """Lives as long as a backward."""


class Runtime:
    """Runs the units of one sharded module.

    Args:
        units: the root unit first.
        context: what their buffers share.
        pool: scratch buffers of the backward.
        num_prefetch: how many units are gathered ahead.
        output_dtype: floating-point outputs of the root are cast to it.
        changes: of the modules; hooks are added to them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        context: Context,
        pool: BufferPool,
        *,
        num_prefetch: int,
        output_dtype: torch.dtype | None,
        changes: Changes,
    ) -> None:
        self.root, self.units, self.context = units[0], tuple(units), context
        self.changes = changes
        self.ignored: Mapping[nn.Parameter, str] = {}
        """Parameters that are not sharded, which optimizers may step beside the others."""
        makes_same_calls = context.setting.placements.frees_parameters and context.axes.dp_replicate.size == 1
        self._together: WeakKeyDictionary[Optimizer, WeakSet[Optimizer]] = WeakKeyDictionary()
        """For each optimizer over the sharded parameters, those that step together with it."""
        self._stepped: WeakSet[Optimizer] = WeakSet()
        """Optimizers that have stepped, while others that step together with them have not."""
        self._is_half_stepped = False
        self._order = UnitOrder(units, is_common=makes_same_calls)
        self.reducer = Reducer(units, context.axes.dp, pool, self._order, context.phase)
        self.here = context.axes.dp.here
        self._num_prefetch = 0 if all(unit.is_resident for unit in units) else num_prefetch
        self._reshard_after_forward = bool(context.setting.placements.kept)
        self._output_dtype = output_dtype
        self._is_alone = context.axes.dp.size == 1 and all(unit.is_resident for unit in units)
        """True if there is nothing to gather, free or reduce: then only the root's outputs are watched."""
        self._calls = CallLog(units)
        self._called: list[Unit] = []
        self._kept: frozenset[Unit] = frozenset()
        self._idle: list[Unit] = []
        """Units whose forward has ended and whose storage goes when another unit begins."""
        self._staying: set[Unit] = set()
        """Units that stay gathered from this forward to its backward."""
        self._hidden: dict[Unit, list[ForwardCall]] = {}
        """Units with outputs that have no hooks: they stay gathered up to the end of a backward or a step."""
        self._has_warned = False
        self.phase = context.phase
        finish = weakref.WeakMethod(self._finish_gathers)
        self.phase.before_edit = lambda: (call := finish()) is not None and call()
        forget = weakref.WeakMethod(self._forget_gradient)
        self.phase.forget_gradient = lambda parameter: (call := forget()) is not None and call(parameter)
        owns = weakref.WeakMethod(self._owns_memory)
        self.phase.owns_memory = lambda tensor: (call := owns()) is not None and call(tensor)
        self.is_in_method = False
        """True if the forward under way is another method of the root, which may call the root itself."""
        self.is_held = False
        """True if everything stays gathered after a forward."""
        self._is_in_backward = False
        self._has_had_backward = False
        """Since the last forward, and its graph is not to come again."""
        self._makes_graph = False
        """True if this backward makes a graph for others, which need the parameters once more."""
        self._has_second_graph = False
        """True if a backward since the last step has made one: then everything stays gathered."""
        self._walk = self._begin_walk()
        """Of the backward under way, or the last one."""
        self._backward: Callable[[], object] = object
        """Gives None when the backward that was begun has ended in an exception."""
        for unit in units:
            self._hook(unit)
        show_first_layers(units, self.module, changes)
        # An engine that is dropped may have gathers under way, into memory that goes with it.
        weakref.finalize(self, _drain, context).atexit = False

    # -- what the outside asks ------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The sharded module."""
        return self.root.modules[0]

    @property
    def buffers(self) -> Iterator[FlatBuffer]:
        return (buffer for unit in self.units for buffer in unit.buffers)

    @property
    def parameters(self) -> Iterator[ShardedParameter]:
        return (parameter for buffer in self.buffers for parameter in buffer.sharded)

    @property
    def is_in_forward(self) -> bool:
        """True if the root's forward, or a method that counts as one, is running."""
        return self.phase.is_in_forward

    @property
    def is_closed(self) -> bool:
        """True if the module is not sharded by this runtime any more."""
        return self.phase.refusal is not None

    @property
    def has_gradients(self) -> bool:
        """True if there are gradients, delivered or deferred."""
        if any(gradients.has_deferred for unit in self.units for gradients in unit.gradients):
            return True
        with torch._C.DisableTorchFunctionSubclass():
            return any(parameter.grad is not None for parameter in self.parameters)

    @property
    def unit_infos(self) -> list[UnitInfo]:
        return [
            UnitInfo(unit.name, unit.plan.numel, kept=self._is_kept(unit), reason=unit.plan.reason)
            for unit in self.units
            if unit.buffers
        ]

    def expect_together(self, optimizers: Sequence[Optimizer]) -> None:
        """From now on these step together: parameters are gathered again after the last of them."""
        together = WeakSet(optimizers)
        for optimizer in optimizers:
            self._together[optimizer] = together

    def before_step(self) -> None:
        """Make the gradients ready for an optimizer: reduce what was deferred.

        Raises:
            RuntimeError: an exception left gradients that hold part of a micro-batch.
        """
        self._recover()
        self._finish_gathers()
        self._drop_second_graph()
        self.reducer.before_step()

    def after_step(self, optimizer: Optimizer) -> None:
        """Main parameters changed: replicated parameters are gathered again while the host goes on."""
        self.context.axes.dp.ledger.note(STEP, REDUCE)
        self.reducer.pace.num_backwards = 0
        torch.clear_autocast_cache()  # torch keeps casts to the end of the context, whatever has changed
        for buffer in self.buffers:
            buffer.mark_stale()
        self._stepped.add(optimizer)
        self._is_half_stepped = not set(self._together[optimizer]) <= set(self._stepped)
        if not self._is_half_stepped:
            self._stepped.clear()
            self._refresh()

    def _refresh(self) -> None:
        for unit in reversed(self._order.of_reductions()):  # the same on all ranks; about that of a forward
            unit.refresh()
        self.phase.reads_main = any(unit.state is UnitState.GATHERING for unit in self.units)

    def _finish_gathers(self) -> None:
        """Before main parameters change: wait for the gathers that read them."""
        if self.phase.reads_main:
            self.phase.reads_main = False
            for unit in self.units:
                if unit.state is UnitState.GATHERING:
                    unit.wait()

    def drop_deferred(self) -> None:
        """Forget gradients that were not reduced yet, as zero_grad() does."""
        self._recover()
        self._drop_second_graph()
        self.reducer.drop_deferred()

    def _forget_gradient(self, parameter: ShardedParameter) -> None:
        """Forget what was added up of the gradient of one parameter and was not reduced yet."""
        if not is_in_backward():
            self._recover()
            self.reducer.forget(parameter)

    def _owns_memory(self, tensor: Tensor) -> bool:
        """True if a tensor lies in the memory of unsharded parameters."""
        return any(share_storage(tensor, buffer.full) for buffer in self.buffers)

    def abandon_forward(self) -> None:
        """If a forward was begun, it has ended in an exception. Gradients stay as they are."""
        if self.phase.is_in_forward and not is_in_backward():
            self.phase.is_in_forward = False
            self._calls.drop_failed()
            self._idle, self._called, self._staying = [], [], set()
            self.put_away()

    def require_slices(self, what: str) -> None:
        """Refuse what works on sharded parameters while others stand in for them.

        Raises:
            RuntimeError: inside unsharded().
        """
        if any(unit.slots.is_shown for unit in self.units):
            raise RuntimeError(
                f"{what} inside engine.unsharded() would take the full parameters for the model's own: call "
                "it after the block; inside, the model's own methods see full parameters"
            )

    def check_slots(self) -> None:
        """Before parameters are read: refuse those that others have put into the modules.

        Raises:
            RuntimeError: naming the first one, on the rank that has it.
        """
        for unit in self.units:
            unit.slots.check()

    def settle(self) -> None:
        """Wait for every exchange under way, and clean up after an exception.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if is_in_backward() or self.phase.is_in_forward:
            raise RuntimeError("full parameters can be had between steps, not inside a forward or backward")
        self._recover()
        self._drop_second_graph()
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                unit.wait()

    # -- forward --------------------------------------------------------------------------------------

    def _hook(self, unit: Unit) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self.before_forward(unit, sys._getframe(1))

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            return self.after_forward(unit, output)

        def after_layer(layer: nn.Module, args: Any, output: Any) -> None:
            self._watch_layer(unit, output)

        def at_last(module: nn.Module, args: Any, output: Any) -> None:
            self.leave_forward(unit)

        cast = None
        if (dtype := self.context.setting.dtypes.param_dtype) is not None:
            cast = functools.partial(cast_inputs, dtype=dtype, in_lists=unit is self.root)
        for module in unit.modules:
            own = None if computes_in_own_dtype(module) else cast
            self._hook_module(module, cast=own, before=before, after=after, at_last=at_last)
        if not unit.is_resident and not unit.is_compiled:
            without = {layer for module in unit.modules for layer in layers_without_hooks(module)}
            for layer in unit.slots.owners.difference(unit.modules) - without:
                self.changes.hook(layer.register_forward_hook(after_layer))
        for gradients in unit.gradients:
            for index, parameter in enumerate(gradients.buffer.unsharded):
                self._hook_gradient(unit, gradients, index, parameter)

    def _hook_module(self, module: nn.Module, *, cast: Any, before: Any, after: Any, at_last: Any) -> None:
        if allows_no_hooks(module):
            surround(module, self.changes, cast=cast, before=before, after=after, at_last=at_last)
            return
        if cast is not None:
            self.changes.hook(module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True))
        self.changes.hook(
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after),
            module.register_forward_hook(at_last, always_call=True),
        )

    def before_forward(self, unit: Unit, caller: FrameType) -> None:
        """Free what has ended, gather this unit and start to gather the next, and show it in the modules.

        Args:
            unit: whose forward begins.
            caller: a frame that runs as long as that does.
        """
        if self.is_in_method and unit is self.root:
            return
        if unit is self.root or not self.phase.is_in_forward:
            refuse_tracers()
        if is_transformed():
            with outside_transforms():
                self.before_forward(unit, caller)
            unit.call.is_transformed = True
            return
        if is_second := is_in_backward():
            self._begin_second_call(unit)
        else:
            self._begin_call(unit, caller)
        unit.unshard()
        if self._num_prefetch and not is_second:
            for upcoming in self._order.following(unit, self._num_prefetch):
                upcoming.unshard()
        unit.wait()
        unit.slots.install()
        if not torch.is_grad_enabled():
            unit.note_views()
        if not is_second:
            self.here.enter("the forward of ", unit.described)

    def _begin_call(self, unit: Unit, caller: FrameType) -> None:
        if self._is_half_stepped:
            raise RuntimeError(
                "a forward between the steps of optimizers that were attached together, after whose last "
                "step parameters are gathered: step all of them, or attach each one by itself"
            )
        if unit is self.root:
            self._begin_forward()
        elif self.phase.is_in_forward:
            self._called.append(unit)
        if self._idle:
            self._free_idle(unit)
        if self._has_had_backward:
            self._has_had_backward = False
            self._calls.forget()
        self._calls.begin(unit, caller)

    def _begin_second_call(self, unit: Unit) -> None:
        """Gather a unit whose forward runs again inside a backward, in the order of all ranks."""
        unit.call = self._walk.repeat(unit, self._calls.tick())
        if self._is_in_backward:
            self._walk.enter_again(unit)

    def after_forward(self, unit: Unit, output: Any) -> Any:
        """Hook the outputs for backward; the output, or views of it."""
        if self.is_in_method and unit is self.root:
            return output
        if unit is self.root and self._output_dtype is not None:
            output = cast_outputs(output, self._output_dtype)
        # Hooks would run inside the transform, and a unit whose outputs have none stays gathered.
        is_hidden = unit.call.is_transformed
        if not is_hidden:
            if not unit.is_resident and not self.is_held:
                output = unit.copy_own(output)
            if unit is self.root or not self._is_alone:
                output, is_hidden = self._watch_outputs(unit, output)
        if not is_in_backward():
            if is_hidden and torch.is_grad_enabled():
                self._hidden.setdefault(unit, []).append(unit.call)
            if unit is self.root:
                with outside_transforms() if unit.call.is_transformed else nullcontext():
                    self._end_forward(torch.is_grad_enabled() or unit.call.is_transformed)
            elif unit.is_resident or unit.call.outer is not None:
                pass
            elif self._reshard_after_forward and not is_hidden:
                self._idle.append(unit)
            else:
                self._staying.add(unit)
        return output

    def leave_forward(self, unit: Unit) -> None:
        """A forward is over, perhaps by an exception; then the root's has not come to its end."""
        if self.is_in_method and unit is self.root:
            return
        if is_transformed():
            with outside_transforms():
                self.leave_forward(unit)
            return
        is_second = is_in_backward()
        self._calls.end(unit, is_second)
        unit.edits.keep()
        if not is_second:
            if not self.is_held and not unit.is_in_forward:  # else it has called itself
                unit.slots.uninstall()
                if not torch.is_grad_enabled():
                    unit.leave_views()
            if unit is self.root:
                self.abandon_forward()
            if self.phase.is_in_forward:
                self.here.enter("the forward of ", self.root.described)
            else:
                self.here.leave()

    def _begin_forward(self) -> None:
        self.abandon_forward()
        self._recover()
        self.reducer.forget_announced()
        self.phase.is_in_forward = True
        self.reducer.pace.num_forwards += torch.is_grad_enabled()
        self._called, self._staying = [], set()
        self._refresh()

    def _end_forward(self, may_have_backward: bool) -> None:
        self.phase.is_in_forward = False
        self._order.follow(self._called, has_backward=may_have_backward)
        if may_have_backward:
            self._kept = frozenset(self._idle)
            self._staying |= {self.root, *self._idle}
        else:
            self._staying = set()
        self._idle = []
        if not self._keeps_all:
            for unit in self.units:
                if unit not in self._staying and unit not in self._hidden:
                    unit.reshard(keep_second=may_have_backward)

    @property
    def _keeps_all(self) -> bool:
        return self.is_held or self._has_second_graph

    def _drop_second_graph(self) -> None:
        """A step ends: no backward goes through earlier forwards and backwards any more."""
        if self._has_second_graph or self._hidden:
            self._has_second_graph, self._has_had_backward = False, True
            self.put_away()

    def _free_idle(self, but: Unit) -> None:
        idle, self._idle = self._idle, []
        if not self._keeps_all:
            for unit in idle:
                if unit is not but and unit not in self._hidden:
                    unit.reshard(keep_second=torch.is_grad_enabled())

    def _is_kept(self, unit: Unit) -> bool:
        return unit.plan.is_kept(
            self.context.setting.placements, is_root=unit is self.root, ends_forward=unit in self._kept
        )

    # -- backward -------------------------------------------------------------------------------------

    def _watch_outputs(self, unit: Unit, output: Any) -> tuple[Any, bool]:
        """Hook the outputs of a forward that will have a backward.

        Returns:
            The output, and whether gradients may come back through something that cannot be hooked.
        """
        if not torch.is_grad_enabled():
            return output, False
        tensors, is_opaque = find_tensors(output)
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if any(tensor.is_leaf or tensor._backward_hooks for tensor in tensors):
            # A unit that returned its input: hooks of one tensor would run in the order of the forward. Those
            # of a parameter, which lives on, would run in later backwards too.
            output = view_tensors(output)
            tensors = [tensor for tensor in find_tensors(output)[0] if tensor.requires_grad]
        if tensors:
            call = unit.call
            if unit.may_join_backward:
                unit.open_calls.add(call)

            def before_backward(gradient: Tensor) -> None:
                self._before_backward(call)

            for tensor in tensors:
                tensor.register_hook(before_backward)
        if is_opaque:
            self._warn_opaque(unit)
        return output, is_opaque

    def _watch_layer(self, unit: Unit, output: Any) -> None:
        """Hook a layer with parameters: its values may leave the unit beside the outputs, as in a cache."""
        if not isinstance(output, Tensor) or not output.requires_grad or torch.compiler.is_compiling():
            return
        call = unit.call
        if call.is_transformed:
            return

        def before_backward(gradient: Tensor) -> None:
            if call.entered_in is not self._backward or self._backward() is None:
                self._before_backward(call)

        output.register_hook(before_backward)

    def _warn_opaque(self, unit: Unit) -> None:
        if unit is not self.root and not unit.is_resident and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{describe_unit(unit.name)} returns an object that zeroshard cannot look into for tensors: "
                "it and its like stay gathered until the end of backward",
                stacklevel=2,
            )

    def _before_backward(self, call: ForwardCall) -> None:
        if self.phase.is_in_forward:
            raise RuntimeError(
                f"autograd ran through {describe_unit(call.unit.name)} inside the model's own forward, which "
                "a sharded model does not allow: take gradients after the forward has returned"
            )
        if self._is_in_backward and self._backward() is None:
            self._abandon_backward()
        if not self._is_in_backward:
            self._begin_backward()
        unit = call.unit
        if unit.open_calls:
            unit.open_calls.discard(call)
        call.entered_in = self._backward
        self._walk.enter(call)
        if unit.backward_needs_parameters:
            unit.unshard()
            unit.wait()
            unit.slots.install()  # a part of it may be recomputed
        self.here.enter("the backward of ", unit.described)

    def _begin_walk(self) -> Backward:
        units = () if self._is_alone else self.units
        return Backward(units, self.reducer, num_prefetch=self._num_prefetch, keeps=self._has_second_graph)

    def _begin_backward(self) -> None:
        if self.is_closed:
            raise RuntimeError("backward through a forward of an engine that was closed since")
        self._is_in_backward = True
        self._makes_graph = torch.is_grad_enabled()
        self._has_second_graph |= self._makes_graph
        self._calls.collect()
        self._walk = self._begin_walk()
        self._order.leave(self._walk.left)
        self.reducer.begin(will_accumulate(self._trained()))
        self._agree_on_frozen()
        if self._is_alone:
            for unit in self.units:
                unit.slots.install()
        token = _Token()
        self._backward = weakref.ref(token)

        def end(_: _Token = token) -> None:  # autograd drops it, and with it the token, on an exception
            self._end_backward()

        at_end_of_backward(end)

    def _trained(self) -> Iterator[nn.Parameter]:
        for unit in self.units:
            for gradients in unit.gradients:
                yield from (p for p in gradients.buffer.unsharded if p.requires_grad)

    def _agree_on_frozen(self) -> None:
        """A frozen unit has a backward if something trained ran before it, perhaps on some ranks only."""
        units = [unit for unit in self.units[1:] if unit.may_join_backward]
        flags = [bool(unit.open_calls) for unit in units]
        answer = self.context.axes.dp.any(flags, "agreement on which frozen units have a backward")
        for unit, joins in zip(units, answer(), strict=True):
            unit.joins_backward = joins

    def _hook_gradient(self, unit: Unit, gradients: Gradients, index: int, parameter: nn.Parameter) -> None:
        # Autograd keeps the hook out of the garbage collector's sight: strong references would leak.
        of_runtime, of_unit, place = weakref.ref(self), weakref.ref(unit), unit.gradients.index(gradients)

        def arrived(parameter: Tensor) -> None:
            runtime, unit = of_runtime(), of_unit()
            assert runtime is not None, "the module's hooks hold it"
            assert unit is not None, "the module's hooks hold it"
            gradients = unit.gradients[place]
            parameter.__class__ = nn.Parameter  # see `edits.py`
            gradient, parameter.grad = parameter.grad, None
            parameter.__class__ = UnshardedParameter
            assert gradient is not None, "called when it has been accumulated"
            if runtime.reducer.lacks_scale:
                raise RuntimeError(
                    f"'{gradients.buffer.originals[index].fqn}' got a gradient of a loss that is not scaled, "
                    "and in float16 small gradients vanish: call engine.backward(loss), not loss.backward()"
                )
            if not runtime._is_in_backward:  # no output of a unit could be hooked
                runtime._begin_backward()
            if unit.state is UnitState.SHARDED and unit.backward_needs_parameters:
                raise RuntimeError(
                    f"the gradient of '{gradients.buffer.originals[index].fqn}' came from outside of the "
                    f"backward of {unit.described}, whose parameters were freed: return what the loss "
                    "depends on from its forward"
                )
            if runtime.reducer.under_way and not gradients.has_more:
                runtime.reducer.make_room()
            gradients.pack(index, gradient, runtime.reducer.is_deferring)
            if not gradients.num_missing:
                runtime._walk.note_gradient(unit)

        parameter.register_post_accumulate_grad_hook(arrived)
        redirect_hooks(parameter, gradients.buffer.sharded[index])

    def announce(self, more: bool, *, send: bool, loss_scale: float) -> None:
        """Tell what a backward that has just begun means; see `Reducer.announce`."""
        if self._is_in_backward and self._backward() is None:
            self._abandon_backward()
        self.reducer.announce(more, send=send, loss_scale=loss_scale)

        def forget() -> None:
            if not self._is_in_backward:  # it did not come here; else its end forgets
                self.reducer.forget_announced()

        at_end_of_backward(forget)

    def _end_backward(self) -> None:
        self._walk.finish()
        self._is_in_backward, self._has_had_backward = False, not self._makes_graph
        self.reducer.end()
        completes = self.reducer.accumulates and not self.reducer.has_more
        self.reducer.forget_announced()
        self.put_away()
        torch.clear_autocast_cache()  # of casts whose gradients would arrive at the end of the next backward
        self.here.leave()
        if completes:
            self.reducer.call_hooks()

    def put_away(self) -> None:
        """Show sharded parameters and free the others, unless they are held or a graph needs them."""
        if self.is_held:
            return
        self._hidden.clear()
        for unit in self.units:
            unit.slots.uninstall()
            if unit.is_resident:
                unit.edits.keep()  # of a forward that ran again
            elif not self._has_second_graph:
                unit.reshard()

    def _recover(self) -> None:
        """Clean up after a backward that ended in an exception."""
        if self._is_in_backward and not is_in_backward():
            self._abandon_backward()

    def _abandon_backward(self) -> None:
        self._walk.finish()  # as the other ranks do
        self._is_in_backward, self._has_had_backward = False, True
        self._has_second_graph = False
        self.reducer.abandon()
        self.put_away()
        self.here.leave()
