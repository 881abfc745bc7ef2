"""A unit: a module whose parameters are gathered and freed together.

SHARDED --unshard()--> GATHERING --wait()--> UNSHARDED --reshard()--> SHARDED
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Handle
from zeroshard.comm.streams import SideStream
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.edits import Edits
from zeroshard.sharding.gradients import Gradients
from zeroshard.sharding.nested import copy_tensors
from zeroshard.sharding.parameter import ShardedParameter, UnshardedParameter, describe_unit
from zeroshard.sharding.slots import Slots


class UnitState(Enum):
    """The states of the full parameters of a unit."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_MOVES = {
    UnitState.SHARDED: UnitState.GATHERING,
    UnitState.GATHERING: UnitState.UNSHARDED,
    UnitState.UNSHARDED: UnitState.SHARDED,
}


NEVER = -1
"""The tick of what has not happened yet."""


@dataclass(slots=True, eq=False)
class Region:
    """The calls inside one activation checkpoint, whose second forward needs all of their units."""

    began: int
    """The first call began here."""
    ended: int = NEVER
    """The last call ended here."""


@dataclass(slots=True)
class Visit:
    """The calls of a unit in one or several forwards, in ticks of the clock of a `CallLog`."""

    began: int
    """The first call began here."""
    ended: int = NEVER
    """The last call ended here."""
    regions: tuple[Region, ...] = ()
    """The checkpoints around its calls, of nested ones the outermost, the last one at the end."""

    def and_then(self, later: Visit) -> Visit:
        """These calls and those of a later forward."""
        return Visit(self.began, later.ended, (*self.regions, *later.regions))


class ForwardCall:
    """One forward of a unit whose backward is still to come; it dies with its graph.

    Args:
        unit: whose forward it is.
        began: the tick at which it begins.
    """

    __slots__ = ("__weakref__", "began", "ended", "entered_in", "is_transformed", "outer", "region", "unit")

    def __init__(self, unit: Unit, began: int) -> None:
        self.unit, self.began, self.ended = unit, began, NEVER
        self.outer: ForwardCall | None = None
        """The call of the same unit that this one is inside of."""
        self.region: Region | None = None
        """The activation checkpoint that it is in."""
        self.is_transformed = False
        """True inside a transform of torch.func: its outputs have no hooks."""
        self.entered_in: object = None
        """The last backward that has come to it."""


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """What `engine.units` tells of a unit."""

    name: str
    """The module's name; the root unit's is empty."""
    numel: int
    """Elements, padding included."""
    kept: bool
    """Whether backward needs no second gather: it stays gathered, or backward needs no parameters."""
    reason: str = ""
    """Why its module is a unit."""


def needs_parameters_in_backward(modules: Iterable[nn.Module]) -> bool:
    """Whether autograd saves the parameters of a unit; an embedding's backward needs the indices alone."""
    return any(type(module) is not nn.Embedding for module in modules)


