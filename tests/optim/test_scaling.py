"""The loss scale's moves, against torch.amp.GradScaler."""

import random

import pytest
import torch

from zeroshard.optim.scaling import GROWTH_INTERVAL, INITIAL, MINIMUM, LossScale


def scales_of_torch(overflows):
    """The scale after each step of torch's GradScaler."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))  # it makes its state when it is first used
    scales = []
    for overflow in overflows:
        parameter.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("seed", [0, 1])
def test_a_dynamic_scale_moves_as_that_of_torch(seed):
    random.seed(seed)
    few = [False] * GROWTH_INTERVAL + [True] + [False] * (GROWTH_INTERVAL - 1) + [True, False]
    overflows = few if seed == 0 else [random.random() < 0.1 for _ in range(100)]
    scale, scales = LossScale.of("dynamic"), []
    for overflow in overflows:
        scale = scale.after(overflow=overflow)
        scales.append(scale.value)
    assert scales == scales_of_torch(overflows)
    assert len(set(scales)) >= 3


def test_a_dynamic_scale_never_falls_below_the_minimum():
    scale = LossScale.of(None)
    assert (scale.value, scale.is_dynamic, scale.can_fall) == (INITIAL, True, True)
    for _ in range(20):
        scale = scale.after(overflow=True)
    assert (scale.value, scale.can_fall) == (MINIMUM, False)
    for _ in range(GROWTH_INTERVAL):
        scale = scale.after(overflow=False)
    assert scale.value == 2 * MINIMUM


def test_a_number_stays_whatever_happens():
    scale = LossScale.of(96.0)
    assert not scale.can_fall
    for overflow in [True, False] * GROWTH_INTERVAL:
        scale = scale.after(overflow=overflow)
    assert scale == LossScale(value=96.0)


def test_without_float16_there_is_no_scale():
    assert LossScale().after(overflow=True) == LossScale() == LossScale(value=1.0)
