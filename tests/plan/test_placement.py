"""The stage table of the ZeRO paper and of the documentation, and what follows from its rows."""

import dataclasses
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zeroshard.memory.tiered import bytes_sent
from zeroshard.plan.buffers import DtypePolicy, Setting, UnitPlan, plan_buffer, units_ahead
from zeroshard.plan.exchange import Collective, Exchange, exchanges
from zeroshard.plan.originals import Original
from zeroshard.plan.placement import DP_INNER, DP_REPLICATE, DP_SHARD, STAGES, SUMMANDS, Placement, place

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
AS_GIVEN = DtypePolicy(param_dtype=None, reduce_dtype=None, main_dtype=None)
IN_BF16 = DtypePolicy(param_dtype=BF16, reduce_dtype=None, main_dtype=None)
GATHER, SCATTER = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
SHARDED = {DP_SHARD: Placement.SHARD}


def sizes(shard, replicate=1, inner=1):
    return {DP_SHARD: shard, DP_REPLICATE: replicate, DP_INNER: inner}


def test_each_stage_shards_one_more_kind_of_model_state():
    rows = [(stage.optimizer, stage.gradient, stage.parameter, stage.kept) for stage in STAGES]
    assert rows == [
        ({}, SUMMANDS, {}, {}),
        (SHARDED, SUMMANDS, {}, {}),
        (SHARDED, SHARDED, {}, {}),
        (SHARDED, SHARDED, SHARDED, SHARDED),
    ]


def test_only_stage_3_chooses_what_is_kept_between_forward_and_backward():
    assert all(
        place(stage, reshard, 8) == STAGES[stage] for stage in range(3) for reshard in (True, False, 2)
    )
    assert place(3, True, 8).kept == place(3, 8, 8).kept == SHARDED
    assert place(3, False, 8).kept == {}
    assert place(3, 2, 8).kept == {DP_INNER: Placement.SHARD}


# ------------------------------------------------------------------------------------------- exchanges


def test_hybrid_sharding_sums_over_the_groups_what_each_group_has_reduced():
    assert exchanges(SUMMANDS, {}, sizes(4, replicate=2)) == (
        Exchange(SCATTER, DP_SHARD),
        Exchange(SCATTER, DP_REPLICATE),
        Exchange(GATHER, DP_REPLICATE),
        Exchange(GATHER, DP_SHARD),
    )


@given(
    before=st.sampled_from([{}, SHARDED, SUMMANDS, {DP_INNER: Placement.SHARD}]),
    after=st.sampled_from([{}, SHARDED, SUMMANDS]),
    shard=st.integers(1, 6),
    replicate=st.integers(1, 6),
    inner=st.integers(1, 6),
)
def test_a_walk_over_exchanges_arrives_at_the_placement(before, after, shard, replicate, inner):
    num_ranks = sizes(shard, replicate, inner)
    now = {axis: before.get(axis, Placement.REPLICATE) for axis in num_ranks}
    for collective, axis in exchanges(before, after, num_ranks):
        assert num_ranks[axis] > 1
        assert now[axis] is (Placement.PARTIAL if collective is SCATTER else Placement.SHARD)
        now[axis] = Placement.SHARD if collective is SCATTER else Placement.REPLICATE
    for axis in (axis for axis in before if num_ranks[axis] > 1):  # a replicated tensor needs no exchange
        wanted = after.get(axis, Placement.REPLICATE)
        assert now[axis] is wanted or (before[axis], wanted) == (Placement.SHARD, Placement.PARTIAL)


@given(shard=st.integers(1, 8), replicate=st.integers(1, 8), blocks=st.integers(1, 9), then=st.integers(1, 8))
def test_bytes_of_a_path_are_those_of_the_documented_formulas(shard, replicate, blocks, then):
    num = blocks * shard * replicate
    n, r = Fraction(shard - 1, shard), Fraction(replicate - 1, replicate)
    num_ranks = sizes(shard, replicate)

    def sent(before, after, *itemsizes):
        return bytes_sent(exchanges(before, after, num_ranks), num, num_ranks, *itemsizes)

    assert sent(SHARDED, {}, 2) == 2 * num * n
    if shard > 1:
        between = 2 * then * num / shard * r
        assert sent(SUMMANDS, SHARDED, 2, then) == pytest.approx(2 * num * n + between)
        assert sent(SUMMANDS, {}, 2, then) == pytest.approx((2 + then) * num * n + between)


