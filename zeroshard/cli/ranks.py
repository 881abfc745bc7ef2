"""`zeroshard mesh`: the groups of ranks along each axis of the mesh, in tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence

from zeroshard.config.sections import Config, Mesh
from zeroshard.plan.arrangement import AXES, DATA, PP, Arrangement
from zeroshard.plan.placement import DP_REPLICATE, DP_SHARD, TP
from zeroshard.tables import render

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tensor", (TP,)),
    ("data", DATA),
    ("shard", (DP_SHARD,)),
    ("replica", (DP_REPLICATE,)),
    ("pipeline", (PP,)),
)
"""The groups by name, with the axes that each kind spans."""

_MAX_RANKS = 1 << 16  # time and memory grow with the ranks, and nobody reads the tables of more
_MAX_SHOWN = 16  # ranks of a group that are written out; the title has the stride of longer ones


def show_groups(options: Namespace) -> None:
    """Run `zeroshard mesh`."""
    if options.ranks > _MAX_RANKS:
        raise ValueError(f"--ranks: expected at most {_MAX_RANKS:,}, got {options.ranks:,}")
    config = Config(mesh=Mesh(pp=options.pp, tp=options.tp), shard_group_size=options.shard_group_size)
    arrangement = Arrangement(options.ranks, config.mesh.pp, config.mesh.tp, config.shard_group_size)
    print(*_paragraphs(arrangement), sep="\n\n")


def _paragraphs(arrangement: Arrangement) -> Iterator[str]:
    sizes = arrangement.sizes
    product = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
    yield (
        f"{_number(arrangement.num_ranks, 'rank')}, counted along the last axis first: {product}\n"
        f"parts of the model, pp x tp: {arrangement.num_parts:,}; "
        f"data-parallel ranks of a part: {arrangement.num_data:,}"
    )
    # Without axes of 1 rank two kinds may span the same axes: without replicas, data and shard groups.
    several = [axis for axis, size in zip(AXES, sizes, strict=True) if size > 1]
    shown: list[list[str]] = []
    for kind, axes in _KINDS:
        spanned = [axis for axis in several if axis in axes]
        if spanned and spanned not in shown:
            shown.append(spanned)
            yield _table(kind, spanned, [axis for axis in several if axis not in axes], arrangement)
    if len(several) < len(AXES):
        single = ", ".join(axis for axis in AXES if axis not in several)
        yield f"no groups along axes of 1 rank: {single}"


def _table(kind: str, axes: Sequence[str], others: Sequence[str], arrangement: Arrangement) -> str:
    """Return the groups along `axes`, each with its place on the other axes."""
    groups = arrangement.groups(*axes)
    size, stride = len(groups[0]), groups[0][1] - groups[0][0]
    ranks = f"{size} consecutive ranks" if stride == 1 else f"{size} ranks, stride {stride}"
    title = f"{_number(len(groups), f'{kind} group')} of {ranks} ({' x '.join(axes)})"
    rows = []
    for number, group in enumerate(groups):
        place = arrangement.coordinates(group[0])._asdict()
        rows.append((str(number), *(str(place[axis]) for axis in others), _written(group)))
    return render(title, ("group", *others, "ranks"), rows)


def _written(group: Sequence[int]) -> str:
    if len(group) <= _MAX_SHOWN:
        return ", ".join(map(str, group))
    return f"{', '.join(map(str, group[:3]))}, ..., {group[-1]}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)
