"""The runtime of a sharded module: questions about its units, calls around an optimizer step, and hooks.

`passes.py` has its forwards and backwards. The hooks on modules and parameters call its verbs and decide
nothing themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.comm.mesh import Axes
from zeroshard.comm.pool import BufferPool
from zeroshard.comm.streams import Streams, mark_here
from zeroshard.comm.watch.status import REDUCE, STEP
from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.nested import cast_inputs
from zeroshard.parameters.sharded import ShardedParameter, gradient_of, set_gradients
from zeroshard.parameters.state import Moment, Phase
from zeroshard.parameters.unsharded import UnshardedParameter
from zeroshard.plan.names import Cast
from zeroshard.plan.originals import computes_in_own_dtype
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.context import Changes, Context
from zeroshard.sharding.gradients import Role
from zeroshard.sharding.passes import Passes
from zeroshard.sharding.reducer import Reducer
from zeroshard.sharding.unit import Unit, UnitState

DRAIN_S = 5.0
"""Seconds to wait for exchanges under way when nobody needs them any more."""

_OURS = (ShardedParameter, UnshardedParameter)


class Runtime:
    """Runs the units of one sharded module.

    Args:
        units: the root unit first.
        context: the objects that their buffers share.
        pool: scratch buffers of the backward.
        changes: the changes of the modules.
    """

    def __init__(self, units: Sequence[Unit], context: Context, pool: BufferPool, changes: Changes) -> None:
        self.root, self.units, self.context, self.changes = units[0], tuple(units), context, changes
        self.buffers = tuple(buffer for unit in units for buffer in unit.buffers)
        """The flat buffers of all units, in the order of the units."""
        self.state, self.here = context.state, context.axes.dp.waits.rank_status
        self.ignored: Mapping[nn.Parameter, str] = {}
        """Parameters that are not sharded; optimizers may step them along with the others."""
        self.casts: Mapping[nn.Module, Cast] = {}
        """Modules that compute in a dtype of their own."""
        self.budget: Any = None
        """Chooses what units keep for their backward, if there is a budget of memory."""
        self.products: Any = None
        """The products of layers, if backwards come in two halves."""
        self.reducer = Reducer(units, context, pool)
        self.passes = Passes(units, context, self.reducer)
        # Parameters call it, without a strong reference to the runtime.
        finish = weakref.WeakMethod(self.finish_gathers)
        self.state.before_edit = lambda: (call := finish()) is not None and call()
        # An engine that is dropped may have gathers under way, into memory that goes with it.
        # Not the context: a step that waits is in its state, and leads back here.
        is_offloaded = any(buffer.plan.travels for buffer in self.buffers)
        device = context.device if is_offloaded else None
        weakref.finalize(self, _drain, context.axes, context.streams, device).atexit = False

    # -- questions ------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The sharded module."""
        return self.root.module

    def input_dtype(self, module: nn.Module) -> torch.dtype | None:
        """The dtype to which float inputs of a module are cast; None: they stay as they are."""
        cast = self.casts.get(module)
        return self.context.setting.dtypes.param_dtype if cast is None else cast.dtype

    def hooked_dtype(self, module: nn.Module) -> torch.dtype | None:
        """The same of a module whose inputs a hook casts; None for one that casts them itself."""
        cast = self.casts.get(module)
        casts_itself = computes_in_own_dtype(module) if cast is None else cast.without is not None
        return None if casts_itself else self.input_dtype(module)

    @property
    def parameters(self) -> Iterator[ShardedParameter]:
        """The sharded parameters of all units, in the order of the buffers."""
        return (parameter for buffer in self.buffers for parameter in buffer.sharded)

    @property
    def is_closed(self) -> bool:
        """True if the module is not sharded by this runtime any more."""
        return self.state.phase is Phase.CLOSED

    @property
    def has_gradients(self) -> bool:
        """True if there are gradients, delivered or deferred."""
        return self.state.has_sums or self.reducer.has_delivered

    def check_slots(self) -> None:
        """Refuse parameters that others have put into the modules, or edited there, before they are read.

        Raises:
            RuntimeError: the name of the first one, on the rank that has it.
        """
        for unit in self.units:
            unit.slots.check()
        self.check_edits()
        self.check_additions()
        self.check_removals()

    def check_additions(self) -> None:
        """Refuse parameters that came into the model after sharding, before a step or a save misses them.

        Raises:
            RuntimeError: the name of the first one, on the rank that has it.
        """
        for path, module in self.root.module.named_modules():
            for name, parameter in module._parameters.items():
                is_ours = isinstance(parameter, _OURS) and parameter.fqn  # a copy of a shown one has no name
                if is_ours or parameter is None or parameter in self.ignored:
                    continue
                raise RuntimeError(
                    f"'{path + '.' if path else ''}{name}' was added to a sharded model: it would not be "
                    "sharded, not be saved, and train differently on each rank. Add it before initialize; or "
                    "call engine.close() on all ranks, add it, and initialize again"
                )

    def check_removals(self) -> None:
        """Refuse to read or save a model that lacks layers which were sharded.

        Raises:
            RuntimeError: the name of the first parameter whose layers have all left the model.
        """
        inside = set(self.module.modules())
        for original in (original for buffer in self.buffers for original in buffer.originals):
            if not any(owner in inside for owner, _ in original.owners):
                raise RuntimeError(
                    f"'{original.fqn}' is sharded, and its layer was taken out of the model: call "
                    "engine.close() on all ranks, take it out, and initialize again"
                )

    def check_edits(self) -> None:
        """Refuse edits of unsharded parameters, which would be lost; see `Unit.check_edits`."""
        for unit in self.units:
            unit.check_edits()

    # -- around a step --------------------------------------------------------------------------------

    def changed(self, buffers: Iterable[FlatBuffer] | None = None) -> None:
        """The main parameters of buffers, None: of all, were written; `refresh` gathers them again."""
        self.state.num_changes += 1
        torch.clear_autocast_cache()
        for buffer in self.buffers if buffers is None else buffers:
            buffer.store.changed()
            buffer.count_edits({*buffer.sharded})

    def finish_gathers(self) -> None:
        """Wait for the gathers that read main parameters, before these change; on the host, it waits."""
        if self.state.reads_main:
            self.state.reads_main = False
            self._await_gathers(self.buffers)

    def _await_gathers(self, buffers: Iterable[FlatBuffer]) -> None:
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                unit.wait()
        for buffer in buffers:
            buffer.store.await_copies()

    def before_step(self) -> None:
        """Make the gradients ready for an optimizer: reduce what was deferred.

        Raises:
            RuntimeError: an exception left gradients that hold part of a micro-batch.
        """
        self.state.steps.take_all()
        if self.state.phase is Phase.BACKWARD or self.passes.second_graph.units:
            self.passes.drop_graphs()
        if self.state.reads_main:  # by parts, copies follow copies
            self._await_gathers(() if self.context.setting.steps_by_parts else self.buffers)
        self.state.refuse("a step", Moment.TAINTED)
        if self.state.has_sums:
            self.reducer.begin(Role())
            self.reducer.pack_sums()
            self.reducer.end()
        if self.reducer.delivered:
            self.reducer.call_hooks()

    def after_step(self, stepped: Container[nn.Parameter] = (), is_last: bool = True) -> None:
        """Start to gather replicated parameters again, since main parameters have changed.

        Args:
            stepped: the parameters that the optimizer has stepped.
            is_last: False if another optimizer steps together with this one, later.
        """
        self.context.axes.dp.ledger.note(STEP, REDUCE)
        torch.clear_autocast_cache()  # torch keeps casts up to the end of the context
        self.state.num_changes += 1
        for buffer in (gradients.buffer for _, gradients in self.passes.trained):
            buffer.filled = None  # on all ranks alike, also where a slice has nothing to step
            if buffer.store.is_near or not self.context.setting.steps_by_parts:
                buffer.store.changed()  # else `MainStore.stepped` has noted it
            if Moment.BATCH not in self.state.moments:  # there a pipeline chooses the values of a backward
                buffer.count_edits(stepped)
        if is_last:
            self.state.moments.discard(Moment.BETWEEN_STEPS)
            self.passes.refresh()
        else:
            self.state.moments.add(Moment.BETWEEN_STEPS)

    def unshard(self, units: Iterable[Unit]) -> None:
        """Start to gather units, and keep them until `reshard`."""
        for unit in units:
            if not unit.is_resident:
                unit.unshard()
                self.passes.scheduled.hold(unit)

    def reshard(self, units: Iterable[Unit] | None = None) -> None:
        """Keep units no longer; None: all that `unshard` has kept. Those that nobody needs are freed."""
        self.passes.scheduled.release(units, for_backward=True)

    def drop_deferred(self) -> None:
        """Drop gradients that were not reduced yet, as zero_grad() does."""
        if self.state.phase is Phase.BACKWARD or self.passes.second_graph.units:
            self.passes.drop_graphs()
        self.state.moments.discard(Moment.TAINTED)
        if self.state.has_sums or self.reducer.started or self.reducer.delivered:
            self.reducer.drop()

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Set `p.grad` to None. torch's `zero_grad` takes several times as long: it reads each one first.

        Args:
            parameters: sharded parameters, and perhaps ignored ones.
        """
        for parameter in parameters:
            if not isinstance(parameter, ShardedParameter):
                parameter.grad = None
        sharded = (p for p in parameters if isinstance(p, ShardedParameter))
        set_gradients([(p, None) for p in sharded if gradient_of(p) is not None])

    def wait(self, call: str = "", *refused: Moment) -> None:
        """Wait for every exchange and copy under way, and clean up after an exception.

        Args:
            call: the name of a call that begins with it.
            refused: the moments in which this call is refused.

        Raises:
            RuntimeError: a forward or backward is running; or it is one of these moments.
        """
        if is_in_backward() or self.state.phase is Phase.FORWARD:
            raise RuntimeError(
                "full parameters are available between steps, not inside a forward or backward"
            )
        self.state.steps.before_look()
        self.passes.drop_graphs()
        self.state.reads_main = False
        self._await_gathers(self.buffers)
        self.state.refuse(call, *refused)


def _drain(axes: Axes, streams: Streams, offloaded: torch.device | None) -> None:
    axes.drain(DRAIN_S)
    streams.join()
    if offloaded is not None:  # host memory goes back to the system at once
        mark_here(offloaded).synchronize()


def hook(runtime: Runtime) -> None:
    """Let the forwards and backwards of a module drive its runtime."""
    for unit in runtime.units:
        _hook_unit(runtime, unit)
    runtime.passes.listen()
    _avoid_fast_paths(runtime.module, runtime.changes)


def _hook_unit(runtime: Runtime, unit: Unit) -> None:
    """Hook the module of a unit, and the layers inside it."""
    module, hook = unit.module, runtime.changes.hook
    if (dtype := runtime.hooked_dtype(module)) is not None:
        own = partial(cast_inputs, dtype=dtype, in_lists=unit is runtime.root)
        hook(module.register_forward_pre_hook(own, prepend=True, with_kwargs=True))
    hook(module.register_forward_pre_hook(partial(runtime.passes.before_forward, unit), prepend=True))
    hook(module.register_forward_hook(partial(runtime.passes.after_forward, unit)))
    # A model without engine still needs the runtime.
    hook(module.register_forward_hook(lambda *_: runtime.passes.exit_forward(unit), always_call=True))
    for layer in unit.layers:
        hook(layer.register_forward_hook(partial(runtime.passes.watch_layer, unit)))


def _avoid_fast_paths(root: nn.Module, changes: Changes) -> None:
    """Let torch's encoders compute in evaluation as in training: their fast paths allow no hooks."""
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            changes.set(module, "activation_relu_or_gelu", 0)
        elif isinstance(module, nn.TransformerEncoder):
            changes.set(module, "use_nested_tensor", False)
