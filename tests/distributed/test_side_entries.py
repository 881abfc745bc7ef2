"""Gradients that enter a unit beside its outputs, and what a unit hands on beside tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed.training import (
    averaged_step,
    differences,
    finish,
    numbers,
    square_loss,
    start,
    step,
)
from tests.ranks import on_ranks

VOCABULARY = 97


class Block(nn.Module):
    """Keeps a loss of its own beside the output."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(7), nn.Linear(7, 7), nn.Linear(7, 4, bias=False)

    def forward(self, x, collected=None):
        hidden = self.norm(x)
        self.aside = self.gate(hidden).square().mean()
        if collected is not None:
            collected.append(self.aside.float())
        return x + self.up(hidden).tanh()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Collecting(Stack):
    def forward(self, x):
        collected = []
        for block in self.blocks:
            x = block(x, collected)
        assert len(collected) == 3
        return self.head(x).float() + torch.stack(collected).sum()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 7))

    def forward(self, length):
        return self.weight[:length]


class ReturnsView(Stack):
    """Uses a part of a unit's parameter after other units have run."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()

    def forward(self, x):
        positions = self.positions(len(x))
        return super().forward(x) + positions


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def batch(number):
    seed = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randint(0, VOCABULARY, (2, 12), generator=seed)


def loss_through_a_cache(model, number):
    """The first forward's outputs are dropped; its keys and values are not."""
    tokens = batch(number)
    first = model(input_ids=tokens[:, :6], use_cache=True)
    second = model(input_ids=tokens[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    del first
    return F.cross_entropy(second.logits[:, :-1].flatten(0, 1), tokens[:, 7:].flatten())


def loss_of_attentions(model, number):
    return model(input_ids=batch(number), output_attentions=True).attentions[-1].square().sum(-1).mean()


def loss_aside(model, number):
    model(numbers(number, 5, 7))
    return sum(block.aside for block in (model.blocks[0], model.blocks[2]))


def gradients_by_hand(model, loss):
    """Of plain PyTorch, averaged over the ranks: DDP does not take all of these losses."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return finish(model, [averaged_step(model, optimizer, loss, number) for number in range(2)])


@pytest.mark.parametrize(
    ("make", "loss", "config"),
    [
        (llama, loss_through_a_cache, {}),
        (llama, loss_of_attentions, {}),
        (Stack, loss_aside, {}),
        (ReturnsView, square_loss, {"units": ["Positions", "Block"]}),
        (Collecting, square_loss, {}),
    ],
)
@on_ranks(2)
def test_a_loss_on_what_leaves_a_unit_trains_as_in_plain_pytorch_to_the_bit(make, loss, config):
    model = make()
    want = gradients_by_hand(model, loss)
    engine, optimizer = start(model, torch.optim.SGD(model.parameters(), lr=0.1), **config)
    got = finish(engine, [step(engine, optimizer, loss, number) for number in range(2)])
    return differences(make.__name__, got, want)


@on_ranks(2)
def test_a_view_of_a_parameter_outlives_its_unit_in_evaluation():
    model = ReturnsView()
    expected = model(numbers(0, 5, 7))
    engine, _ = start(model, stage=3, units=["Positions", "Block"])
    with torch.no_grad():
        assert torch.equal(engine(numbers(0, 5, 7)), expected)
