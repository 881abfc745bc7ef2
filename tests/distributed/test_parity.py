"""The numbers of zeroshard are those of DistributedDataParallel, and on one rank of plain PyTorch.

To the bit where the order of all additions is the same: fp32 on one or two ranks. A step whose numbers differ
shows in the loss of the next one. With three or more ranks DDP adds in another order: there the fuzz compares
all stages with plain PyTorch that adds in the order of the ranks.
"""

import torch
from torch import nn

from tests.distributed.models import Tiny
from tests.distributed.training import (
    OPTIMIZERS,
    build,
    same_as_replicated,
    square_loss,
)
from tests.ranks import on_ranks


def against_replicated(kinds, optimizers):
    return [
        f"{kind}: {line}"
        for kind in kinds
        for optimizer in optimizers
        for line in same_as_replicated(build(kind), optimizer)
    ]


@on_ranks(2, timeout=200)
def test_steps_on_two_ranks_equal_those_of_ddp_to_the_bit_at_every_stage():
    found = against_replicated(["GPT", "Llama", "tied transformers Llama"], ["AdamW"])
    return found + against_replicated(["tied GPT"], ["fused AdamW", "SGD"])


@on_ranks(1)
def test_steps_on_one_rank_equal_those_of_plain_pytorch_to_the_bit():
    found = against_replicated(["tied GPT"], ["AdamW"])
    return found + against_replicated(["Llama"], ["fused AdamW", "SGD"])


# ------------------------------------------------------------------------------------------- small shapes


class OneElement(nn.Module):
    """One parameter, and of it one element."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.full((), 1.5))

    def forward(self, x):
        return x * self.factor


@on_ranks(2)
def test_parameters_of_one_element_train_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    models = [Tiny(1), Tiny(3), OneElement(), nn.Sequential(nn.Linear(7, 1))]
    return [line for m in models for o in OPTIMIZERS for line in same_as_replicated(m, o, 4, square_loss)]
