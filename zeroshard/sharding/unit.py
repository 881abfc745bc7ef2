"""A unit: a module whose parameters are gathered and freed together.

SHARDED --unshard()--> GATHERING --wait()--> UNSHARDED --reshard()--> SHARDED

[Note: Slots] The slots of a unit are the places in modules that hold its parameters.
A slot shows the sharded parameter, or a stand-in for it under `unsharded()`. In forward and backward it shows
the unsharded parameter. Any other object was put there by somebody: by an assignment after `initialize`, or
for one call by `torch.func.functional_call`. The engine computes with its own parameters and refuses others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Handle
from zeroshard.comm.streams import SideStream
from zeroshard.internals.autograd import next_node
from zeroshard.internals.dispatch import past_guards
from zeroshard.internals.nested import change_tensors, find_tensors
from zeroshard.parameters.sharded import describe_unit
from zeroshard.parameters.unsharded import ShownParameter, UnshardedParameter, edit_error
from zeroshard.plan.buffers import UnitPlan
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.gradients import Gradients


class UnitState(Enum):
    """The states of the full parameters of a unit."""

    __hash__ = object.__hash__  # an enum's own takes many times as long
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


_MOVES = {
    UnitState.SHARDED: UnitState.GATHERING,
    UnitState.GATHERING: UnitState.UNSHARDED,
    UnitState.UNSHARDED: UnitState.SHARDED,
}


# Every unit is asked in every step: a generator would take three times as long.
_is_stale, _missing = attrgetter("is_stale"), attrgetter("missing")

_OWN_KINDS = (Tensor, nn.Parameter)
"""The types of views of unsharded parameters."""

_OVER = object()
"""The mark after the last exchange of a reduction."""

NEVER, LATEST = -1, sys.maxsize
"""The tick of an event that has not happened yet, and a tick after all others."""


@dataclass(slots=True, eq=False)
class Ticks:
    """The ticks of a call of a unit, or of the calls inside an activation checkpoint."""

    began: int
    """The tick of the clock of a `CallLog` at which the call, or the first one inside, began."""
    ended: int = NEVER
    """The tick at which the call, or the last one inside, ended."""
    around: Ticks | None = None
    """The activation checkpoint around the call; of nested ones the outermost."""

    @property
    def whole(self) -> Ticks:
        """The checkpoint around the call, or the call itself: a backward needs the unit from end to begin."""
        return self.around or self


@dataclass(slots=True, eq=False, weakref_slot=True, repr=False)
class ForwardCall:
    """One forward of a unit whose backward is still to come; it dies with its graph."""

    unit: Unit
    """The unit that is called."""
    ticks: Ticks
    """Its ticks; of a second forward those of all calls that it may repeat."""
    forward: object = None
    """The notes of the call log on its forward, which live as long as a call of it."""
    entered_in: object = None
    """The last backward that has come to it."""
    first_node: int = field(default_factory=next_node)
    """The first node of autograd's graph that was made in it."""


class Slots:
    """The slots of one unit.

    Args:
        buffers: the buffers of the unit.
    """

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._places = [
            (owner, attribute, unsharded, sharded)
            for buffer in buffers
            for original, unsharded, sharded in zip(
                buffer.originals, buffer.unsharded, buffer.sharded, strict=True
            )
            for owner, attribute in original.owners
        ]
        self.owners = {place[0] for place in self._places}
        """The modules that have the slots."""
        self.unsharded = {id(sharded): unsharded for _, _, unsharded, sharded in self._places}
        """The unsharded parameters, by the id of the sharded ones."""
        self.stand_ins: Mapping[int, nn.Parameter] = {}
        """The parameters that are shown at rest for the sharded ones, by the id of these."""
        self._slots: list[tuple[dict[str, nn.Parameter | None], str, UnshardedParameter, nn.Parameter]] = []
        """Each slot: the dictionary of its module, the name there, the unsharded parameter, and what it shows
        at rest."""
        plain = nn.Module.__setattr__
        self._watched = [place[:2] for place in self._places if type(place[0]).__setattr__ is not plain]
        """The places in modules that must hear of a change: an RNN keeps a list of its weights, too."""
        self.stand_in({})

    def stand_in(self, parameters: Mapping[int, nn.Parameter]) -> Mapping[int, nn.Parameter]:
        """Show stand-ins at rest from now on, by the id of the sharded parameter.

        Returns:
            The stand-ins that were shown before.
        """
        before, self.stand_ins = self.stand_ins, parameters
        self._slots = [
            (owner._parameters, attribute, unsharded, parameters.get(id(sharded), sharded))
            for owner, attribute, unsharded, sharded in self._places
        ]
        for slots, attribute, _, shown in self._slots:
            if attribute in slots:  # a removed parameter stays removed, for `check` to find
                slots[attribute] = shown
        self._announce()
        return before

    def install(self) -> None:
        """Show the unsharded parameters.

        Raises:
            RuntimeError: as `check`; or a stand-in was edited, which the engine does not see.
        """
        if self.stand_ins:
            self._check_shown()
        for slots, attribute, unsharded, shown in self._slots:
            current = slots.get(attribute)
            if current is shown:
                slots[attribute] = unsharded
            elif current is not unsharded:
                self.check()
        if self._watched:
            self._announce()

    def uninstall(self) -> None:
        """Show the parameters of rest again. An object of others stays, for `check` to find."""
        for slots, attribute, unsharded, shown in self._slots:
            if slots.get(attribute) is unsharded:
                slots[attribute] = shown
        if self._watched:
            self._announce()

    def _announce(self) -> None:
        for owner, attribute in self._watched:
            if attribute in owner._parameters:
                setattr(owner, attribute, owner._parameters[attribute])

    def check(self) -> None:
        """Look at the slots between forwards.

        Raises:
            RuntimeError: a slot holds an object of others.
        """
        for slots, attribute, unsharded, shown in self._slots:
            current = slots.get(attribute)
            if current is not shown and current is not unsharded:
                raise RuntimeError(
                    f"'{unsharded.fqn}' was replaced, tied or removed after initialize: its module now has a "
                    f"{type(current).__name__}, which would be neither sharded nor trained. Assign, tie and "
                    "remove parameters before initialize, or edit them in place under "
                    "engine.unsharded(write_back=True), and undo pruning in the same block; parametrizations "
                    "come and go before initialize. For torch.func.functional_call with other parameters use "
                    "a model that is not sharded. engine.close(restore=False) gives the model up"
                )

    def _check_shown(self) -> None:
        for _, _, unsharded, shown in self._slots:
            if isinstance(shown, ShownParameter) and shown.is_edited:
                raise RuntimeError(
                    f"a forward inside engine.unsharded() after an edit of '{unsharded.fqn}': the engine "
                    "still computes with the values before the edit. Leave the block, with "
                    "write_back=True, and then call forward"
                )