class Unit:
    """Parameters of one module, their buffers and their state.

    Args:
        name: the module's name in the model.
        modules: whose forwards bracket the use of the parameters; one, or several that are listed together.
        buffers: one for each dtype and `requires_grad`.
        gradients: one for each trained buffer.
        stream: on which its parameters are gathered.
        reason: why the module is a unit, for people.
    """

    def __init__(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        buffers: list[FlatBuffer],
        gradients: list[Gradients],
        stream: SideStream,
        reason: str = "",
    ) -> None:
        self.reason = reason
        self.name, self.modules, self.described = name, modules, describe_unit(name)
        self.buffers, self.gradients, self._stream = buffers, gradients, stream
        self.is_resident = all(buffer.is_resident for buffer in buffers)
        self.is_compiled = False
        """Whether nothing inside the module can be hooked."""
        self.backward_needs_parameters = needs_parameters_in_backward(modules)
        self.position = -1
        """The place in the order of forwards, see `order.py`; -1 before the first one, and for the root."""
        self.call = ForwardCall(self, NEVER)
        """The forward under way, or the last one."""
        self.visit: Visit | None = None
        """Its calls in the forwards that a backward may come to, if there are any."""
        self.recomputed_in: list[Unit] = []
        """The units around it whose forward is run again in backward."""
        self.open_calls: WeakSet[ForwardCall] = WeakSet()
        """The calls whose outputs have a graph that this backward has not come to."""
        self.joins_backward = self.backward_needs_parameters
        """Whether its parameters are gathered in this backward: on all ranks, as soon as one needs them."""
        self.state = UnitState.UNSHARDED if self.is_resident else UnitState.SHARDED
        self._handles: list[Handle] = []
        self._slots = Slots(buffers)
        self.edits = Edits(buffers)
        """What forwards have edited."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of it is under way."""
        return self.call.began != NEVER and self.call.ended == NEVER

    @property
    def owners(self) -> set[nn.Module]:
        """The modules that hold its parameters."""
        return self._slots.owners

    @property
    def numel(self) -> int:
        """Elements of all buffers, padding included."""
        return sum(buffer.layout.total for buffer in self.buffers)

    @property
    def entered(self) -> int:
        """The tick at which a backward needs it: the end of its last call, or of a checkpoint around that.

        Ranks may call a recomputed unit under no_grad, which makes no checkpoint.
        """
        assert self.visit is not None, "it was called"
        around = [outer.visit.ended for outer in self.recomputed_in if outer.visit is not None]
        return max([self.visit.ended, *around, *(region.ended for region in self.visit.regions)])

    # -- parameters -----------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Start to gather, unless the full parameters are there or on their way."""
        if self.state is not UnitState.SHARDED:
            return
        self._move(UnitState.GATHERING)
        needed = [buffer for buffer in self.buffers if buffer.is_stale or not buffer.is_resident]
        with torch.no_grad(), self._stream.after_compute():
            gathers = [gather for buffer in needed if (gather := buffer.begin_gather()) is not None]
            for axis in dict.fromkeys(gather.axis for gather in gathers):
                parts = [gather.part for gather in gathers if gather.axis is axis]
                self._handles.append(axis.all_gather_together(parts, label=f"all-gather of {self.described}"))
            if not gathers:  # a cast at most; else the handles cover that too
                self._handles.append(self._stream.mark())

    def wait(self) -> None:
        """Let compute wait for the full parameters; gathers them if nobody has started to."""
        self.unshard()
        if self.state is UnitState.GATHERING:
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.wait()
            self._move(UnitState.UNSHARDED)

    def reshard(self, keep_second: bool = False) -> None:
        """Free the full parameters, where they are freed at all.

        Args:
            keep_second: this is between a forward and its backward; see `FlatBuffer.free`.
        """
        if not keep_second and (self.is_resident or self.state is not UnitState.SHARDED):
            self.edits.keep()  # of a forward that ran again; others have been looked at when they ended
        if self.is_resident:
            return
        if self.state is not UnitState.SHARDED:
            self.wait()
            for buffer in self.buffers:
                buffer.free(keep_second and self.backward_needs_parameters)
            self._move(UnitState.SHARDED)
        elif not keep_second:
            for buffer in self.buffers:
                buffer.drop_second()

    def refresh(self) -> None:
        """Where main parameters have changed: start new gathers of replicated ones, free the others."""
        if self.state is UnitState.SHARDED or not any(buffer.is_stale for buffer in self.buffers):
            return
        self.wait()
        if self.is_resident:
            self._move(UnitState.SHARDED)
            self.unshard()
        else:
            self.reshard()

    def install(self) -> None:
        """Put the unsharded parameters into the modules."""
        self._slots.install()

    def uninstall(self) -> None:
        """Put the sharded parameters into the modules, or what stands in for them."""
        self._slots.uninstall()

    def check_slots(self) -> None:
        """Refuse parameters that others have put into the modules; see `Slots.check`."""
        self._slots.check()

    def note_views(self) -> None:
        """Before a forward without a graph: count the views of parameters that are there already."""
        for buffer in self.buffers:
            buffer.note_views()

    def leave_views(self) -> None:
        """After a forward without a graph: whoever keeps a view of a parameter keeps its memory."""
        for buffer in self.buffers:
            buffer.leave_views()

    def copy_own(self, output: Any) -> Any:
        """Return the output of a forward without views of parameters, whose memory is about to be freed."""
        places = [(b.full.data_ptr(), b.full.data_ptr() + b.full_bytes) for b in self.buffers]

        def is_own(tensor: Tensor) -> bool:
            has_place = type(tensor) in (Tensor, UnshardedParameter) and tensor.layout is torch.strided
            at = tensor.data_ptr() if has_place else 0
            return any(start <= at < stop for start, stop in places)

        return copy_tensors(output, is_own)

    @property
    def is_shown(self) -> bool:
        """True while others stand in for the sharded parameters."""
        return self._slots.is_shown

    def stand_in(self, parameters: Mapping[int, nn.Parameter]) -> Mapping[int, nn.Parameter]:
        """From now on show others in the modules at rest, by the id of the sharded parameter.

        Returns:
            What was shown before.
        """
        return self._slots.stand_in(parameters)

    @property
    def may_join_backward(self) -> bool:
        """True for a frozen unit: the graph decides if a backward gathers its parameters."""
        return self.backward_needs_parameters and not self.is_resident and not self.gradients

    # -- gradients ------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """True once every trained parameter has got its gradient."""
        return not any(gradients.num_missing for gradients in self.gradients)

    @property
    def is_reducing(self) -> bool:
        """True while exchanges of its gradients are under way or to come."""
        return any(gradients.is_reducing for gradients in self.gradients)

    @property
    def has_more(self) -> bool:
        """True if gradients have arrived since their last reduction."""
        return any(gradients.has_more for gradients in self.gradients)

    def start_reduce(self) -> None:
        for gradients in self.gradients:
            gradients.start_reduce()

    def settle_reduce(self) -> None:
        """Wait for the exchanges under way, so that packed buffers are free."""
        for gradients in self.gradients:
            gradients.settle()

    def progress_reduce(self) -> None:
        """Wait for the exchanges under way, and start the next ones."""
        for gradients in self.gradients:
            gradients.progress()

    def starts(self) -> dict[ShardedParameter, int]:
        """The places where this rank's slices of trained parameters start in the whole ones."""
        trained = (buffer for buffer in self.buffers if buffer.trainable)
        return {p: buffer.start(index) for buffer in trained for index, p in enumerate(buffer.sharded)}

    def drop_gradients(self) -> None:
        """Forget the gradients of a backward that failed."""
        for gradients in self.gradients:
            gradients.drop()
        for buffer in self.buffers:
            for parameter in buffer.unsharded:
                parameter.grad = None
        self.open_calls.clear()

    def release(self) -> None:
        """Forget the module and all parameters: the engine was closed."""
        self.modules = (nn.Identity(),)  # unit and call hold each other: modules go before garbage does
        for gradients in self.gradients:
            gradients.drop()
        for buffer in self.buffers:
            buffer.release()
        self._slots.clear()
        self.edits = Edits(())

    def _move(self, state: UnitState) -> None:
        if _MOVES[self.state] is not state:
            raise RuntimeError(
                f"{describe_unit(self.name)} cannot go from {self.state.value} to {state.value}; "
                f"expected {_MOVES[self.state].value}"
            )
        self.state = state
