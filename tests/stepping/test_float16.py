"""fp16 compute with a scaled loss, against the same by hand; gradients that are inf or nan in any dtype."""

import copy
import math
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.models import tiny
from tests.distributed.training import (
    SOME_STAGES,
    Run,
    by_hand,
    caught,
    differences,
    finish,
    numbers,
    only,
    small_gpt,
    square_loss,
    start,
    token_loss,
)
from tests.ranks import on_ranks
from zeroshard import Config

BAD = 7
"""The number of a step in which the last rank's batch holds an inf."""


def half(loss_scale="dynamic", **options):
    return {"precision": {"param_dtype": "fp16", "loss_scale": loss_scale, **options}}


def batch(number):
    """[5, 7]"""
    values = numbers(number, 5, 7)
    if number == BAD and dist.get_rank() == dist.get_world_size() - 1:
        values[0, 0] = math.inf
    return values


def batch_loss(model, number):
    return model(batch(number)).float().square().mean()


def steps(engine, which, loss=batch_loss):
    """The run of `engine.backward` and `engine.step`, and what step() said; skipped losses are left out."""
    losses, taken = [], []
    for number in which:
        value = loss(engine, number)
        engine.backward(value)
        taken.append(engine.step())
        losses += [value.item()] if taken[-1] else []
    return finish(engine, losses), taken


@pytest.mark.long_where(reduce_dtype=[torch.float16])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
@on_ranks(2)
def test_a_static_scale_equals_the_hand_written_loop_to_the_bit(reduce_dtype):
    model, which, found = small_gpt(), range(3), []
    reduced = {"reduce_dtype": reduce_dtype or torch.float32}
    want = by_hand(model, "AdamW", which, token_loss, torch.float16, **reduced, loss_scale=1024.0)
    for stage in SOME_STAGES:
        config = half(1024, reduce_dtype=reduce_dtype)
        engine, _ = start(copy.deepcopy(model), "AdamW", stage=stage, **config)
        run, taken = steps(engine, which, token_loss)
        got = only(run, want.parameters)
        found += differences(f"stage {stage}", got, only(want, got.parameters))
        found += [] if taken == [True] * 3 else [taken]
    return found


@on_ranks(2)
def test_a_half_model_gets_fp32_main_parameters_and_a_dynamic_scale():
    """A model that is given in float16, and one that is told to compute in it."""
    native, _ = start(tiny().half())
    told, _ = start(tiny().half().float(), **half(None))

    def loss(model, number):
        return model(batch(number).half()).float().square().mean()

    runs = [steps(engine, range(3), loss)[0] for engine in (native, told)]
    assert {(e.loss_scale, p.dtype) for e in (native, told) for p in e.parameters()} == {
        (65536.0, torch.float32)
    }
    return differences("told", *runs)


@on_ranks(2)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_all():
    """A run with a bad batch on one rank, compared with one that never had it."""
    found = []
    for stage in SOME_STAGES:
        runs = []
        for which in ([0, 1, BAD, 2, 3], [0, 1, 2, 3]):
            engine, optimizer = start(tiny(), "AdamW", stage=stage, clip_grad_norm=1.0, **half(1024))
            engine.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            run, taken = steps(engine, which)
            runs.append(run)
            assert taken == [number != BAD for number in which]
            counts = engine.global_step, optimizer.param_groups[0]["lr"], engine.skipped_steps
            assert counts == (4, 1e-3 / 16, len(which) - 4)
        found += differences(f"stage {stage}", *runs)
    return found


def large_loss(model, number):
    dtype = next(model.parameters()).dtype  # the engine casts inputs by itself
    return 30 * model(batch(number).to(dtype)).float().square().mean()


@on_ranks(2)
def test_a_dynamic_scale_falls_until_gradients_fit_and_leaves_no_trace():
    """Each step is repeated until it is taken; the first one has the largest gradients."""
    found, model, order = [], tiny(), (2, 0, 1)
    for stage in SOME_STAGES:
        engine, _ = start(copy.deepcopy(model), "SGD", stage=stage, **half())
        losses, scales = [], set()
        for number in order:
            taken = [False]
            while not taken[-1]:
                run, taken = steps(engine, [number], large_loss)
            losses += run.losses
            scales.add(engine.loss_scale)
        (scale,) = scales
        assert 1 <= scale == 65536.0 * 0.5**engine.skipped_steps < 65536
        want = by_hand(model, "SGD", order, large_loss, torch.float16, loss_scale=scale)
        run.losses = losses
        got = only(run, want.parameters)
        found += differences(f"stage {stage}", got, only(want, got.parameters))
    return found


@pytest.mark.long_where(scale=["dynamic"])
@pytest.mark.parametrize(("scale", "num_lower", "least"), [(1024, 0, 1024.0), ("dynamic", 16, 1.0)])
@on_ranks(2)
def test_an_overflow_that_no_lower_scale_can_cure_is_warned_of_or_an_error(scale, num_lower, least):
    for nonfinite, num_skipped, num_warnings in (("report", 17, 17 - num_lower), ("error", num_lower, 0)):
        engine, _ = start(tiny(), nonfinite=nonfinite, **half(scale))
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            error = caught(steps, engine, [BAD] * 17)
        said = [str(warning.message) for warning in noted if "skipped_steps" in str(warning.message)]
        assert (len(said), engine.skipped_steps, engine.loss_scale) == (num_warnings, num_skipped, least)
        assert all(f"the loss scale {least:g} is not lowered" in text for text in said)
        assert ("nothing was raised" if said else "the gradient norm is nan") in error


@pytest.mark.parametrize("config", [half(1024), {"nonfinite": "skip"}], ids=["float16", "skip"])
@on_ranks(2)
def test_an_unscaled_backward_and_a_step_that_cannot_be_left_out_are_refused(config):
    """And the engine goes on as if they had not been tried."""
    engine, optimizer = start(tiny(), **config)
    if "precision" in config:
        loss = engine(batch(0)).float().sum()
        for call in (square_loss(engine, 0).backward, loss.backward):
            said = caught(call)
            assert "without loss scale" in said
            assert "call engine.backward(loss), not loss.backward()" in said
    engine.zero_grad()
    engine.backward(batch_loss(engine, 0))
    assert "call engine.step(), not optimizer.step()" in caught(optimizer.step)
    engine.step()
    run, _ = steps(engine, [1, 2])
    clean, _ = steps(start(tiny(), **config)[0], range(3))
    return differences("then", Run([], run.parameters), Run([], clean.parameters))


class Float(nn.Module):
    """Casts to float32."""

    def forward(self, x):
        return x.float()


@on_ranks(1, 2)
def test_an_unscaled_backward_is_refused_wherever_float16_is():
    torch.manual_seed(0)
    frozen = nn.Linear(7, 10).half().requires_grad_(False)
    engine, _ = start(nn.Sequential(frozen, Float(), nn.Linear(10, 3)), stage=3)
    module = tiny()
    zeroshard.shard(module, Config.from_dict(half()))
    inputs = batch(0)
    said = caught(engine(inputs.half()).sum().backward), caught(module(inputs).sum().backward)
    assert all("a loss without loss scale" in each for each in said)


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
        engine, _ = start(tiny(), stage=3, **config)
        for number in range(2):
            engine.reset_comm_report()
            engine.backward(loss_of(engine, number))
            engine.step()
        # One says which parameters were used.
        assert engine.comm_report().calls["control"] == (2 if config else 1), config
