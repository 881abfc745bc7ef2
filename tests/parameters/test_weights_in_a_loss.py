"""Losses over weights: refused where their gradients would be lost, and right where the messages say."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.training import numbers, square_loss, start
from tests.ranks import on_ranks


class Net(nn.Module):
    """Two layers that are units of their own, and a head of the root unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def of_head(self):
        return 0.1 * self.head.weight.square().sum()


class WithTerm(nn.Module):
    """The module around the model that the message asks for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x), term(self.model)


def term(model):
    return 0.1 * sum(p.square().sum() for n, p in model.named_parameters() if n.endswith("weight"))


def check(engine, penalty, prefix="", model=None):
    """Compare with the gradients of plain PyTorch over the batches of all ranks."""
    model = model or Net()
    for rank in range(dist.get_world_size()):
        (model(numbers(0, 5, 7, rank=rank)).square().mean() / dist.get_world_size()).backward()
    if penalty is not None:
        penalty(model).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(engine.full_gradient(prefix + name), p.grad)


def outside(engine):
    engine.backward(square_loss(engine, 0) + term(engine.module))


def read_before(engine):
    with engine.unsharded():
        penalty = term(engine.module)
    engine.backward(square_loss(engine, 0) + penalty)


def all_inside(engine):
    with engine.unsharded():
        engine.backward(square_loss(engine, 0) + term(engine.module))


def term_alone(engine):
    with engine.unsharded(write_back=True):
        term(engine.module).backward()


def trained_again(engine):
    engine.module.head.weight.requires_grad_(False)
    try:
        with engine.unsharded():
            engine.module.head.weight.requires_grad_()
            engine.module.head.weight.square().sum().backward()
    finally:
        engine.module.head.weight.requires_grad_()


WAYS = (outside, read_before, all_inside, term_alone, trained_again)


@on_ranks(2)
def test_a_loss_over_weights_is_refused_where_its_gradient_would_be_lost():
    engine, _ = start(Net(), "SGD", stage=3)
    before = engine.full_parameter("head.weight")
    for way in WAYS:
        with pytest.raises(RuntimeError, match=r"\.weight'.*outside the forward of its unit") as caught:
            way(engine)
        assert "name its class in units=" in str(caught.value)
        engine.zero_grad()
    assert torch.equal(engine.full_parameter("head.weight"), before)
    engine.backward(square_loss(engine, 0))  # the engine goes on
    check(engine, None)


@on_ranks(2)
def test_each_remedy_for_a_loss_over_weights_gives_the_gradients_of_plain_pytorch():
    engine, _ = start(WithTerm(Net()), "SGD", stage=3, units=["WithTerm"])
    output, penalty = engine(numbers(0, 5, 7))
    engine.backward(output.square().mean() + penalty)
    check(engine, term, prefix="model.")

    engine, _ = start(Net(), "SGD", stage=3)
    engine.register_forward_method("of_head")
    engine.backward(square_loss(engine, 0) + engine.of_head())
    check(engine, Net.of_head)

    with torch.no_grad(), engine.unsharded(engine.module.head):
        read = engine.module.head.weight.norm()
    torch.testing.assert_close(read, engine.full_parameter("head.weight").norm())


@on_ranks(2)
def test_a_batch_inside_unsharded_has_the_gradients_of_one_outside():
    for write_back in (False, True):
        engine, _ = start(Net(), "SGD", stage=3)
        with engine.unsharded(write_back=write_back):
            with torch.no_grad():
                term(engine.module)
            engine.backward(square_loss(engine, 0))
        check(engine, None)
        engine.zero_grad()
        with engine.unsharded(write_back=write_back):
            loss = square_loss(engine, 0)
        engine.backward(loss)
        check(engine, None)


class Lends(Net):
    """A block that computes with the weight of the block after it, which it has kept from a forward."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.blocks[1].register_forward_pre_hook(lambda block, _: self.kept.append(block[0].weight))
        self.blocks[0][1].register_forward_pre_hook(lambda _, args: args[0] * self.factor())

    def factor(self):
        return self.kept[-1].mean() if self.training else 1.0


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_weight_that_an_earlier_unit_computes_with_gets_both_gradients(stage):
    (engine, _), plain = start(Lends(), "SGD", stage=stage), Lends()
    for model in (engine, plain):
        model.eval()
        model(numbers(0, 5, 7))
        model.train()
    square_loss(engine, 0).backward()
    check(engine, None, model=plain)
