"""Hooks on parameters and on outputs; gradients inside engine.unsharded(), and those asked for by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.models import Layered
from tests.distributed.training import (
    differences,
    finish,
    flat_gradients,
    full_gradients,
    numbers,
    plain,
    replicate,
    seeded,
    square_loss,
    start,
    train_sharded,
    unequal,
)
from tests.ranks import on_ranks


@on_ranks(2)
def test_optimizers_may_step_in_the_hooks():
    """An optimizer for each parameter, stepped in its hook, against one that steps after the backward."""
    want = train_sharded(Layered(), "SGD", 3, square_loss, stage=3)
    engine, _, _, _ = zeroshard.initialize(Layered(), None, {"stage": 3})
    for parameter in engine.parameters():
        if not parameter.requires_grad:
            continue
        optimizer = torch.optim.SGD([parameter], lr=0.05, momentum=0.9)

        def hook(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    losses = []
    for number in range(3):
        loss = square_loss(engine, number)
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is None for p in engine.parameters())
    return differences("stepped in hooks", finish(engine, losses), want)


@pytest.mark.parametrize("where", ["after initialize", "forward"])
@on_ranks(2)
def test_a_tensor_hook_gets_the_whole_local_gradient_as_in_ddp(where):
    """A mask of the whole gradient: the gradients that are left differ from DDP's in these places."""
    mask = torch.ones(3, 7)
    mask[1] = 0

    def register(parameter):
        parameter.register_hook(lambda gradient: gradient * mask)

    replica = replicate(Layered(), find_unused=True)
    register(plain(replica).table)
    square_loss(replica, 0).backward()
    want = plain(replica).table.grad.flatten()
    assert not want[7:14].any()
    engine, _ = start(Layered(), "SGD", stage=3)
    if where == "forward":
        engine.module.register_forward_pre_hook(lambda module, _: register(module.table))
    else:
        register(engine.get_parameter("table"))
    square_loss(engine, 0).backward()
    assert torch.equal(full_gradients(engine)["table"], want)


def take_away(parameter):
    parameter.grad = None


@on_ranks(2)
def test_gradients_are_neither_shown_nor_changed_under_unsharded_and_the_remedy_is_named():
    engine, _ = start(Layered(), "SGD")
    square_loss(engine, 0).backward()
    before = full_gradients(engine)
    for write_back in (False, True):
        for use in (lambda parameter: parameter.grad.zero_(), take_away):
            with engine.unsharded(write_back=write_back):
                parameter = engine.module.blocks[0][2].bias
                with pytest.raises(RuntimeError, match=r"'blocks.0.2.bias'.*engine\.full_gradient"):
                    use(parameter)
    after = full_gradients(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


@on_ranks(2)
def test_backward_for_some_parameters_of_a_forward_gives_them_the_gradients_of_ddp():
    """`inputs` of parameters as the forward saw them, and of a tensor that is none; then a whole backward."""
    x = numbers(0, 5, 7).requires_grad_()
    replica = replicate(Layered(num_blocks=3), find_unused=True)
    replica(x).square().mean().backward()
    want, found = flat_gradients(replica), []
    engine, _ = start(Layered(num_blocks=3), "SGD")
    seen = []
    handle = engine.module.blocks[1][0].register_forward_hook(
        lambda layer, *_, to=seen: to.append(layer.weight)
    )
    for times in (1, 2):
        y = numbers(0, 5, 7).requires_grad_()
        seen.clear()
        engine(y).square().mean().backward(inputs=[y, *seen])
        got = full_gradients(engine)
        assert list(got) == ["blocks.1.0.weight"]
        assert torch.equal(x.grad, y.grad)
        found += unequal(f"{times}", got, {name: times * want[name] for name in got})
    handle.remove()
    engine.zero_grad()
    square_loss(engine, 0).backward()
    found += unequal("whole", full_gradients(engine), want)
    loss = square_loss(engine, 0)
    trained = [p for p in engine.parameters() if p.requires_grad]
    for ask in (
        partial(torch.autograd.grad, loss, trained, allow_unused=True),
        partial(loss.backward, inputs=trained),
    ):
        with pytest.raises(RuntimeError, match=r"'table'.*Freeze the other parameters before"):
            ask()
    return found


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Model(nn.Module):
    """Returns its hidden states; one block returns the output of a unit inside, as it is."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Sequential(Block()), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.head(x).square().mean(), hidden


@pytest.mark.parametrize(("stage", "recompute"), [(0, "none"), (3, "none"), (3, "unit")])
@on_ranks(2)
def test_a_hook_on_a_hidden_state_changes_the_gradients_of_all_that_made_it(stage, recompute):
    plain = seeded(Model)
    torch.manual_seed(0)
    config = {"stage": stage, "units": ["Block", "Sequential"], "recompute": recompute}
    engine = zeroshard.initialize(Model(), lambda ps: torch.optim.SGD(ps, 1.0), config).engine
    for model, backward in ((plain, torch.Tensor.backward), (engine, engine.backward)):
        loss, hidden = model(torch.ones(2, 4))
        for number, state in enumerate(hidden):
            state.register_hook(lambda gradient, factor=number + 2: gradient * factor)
        backward(loss)
    for name, parameter in plain.named_parameters():
        # All ranks have the same batch, and factors are whole: the mean is exact.
        assert torch.equal(engine.full_gradient(name), parameter.grad), name


class Shared(nn.Module):
    """Autograd gives its two parameters views of one gradient."""

    def __init__(self):
        super().__init__()
        self.rows, self.more = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        return x * (self.rows.view(2, 2) + self.more)


@on_ranks(1)
def test_gradients_that_share_memory_are_unscaled_once():
    model = nn.Sequential(nn.Linear(2, 2), Shared())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
    precision = {"param_dtype": "float16", "loss_scale": 1024.0, "overrides": {"1": "float32"}}
    engine = zeroshard.initialize(model, lambda ps: torch.optim.SGD(ps, 1.0), {"precision": precision}).engine
    engine.backward(engine(torch.ones(2, 2)).sum())
    for name in ("1.rows", "1.more"):
        assert engine.full_gradient(name).reshape(-1).tolist() == [2.0] * 4


@on_ranks(2)
def test_a_sparse_gradient_of_one_dimension_is_refused():
    class Picked(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(8))

        def forward(self, places):
            return torch.gather(self.table, 0, places, sparse_grad=True).sum()

    engine = zeroshard.initialize(Picked(), lambda ps: torch.optim.SGD(ps, 1.0)).engine
    with pytest.raises(RuntimeError, match=r"of 'table' is torch\.sparse_coo; expected a dense one: build"):
        engine.backward(engine(torch.tensor([0, 3])))
