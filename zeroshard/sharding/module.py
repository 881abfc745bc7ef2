"""A sharded module: its units, and the questions about them between forward and backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.parameters.gradient import gradient_of
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import Phase
from zeroshard.parameters.unsharded import UnshardedParameter
from zeroshard.plan.names import Cast
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.changes import Changes
from zeroshard.sharding.context import Context
from zeroshard.sharding.order import UnitOrder
from zeroshard.sharding.slots import ShownParameter
from zeroshard.sharding.unit import Unit, UnitInfo, UnitState

_OURS = (ShardedParameter, UnshardedParameter, ShownParameter)


class ShardedModule:
    """The units of one module.

    Args:
        units: the root unit first.
        context: the objects that their buffers share.
        changes: the changes of the modules.
    """

    def __init__(self, units: Sequence[Unit], context: Context, changes: Changes) -> None:
        self.root, self.units, self.context, self.changes = units[0], tuple(units), context, changes
        self.state, self.here = context.state, context.axes.dp.rank_status
        self.ignored: Mapping[nn.Parameter, str] = {}
        """Parameters that are not sharded; optimizers may step them beside the others."""
        self.casts: Mapping[nn.Module, Cast] = {}
        """Modules that compute in a dtype of their own."""
        placements = context.setting.placements
        makes_same_calls = placements.frees_parameters and context.axes.dp_replicate.size == 1
        self.order = UnitOrder(units, is_common=makes_same_calls)
        self._offloaded = [buffer for buffer in self.buffers if buffer.plan.main_tier is not Tier.DEVICE]
        self._last: frozenset[Unit] = frozenset()
        """The units that the last forward with a backward ended with."""
        self.is_delivering = False
        """True in a backward that comes through no unit, see `Runtime.delivering`."""
        self.is_bare = False
        """True while forwards need nothing of their units, see `Runtime.show_all`."""

    def _answer_parameters(
        self, finish_gathers: Callable[[], None], forget_gradient: Callable[[Any], None]
    ) -> None:
        """Give parameters the functions that they call, without a strong reference to the module."""
        finish, forget = weakref.WeakMethod(finish_gathers), weakref.WeakMethod(forget_gradient)
        self.state.before_edit = lambda: (call := finish()) is not None and call()
        self.state.forget_gradient = lambda parameter: (call := forget()) is not None and call(parameter)

    @property
    def module(self) -> nn.Module:
        """The sharded module."""
        return self.root.modules[0]

    def input_dtype(self, module: nn.Module) -> torch.dtype | None:
        """The dtype to which float inputs of a module are cast; None: they stay as they are."""
        cast = self.casts.get(module)
        return self.context.setting.dtypes.param_dtype if cast is None else cast.dtype

    @property
    def buffers(self) -> Iterator[FlatBuffer]:
        """The flat buffers of all units, in the order of the units."""
        return (buffer for unit in self.units for buffer in unit.buffers)

    @property
    def parameters(self) -> Iterator[ShardedParameter]:
        """The sharded parameters of all units, in the order of the buffers."""
        return (parameter for buffer in self.buffers for parameter in buffer.sharded)

    @property
    def is_in_forward(self) -> bool:
        """True if the root's forward, or a method that counts as one, is running."""
        return self.state.phase is Phase.FORWARD

    @property
    def is_closed(self) -> bool:
        """True if the module is not sharded by this runtime any more."""
        return self.state.phase is Phase.CLOSED

    @property
    def has_gradients(self) -> bool:
        """True if there are gradients, delivered or deferred."""
        if any(gradients.has_deferred for unit in self.units for gradients in unit.gradients):
            return True
        return any(gradient_of(parameter) is not None for parameter in self.parameters)

    @property
    def unit_infos(self) -> list[UnitInfo]:
        """The units that own parameters, for people."""
        placements = self.context.setting.placements
        return [
            UnitInfo(
                plan.name,
                plan.numel,
                plan.is_kept(placements, is_root=unit is self.root, ends_forward=unit in self._last),
                plan.reason,
            )
            for unit in self.units
            if (plan := unit.plan).buffers
        ]

    def require_slices(self, what: str) -> None:
        """Refuse a call that works on sharded parameters while others stand in for them.

        Raises:
            RuntimeError: the call is inside unsharded().
        """
        if any(unit.slots.is_shown for unit in self.units):
            raise RuntimeError(
                f"{what} inside engine.unsharded() would take the full parameters for the model's own: call "
                "it after the block; inside, the model's own methods see full parameters"
            )

    def check_slots(self) -> None:
        """Refuse parameters that others have put into the modules, or edited there, before they are read.

        Raises:
            RuntimeError: the name of the first one, on the rank that has it.
        """
        for unit in self.units:
            unit.slots.check()
        self.check_additions()
        self.check_edits()

    def check_additions(self) -> None:
        """Refuse parameters that came into the model after sharding, before a step or a save misses them.

        Raises:
            RuntimeError: the name of the first one, on the rank that has it.
        """
        for path, module in self.module.named_modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, _OURS) or parameter is None or parameter in self.ignored:
                    continue
                raise RuntimeError(
                    f"'{path + '.' if path else ''}{name}' was added to a sharded model: it would not be "
                    "sharded, not be saved, and train differently on each rank. Add it before initialize; or "
                    "call engine.close() on all ranks, add it, and initialize again"
                )

    def check_edits(self) -> None:
        """Refuse edits of unsharded parameters, which would be lost; see `Edits.check`."""
        for unit in self.units:
            unit.edits.check()

    def changed(self, buffers: Iterable[FlatBuffer] | None = None) -> None:
        """The main parameters of buffers, None: of all, were written; `refresh` gathers them again."""
        self.state.num_changes += 1
        for buffer in self.buffers if buffers is None else buffers:
            buffer.source.changed()

    def refresh(self) -> None:
        """Gather replicated parameters again and free the others, after main parameters have changed."""
        for unit in reversed(self.order.of_reductions()):  # the same on all ranks; about that of a forward
            unit.refresh()
        self.state.reads_main = any(unit.state is UnitState.GATHERING for unit in self.units)
        self.state.reads_main |= any(buffer.source.is_copied for buffer in self._offloaded)

    def finish_gathers(self) -> None:
        """Wait for the gathers that read main parameters, before these change; on the host, it waits."""
        if self.state.reads_main:
            self.state.reads_main = False
            for unit in self.units:
                if unit.state is UnitState.GATHERING:
                    unit.wait()
            for buffer in self._offloaded:
                buffer.source.await_copies()
