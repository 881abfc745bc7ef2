"""Gradients that are inf or nan, in the dtypes that need no loss scale."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import tiny
from tests.distributed.training import (
    ALL_STAGES,
    SOME_STAGES,
    differences,
    finish,
    numbers,
    start,
)
from tests.ranks import on_ranks

BAD = 7
"""The number of a step in which the last rank's batch holds an inf."""


def loss_of(model, number):
    values = numbers(number, 5, 7)
    output = model(values)
    if number == BAD and dist.get_rank() == dist.get_world_size() - 1:
        output = output * torch.tensor([1.0, math.inf, 1.0])
    return output.mean()


def is_told(clip, backward, nonfinite, numbers_of_steps):
    """By stage, the warnings of each step, at the line that calls it; a schedule of the rate surrounds it."""
    said = []
    for stage in SOME_STAGES:
        engine, optimizer = start(tiny(), "SGD", stage=stage, clip_grad_norm=clip, nonfinite=nonfinite)
        engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        texts = []
        for number in numbers_of_steps:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = loss_of(engine, number)
                engine.backward(loss) if backward == "engine" else loss.backward()
                engine.step()
            texts.append([str(one.message) for one in caught if one.filename == __file__])
        said.append(texts)
    return said


@pytest.mark.long_where(clip=[None])
@pytest.mark.parametrize(
    ("clip", "backward"),
    [(1.0, "plain"), (None, "engine")],  # None: the loss tells, on the rank that has it; then all are nan
)
def test_the_first_step_with_nan_is_told_once_and_the_remedy_leaves_it_out(ranks, clip, backward):
    for said in ranks(1, is_told, clip, backward, "report", [0, BAD, 1, 2]):
        for first, second, *later in said:
            assert first == []
            assert len(second) == 1
            assert second[0].startswith("step 2 was taken with a loss or a gradient norm that is not")
            assert "nonfinite='skip'" in second[0]
            assert later == [[], []]
    for said in ranks(2, is_told, clip, backward, "report", [0, BAD, 1, 2]):
        for texts in said:
            assert sum(map(len, texts)) == 1
    assert ranks(2, is_told, clip, backward, "skip", [0, BAD, 1, 2]) == [[[[]] * 4] * len(SOME_STAGES)] * 2


@pytest.mark.parametrize(
    ("num_ranks", "way", "config"),
    [
        (1, "engine", {}),
        (2, "optimizer", {}),
        (2, "engine", {"precision": {"param_dtype": "bf16"}, "clip_grad_norm": 1.0}),
    ],
)
@on_ranks()
def test_as_an_error_it_comes_on_all_ranks_before_anything_changes(way, config):
    """And the run goes on as one that never had the bad batch."""
    found = []
    for stage in SOME_STAGES:
        told, runs = [], []
        for which in ([0, BAD, 1], [0, 1]):
            engine, optimizer = start(tiny(), stage=stage, nonfinite="error", **config)
            step = engine.step if way == "engine" else optimizer.step
            for number in which:
                engine.backward(loss_of(engine, number))
                try:
                    step()
                except RuntimeError as error:
                    told.append(str(error))
                engine.zero_grad()
            runs.append(finish(engine, []))
        found += differences(f"stage {stage}", *runs)
        (said,) = told
        assert said.startswith(("the gradient norm is inf; not finite", "the gradient norm is nan; not"))
        assert "the gradients of 'gain', 'inner.weight', 'inner.bias' and 10 more" in said
        assert said.endswith("The step was not taken: Config(nonfinite='error')")
    return found


def small_messages(**config):
    """Exchanges beside parameters and gradients in a second step; the first agrees on an order."""
    found = []
    for stage in ALL_STAGES:
        engine, _ = start(tiny(), stage=stage, **config)
        for number in range(2):
            engine.reset_comm_report()
            engine.backward(loss_of(engine, number))
            engine.step()
        found.append(engine.comm_report().calls["control"])
    return found


def test_judging_takes_one_small_exchange_and_only_where_it_is_asked_for(ranks):
    """One tells which parameters were used; clipping and judging share the norm."""
    assert ranks(2, small_messages) == [[1] * 4] * 2
    for config in ({"nonfinite": "error"}, {"nonfinite": "skip"}, {"clip_grad_norm": 1.0}):
        assert ranks(2, small_messages, **config) == [[2] * 4] * 2
    assert ranks(2, small_messages, clip_grad_norm=1.0, nonfinite="error") == [[2] * 4] * 2
