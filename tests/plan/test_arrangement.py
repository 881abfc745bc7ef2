"""The places of ranks on the axes of the mesh: all small meshes, and properties of large ones."""

from __future__ import annotations

import itertools

import numpy as np

from tests.distributed.training import refused
from zeroshard.plan.arrangement import AXES, DATA, PP, Arrangement
from zeroshard.plan.placement import TP

KINDS = [axes for count in range(len(AXES) + 1) for axes in itertools.combinations(AXES, count)]
"""Every set of axes."""


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


SMALL = [
    Arrangement(num_ranks, pp, tp, group_size)
    for num_ranks in range(1, 25)
    for pp in divisors(num_ranks)
    for tp in divisors(num_ranks // pp)
    for group_size in (None, *divisors(num_ranks // pp // tp))
]
"""Every mesh of at most 24 ranks."""


def grid(arrangement):
    """The ranks as an array over (pp, data, tp), the last one fastest, with the data axis cut in two."""
    a = arrangement
    data = a.num_ranks // (a.pp * a.tp)
    shard = data if a.shard_group_size is None else a.shard_group_size
    return np.arange(a.num_ranks).reshape(a.pp, data // shard, shard, a.tp)


def lines(array, axes):
    """The parts of an array along some of its axes, one for each place on the others."""
    inner = [AXES.index(axis) for axis in axes]
    outer = [index for index in range(array.ndim) if index not in inner]
    size = int(np.prod([array.shape[index] for index in inner]))
    return array.transpose(outer + inner).reshape(-1, size).tolist()


def test_groups_of_every_small_mesh_are_those_of_an_array():
    for arrangement in SMALL:
        array = grid(arrangement)
        for axes in KINDS:
            assert arrangement.groups(*axes) == lines(array, axes), (arrangement, axes)
        assert arrangement.sizes == array.shape
        for rank in range(arrangement.num_ranks):
            assert array[arrangement.coordinates(rank)] == rank


def test_tensor_data_and_pipeline_groups_of_every_small_mesh_are_those_of_megatron():
    """The loops are those of `initialize_model_parallel` of Megatron-LM."""
    for a in SMALL:
        n, per_stage = a.num_ranks, a.num_ranks // a.pp
        tensor = [list(range(i * a.tp, (i + 1) * a.tp)) for i in range(n // a.tp)]
        starts = [i * per_stage for i in range(a.pp)]
        data = [list(range(s + j, s + per_stage, a.tp)) for s in starts for j in range(a.tp)]
        pipeline = [list(range(i, n, per_stage)) for i in range(per_stage)]
        assert (a.groups(TP), a.groups(*DATA), a.groups(PP)) == (tensor, data, pipeline), a


def test_sizes_that_do_not_divide_the_ranks_are_refused_and_all_others_are_not():
    for num_ranks, pp, tp, group_size in itertools.product(range(1, 17), (1, 2, 3, 8), (1, 2, 5), range(18)):
        divisor = pp * tp * (group_size or 1)
        if num_ranks % divisor:
            asked = {"mesh.pp": pp, "mesh.tp": tp, "shard_group_size": group_size}
            keys = ", ".join(f"{key}={number}" for key, number in asked.items() if number > 1)
            assert refused(Arrangement, num_ranks, pp, tp, group_size or None) == (
                f"{num_ranks} rank(s) cannot be arranged with {keys}: expected a multiple of {divisor}"
            )
        else:
            sizes = Arrangement(num_ranks, pp, tp, group_size or None).sizes
            assert sizes.dp_shard == (group_size or num_ranks // (pp * tp))
    assert refused(Arrangement, 0) == "num_ranks: expected at least 1 rank, got 0"
