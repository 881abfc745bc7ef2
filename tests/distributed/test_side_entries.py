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
    by_hand,
    differences,
    finish,
    numbers,
    only,
    square_loss,
    start,
    step,
)

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
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        value = loss(model, number)
        value.backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient *= 1 / dist.get_world_size()
            dist.all_reduce(gradient)
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return finish(model, losses)


def train_both(make, loss, config):
    model = make()
    want = gradients_by_hand(model, loss)
    engine, optimizer = start(model, torch.optim.SGD(model.parameters(), lr=0.1), **config)
    got = finish(engine, [step(engine, optimizer, loss, number) for number in range(2)])
    return differences(make.__name__, got, want)


@pytest.mark.long_where(config=[{"stage": 3, "reshard_after_forward": False}, {"stage": 2}])
@pytest.mark.parametrize("config", [{"stage": 3}, {"stage": 3, "reshard_after_forward": False}, {"stage": 2}])
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (llama, loss_through_a_cache),
        (llama, loss_of_attentions),
        (Stack, loss_aside),
        (Stack, gradient_penalty),
        (ReturnsView, square_loss),
        (Collecting, square_loss),
    ],
)
def test_a_loss_on_what_leaves_a_unit_trains_as_in_plain_pytorch_to_the_bit(ranks, make, loss, config):
    if make is ReturnsView:
        config = config | {"units": ["Positions", "Block"]}
    for found in ranks(2, train_both, make, loss, config):
        assert found == []


def evaluate_with_views():
    model = ReturnsView()
    expected = model(numbers(0, 5, 7))
    engine, _ = start(model, stage=3, units=["Positions", "Block"])
    with torch.no_grad():
        return torch.equal(engine(numbers(0, 5, 7)), expected)


def test_a_view_of_a_parameter_outlives_its_unit_in_evaluation(ranks):
    assert all(ranks(2, evaluate_with_views))


def train_in_dtype(make, dtype, keep, stage):
    torch.manual_seed(0)
    model = make()

    def cast_loss(net, number):
        return net(numbers(number, 6, 7).to(dtype)).float().square().mean()

    def loss(net, number):
        return net(numbers(number, 6, 7)).float().square().mean()

    want = only(by_hand(model, "SGD", range(3), cast_loss, dtype, keep=keep), dict(model.named_parameters()))
    engine, optimizer = start(model, "SGD", stage=stage, precision={"param_dtype": dtype})
    got = finish(engine, [step(engine, optimizer, loss, number) for number in range(3)])
    return differences(f"stage {stage}", only(got, dict(engine.named_parameters())), want)


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_add_to_the_lists_they_are_given_whatever_the_dtype_to_compute_in(ranks, dtype, stage):
    for found in ranks(2, train_in_dtype, Collecting, dtype, (), stage):
        assert found == []


class Normalized(nn.Sequential):
    def __init__(self):
        blocks = (nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh()) for _ in range(2))
        super().__init__(*blocks, nn.Linear(7, 3))


@pytest.mark.long_where(stage=[0, 1])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_batch_norm_keeps_its_dtype_where_the_rest_computes_in_bfloat16(ranks, stage):
    for found in ranks(2, train_in_dtype, Normalized, torch.bfloat16, nn.BatchNorm1d, stage):
        assert found == []


class Encoding(Stack):
    def encode(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.encode(x))


def train_with_a_method_of_the_forward(stage):
    model = Encoding()

    def loss(net, number):
        value = net(numbers(number, 5, 7)).square().mean()
        return value + net.encode(numbers(number + 1, 5, 7)).mean() if number else value

    want = gradients_by_hand(model, loss)
    engine, optimizer = start(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    engine.register_forward_method("encode")
    with torch.no_grad():
        engine(numbers(9, 5, 7))
    got = finish(engine, [step(engine, optimizer, loss, number) for number in range(2)])
    return differences(f"stage {stage}", got, want)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_registered_method_may_be_what_forward_calls(ranks, stage):
    for found in ranks(2, train_with_a_method_of_the_forward, stage):
        assert found == []


def save_slices(folder):
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
        return all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_a_model_that_shows_slices_is_not_saved_as_a_whole_one(ranks, tmp_path):
    assert ranks(2, save_slices, str(tmp_path)) == [True] * 2


def resized(stage):
    model = llama()
    engine = zeroshard.initialize(model, config={"stage": stage}).engine
    with pytest.raises(RuntimeError, match=r"call it before initialize, or after engine.close\(\)"):
        model.resize_token_embeddings(VOCABULARY + 3)
    with pytest.raises(RuntimeError, match="shape"), engine.unsharded(write_back=True):
        model.resize_token_embeddings(VOCABULARY + 3)
    engine = zeroshard.initialize(llama(), config={"stage": stage}).engine
    engine.close()
    model = engine.module
    model.resize_token_embeddings(VOCABULARY + 3)
    return zeroshard.initialize(model, config={"stage": stage}).engine(batch(0)).logits.shape[-1]


@pytest.mark.parametrize("stage", [0, 3])
def test_embeddings_are_resized_before_initialize_or_after_close(ranks, stage):
    assert ranks(2, resized, stage) == [VOCABULARY + 3] * 2
