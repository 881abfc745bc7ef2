"""Gradients that enter a unit beside its outputs, and what a unit hands on beside tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard
from tests.distributed.training import (
    averaged_step,
    by_hand,
    differences,
    finish,
    numbers,
    only,
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


def gradient_penalty(model, number):
    x = numbers(number, 5, 7).requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.mean() + (gradient.norm(dim=1) - 1).square().mean()


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
        (Stack, gradient_penalty, {"reshard_after_forward": False}),
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


class Normalized(nn.Sequential):
    def __init__(self):
        blocks = (nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh()) for _ in range(2))
        super().__init__(*blocks, nn.Linear(7, 3))


@pytest.mark.parametrize(("make", "keep"), [(Collecting, ()), (Normalized, nn.BatchNorm1d)])
@on_ranks(2)
def test_in_bfloat16_lists_that_blocks_are_given_are_added_to_and_batch_norm_keeps_its_dtype(make, keep):
    model = make()

    def cast_loss(net, number):
        return net(numbers(number, 6, 7).bfloat16()).float().square().mean()

    def loss(net, number):
        return net(numbers(number, 6, 7)).float().square().mean()

    want = by_hand(model, "SGD", range(3), cast_loss, torch.bfloat16, keep=keep)
    engine, optimizer = start(model, "SGD", precision={"param_dtype": "bf16"})
    got = finish(engine, [step(engine, optimizer, loss, number) for number in range(3)])
    names = dict(engine.named_parameters())
    return differences(make.__name__, only(got, names), only(want, names))


@on_ranks(2)
def test_a_model_that_shows_slices_is_not_saved_as_a_whole_one(tmp_path):
    folder = str(tmp_path)
    model = llama()
    engine, _ = start(model, stage=3)
    with pytest.raises(RuntimeError, match=r"or call save_pretrained\(\) of the engine"):
        engine.module.save_pretrained(folder)
    with engine.unsharded():
        if dist.get_rank() == 0:
            engine.module.save_pretrained(folder)
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    with engine.unsharded():
        assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_embeddings_are_resized_before_initialize_or_after_close(stage):
    model = llama()
    engine = zeroshard.initialize(model, config={"stage": stage}).engine
    with pytest.raises(RuntimeError, match=r"call it before initialize, or after engine.close\(\)"):
        model.resize_token_embeddings(VOCABULARY + 3)
    with pytest.raises(RuntimeError, match="was added to a sharded"), engine.unsharded(write_back=True):
        model.resize_token_embeddings(VOCABULARY + 3)
    engine = zeroshard.initialize(llama(), config={"stage": stage}).engine
    engine.close()
    model = engine.module
    model.resize_token_embeddings(VOCABULARY + 3)
    assert (
        zeroshard.initialize(model, config={"stage": stage}).engine(batch(0)).logits.shape[-1]
        == VOCABULARY + 3
    )
