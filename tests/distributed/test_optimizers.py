"""Optimizers over sharded parameters: two ranks, against DDP to the bit.

An element-wise update of a slice that starts on a block gives the bits of the whole tensor's.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import zeroshard
from tests.distributed.models import Tiny
from tests.distributed.training import (
    STAGES,
    build,
    differences,
    finish,
    replicate,
    square_loss,
    start,
    step,
    token_loss,
    train,
)
from tests.ranks import on_ranks

ELEMENT_WISE = [
    ("ASGD", {}),
    ("Adadelta", {"lr": 0.3}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adam", {"amsgrad": True}),
    ("Adam", {"foreach": True, "weight_decay": 0.1}),
    ("Adam", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"fused": True}),
    ("Adagrad", {"fused": True}),
]


@on_ranks(2)
def test_every_element_wise_optimizer_of_torch_trains_as_in_ddp_to_the_bit():
    found = {}
    for name, options in ELEMENT_WISE:
        torch.manual_seed(0)
        model = Tiny(3)

        def make(parameters, name=name, options=options):
            return getattr(torch.optim, name)(parameters, **({"lr": 1e-2} | options))

        replica = replicate(model)
        want = train(replica, make(replica.parameters()), 6, square_loss)
        sharded = copy.deepcopy(model)
        got = train(*start(sharded, make(sharded.parameters())), 6, square_loss)
        if lines := differences(name, got, want):
            found[name, str(options)] = lines
    return found


# ------------------------------------------------------------------------------------ groups and schedules


def in_groups(model):
    """Three groups that share nothing but the class of their optimizer."""
    parameters = dict(model.named_parameters())
    first = [p for name, p in parameters.items() if name.startswith("blocks.1")]
    second = [
        p for name, p in parameters.items() if name.endswith("bias") and not name.startswith("blocks.1")
    ]
    chosen = set(first) | set(second)
    rest = [p for p in parameters.values() if p not in chosen]
    return [
        {"params": first, "lr": 3e-3, "weight_decay": 0.3},
        {"params": second, "lr": 1e-2, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        {"params": rest, "amsgrad": True, "label": "the rest"},
    ]


SCHEDULERS = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, 0.3),
    "LambdaLR": lambda optimizer: LambdaLR(
        optimizer, [lambda n: 0.5**n, lambda n: 1.0, lambda n: 1 / (n + 1)]
    ),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=[1e-2, 2e-2, 3e-2], total_steps=8),
}


@on_ranks(2)
def test_groups_keep_their_hyperparameters_and_schedulers_go_on_working():
    """Differences from DDP of parameters and learning rates, the scheduler stepped by hand or by engine."""
    found, model = [], build("tied GPT")
    for how, (name, make) in zip(("by hand", "given", "built"), SCHEDULERS.items(), strict=True):
        replica = replicate(model)
        optimizer = torch.optim.AdamW(in_groups(replica.module), lr=1e-3)
        scheduler, losses, rates = make(optimizer), [], []
        for number in range(6):
            losses.append(step(replica, optimizer, token_loss, number))
            scheduler.step()
            rates.append([group["lr"] for group in optimizer.param_groups])
        want = finish(replica, losses)
        for stage in STAGES:
            sharded = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(in_groups(sharded), lr=1e-3)
            given = {"by hand": None, "given": make(optimizer), "built": make}[how]
            engine, same, _, scheduler = zeroshard.initialize(
                sharded, optimizer, {"stage": stage}, lr_scheduler=given
            )
            assert same is optimizer
            if how == "by hand":
                scheduler = make(optimizer)
            losses, got_rates = [], []
            for number in range(6):
                loss = token_loss(engine, number)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
                if how == "by hand":
                    scheduler.step()
                got_rates.append([group["lr"] for group in optimizer.param_groups])
            found += differences(f"{name}, stage {stage}", finish(engine, losses), want)
            found += [] if got_rates == rates else [(name, got_rates, rates)]
            found += [] if optimizer.param_groups[2]["label"] == "the rest" else [name]
    return found


@on_ranks(2)
def test_an_optimizer_may_hold_a_part_of_the_parameters():
    """An optimizer over a part of the parameters leaves the others alone, as in plain PyTorch."""
    found, model = [], build("tied GPT")

    def some(net):
        return torch.optim.AdamW([p for name, p in net.named_parameters() if "blocks" in name], lr=1e-2)

    replica = replicate(model)
    want = train(replica, some(replica), 4)
    for stage in STAGES:
        sharded = copy.deepcopy(model)
        engine, optimizer = start(sharded, some(sharded), stage=stage)
        found += differences(f"stage {stage}", train(engine, optimizer, 4), want)
    return found


@on_ranks(2)
def test_a_step_may_take_a_closure():
    """optimizer.step(closure), which runs forward and backward inside the step."""
    model, found = build("tied GPT"), []

    def loop(net, optimizer):
        losses = []
        for number in range(3):

            def closure(number=number):
                optimizer.zero_grad()
                loss = token_loss(net, number)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return finish(net, losses)

    replica = replicate(model)
    want = loop(replica, torch.optim.AdamW(replica.parameters(), lr=1e-3))
    for stage in STAGES:
        found += differences(f"stage {stage}", loop(*start(copy.deepcopy(model), stage=stage)), want)
    return found


@on_ranks(2)
def test_states_have_the_shape_of_the_slice_even_where_it_has_no_elements():
    """Shapes of states, by stage, for the rank's slices; and what states hold for a slice of no elements."""
    found = []
    for stage in STAGES:
        engine, optimizer = start(nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)), stage=stage)
        engine(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        for name, p in engine.named_parameters():
            state = optimizer.state[p]
            shapes = {tuple(p.shape), tuple(p.grad.shape), tuple(state["exp_avg"].shape)}
            found += [] if len(shapes) == p.dim() == 1 else [(stage, name, shapes)]
    return found


@on_ranks(2)
def test_a_parameter_that_was_added_after_sharding_is_refused_at_the_step():
    engine, optimizer = start(nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]})
    engine(torch.ones(2, 7)).sum().backward()
    with pytest.raises(RuntimeError, match=r"group 1 .* shape \[3, 4\], added after the model"):
        optimizer.step()
