"""The forwards of units that lie on one rank, with nothing to gather, free or reduce.

Their parameters are shown in the modules for the time of the forward alone. So a model that uses a parameter
outside the forward of its unit fails on one rank as it does on several. Nothing else is noted: no turn of a
backward depends on these calls. The root's forward goes the way of all units, see `passes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from zeroshard.comm.watch.status import RankStatus
from zeroshard.internals.autograd import is_in_backward
from zeroshard.parameters.state import ModuleState, Phase
from zeroshard.sharding.lease import Lease
from zeroshard.sharding.tracers import refuse_tracers, refuse_transforms
from zeroshard.sharding.unit import Unit, UnitState

# An attribute of an enum takes longer to read than a global name.
_FORWARD, _UNSHARDED = Phase.FORWARD, UnitState.UNSHARDED


class LocalForwards:
    """Begins and ends these forwards.

    Args:
        root: the root unit.
        state: the state of the module.
        here: the status of this rank.
        held: the lease of methods that keep the parameters of all units shown.
    """

    def __init__(self, root: Unit, state: ModuleState, here: RankStatus, held: Lease[Unit]) -> None:
        self._root, self._state, self._here, self._held = root, state, here, held
        self._shown: tuple[Unit, ...] = ()
        """The units whose parameters are shown between forwards, too."""

    @property
    def shows_all(self) -> bool:
        """True while the parameters of all units are shown, in forwards and between them."""
        return bool(self._shown)

    def show(self, units: Iterable[Unit]) -> None:
        """Show the parameters of all units until `hide`."""
        self._shown = tuple(units)
        for unit in self._shown:
            unit.wait()
            unit.slots.install()

    def hide(self) -> None:
        """Show sharded parameters between forwards again."""
        shown, self._shown = self._shown, ()
        for unit in shown:
            unit.slots.uninstall()

    def begin(self, unit: Unit) -> None:
        """Show the parameters of a unit.

        Raises:
            RuntimeError: a tracer or a transform is around, or the steps of optimizers are under way.
        """
        if not self._shown:
            self._show(unit)
        if not is_in_backward():
            self._here.enter("the forward of ", unit.described)

    def _show(self, unit: Unit) -> None:
        if self._state.phase is not _FORWARD:
            refuse_tracers()
            self._state.refuse_between_steps()
        refuse_transforms()
        unit.num_open += 1
        if unit.state is not _UNSHARDED:  # a copy in the compute dtype follows the main parameters
            unit.wait()
        unit.slots.install()

    def end(self, unit: Unit) -> None:
        """Show the sharded parameters again.

        Raises:
            RuntimeError: the forward has edited a parameter.
        """
        if not self._shown:
            self._end(unit)
        if not is_in_backward():
            if self._state.phase is _FORWARD:
                self._here.enter("the forward of ", self._root.described)
            else:
                self._here.leave()
        unit.edits.check()

    def _end(self, unit: Unit) -> None:
        if unit.num_open:  # a hook before ours may have failed
            unit.num_open -= 1
        # Else a backward shows all, methods hold all, or the unit has called itself.
        if not (is_in_backward() or self._held.units or unit.is_in_forward):
            unit.slots.uninstall()
