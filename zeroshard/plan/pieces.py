"""Values that travel for a step, and the cuts: integers in, integers out.

Values on the host and in files go through pieces of memory, a part after the other. A part is parameters of
one buffer with up to `NEAR_BYTES`, or one larger parameter, which is stepped in pieces.
"""

from __future__ import annotations

from itertools import pairwise

from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.layout import BLOCK, Span, round_up

NEAR_BYTES = 64 << 20
"""The most bytes of main parameters, or of averages, that travel together for a step."""
NUM_OTHERS = 2
"""The pieces that are not read ahead: one is stepped, one is written."""
MOST_BYTES = 1 << 30
"""The most bytes of all pieces, if several parcels are read ahead."""
MOST_UNDER_WAY = 2
"""Units whose gradients exist on a device while another unit is reduced, as compute comes later."""


def most_elements(plan: BufferPlan) -> int:
    """Return the elements of a buffer that are stepped together, at most."""
    return max(BLOCK, NEAR_BYTES // plan.main_dtype.itemsize)


def near_parts(plan: BufferPlan) -> list[range]:
    """Return the parameters of a buffer with states on a farther tier that are stepped together, by index.

    Parts are the same on all ranks. One with more than `most_elements` is one parameter, which is cut.
    """
    if not (plan.travels and plan.trainable):
        return []
    sizes, most = slice_sizes(plan), most_elements(plan)
    starts, so_far = [0], 0
    for index, size in enumerate(sizes):
        if index > starts[-1] and so_far + size > most:
            starts.append(index)
            so_far = 0
        so_far += size
    return [range(start, stop) for start, stop in pairwise([*starts, len(sizes)])]


def slice_sizes(plan: BufferPlan) -> list[int]:
    """Return the elements of each parameter that the rank has which holds most of it."""
    return [min(size, plan.main_size) for size in plan.layout.sizes]


def cut(size: int, most: int) -> list[Span]:
    """Return the pieces of a parameter's slice with about `most` elements each.

    No piece begins inside a block of an 8-bit state, so it may have a block more.
    """
    step = round_up(-(-size // max(1, -(-size // most))), BLOCK) if size else 1
    return [Span(start, min(size, start + step)) for start in range(0, size, step)]


def most_ahead(num: int, largest: int) -> int:
    """Return the number of parcels that are read ahead.

    Args:
        num: the number that is asked for, at least 1.
        largest: the bytes of the largest parcel.
    """
    return max(1, min(num, MOST_BYTES // max(1, largest) - NUM_OTHERS))
