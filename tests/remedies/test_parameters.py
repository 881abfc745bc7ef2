"""Remedies in errors about the parameters of an engine are followed, and they work."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import zeroshard
from tests.remedies.told import (
    DATA,
    adamw,
    loss_of,
    net,
    same,
    start,
    told,
    trained,
    trains,
    whole,
)


def test_a_parameter_of_two_units_is_in_one():
    class Borrows(nn.Module):
        """The second block computes with the weight of the first."""

        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(7, 7)) for _ in range(2))

        def forward(self, x):
            return self.second(self.first(x)) @ self.first[0].weight

    torch.manual_seed(0)
    model = Borrows()
    engine = start(copy.deepcopy(model), units=["Sequential"])
    with told("To share it between modules"):
        loss_of(engine)
    trains(start(copy.deepcopy(model), units=["Borrows"]), model)


def test_a_gradient_is_taken_by_backward():
    model = net()
    loss_of(model).backward()
    want = model.inner.weight.grad.flatten()
    engine = start()
    parameter = engine.module.inner.weight
    words = "Freeze the other parameters before the forward, call loss.backward() and read p.grad"
    with told(words):
        torch.autograd.grad(loss_of(engine), parameter)
    with told(words):
        loss_of(engine).backward(inputs=[parameter])
    engine.zero_grad()
    for other in engine.parameters():
        other.requires_grad_(other is parameter)
    loss_of(engine).backward()
    assert torch.equal(parameter.grad.flatten(), want)
    engine.zero_grad()
    seen = []
    hook = engine.module.inner.register_forward_hook(lambda module, *_: seen.append(module.weight))
    loss = loss_of(engine)
    hook.remove()
    assert torch.equal(torch.autograd.grad(loss, seen[0])[0].flatten(), want)


def test_gradients_of_gradients_need_no_transform():
    def slopes(model):
        x = DATA.clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]

    engine = start()
    with told("torch.autograd.grad(outputs, inputs, create_graph=True)"):
        torch.func.grad(lambda x: engine(x).sum())(DATA)
    assert torch.equal(slopes(engine), slopes(net()))


def test_pruning_is_undone_in_the_block_and_parametrizations_are_added_before():
    from torch.nn.utils import parametrize, prune

    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    engine = start()
    words = "and undo pruning in the same block"
    with told(words), engine.unsharded():
        prune.l1_unstructured(engine.module.inner, "weight", amount=0.5)
    engine = start()
    with engine.unsharded(write_back=True):
        prune.l1_unstructured(engine.module.inner, "weight", amount=0.5)
        prune.remove(engine.module.inner, "weight")
    assert (whole(engine)["inner.weight"] == 0).sum() == 35
    model = net()
    parametrize.register_parametrization(model.inner, "weight", Doubled())
    trains(start(copy.deepcopy(model)), model)


def test_an_original_parameter_is_read_from_its_module():
    model = net()
    kept = model.inner.weight
    engine = start(model)
    with told("under engine.unsharded()"):
        kept.square()
    with engine.unsharded():
        assert torch.equal(engine.module.inner.weight.square(), net().inner.weight.square())
    model = net()
    late = [*model.parameters()]
    engine = start(model, optimizer=None)
    with told("Build an optimizer that initialize is not given over engine.parameters()"):
        loss = loss_of(engine)
        loss.backward()
        AdamW(late).param_groups[0]["params"][0].add(1)
    engine.zero_grad()
    optimizer = adamw(engine.parameters())
    loss_of(engine).backward()
    optimizer.step()
    same(whole(engine), trained())


def test_a_replaced_parameter_is_edited_in_place_or_left():
    engine = start()
    engine.module.inner.weight = nn.Parameter(torch.ones(10, 7))
    words = "use a model that is not sharded. engine.close(restore=False) gives the model up"
    with told(words):
        engine.close()
    engine.close(restore=False)
    engine = start()
    with engine.unsharded(write_back=True):
        engine.module.inner.weight.data.fill_(1)
    engine.close()
    assert torch.equal(engine.module.inner.weight, torch.ones(10, 7))


def test_optimizers_step_before_the_forward():
    want = trained(optimizer=lambda parameters: SGD(parameters, lr=0.1))
    for is_together in (True, False):
        dist.is_initialized() or dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        sharded = zeroshard.shard(net())
        parameters = list(sharded.module.parameters())
        made = [SGD(parameters[:2], lr=0.1), SGD(parameters[2:], lr=0.1)]
        for optimizers in [made] if is_together else [[one] for one in made]:
            sharded.attach(*optimizers)
        loss_of(sharded.module).backward()
        made[0].step()
        if is_together:
            with told("Step all of them before the forward, or attach each optimizer by itself"):
                loss_of(sharded.module)
        else:
            loss_of(sharded.module)
        made[1].step()
        same(whole(sharded), want)
