"""The forward and backward of a sharded module: gather a unit before use, free it after, reduce gradients.

    before forward    unshard this, prefetch the next, wait for this
    after forward     put the sharded parameters back; the storage goes when the next unit begins
    before backward   take the turns of the backward up to this unit, wait for it. It begins with the first
                      gradient of an output, or of a layer inside: its values may leave with the outputs
    a gradient        pack it; when the unit has all of its gradients and it is its turn, start the reduction
    end of backward   take the turns that are left, agree on which parameters were used, deliver, free

Hooks of `runtime.py` call these verbs. `walk.py` notes the calls of a forward, makes the turns of a backward
of them, and lists the reasons to keep a unit gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from zeroshard.config.pipeline import NEWEST_WEIGHTS
from zeroshard.internals.autograd import (
    at_end_of_backward,
    backward_task,
    is_in_backward,
    is_inside,
    is_recorded,
    reentrant_error,
    will_accumulate,
)
from zeroshard.internals.nested import cast_tensors, find_tensors
from zeroshard.parameters.state import Moment, Phase
from zeroshard.sharding.context import Context
from zeroshard.sharding.reducer import Reducer
from zeroshard.sharding.unit import NEVER, ForwardCall, Unit, UnitState
from zeroshard.sharding.walk import CallLog, Lease, Walk, hook_outputs

# An attribute of an enum takes longer to read than a global name.
_REST, _FORWARD, _BACKWARD, _SHARDED = Phase.REST, Phase.FORWARD, Phase.BACKWARD, UnitState.SHARDED

_NONE_RUNS = bool
"""The backward under way while there is none: a call gives False."""
_DELIVERS = object
"""The backward under way in `Passes.delivering`, which ends it itself: a call gives something true."""


class Passes:
    """The forwards and backwards of a sharded module.

    Args:
        units: the root unit first.
        context: the objects that their buffers share.
        reducer: reduces their gradients, in the order that it knows.
    """

    def __init__(self, units: Sequence[Unit], context: Context, reducer: Reducer) -> None:
        self._root, self._units = units[0], tuple(units)
        self._context, self._order, self._reducer = context, reducer.order, reducer
        self._state, self._here = context.state, context.axes.dp.waits.rank_status
        walked = self._order.reductions
        self.quiet = dict.fromkeys(unit for unit in units if unit not in walked)
        """Units without turns in a backward: nothing of them is freed, exchanged or stepped there."""
        self._num_prefetch = 0 if all(unit.is_resident for unit in units) else context.num_prefetch
        self.trained = [(unit, gradients) for unit in units for gradients in unit.gradients]
        """The gradients of each trained buffer, and their unit."""
        frozen = (unit for unit in units[1:] if not (unit.is_resident or unit.gradients))
        self._frozen = dict.fromkeys(unit for unit in frozen if unit.backward_needs_parameters)
        """Units without gradients: the graph decides if a backward gathers them."""
        self._with_copies = [u for u in units if not all(b.plan.is_alias for b in u.buffers)]
        """Units whose modules compute with other memory than the main parameters: edits there are lost."""
        self.calls = CallLog(walked)
        self._forward, self._graph, self.second_graph, self.scheduled = (Lease() for _ in range(4))
        self._trails = bool(context.setting.placements.kept) or context.setting.weights not in NEWEST_WEIGHTS
        """True if a unit is freed after its forward, when another unit begins."""
        self._ended: dict[Unit, None] = {}
        """The units whose forward has ended and that stay gathered."""
        self.last: Collection[Unit] = ()
        """The units that the last forward with a backward ended with."""
        self.passive: Collection[Unit] = ()
        """Units whose forwards need nothing: the quiet ones in a batch, which shows their parameters all the
        time, and the root inside another of its methods."""
        self._walk = Walk({}, reducer, self._graph)
        """The backward under way, or the last one."""
        self._task: int | None = NEVER
        """The task of autograd in which it has begun, see `backward_task`; None: gradients come from any."""
        self._backward: Callable[[], object] = _NONE_RUNS
        """The backward under way, of `at_end_of_backward`: a call gives something true as long as it runs."""

    # -- forward --------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, *_: Any) -> None:
        """Free what has ended, gather this unit and start to gather the next, and show it in the modules.

        Args:
            unit: the unit whose forward begins.
        """
        if unit in self.passive:
            unit.wait()  # its parameters may follow a step
            return
        if is_recorded():
            raise capture_error()
        if is_in_backward():
            unit.under_way.append(self._walk.enter_again(unit))
        else:
            self._begin_call(unit)
        unit.wait()
        unit.slots.install()

    def _begin_call(self, unit: Unit) -> None:
        if unit is self._root and not (unit.under_way and is_inside(unit.module)):
            self._begin_forward()
        elif self._state.phase is not _FORWARD:
            self._state.refuse("a forward", Moment.BETWEEN_STEPS)
            self.refresh(unit)
        if not unit.is_resident:
            self._forward.hold(unit)
            self._graph.release((unit,))
        if self._ended and self._trails:
            ended, self._ended = self._ended, {}
            ended.pop(unit, None)
            self._forward.release(ended, for_backward=torch.is_grad_enabled())
        self.calls.begin(unit)
        self._here.enter("the forward of ", unit.described)
        unit.unshard()
        if self._num_prefetch:
            ahead = self._order.following(unit)
            for upcoming in ahead[: self._num_prefetch]:
                upcoming.unshard()
                self._forward.hold(upcoming)
            for upcoming in ahead[self._num_prefetch :]:
                upcoming.read_ahead()

    def after_forward(self, unit: Unit, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Hook the outputs for backward, and return the output.

        Raises:
            RuntimeError: the forward has edited a parameter.
        """
        if unit in self.passive:
            return output
        unit.check_edits()
        is_outermost = unit is self._root and len(unit.under_way) == 1  # it may call itself
        if is_outermost and (dtype := self._context.output_dtype) is not None:
            output = cast_tensors(output, dtype)
        if not unit.is_resident:
            output = unit.copy_own(output)
        if is_outermost and not is_in_backward():
            self._end_forward()
        if unit not in self.quiet:
            self._watch(unit, output)
        return output

    def exit_forward(self, unit: Unit) -> None:
        """End a forward, perhaps after an exception; then the root's forward has failed, too."""
        if unit in self.passive:
            return
        is_second = is_in_backward()
        if unit.under_way:  # else a hook before ours has failed
            unit.under_way.pop() if is_second else self.calls.end(unit)
        if unit.under_way:  # it has called itself
            return
        if not (is_second and self._state.phase is _BACKWARD):
            unit.slots.uninstall()
        if is_second:
            return
        if not unit.is_resident:
            self._ended[unit] = None
        if self._state.phase is not _FORWARD:
            self._here.enter(self._here.OUTSIDE)
        elif unit is self._root:  # it has failed
            self.recover()
        else:
            self._here.enter("the forward of ", self._root.described)

    def _begin_forward(self) -> None:
        self._state.refuse("a forward", Moment.BETWEEN_STEPS, Moment.FAILED)
        if self._state.phase is not _REST:
            self.recover()
        self._state.move(_FORWARD)
        self.refresh()

    def refresh(self, *units: Unit) -> None:
        """Gather replicated parameters again and free the others, after main parameters have changed.

        Args:
            units: units whose parameters may have changed; none: all.
        """
        # The same order on all ranks; about a forward's order.
        for unit in units or (*self.quiet, *reversed(self._order.reductions)):
            if unit.state is not _SHARDED:
                unit.refresh()
                self._state.reads_main |= unit.state is UnitState.GATHERING

    def _end_forward(self) -> None:
        """Keep the units that backward begins with or would gather again, and free the others."""
        self._state.move(_REST)
        called = [unit for unit in self.calls.forward.values() if unit is not self._root]
        may_have_backward = self.calls.may_have_backward
        if called != self._order.units:
            self._order.follow(called, may_have_backward)
        self._graph.release()
        if may_have_backward:
            self.last = self._ended
            self._graph.hold(self._root, *self._ended)
        self._ended = {}
        self._forward.release(for_backward=may_have_backward)

    # -- backward -------------------------------------------------------------------------------------

    def _watch(self, unit: Unit, output: Any) -> None:
        """Hook the outputs of a forward that will have a backward: the first gradient of one begins it.

        Raises:
            RuntimeError: no tensor is found, and the parameters would be freed before the backward.
        """
        if not torch.is_grad_enabled():
            return
        tensors, is_opaque = find_tensors(output)
        # Hooks of inner layers notice a backward that comes through a hidden tensor, but for own parameters.
        is_unnoticed = is_opaque and (not tensors or unit.module in unit.slots.owners)
        if is_unnoticed and unit is not self._root and not unit.is_resident:
            raise RuntimeError(
                f"{unit.described} returns a {type(output).__name__}, in which no tensor can be found, so "
                "its backward would not be noticed: return a tensor, or tensors in tuples, lists, dicts or "
                "dataclasses, or name in units= the class of a module around it that does"
            )
        call = unit.under_way[-1]
        if hook_outputs(call, tensors, self.before_backward) and unit in self._frozen:
            unit.graph_calls.add(call)

    def watch_layer(self, unit: Unit, _module: nn.Module, _inputs: Any, output: Any) -> None:
        """Hook a layer with parameters: its values may leave the unit with the outputs, as in a cache."""
        # No call is under way where a part is recomputed.
        if isinstance(output, Tensor) and not torch.compiler.is_compiling() and unit.under_way:
            hook_outputs(unit.under_way[-1], (output,), self.before_backward)

    def before_backward(self, call: ForwardCall, *_: Tensor) -> None:
        """Take the turns up to a call, as the gradient of one of its outputs has arrived; wait for its unit.

        Args:
            call: the call whose backward begins; with the first one, the backward of the module begins.
        """
        unit = call.unit
        if not self._backward():
            self._begin_backward(unit)
        elif call.entered_in is self._backward and unit.state is not _SHARDED:
            return
        call.entered_in = self._backward
        self._walk.enter(call)
        if unit.backward_needs_parameters:
            unit.wait()
            unit.slots.install()  # a part of it may be recomputed
        self._here.enter("the backward of ", unit.described)

    def _begin_backward(self, unit: Unit) -> None:
        if self._state.phase is _BACKWARD:
            self.recover()
        if self._state.phase is Phase.CLOSED:
            raise closed_error()
        if self._state.phase is _FORWARD:
            raise RuntimeError(
                f"autograd ran through {unit.described} inside the model's own forward, which "
                "a sharded model does not allow: take gradients after the forward has returned"
            )
        self._state.steps.scale_gradients()
        if accumulates := will_accumulate(p for _, one in self.trained for p in one.buffer.unsharded):
            self._state.refuse("a backward", Moment.AVERAGED)
            self._reducer.check_begin()
        self._state.move(_BACKWARD)
        self._graph.hold(*self._forward.units)
        self._forward.release()
        if makes_graph := torch.is_grad_enabled():
            self.second_graph.hold(*self._units)
        visits = self.calls.collect()
        self._walk = Walk(visits, self._reducer, self._graph, num_prefetch=self._num_prefetch)
        if self._order.is_common and self._walk.left != self._order.reductions:
            self._order.reduce_first(self._walk.left)
        self._task = backward_task()
        self._reducer.begin(self._reducer.asked if accumulates else None)
        if self._frozen:  # a part of the ranks may have a backward through a frozen unit after a trained one
            flags = [any(call.entered_in is None for call in one.graph_calls) for one in self._frozen]
            label = "agreement on which frozen units have a backward"
            answer = self._context.axes.everyone.any(flags, label)()
            for frozen, joins in zip(self._frozen, answer, strict=True):
                frozen.joins_backward = joins
        for shown in self.quiet:  # their parameters may follow a step; a part may be recomputed
            shown.wait()
            shown.slots.install()
        self._backward = at_end_of_backward(lambda: self.after_backward(makes_graph))

    def listen(self, is_heard: bool = True) -> None:
        """Let autograd call `receive` for each gradient that it has accumulated; or let it call nobody."""
        for number, (_, gradients) in enumerate(self.trained):
            for index, parameter in enumerate(gradients.buffer.unsharded):
                # torch's own call refuses a frozen parameter. Hooks of users are with the sharded one.
                hook = partial(self.receive, ref(self), number, index)
                parameter._post_accumulate_grad_hooks = {0: hook} if is_heard else {}

    @staticmethod
    def receive(of_self: ref[Passes], number: int, index: int, parameter: Tensor) -> None:
        """Pack a gradient that autograd has accumulated, and start the reductions that are due; a hook.

        Autograd keeps hooks out of the garbage collector's sight: a strong reference would leak.

        Args:
            of_self: the object.
            number: the place of the buffer in `trained`.
            index: the place of the parameter in the buffer.
            parameter: an unsharded parameter with its gradient.

        Raises:
            RuntimeError: the gradient came after the unit was freed or stepped, or from a reentrant
                checkpoint.
        """
        gradient, parameter.grad = parameter.grad, None
        self = of_self()
        if self is None:
            raise closed_error()
        assert gradient is not None, "called when it has been accumulated"
        unit, gradients = self.trained[number]
        if self._task is not None and backward_task() != self._task:
            if not self._backward():
                self._begin_backward(unit)  # its first gradient is a parameter's: no output could be hooked
            if backward_task() != self._task:
                raise reentrant_error()
        if unit.state is _SHARDED and unit.backward_needs_parameters and self._task is not None:
            raise RuntimeError(
                f"the gradient of '{gradients.buffer.originals[index].fqn}' came from outside of the "
                f"backward of {unit.described}, after its parameters were freed: return every tensor "
                "that the loss depends on from the unit's forward"
            )
        if gradients.flat is None and unit not in self.quiet:
            self._reducer.receive(unit, gradients, index, gradient)
        else:
            gradients.pack(index, gradient)
        if not gradients.missing and unit not in self.quiet:
            self._walk.note_gradient(unit)

    def after_backward(self, makes_graph: bool) -> None:
        """Take the turns that are left, deliver the gradients and free all units; the backward has ended.

        Args:
            makes_graph: True if a backward through this backward may come.
        """
        self._walk.take()
        self._backward = _NONE_RUNS
        self._state.move(_REST)
        if not makes_graph:
            self.calls.end_backward()
        completes = self._reducer.end()
        self.reshard_all()
        torch.clear_autocast_cache()  # gradients of old casts would arrive at the end of the next backward
        self._here.enter(self._here.OUTSIDE)
        for unit in self._with_copies:
            unit.check_edits()  # of hooks in the backward, too
        if completes:
            self._reducer.call_hooks()

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Take gradients from a backward that comes through no unit: nothing is gathered for it.

        The operands of such gradients were kept, as the second half of a divided backward has them. For the
        reducer it is a backward like any other: on all ranks alike, also where no gradient comes.
        """
        self.recover()
        self._reducer.check_begin()
        self._backward = _DELIVERS
        self._state.move(_BACKWARD)
        self._walk = Walk({}, self._reducer, self._graph)
        self._reducer.begin(self._reducer.asked)
        self._task = None
        try:
            yield
        finally:
            self._task, self._backward = NEVER, _NONE_RUNS  # after an exception the next call cleans up
        self._state.move(_REST)
        if self._reducer.end():
            self._reducer.call_hooks()

    def recover(self) -> None:
        """Clean up after a forward or backward that ended in an exception. Gradients before it stay."""
        phase = self._state.phase
        if phase is _BACKWARD and not (is_in_backward() and self._backward()):
            self._walk.take()  # as the other ranks do
        elif phase is not _FORWARD or is_in_backward():
            return
        self._state.move(_REST)
        for unit in self._units:  # torch ends no second forward that was interrupted by KeyboardInterrupt
            unit.under_way.clear()
        if phase is _FORWARD:
            self.calls.drop_failed()
        else:
            self._backward = _NONE_RUNS
            self.calls.end_backward()
            self.second_graph.release()
            self._reducer.drop_backward()
        self.reshard_all()
        self._here.enter(self._here.OUTSIDE)

    def drop_graphs(self) -> None:
        """Drop earlier forwards and backwards: after a step no backward goes through them."""
        self.recover()
        if self.second_graph.units:
            self.second_graph.release()
            self.calls.end_backward()
            self.reshard_all()

    def reshard_all(self) -> None:
        """Show the parameters of rest, and free the units that no other lease keeps."""
        for unit in self._units:
            if unit not in self.passive:
                unit.slots.uninstall()
        self._ended = {}
        self._forward.release()
        self._graph.release(self._units)


def closed_error() -> RuntimeError:
    """Return the error for a backward of an engine that is closed or gone."""
    return RuntimeError(
        "backward through a forward of an engine that has been closed: call backward before close()"
    )


def capture_error() -> RuntimeError:
    """Return the error for a forward that is recorded or transformed: parameters and hooks come and go."""
    return RuntimeError(
        "a sharded model cannot be called inside a transform of torch.func (grad, vmap, ...), a tracer "
        "(torch.jit, torch.fx, torch.export, FakeTensorMode) or zeroshard.deferred_init(): its full "
        "parameters are in the modules during a forward only. Trace or transform the model before "
        "zeroshard.initialize, or a second model that has loaded engine.full_state_dict(); for shapes "
        "alone, build a second model under torch.device('meta'). Gradients of gradients need no "
        "transform: torch.autograd.grad(outputs, inputs, create_graph=True)"
    )
