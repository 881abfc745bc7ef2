"""Values that a step takes in pieces, and the cuts: integers in, integers out.

A step of the tier of files needs host buffers of the largest unit that it takes whole. Most units of a model
are alike, but an embedding may be several times as large. So the few units that are larger than the rest are
stepped in pieces, and need no buffers.

    bytes of units    2, 5, 5, 5, 5, 5, 5, 20, 1
    usual size        5: units up to this size have at least half of all bytes
    in pieces         the one of 20

Values on the host go through pieces of the device, a part after the other. A part is parameters of one buffer
with up to `NEAR_BYTES`, or a larger one, which is stepped in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from zeroshard.plan.buffers import BufferPlan
from zeroshard.plan.layout import BLOCK, round_up
from zeroshard.plan.tiers import Tier

LEAST_BYTES = 64 << 20
"""Units with fewer bytes of main parameters are taken whole: three buffers of them are no burden."""
PIECE_BYTES = 16 << 20
"""Bytes of main parameters of a piece in files; larger ones were not faster, see docs/decisions.md."""
_SHARE = 1 / 2
"""The least share of all bytes in units up to the usual size: most bytes go through buffers, by direct
I/O. In typical models of 1B to 70B, embedding and head have 3 to 26%; see `memory/activations.py`."""
_MARGIN = 1.25
"""A unit that is larger by less than this saves too little."""


NEAR_BYTES = 64 << 20
"""The most bytes of main parameters that travel to the device together for a step."""


def most_elements(plan: BufferPlan) -> int:
    """Return the elements of a buffer that are stepped together, at most, where parameters are cut."""
    num_bytes = NEAR_BYTES if plan.state_tier is Tier.HOST else PIECE_BYTES
    return max(BLOCK, num_bytes // plan.main_dtype.itemsize)


def near_parts(plan: BufferPlan) -> list[range]:
    """Return the parameters of a buffer on the host that are stepped together on the device, by index.

    Parts are the same on all ranks. One with more than `most_elements` is one parameter, which is cut.
    """
    if plan.state_tier is not Tier.HOST or not plan.trainable:
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
    most = plan.layout.shard_size if plan.is_partial else plan.layout.total
    return [min(size, most) for size in plan.layout.sizes]


class StepPiece(NamedTuple):
    """A range of elements [start, stop) of one parameter's slice."""

    parameter: int
    """The number of the parameter."""
    start: int
    stop: int


def main_bytes(plans: Iterable[BufferPlan]) -> int:
    """Return the bytes of a rank's trained main parameters in files."""
    in_files = (plan for plan in plans if plan.trainable and plan.main_tier is Tier.DISK)
    return sum(plan.main_size * plan.main_dtype.itemsize for plan in in_files)


def are_cut(sizes: Sequence[int]) -> list[bool]:
    """Return True for each unit that is stepped in pieces.

    Args:
        sizes: `main_bytes` of each unit.
    """
    usual, so_far = 0, 0
    for size in sorted(sizes):
        if so_far >= _SHARE * sum(sizes):
            break
        usual, so_far = size, so_far + size
    return [size > max(LEAST_BYTES, _MARGIN * usual) for size in sizes]


def cut(sizes: Sequence[int], most: int) -> list[list[StepPiece]]:
    """Return the pieces of a unit in lists that are stepped together, with about `most` elements each.

    No piece begins inside a block of an 8-bit state, and no list has two pieces of one parameter.

    Args:
        sizes: elements of each parameter's slice; a parameter of none has one empty piece.
        most: the elements that are stepped together, at most; but a block more where a piece is rounded up.
    """
    together: list[list[StepPiece]] = [[]]
    left = most
    for index, size in enumerate(sizes):
        step = round_up(-(-size // max(1, -(-size // most))), BLOCK) if size else 1
        for start in range(0, max(size, 1), step):
            piece = StepPiece(index, start, min(size, start + step))
            if together[-1] and (piece.stop - piece.start > left or together[-1][-1].parameter == index):
                together.append([])
                left = most
            together[-1].append(piece)
            left -= piece.stop - piece.start
    return together
