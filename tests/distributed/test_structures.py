"""Parameters in lists and dicts, outside of layers."""

import torch
from torch import nn

from tests.distributed.training import (
    same_as_replicated,
    square_loss,
)
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
