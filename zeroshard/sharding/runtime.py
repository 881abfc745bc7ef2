"""The runtime of a sharded module: its forwards and backwards, and the calls around an optimizer step."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zeroshard.comm.streams import mark_here
from zeroshard.comm.watch.status import REDUCE, STEP
from zeroshard.internals.autograd import is_in_backward
from zeroshard.parameters.gradient import gradient_of, set_gradients
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import Phase
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.backward import Backward
from zeroshard.sharding.context import Context
from zeroshard.sharding.passes import Passes
from zeroshard.sharding.unit import Unit, UnitState

DRAIN_S = 5.0
"""Seconds to wait for exchanges under way when nobody needs them any more."""


class Runtime(Passes):
    """Runs the units of one sharded module; arguments as `Passes` has them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answer_parameters(self.finish_gathers, self._forget_gradient)
        # An engine that is dropped may have gathers under way, into memory that goes with it.
        weakref.finalize(self, _drain, self.context, bool(self._offloaded)).atexit = False

    @contextmanager
    def delivering(self) -> Iterator[None]:
        """Take gradients from a backward that comes through no unit: nothing is gathered for it.

        The operands of such gradients were kept, as the second half of a divided backward has them; or its
        forward was bare, see `show_all`. A backward like any other for the reducer: on all ranks alike, also
        where no gradient comes.
        """
        self._recover()
        self.reducer.check_begin()
        self._around_backward, self._backward = self.state.phase, object
        self.state.move(Phase.BACKWARD)
        self._walk = Backward((), self.reducer, self.leases.graph, num_prefetch=0, makes_graph=False)
        for unit in self.units:
            unit.visit = None
        self.reducer.begin(accumulates=True)
        self.is_delivering = True
        try:
            yield
        finally:
            self.is_delivering = False  # after an exception, the next call cleans up: see `_recover`
        self.state.move(self._around_backward)
        if self.reducer.end():
            self.reducer.call_hooks()

    def before_step(self) -> None:
        """Make the gradients ready for an optimizer: reduce what was deferred.

        Raises:
            RuntimeError: an exception left gradients that hold part of a micro-batch.
        """
        self._recover()
        self.finish_gathers()
        self._drop_graphs()
        self.reducer.before_step()

    def after_step(self, is_last: bool = True) -> None:
        """Start to gather replicated parameters again, since main parameters have changed.

        Args:
            is_last: False if another optimizer steps together with this one, later.
        """
        self.context.axes.dp.ledger.note(STEP, REDUCE)
        torch.clear_autocast_cache()  # torch keeps casts up to the end of the context
        # The tier of files tells of each part of a step itself.
        self.changed(b for b in self.buffers if b.trainable and b.plan.main_tier is not Tier.DISK)
        if self.state.phase is (Phase.STEP if is_last else Phase.REST):
            self.state.move(Phase.REST if is_last else Phase.STEP)
        if is_last:
            self.refresh()

    @contextmanager
    def part(self, name: Hashable, units: Collection[Unit]) -> Iterator[None]:
        """Run a forward or a backward of some units, beside others whose graphs are alive.

        Args:
            name: the name of the forward; a backward with the same name comes to its calls alone.
            units: the units of the forward; others are not gathered ahead.
        """
        self._calls.name, self.order.scope = name, units
        try:
            yield
        finally:
            self._calls.name = self.order.scope = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run the micro-batches of a batch; no other forward runs between them."""
        self.state.is_in_batch = True
        try:
            yield
        except BaseException:
            self.reducer.taint()
            raise
        finally:
            self.is_bare = self.state.is_in_batch = False
            self.local.hide()
            self.end_parts()
        self.check_edits()

    def show_all(self) -> None:
        """Show the parameters of all units to the end of the batch, where they all lie on this rank.

        The first micro-batch runs without it: a parameter that is used outside the forward of its unit fails.
        Where nothing is exchanged either, forwards are bare from here on: nobody notes them, and their
        backwards run inside `delivering`.
        """
        if self.is_local and not self.local.shows_all:
            self.local.show(self.units)
            self.is_bare = self.context.axes.everyone.size == 1

    def await_shown(self) -> None:
        """Let compute wait for parameters that follow a step while they are shown: bare forwards do not."""
        if self.local.shows_all:
            for unit in self.units:
                unit.wait()

    def forget_part(self, name: Hashable) -> None:
        """Forget a forward with a name: no backward comes to it any more."""
        self._calls.forget(name)

    def unshard(self, units: Iterable[Unit]) -> None:
        """Start to gather units, and keep them until `reshard`."""
        for unit in units:
            if not unit.is_resident:
                unit.unshard()
                self.leases.scheduled.take(unit)

    def reshard(self, units: Iterable[Unit] | None = None) -> None:
        """Keep units no longer; None: all that `unshard` has kept. Those that nobody needs are freed."""
        ended = tuple(self.leases.scheduled.units if units is None else units)
        self.leases.scheduled.end(ended)
        self._free(ended, for_backward=True)

    def end_parts(self) -> None:
        """Forget the forwards with names, and keep no units for them: a batch is over, or has failed."""
        self._calls.forget_named()
        self.reshard()

    def drop_deferred(self) -> None:
        """Forget gradients that were not reduced yet, as zero_grad() does."""
        self._recover()
        self._drop_graphs()
        self.reducer.drop_deferred()

    def clear_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set `p.grad` to None. torch's `zero_grad` takes several times as long: it reads each one first.

        Args:
            parameters: sharded parameters, and perhaps ignored ones.
        """
        self.state.show_gradients()
        cleared: list[tuple[ShardedParameter, None]] = []
        for parameter in parameters:
            if not isinstance(parameter, ShardedParameter):
                parameter.grad = None
            elif gradient_of(parameter) is not None:
                cleared.append((parameter, None))
        set_gradients(cleared)

    def settle(self) -> None:
        """Wait for every exchange and copy under way, and clean up after an exception.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if is_in_backward() or self.is_in_forward:
            raise RuntimeError(
                "full parameters are available between steps, not inside a forward or backward"
            )
        self._recover()
        self._drop_graphs()
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                unit.wait()
        for buffer in self._offloaded:
            buffer.source.await_copies()

    def _forget_gradient(self, parameter: ShardedParameter) -> None:
        """Forget the sum of gradients of one parameter that was not reduced yet."""
        if not is_in_backward():
            self._recover()
            self.reducer.forget(parameter)

    def _drop_graphs(self) -> None:
        """Let go of earlier forwards and backwards: after a step no backward goes through them."""
        if self.leases.second_graph.units:
            self.leases.second_graph.end()
            self._calls.end_backward()
            self.put_away()


def _drain(context: Context, is_offloaded: bool) -> None:
    context.axes.drain(DRAIN_S)
    context.streams.join()
    if is_offloaded:  # host memory goes back to the system at once
        mark_here(context.device).synchronize()
