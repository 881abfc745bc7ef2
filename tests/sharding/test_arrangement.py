"""The places of ranks on the axes of the mesh: all small meshes, and properties of large ones."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from zeroshard.plan.arrangement import AXES, DATA, PP, Arrangement, PerAxis
from zeroshard.plan.placement import DP_REPLICATE, DP_SHARD, TP

KINDS = [axes for count in range(len(AXES) + 1) for axes in itertools.combinations(AXES, count)]
"""Every set of axes."""


def divisors(number):
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


SMALL = [
    Arrangement(num_ranks, pp, tp, group_size)
    for num_ranks in range(1, 65)
    for pp in divisors(num_ranks)
    for tp in divisors(num_ranks // pp)
    for group_size in (None, *divisors(num_ranks // pp // tp))
]
"""Every mesh of at most 64 ranks."""

SIZES = st.integers(1, 12)
LARGE = st.builds(
    lambda pp, replicas, shard, tp: Arrangement(pp * replicas * shard * tp, pp, tp, shard),
    *(SIZES, SIZES, SIZES, SIZES),
)


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
        for axes in KINDS:
            assert arrangement.groups(*axes) == lines(grid(arrangement), axes), (arrangement, axes)


def test_tensor_data_and_pipeline_groups_of_every_small_mesh_are_those_of_megatron():
    """The loops are those of `initialize_model_parallel` of Megatron-LM."""
    for a in SMALL:
        n, per_stage = a.num_ranks, a.num_ranks // a.pp
        tensor = [list(range(i * a.tp, (i + 1) * a.tp)) for i in range(n // a.tp)]
        starts = [i * per_stage for i in range(a.pp)]
        data = [list(range(s + j, s + per_stage, a.tp)) for s in starts for j in range(a.tp)]
        pipeline = [list(range(i, n, per_stage)) for i in range(per_stage)]
        assert (a.groups(TP), a.groups(*DATA), a.groups(PP)) == (tensor, data, pipeline), a


def test_a_shard_group_is_a_run_of_data_parallel_ranks_in_every_small_mesh():
    for a in SMALL:
        size = a.num_data if a.shard_group_size is None else a.shard_group_size
        runs = [g[i : i + size] for g in a.groups(*DATA) for i in range(0, a.num_data, size)]
        assert sorted(a.groups(DP_SHARD)) == sorted(runs)
        same_places = [g[place::size] for g in a.groups(*DATA) for place in range(size)]
        assert sorted(a.groups(DP_REPLICATE)) == sorted(same_places)


def test_coordinates_of_every_small_mesh_are_the_indices_of_an_array():
    for arrangement in SMALL:
        array = grid(arrangement)
        assert arrangement.sizes == array.shape
        for rank in range(arrangement.num_ranks):
            place = arrangement.coordinates(rank)
            assert array[place] == rank


# ------------------------------------------------------------------------------------------ large meshes


@given(LARGE, st.sampled_from(KINDS))
def test_every_rank_is_in_exactly_one_group_of_a_kind(arrangement, axes):
    groups = arrangement.groups(*axes)
    assert sorted(itertools.chain(*groups)) == list(range(arrangement.num_ranks))
    sizes = dict(zip(AXES, arrangement.sizes, strict=True))
    assert {len(group) for group in groups} == {int(np.prod([sizes[axis] for axis in axes]))}


@given(LARGE, st.sampled_from(KINDS))
def test_ranks_and_groups_are_in_order_however_the_axes_are_listed(arrangement, axes):
    groups = arrangement.groups(*axes)
    assert all(group == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert arrangement.groups(*reversed(axes)) == groups


@given(LARGE, st.sampled_from(KINDS), st.data())
def test_the_ranks_of_a_group_differ_only_on_its_axes(arrangement, axes, data):
    group = data.draw(st.sampled_from(arrangement.groups(*axes)))
    places = [arrangement.coordinates(member)._asdict() for member in group]
    for axis in AXES:
        found = {place[axis] for place in places}
        assert len(found) == (getattr(arrangement.sizes, axis) if axis in axes else 1)


@given(LARGE, st.data())
def test_coordinates_and_ranks_are_of_the_same_order(arrangement, data):
    ranks = st.integers(0, arrangement.num_ranks - 1)
    one, other = data.draw(ranks), data.draw(ranks)
    places = arrangement.coordinates(one), arrangement.coordinates(other)
    assert all(at < size for at, size in zip(places[0], arrangement.sizes, strict=True))
    assert (one < other) == (places[0] < places[1])  # pp counts most, tp least
    assert (one == other) == (places[0] == places[1])


@given(LARGE)
def test_the_groups_of_any_single_axis_have_the_stride_of_the_axis(arrangement):
    for number, axis in enumerate(AXES):
        stride = int(np.prod(arrangement.sizes[number + 1 :]))
        for group in arrangement.groups(axis):
            assert {after - before for before, after in itertools.pairwise(group)} <= {stride}


# -------------------------------------------------------------------------------------------- examples


def test_32_ranks_with_tp_4_and_pp_4_have_2_data_parallel_ranks():
    arrangement = Arrangement(32, pp=4, tp=4)
    assert arrangement.sizes == PerAxis(pp=4, dp_replicate=1, dp_shard=2, tp=4)
    assert (arrangement.num_data, arrangement.num_parts) == (2, 16)
    assert arrangement.groups(TP) == [list(range(first, first + 4)) for first in range(0, 32, 4)]
    data = [[r, r + 4] for first in (0, 8, 16, 24) for r in range(first, first + 4)]
    assert arrangement.groups(*DATA) == data
    assert arrangement.groups(PP) == [[r, r + 8, r + 16, r + 24] for r in range(8)]
    assert len(arrangement.groups(TP)) == len(arrangement.groups(PP)) == 8
    assert len(arrangement.groups(*DATA)) == 16


def test_16_ranks_with_tp_2_and_pp_4_are_those_of_megatrons_documentation():
    arrangement = Arrangement(16, pp=4, tp=2)
    assert arrangement.groups(*DATA) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert arrangement.groups(TP) == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert arrangement.groups(PP) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert arrangement.groups(PP, TP) == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_the_drawing_of_8_ranks_is_as_drawn():
    arrangement = Arrangement(8, pp=2, tp=2)
    assert arrangement.groups(TP)[0] == [0, 1]
    assert arrangement.groups(*DATA)[0] == [0, 2]
    assert arrangement.groups(PP)[0] == [0, 4]
    assert arrangement.coordinates(6) == PerAxis(pp=1, dp_replicate=0, dp_shard=1, tp=0)


def test_hybrid_sharding_divides_the_data_parallel_ranks_of_each_part_of_the_model():
    arrangement = Arrangement(16, pp=2, tp=2, shard_group_size=2)
    assert arrangement.sizes == PerAxis(pp=2, dp_replicate=2, dp_shard=2, tp=2)
    assert arrangement.groups(*DATA)[-1] == [9, 11, 13, 15]
    assert arrangement.groups(DP_SHARD)[-1] == [13, 15]
    assert [9, 13] in arrangement.groups(DP_REPLICATE)


@pytest.mark.parametrize("num_ranks", [1, 2, 7, 64])
def test_without_sizes_all_ranks_are_one_shard_group(num_ranks):
    arrangement = Arrangement(num_ranks)
    everyone = list(range(num_ranks))
    assert arrangement.groups(DP_SHARD) == [everyone]
    assert arrangement.groups(TP) == arrangement.groups(PP) == [[rank] for rank in everyone]


def test_an_arrangement_is_a_value():
    arrangement = Arrangement(8, 2, 2)
    assert arrangement == Arrangement(8, pp=2, tp=2, shard_group_size=None)
    assert len({arrangement, Arrangement(8, 2, 2)}) == 1
    with pytest.raises(FrozenInstanceError):
        arrangement.pp = 4


# ---------------------------------------------------------------------------------------------- errors


def refusal(function, *args):
    with pytest.raises(ValueError, match=r"\w") as caught:
        function(*args)
    return str(caught.value)


def test_sizes_that_do_not_divide_the_ranks_are_refused_and_all_others_are_not():
    for num_ranks, pp, tp, group_size in itertools.product(range(1, 17), range(1, 9), range(1, 9), range(18)):
        divisor = pp * tp * (group_size or 1)
        if num_ranks % divisor:
            asked = {"mesh.pp": pp, "mesh.tp": tp, "shard_group_size": group_size}
            keys = ", ".join(f"{key}={number}" for key, number in asked.items() if number > 1)
            assert refusal(Arrangement, num_ranks, pp, tp, group_size or None) == (
                f"{num_ranks} rank(s) cannot be arranged with {keys}: expected a multiple of {divisor}"
            )
        else:
            sizes = Arrangement(num_ranks, pp, tp, group_size or None).sizes
            assert sizes.dp_shard == (group_size or num_ranks // (pp * tp))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0,), "num_ranks: expected at least 1 rank, got 0"),
        ((-4,), "num_ranks: expected at least 1 rank, got -4"),
    ],
)
def test_a_number_below_1_is_refused_with_its_name(sizes, expected):
    assert refusal(Arrangement, *sizes) == expected
