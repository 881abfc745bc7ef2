"""The gradient hooks of examples/hooks.py: their formulas, and runs under zeroshard and under DDP."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from examples import hooks
from tests.distributed.training import numbers
from tests.ranks import on_ranks


@pytest.mark.parametrize("levels", [1, 7])
def test_qsgd_is_unbiased_and_its_variance_is_within_the_bound(levels):
    num, num_draws = 256, 10_000
    v = torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    codes, norms = hooks.quantize(v.expand(num_draws, num), levels, torch.Generator().manual_seed(2))
    draws = hooks.dequantize(codes.double(), norms, levels)
    bound = min(num / levels**2, num**0.5 / levels) * v.norm() ** 2
    assert (draws - v).square().sum(1).mean() <= bound
    # The mean of draws has a variance of `bound` / num_draws at most; 5 times its root is never reached.
    assert (draws.mean(0) - v).norm() < 5 * (bound / num_draws).sqrt()
    assert codes.abs().max() <= levels


def test_a_sketch_finds_the_largest_elements_and_is_linear():
    num, columns, largest = 2000, 200, [7, 800, 1999]
    v = torch.randn(num, generator=torch.Generator().manual_seed(1)) * 0.1
    v[largest] = torch.tensor([9.0, -8.0, 7.0])
    places, signs = hooks.hashes(num, 5, columns, 0, v.device)
    table = hooks.sketch(v, places, signs, columns)
    assert sorted(hooks.estimate(table, places, signs).abs().topk(3).indices.tolist()) == largest
    double = hooks.sketch(v + v, places, signs, columns)
    assert torch.equal(double, table + table)
    assert places.max() < columns
    assert set(signs.unique().tolist()) == {-1, 1}


def build():
    torch.manual_seed(0)
    return nn.Linear(40, 20, bias=False)


def loss_of(model, number):
    return (model(numbers(number, 6, 40)) - 1).square().mean()


def train(model, optimizer, num_steps):
    losses = []
    for number in range(num_steps):
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


STATES = [
    (hooks.QSGD, hooks.qsgd_hook),
    (lambda: hooks.SketchedSGD(share=0.1, columns=0.1), hooks.sketched_hook),
]


@on_ranks(2)
def test_both_train_alike_under_zeroshard_and_ddp():
    for make, hook in STATES:
        model = DistributedDataParallel(build())
        model.register_comm_hook(make(), hook)
        want = train(model, torch.optim.SGD(model.parameters(), lr=0.05), 30)
        for stage in (0, 1):
            model, state = build(), make()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            engine = zeroshard.initialize(
                model, optimizer, {"stage": stage}, gradient_hook=(state, hook)
            ).engine
            assert train(engine, optimizer, 30) == want
            assert state.iter == 30


@on_ranks(2)
def test_a_sketch_of_everything_gives_the_exact_mean():
    state = hooks.SketchedSGD(share=1.0, columns=1.0)
    state.iter = hooks.FIRST
    values = numbers(0, 50)

    class Bucket:
        buffer = staticmethod(lambda: values.clone())
        index = staticmethod(lambda: 0)
        is_last = staticmethod(lambda: True)

    mean = values.clone()
    dist.all_reduce(mean)
    assert torch.allclose(hooks.sketched_hook(state, Bucket()).value(), mean / 2, atol=1e-7)
    assert not state.errors[0].any()
