"""Gradients that are inf or nan, in the dtypes that need no loss scale."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.distributed.models import tiny
from tests.distributed.training import (
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


def warned(clip, nonfinite, numbers_of_steps):
    """The warnings of each step, at the line that calls it; a schedule of the rate surrounds it."""
    engine, optimizer = start(tiny(), "SGD", clip_grad_norm=clip, nonfinite=nonfinite)
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    texts = []
    for number in numbers_of_steps:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = loss_of(engine, number)
            engine.backward(loss) if clip is None else loss.backward()
            engine.step()
        texts.append([str(one.message) for one in caught if one.filename == __file__])
    return texts


@on_ranks(1, 2)
def test_the_first_step_with_nan_is_told_once_and_the_remedy_leaves_it_out(num_ranks):
    """Without clipping the loss shows it, on the rank that has it; then all are nan."""
    for clip in (1.0, None):
        first, second, *later = warned(clip, "report", [0, BAD, 1, 2])
        assert sum(map(len, (first, second, *later))) == 1
        if num_ranks == 1:
            assert (first, later) == ([], [[], []])
            assert second[0].startswith("step 2 was taken with a loss or a gradient norm that is not")
            assert "nonfinite='skip'" in second[0]
        assert warned(clip, "skip", [0, BAD, 1, 2]) == [[]] * 4


NOT_TAKEN = (
    r"^the gradient norm is (inf|nan); not finite.*the gradients of 'gain', 'inner.weight', 'inner.bias' and "
    r"10 more.*The step was not taken: Config\(nonfinite='error'\)$"
)


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
    runs = []
    for which in ([0, BAD, 1], [0, 1]):
        engine, optimizer = start(tiny(), nonfinite="error", **config)
        step = engine.step if way == "engine" else optimizer.step
        for number in which:
            engine.backward(loss_of(engine, number))
            with pytest.raises(RuntimeError, match=NOT_TAKEN) if number == BAD else nullcontext():
                step()
            engine.zero_grad()
        runs.append(finish(engine, []))
    return differences("then", *runs)


@on_ranks(2)
def test_judging_takes_one_small_exchange_and_only_where_it_is_asked_for():
    """Of a second step, as the first agrees on an order. Clipping and judging share the norm."""
    clips, judges, skips = {"clip_grad_norm": 1.0}, {"nonfinite": "error"}, {"nonfinite": "skip"}
    for config in ({}, clips, judges, skips, clips | judges):
        for stage in (0, 1, 3):
            engine, _ = start(tiny(), stage=stage, **config)
            for number in range(2):
                engine.reset_comm_report()
                engine.backward(loss_of(engine, number))
                engine.step()
            # One says which parameters were used.
            assert engine.comm_report().calls["control"] == (2 if config else 1), (stage, config)
