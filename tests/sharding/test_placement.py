"""The stage table of the ZeRO paper and of the documentation, and what follows from its rows."""

import dataclasses
from fractions import Fraction

import pytest
import torch

from zeroshard.plan.placement import STAGES, DtypePolicy, Placement, Placements, plan_buffer

REPLICATED, SHARDED = Placement.REPLICATE, Placement.SHARD
FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
AS_GIVEN = DtypePolicy(param_dtype=None, reduce_dtype=None, main_dtype=None)
IN_BF16 = DtypePolicy(param_dtype=BF16, reduce_dtype=None, main_dtype=None)


def test_each_stage_shards_one_more_kind_of_model_state():
    rows = [(stage.optimizer, stage.gradient, stage.parameter) for stage in STAGES]
    assert rows == [
        (REPLICATED, REPLICATED, REPLICATED),
        (SHARDED, REPLICATED, REPLICATED),
        (SHARDED, SHARDED, REPLICATED),
        (SHARDED, SHARDED, SHARDED),
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_bytes_per_parameter_are_those_of_the_stage_formulas(num_ranks):
    """Float32 with Adam: 4 bytes of parameter, 4 of gradient, 8 of optimizer state."""

    def part(placement):
        return Fraction(1, num_ranks) if placement is SHARDED else Fraction(1)

    held = [4 * part(s.parameter) + 4 * part(s.gradient) + 8 * part(s.optimizer) for s in STAGES]
    n = Fraction(num_ranks)
    assert held == [16, 8 + 8 / n, 4 + 12 / n, 16 / n]


def test_only_stage_3_frees_parameters():
    assert [stage.frees_parameters for stage in STAGES] == [False, False, False, True]


def test_stages_0_and_1_add_micro_batches_up_locally():
    assert [stage.accumulates_locally for stage in STAGES] == [True, True, False, False]


def test_only_stage_0_gathers_reduced_gradients_on_every_rank():
    assert [stage.gathers_gradients for stage in STAGES] == [True, False, False, False]


def test_a_stage_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        STAGES[3].parameter = REPLICATED
    with pytest.raises(TypeError):
        Placements(SHARDED, SHARDED, SHARDED)


# ------------------------------------------------------------------------------------- one flat buffer


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("stage", range(4))
def test_main_parameters_are_cut_where_the_optimizer_or_frozen_parameters_are_sharded(stage, trainable):
    plan = plan_buffer(STAGES[stage], AS_GIVEN, FP32, trainable, num_ranks=4)
    assert plan.is_partial == (stage >= 1 if trainable else stage == 3)
    assert plan.is_resident == (stage < 3)


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_alone_holds_everything_once(stage):
    plan = plan_buffer(STAGES[stage], AS_GIVEN, FP32, True, num_ranks=1)
    assert not plan.is_partial
    assert plan.is_resident
    assert plan.is_alias


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
    plan = plan_buffer(STAGES[3], dtypes, given_dtype, True, num_ranks=2)
    assert (plan.compute_dtype, plan.main_dtype, plan.reduce_dtype) == (compute, main, reduce)


def test_frozen_parameters_need_no_wider_copy_than_the_one_that_computes():
    plan = plan_buffer(STAGES[2], IN_BF16, FP32, False, num_ranks=2)
    assert plan.main_dtype == plan.compute_dtype == BF16
    assert plan.is_alias


@pytest.mark.parametrize("stage", range(4))
def test_mixed_precision_keeps_a_main_copy_beside_the_one_that_computes(stage):
    assert not plan_buffer(STAGES[stage], IN_BF16, FP32, True, num_ranks=2).is_alias
