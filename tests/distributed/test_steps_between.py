"""Steps between a forward and its backward, and edits before a part is called alone.

Plain PyTorch refuses a backward that has saved a value from before a step. So do all stages.
"""

import pytest
import torch

from tests.distributed.models import Stemmed
from tests.distributed.training import ALL_STAGES, numbers, start
from tests.ranks import on_ranks

REFUSED = "modified by an inplace operation"
BF16 = {"param_dtype": "bfloat16"}


def loss(model, number=0):
    """The same batch on all ranks."""
    return model(numbers(number, 5, 7, rank=0)).float().square().mean()


def step_between(model, optimizer):
    loss(model, 1).backward()
    late = loss(model)
    optimizer.step()
    late.backward()


def step_and_forward_between(model, optimizer):
    loss(model, 1).backward()
    late = loss(model)
    optimizer.step()
    loss(model, 1).backward()
    late.backward()


def second_backward_after_a_step(model, optimizer):
    late = loss(model)
    late.backward(retain_graph=True)
    optimizer.step()
    late.backward()


def settings():
    return [(stage, precision) for stage in ALL_STAGES for precision in ({}, BF16)]


def engine_of(stage, precision, **config):
    return start(Stemmed(), "SGD", stage=stage, units=["Residual"], precision=precision, **config)


@on_ranks(1, 2)
def test_a_backward_of_values_before_a_step_is_refused_as_in_plain_pytorch():
    """The ways and settings in which values from before a step are used, or those after it, in silence."""
    found = []
    ways = (step_between, step_and_forward_between, second_backward_after_a_step)
    for way in ways:
        plain = Stemmed()
        with pytest.raises(RuntimeError, match=REFUSED):
            way(plain, torch.optim.SGD(plain.parameters()))
        for setting in settings():
            engine, optimizer = engine_of(*setting)
            try:
                way(engine.module, optimizer)
                found.append((way.__name__, setting))
            except RuntimeError as error:
                found += [] if REFUSED in str(error) else [str(error)]
    return found