# ------------------------------------------------------------------------------------- one flat buffer


def planned(stage, dtypes, given_dtype, trainable, num_ranks, reshard=True, size=10):
    weight = nn.Parameter(torch.empty(size, dtype=given_dtype, device="meta"), requires_grad=trainable)
    setting = Setting(placements=place(stage, reshard, num_ranks), dtypes=dtypes, sizes=sizes(num_ranks))
    return plan_buffer([Original(weight, "weight", ())], setting)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_main_parameters_are_cut_where_the_optimizer_or_frozen_parameters_are_sharded(stage, trainable):
    plan = planned(stage, AS_GIVEN, FP32, trainable, num_ranks=4)
    assert plan.is_partial == (stage >= 1 if trainable else stage == 3)
    assert plan.is_resident == (stage < 3)
    assert plan.main_size == plan.layout.total // (4 if plan.is_partial else 1)
    assert bool(plan.reductions) == trainable
    assert bool(plan.gathers) == plan.is_partial
    assert plan.regathers == (plan.gathers if stage == 3 else ())


@pytest.mark.parametrize(
    ("dtypes", "given_dtype", "compute", "main", "reduce"),
    [
        (AS_GIVEN, FP32, FP32, FP32, FP32),
        (AS_GIVEN, BF16, BF16, FP32, FP32),
        (AS_GIVEN, FP64, FP64, FP64, FP64),
        (IN_BF16, FP32, BF16, FP32, FP32),
        (dataclasses.replace(IN_BF16, reduce_dtype=BF16), FP32, BF16, FP32, BF16),
        (dataclasses.replace(IN_BF16, main_dtype=FP64), FP32, BF16, FP64, FP32),
    ],
)
def test_dtypes_left_open_are_the_models_for_compute_and_at_least_float32_for_the_rest(
    dtypes, given_dtype, compute, main, reduce
):
    plan = planned(3, dtypes, given_dtype, True, num_ranks=2)
    assert (plan.compute_dtype, plan.main_dtype, plan.reduce_dtype) == (compute, main, reduce)


# ---------------------------------------------------------------------------------- units under way


@pytest.mark.parametrize(("size", "expected"), [(1 << 4, 8), (1 << 16, 4), (1 << 18, 1), (1 << 30, 1)])
def test_small_units_are_gathered_further_ahead_unless_the_config_has_a_number(size, expected):
    root, unit = (UnitPlan("", (planned(3, AS_GIVEN, FP32, True, 2, size=one),)) for one in (1 << 24, size))
    assert units_ahead(None, [root, unit, unit]) == expected
    assert [units_ahead(asked, [root, unit]) for asked in (0, 1, 20)] == [0, 1, 20]


# --------------------------------------------------------------------------- from forward to backward


def is_kept(stage, num_ranks, reshard, needs=True, **where):
    unit = UnitPlan("", (planned(stage, AS_GIVEN, FP32, True, num_ranks, reshard),), needs)
    where = {"is_root": False, "ends_forward": False} | where
    return unit.is_kept(place(stage, reshard, num_ranks), **where)


def test_units_between_the_root_and_the_last_one_are_gathered_twice_at_stage_3():
    assert not is_kept(3, 2, True)
    assert not is_kept(3, 4, 2)
    assert is_kept(3, 2, True, is_root=True)
    assert is_kept(3, 2, True, ends_forward=True)
    assert is_kept(3, 2, False)
    assert is_kept(3, 1, True), "it is resident"
    assert is_kept(3, 2, True, needs=False)
    assert all(is_kept(stage, 2, True) for stage in range(3))
