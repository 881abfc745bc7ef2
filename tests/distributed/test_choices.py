"""Models whose forward runs a part of a list, another one on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import numbers, start
from tests.ranks import on_ranks

WIDTH = 7


class Heads(nn.Module):
    """A head for each task."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in "abc")

    def forward(self, x, task):
        return self.heads[task](x)


class Tasks(nn.Module):
    """Blocks that all ranks call, and heads among which each rank chooses."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in "ab")
        self.heads = Heads()

    def forward(self, x, task):
        for block in self.blocks:
            x = torch.tanh(block(x, x))
        return self.heads(x, task)


def task_loss(model, number):
    return model(numbers(number, 5, WIDTH), (dist.get_rank() + number) % 3).square().mean()


@pytest.mark.long  # test_order_of_calls.py has the message at once
@on_ranks(2, process_group=False)
def test_a_choice_that_units_cut_is_an_error_that_says_what_to_list():
    torch.manual_seed(0)
    engine, _ = start(Tasks(), stage=3, watchdog_s=30.0)
    with pytest.raises(RuntimeError) as error:
        task_loss(engine, 0)
    message = str(error.value)
    assert "all-gather of unit 'heads.heads.0'" in message
    assert "list in units= the class of the module that holds them" in message
