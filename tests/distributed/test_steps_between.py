"""Steps between a forward and its backward, and edits before a part is called alone.

Plain PyTorch refuses a backward that has saved a value from before a step. So do all stages.
"""

import pytest
import torch

from tests.distributed.models import Stemmed
from tests.distributed.training import numbers, start
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


@on_ranks(1, 2)
def test_a_backward_of_values_before_a_step_is_refused_as_in_plain_pytorch():
    for way in (step_between, step_and_forward_between, second_backward_after_a_step):
        plain = Stemmed()
        with pytest.raises(RuntimeError, match=REFUSED):
            way(plain, torch.optim.SGD(plain.parameters()))
        for stage, precision in ((0, {}), (1, {}), (2, BF16), (3, {}), (3, BF16)):
            engine, optimizer = start(Stemmed(), "SGD", stage=stage, units=["Residual"], precision=precision)
            with pytest.raises(RuntimeError, match=REFUSED):
                way(engine.module, optimizer)
