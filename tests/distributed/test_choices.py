"""Models whose forward runs a part of a list, another one on each rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import numbers, same_as_replicated, start
from tests.ranks import on_ranks

WIDTH = 7


class Softmax(nn.Module):
    """torch's adaptive softmax: ranks have targets in other clusters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)) for _ in "ab")
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 60, cutoffs=[10, 20, 40], div_value=2.0)

    def forward(self, x, targets):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.softmax(x, targets).loss


def softmax_loss(model, number):
    rank = dist.get_rank()
    return model(numbers(number, 5, WIDTH), torch.randint(20, (5,)) + 20 * rank)


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


MODELS = {
    "adaptive softmax": (Softmax, softmax_loss, {}),
    "a head for each task": (Tasks, task_loss, {"units": ["Bilinear", "Heads"]}),
}


def seeded(loss):
    def again(model, number):
        torch.manual_seed(number)
        return loss(model, number)

    return again


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_ranks_that_run_other_parts_of_a_list_train_as_in_ddp_to_the_bit(name):
    torch.manual_seed(0)
    make, loss, config = MODELS[name]
    return same_as_replicated(make(), num_steps=3, loss=seeded(loss), find_unused=True, **config)


@on_ranks(2, process_group=False)
def test_a_choice_that_units_cut_is_an_error_that_says_what_to_list():
    torch.manual_seed(0)
    engine, _ = start(Tasks(), stage=3, watchdog_s=30.0)
    with pytest.raises(RuntimeError) as error:
        task_loss(engine, 0)
    message = str(error.value)
    assert "all-gather of unit 'heads.heads.0'" in message
    assert "list in units= the class of the module that holds them" in message
