"""The loss scale's moves, against torch.amp.GradScaler."""

import random

import pytest
import torch

from zeroshard import Config, Precision
from zeroshard.config.sections import DynamicLossScale
from zeroshard.stepping.guard import LossScale

DEFAULT = DynamicLossScale()
INITIAL, GROWTH_INTERVAL, MINIMUM = DEFAULT.start, DEFAULT.window, DEFAULT.minimum


def scales_of_torch(overflows, **options):
    """The scale after each step of torch's GradScaler."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", **options)
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
    scales = moves("dynamic", overflows)
    assert scales == scales_of_torch(overflows)
    assert len(set(scales)) >= 3


def moves(policy, overflows):
    scale, scales = LossScale.of(policy), []
    for overflow in overflows:
        scale = scale.after(overflow=overflow)
        scales.append(scale.value)
    return scales


def test_a_dynamic_scale_never_falls_below_the_minimum():
    assert LossScale.of(None).value == INITIAL
    scales = moves(None, [True] * 20 + [False] * GROWTH_INTERVAL)
    assert (scales[19], scales[-1]) == (MINIMUM, 2 * MINIMUM)


def test_a_number_stays_whatever_happens():
    assert set(moves(96.0, [True, False] * GROWTH_INTERVAL)) == {96.0}


def test_start_and_window_mean_what_they_mean_in_torch():
    random.seed(2)
    overflows = [random.random() < 0.2 for _ in range(200)]
    policy = DynamicLossScale(start=2.0**40, window=5, minimum=2.0**-60)
    assert moves(policy, overflows) == scales_of_torch(overflows, init_scale=2.0**40, growth_interval=5)


def scales_of_deepspeed(overflows, scale, window, minimum, hysteresis):
    """The rules that DeepSpeed documents: once `hysteresis` overflows have come, each one halves."""
    left, since, scales = hysteresis, 0, []
    for overflow in overflows:
        since = 0 if overflow else since + 1
        if overflow and left > 1:
            left -= 1
        elif overflow:
            scale = max(minimum, scale / 2)
        elif since % window == 0:
            scale, left = scale * 2, hysteresis
        scales.append(scale)
    return scales


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_lets_the_first_overflows_pass(hysteresis):
    random.seed(hysteresis)
    overflows = [random.random() < 0.3 for _ in range(300)]
    policy = DynamicLossScale(start=256, window=4, minimum=16, hysteresis=hysteresis)
    scales = moves(policy, overflows)
    assert scales == scales_of_deepspeed(overflows, 256.0, 4, 16.0, hysteresis)
    assert min(scales) == 16


def test_a_dict_in_the_config_tells_how_the_scale_moves():
    precision = Precision(param_dtype="fp16", loss_scale={"start": 8, "window": 10})
    assert precision.loss_scale == DynamicLossScale(start=8.0, window=10)
    config = Config(precision=precision)
    assert Config.from_dict(config.to_dict()) == config
    assert LossScale.of(precision.loss_scale).value == 8
    for wrong, text in (
        ({"begin": 8}, "unknown config key 'precision.loss_scale.begin'"),
        ({"start": 0}, "precision.loss_scale.start"),
        ({"start": 8, "minimum": 16}, "precision.loss_scale.start=8.0 needs"),
        ([8], "a dict of start, window, minimum, hysteresis"),
    ):
        with pytest.raises(ValueError, match=text.replace("[", r"\[")):
            Precision(param_dtype="fp16", loss_scale=wrong)


def test_without_float16_there_is_no_scale():
    assert LossScale().after(overflow=True) == LossScale() == LossScale(value=1.0)
