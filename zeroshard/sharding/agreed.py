"""Agreements of all ranks in a backward: flags of each rank, each set if it is set on any rank.

[Note: Ranks that leave out a batch] A rank may leave out a batch, because it caught an exception of its own
or skipped a loss. It goes on with its next batch. At stages 0 to 2 its reductions then meet the other ranks'
reductions, so nothing fails until these wait at the end. The agreement at the end of a backward notices it
without another exchange: each bit of the number of forwards is sent once as it is and once inverted. Steps
are noted in the ledger, which is compared there too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from operator import and_
from typing import NamedTuple

from zeroshard.comm.collectives import Axis
from zeroshard.sharding.gradients import Gradients, GradientState
from zeroshard.sharding.unit import Unit

_NUM_BITS = 4
"""Forwards between two backwards are counted up to 15."""


class Agreed(NamedTuple):
    """The end of a backward on all ranks together."""

    used: list[list[bool]]
    """True where any rank has a gradient, for each buffer and parameter."""
    again: list[Unit]
    """The units whose gradients came in two parts on any rank; the second part is still to be reduced."""
    early: set[Unit]
    """The units that any rank has stepped in this backward."""
    has_changed: bool
    """True if any rank has met another order of units."""
    has_failed: bool
    """True if any rank's backward has ended in an exception."""
    has_other_pace: bool
    """True if any rank has called the model another number of times since the last agreement."""


def flags_of(
    everything: Sequence[Gradients],
    units: Sequence[Unit],
    has_changed: bool,
    has_failed: bool,
    num_forwards: int,
) -> list[bool]:
    """Return the flags of this rank; the arguments are as in `Agreed`, with the gradients of all buffers."""
    bits = [bool(min(num_forwards, (1 << _NUM_BITS) - 1) >> bit & 1) for bit in range(_NUM_BITS)]
    flags = [flag for gradients in everything for flag in gradients.used]
    for state in (GradientState.PACKING, GradientState.STEPPED):
        flags += [any(gradients.state is state for gradients in unit.gradients) for unit in units]
    return [*flags, has_changed, has_failed, *bits, *(not bit for bit in bits)]


def read_flags(flags: Iterable[bool], everything: Sequence[Gradients], units: Sequence[Unit]) -> Agreed:
    """Return what the flags of all ranks tell, in the order of `flags_of`."""
    flag = iter(flags)
    return Agreed(
        used=[list(islice(flag, len(gradients.used))) for gradients in everything],
        again=[unit for unit in units if next(flag)],
        early={unit for unit in units if next(flag)},
        has_changed=next(flag),
        has_failed=next(flag),
        has_other_pace=any(map(and_, list(islice(flag, _NUM_BITS)), flag)),
    )


def agree_on_frozen(units: Collection[Unit], axis: Axis) -> None:
    """Agree on frozen units with a backward: those after a trained module, perhaps on some ranks only."""
    flags = [bool(unit.open_calls) for unit in units]
    answer = axis.any(flags, "agreement on which frozen units have a backward")
    for unit, joins in zip(units, answer(), strict=True):
        unit.joins_backward = joins