class Unit:
    """Parameters of one module, their buffers and their state.

    Args:
        plan: the plan of the unit.
        module: the module whose forward uses the parameters.
        buffers: one buffer for each dtype and `requires_grad`.
        gradients: the gradients of each trained buffer.
        stream: the stream of the gathers.
    """

    def __init__(
        self,
        plan: UnitPlan,
        module: nn.Module,
        buffers: list[FlatBuffer],
        gradients: list[Gradients],
        stream: SideStream,
    ) -> None:
        self.plan, self.name, self.module = plan, plan.name, module
        self.described = describe_unit(plan.name)
        self.buffers, self.gradients, self._stream = buffers, gradients, stream
        self.in_files = [b for b in buffers if Tier.DISK in (b.plan.main_tier, b.plan.copy_tier)]
        """The buffers whose gathers start in files."""
        self._gathered = [buffer for buffer in buffers if buffer.plan.gathers or not buffer.plan.is_alias]
        """The buffers that are filled by a gather or a copy; others show main parameters themselves."""
        self._freed = [buffer for buffer in buffers if not buffer.is_resident]
        """The buffers that are filled for each use, and not only after a change."""
        self.freed_inside = [*self._freed]
        """These, and those of the units inside that are recomputed with it."""
        self._seconds = [buffer for buffer in buffers if buffer.has_second]
        """The buffers of which a few ranks may keep a copy."""
        self.is_resident = plan.is_resident
        self.backward_needs_parameters = plan.needs_parameters_in_backward
        self.position = -1
        """The place in the order of forwards, see `UnitOrder`; -1 before the first one, and for the root."""
        self.under_way: list[ForwardCall] = []
        """The calls that are under way, the innermost last: a unit may call itself."""
        self.recomputed_in: list[Unit] = []
        """The units around it whose forward is run again in backward."""
        self.step_under_way: Callable[[], object] = object
        """Takes the step of the unit, if one waits for this use of its parameters."""
        self.graph_calls: WeakSet[ForwardCall] = WeakSet()
        """The calls with a graph; noted if the unit has no gradients and may join a backward."""
        self.joins_backward = self.backward_needs_parameters
        """True if this backward gathers its parameters: on all ranks, if any rank needs them."""
        self.leases: set[object] = set()
        """The leases on the unit: it is freed when the last one ends."""
        self.state = UnitState.UNSHARDED if self.is_resident else UnitState.SHARDED
        self._handles: list[Handle] = []
        self._readers: list[Callable[[], None]] = []
        """Let compute wait for copies from its parameters on another stream, before these are freed."""
        self.slots = Slots(buffers)
        """The places in modules that hold its parameters."""
        self._reductions: list[Iterator[None]] = []
        """The reductions of its gradients that have not come to their end."""
        self.layers = set() if self.is_resident else self.slots.owners - {module}
        """Modules inside, whose values may leave the unit with its outputs; none in a compiled module."""

    # -- parameters -----------------------------------------------------------------------------------

    def wait_for_step(self, step: Callable[[], object]) -> None:
        """Call `step` before the parameters are used the next time; they are at rest, between steps."""
        self.step_under_way = step
        if self.is_resident and self.state is UnitState.UNSHARDED:
            self._move(UnitState.SHARDED)  # so the next use begins with `unshard`

    def unshard(self) -> None:
        """Start to gather, unless the full parameters are there or on their way."""
        if self.state is not UnitState.SHARDED:
            return
        self.step_under_way()
        needed = [buffer for buffer in self._gathered if not buffer.is_resident or buffer.is_stale]
        for buffer in filter(needed.__contains__, self.in_files):
            buffer.store.prefetch()
        self._move(UnitState.GATHERING)
        with self._stream.after_compute():
            for buffer in needed:
                handle = buffer.begin_gather(f"all-gather of {self.described}")
                self._handles.append(handle or self._stream.mark())  # no handle: at most a cast

    def read_ahead(self) -> None:
        """Let the system read what the next gather starts from, if it lies in files."""
        if self.state is UnitState.SHARDED:
            for buffer in self.in_files:
                buffer.store.prefetch()

    def wait(self) -> None:
        """Let compute wait for the full parameters; start their gather if nobody has."""
        if self.state is UnitState.UNSHARDED:
            return
        self.unshard()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        self._move(UnitState.UNSHARDED)

    def lend(self, buffer: FlatBuffer, follow: Callable[[], None]) -> Tensor | None:
        """Return the main parameters of a buffer as they are gathered, [shard]; None if they are not.

        Args:
            follow: lets compute wait for a copy of them on another stream, which begins after compute.
        """
        plan = buffer.plan
        is_same = plan.compute_dtype == plan.main_dtype and buffer.filled == buffer.store.version
        if self.is_resident or self.state is UnitState.SHARDED or not is_same:
            return None
        self.wait()
        self._readers.append(follow)
        return buffer.full.detach()[buffer.main_span.slice]

    def reshard(self, for_backward: bool = False) -> None:
        """Free the full parameters, unless the unit is resident.

        Args:
            for_backward: True between a forward and its backward; see `FlatBuffer.free`.
        """
        if self.is_resident:
            return
        if self.state is not UnitState.SHARDED:
            self.wait()
            while self._readers:
                self._readers.pop()()
            for buffer in self._freed:
                buffer.free(for_backward and self.backward_needs_parameters)
            self._move(UnitState.SHARDED)
        elif not for_backward:
            for buffer in self._seconds:
                buffer.keep_second(False)

    def refresh(self) -> None:
        """Start a new gather, or free what is gathered and not resident, if main parameters have changed."""
        if any(map(_is_stale, self._gathered)):
            self.wait()
            if self.is_resident:
                self._move(UnitState.SHARDED)
                self.unshard()
            else:
                self.reshard()

    def copy_own(self, output: Any) -> Any:
        """Return the output of a forward without views of parameters, whose memory is about to be freed."""
        own = {buffer.full.untyped_storage().data_ptr() for buffer in self.buffers}
        tensors, _ = find_tensors(output)
        plain = (t for t in tensors if type(t) in _OWN_KINDS or isinstance(t, UnshardedParameter))
        views = (t for t in plain if t.layout is torch.strided and t.untyped_storage().data_ptr() in own)
        copies = {id(view): view.clone() for view in views}
        return change_tensors(output, lambda tensor: copies.get(id(tensor), tensor)) if copies else output

    def check_edits(self) -> None:
        """Look for edits of its unsharded parameters; see [Note: Edits].

        Raises:
            RuntimeError: one was edited since the last look, in memory of its own. It is gathered again.
        """
        # torch takes several times as long to read an attribute of a subclass of Parameter.
        with past_guards():
            if any(map(FlatBuffer.has_edits, self.buffers)):
                lost = [fqn for buffer in self.buffers for fqn in buffer.take_edits()]
                if lost:
                    raise edit_error(lost[0])

    # -- gradients ------------------------------------------------------------------------------------

    @property
    def is_complete(self) -> bool:
        """True once every trained parameter has got its gradient."""
        return not any(map(_missing, self.gradients))

    def reduce(self) -> bool:
        """Start to reduce the gradients of each buffer, or go on with it: see `Gradients.reduce`.

        Returns:
            True until the reduction has come to its end.
        """
        parts = self._reductions or [gradients.reduce() for gradients in self.gradients]
        self._reductions = []  # a part may fail: then the next backward begins anew
        self._reductions = [part for part in parts if next(part, _OVER) is not _OVER]
        return bool(self._reductions)

    def release(self) -> None:
        """Drop the module and all parameters, when the engine is closed."""
        self.leases.clear()
        self.module, self.layers = nn.Identity(), set()  # at once: unit and call hold each other
        self._reductions = []
        for gradients in self.gradients:
            gradients.drop()
        for buffer in self.buffers:
            buffer.release()
        self.slots = Slots(())

    def _move(self, state: UnitState) -> None:
        before = self.state
        assert _MOVES[before] is state, f"{self.described} cannot go from {before.value} to {state.value}"
        self.state = state
