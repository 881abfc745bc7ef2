"""Ranks that call units in different orders at stage 3 are told so within seconds."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import numbers, start
from tests.ranks import on_ranks

CONFIG = {"stage": 3, "units": ["Linear"], "watchdog_s": 60.0}


class Ordered(nn.Module):
    """Calls its blocks in the order that the caller gives."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(5)])

    def forward(self, x, order):
        for number in order:
            x = torch.relu(self.blocks[number](x)) + x
        return x


def train(order_of_rank, steps):
    """The error of this rank and the seconds until it came; None when there was none."""
    torch.manual_seed(0)
    engine, _, _, _ = zeroshard.initialize(
        Ordered(), lambda parameters: torch.optim.SGD(parameters, lr=0.1), CONFIG
    )
    rank, start = dist.get_rank(), time.monotonic()
    try:
        for step in range(steps):
            order = range(5) if step == 0 else order_of_rank[rank]
            loss = engine(torch.ones(2, 8), order).square().mean()
            engine.backward(loss)
            engine.step()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


IN_ORDER, SWAPPED = [0, 1, 2, 3, 4], [0, 3, 2, 1, 4]


@pytest.mark.long_where(num_ranks=[3])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_call_blocks_in_different_orders_raise_an_error_that_names_the_first(ranks, num_ranks):
    orders = [IN_ORDER] * (num_ranks - 1) + [SWAPPED]
    for outcome in ranks(num_ranks, train, orders, 3, process_group=False):
        assert outcome is not None
        message, seconds = outcome
        assert seconds < 10
        assert re.search(
            r"collective \d+ of rank \d is the all-gather of unit 'blocks\.\d', "
            r"on rank \d it is the all-gather of unit 'blocks\.\d': at stage 3 all ranks must call",
            message,
        ), message


# ------------------------------------------------------------- parts of a list among which each rank chooses


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


@pytest.mark.long
@on_ranks(2, process_group=False)
def test_a_choice_that_units_cut_is_an_error_that_says_what_to_list():
    torch.manual_seed(0)
    engine, _ = start(Tasks(), stage=3, watchdog_s=30.0)
    with pytest.raises(RuntimeError) as error:
        task_loss(engine, 0)
    message = str(error.value)
    assert "all-gather of unit 'heads.heads.0'" in message
    assert "list in units= the class of the module that holds them" in message
