"""Parameters in lists and dicts, units that call themselves, and ranks that take other branches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import numbers, same_as_replicated, square_loss
from tests.ranks import on_ranks


class Collections(nn.Module):
    """Parameters in lists and dicts."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ListAndDict() for _ in range(2))
        self.scales = nn.ParameterList([torch.randn(7), torch.randn(7)])

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        for block in self.blocks:
            x = x + block(x)
        return x


class ListAndDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(7, 5), torch.randn(5, 7)])
        self.named = nn.ParameterDict({"scale": torch.randn(7), "popped": torch.randn(7)})
        self.inner = nn.Identity()

    def forward(self, x):
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.inner(x * self.named["scale"] + self.named["popped"])


@on_ranks(2)
def test_lists_and_dicts_of_parameters_train_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    return same_as_replicated(Collections(), num_steps=2, loss=square_loss)


class CallsItself(nn.Module):
    """Runs its own forward inside its forward, and uses its parameters before and after."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(7, 7) / 3), nn.Linear(7, 7)

    def forward(self, x, depth=2):
        x = self.inner(x)
        if depth:
            x = x + self(x, depth - 1)
        return (x @ self.weight).tanh()


class Holds(nn.Module):
    """A unit that may hold another one of its class."""

    def __init__(self, inside=None):
        super().__init__()
        self.weight, self.inside = nn.Parameter(torch.randn(7, 7) / 3), inside

    def forward(self, x):
        x = x @ self.weight
        return (x if self.inside is None else x + self.inside(x)).tanh() @ self.weight


@pytest.mark.parametrize("units", [["CallsItself", "Holds"], ["CallsItself", "Holds", "Linear"]])
@on_ranks(1, 2)
def test_a_unit_may_call_itself_and_hold_its_like(units):
    torch.manual_seed(0)
    layers = CallsItself(), nn.Linear(7, 7), CallsItself(), Holds(Holds(Holds())), nn.Linear(7, 1)
    return same_as_replicated(nn.Sequential(*layers), "SGD", 3, square_loss, units=units)


class Softmax(nn.Module):
    """torch's adaptive softmax: ranks have targets in other clusters, whose layers stand in a list."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 7))
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(7, 60, cutoffs=[10, 20, 40], div_value=2.0)

    def forward(self, x, targets):
        return self.softmax(self.block(x), targets).loss


@on_ranks(2)
def test_ranks_that_run_other_parts_of_a_list_train_as_in_ddp_to_the_bit():
    def loss(model, number):
        torch.manual_seed(number)
        return model(numbers(number, 5, 7), torch.randint(20, (5,)) + 20 * dist.get_rank())

    torch.manual_seed(0)
    return same_as_replicated(Softmax(), num_steps=3, loss=loss, find_unused=True)
