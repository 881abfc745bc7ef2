"""1-bit Adam against a simulation of its workers in one process, in float64."""

import math

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import farthest, numbers, take_steps, values_after
from tests.ranks import Ranks, on_ranks
from zeroshard.optim import OneBitAdam

WARM_UP, NUM_STEPS = 3, 9
OPTIONS = {"lr": 0.01, "freeze_step": WARM_UP, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.02}


class Net(nn.Module):
    """The weight has a number of elements that ranks and bytes do not divide, `few` less than a byte."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.few = nn.Linear(7, 11), nn.Parameter(torch.randn(3))
        self.rows = nn.Embedding(6, 3)  # the last two are never asked for
        self.double()

    def forward(self, x):
        return self.first(x).sum(1, keepdim=True) * self.few + self.rows(torch.arange(len(x)) % 4)


def loss_of(model, number, rank=None):
    return model(numbers(number, 5, 7, rank=rank).double()).square().mean()


def compressed(c):
    """What the signs of c stand for, and what they leave out."""
    means = c.norm() / math.sqrt(max(1, c.numel())) * torch.where(c >= 0, 1.0, -1.0).double()
    return means, c - means


def simulate(num_ranks, num_steps=NUM_STEPS, drop_at=None):
    """The parameters after steps of all workers, in one process; at a step, their errors may be dropped."""
    model, options = Net(), OPTIONS
    (b1, b2), states = options["betas"], {}
    for step in range(num_steps):
        own = []
        for rank in range(num_ranks):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            own.append([p.grad.flatten() for p in model.parameters()])
        for p, *gradients in zip(model.parameters(), *own, strict=True):
            n, part = p.numel(), -(-p.numel() // (8 * num_ranks)) * 8
            state = states.setdefault(p, {"m": torch.zeros(n).double(), "v": torch.zeros(n).double()})
            if step < WARM_UP:
                g = sum(gradients) / num_ranks
                state["m"], state["v"] = b1 * state["m"] + (1 - b1) * g, b2 * state["v"] + (1 - b2) * g * g
            else:
                if step in (WARM_UP, drop_at):
                    state["workers"] = [torch.zeros(n).double() for _ in gradients]
                    state["servers"] = [torch.zeros_like(c) for c in state["m"].split(part)]
                momenta = [b1 * state["m"] + (1 - b1) * g for g in gradients]
                if num_ranks > 1:
                    sent = [compressed(m + e) for m, e in zip(momenta, state["workers"], strict=True)]
                    state["workers"] = [error for _, error in sent]
                    mean = (sum(means for means, _ in sent) / num_ranks).split(part)
                    served = [compressed(d + e) for d, e in zip(mean, state["servers"], strict=True)]
                    state["servers"] = [error for _, error in served]
                    momenta = [torch.cat([means for means, _ in served])]
                state["m"] = momenta[0] * (state["v"] > 0)
            update = state["m"] / (state["v"].sqrt() + options["eps"])
            update = update.view_as(p) + options["weight_decay"] * p.detach()
            p.data -= options["lr"] * update
    return [p.detach().flatten() for p in model.parameters()]


def one_bit(**config):
    model = Net()
    optimizer = OneBitAdam(model.parameters(), **OPTIONS)
    return zeroshard.initialize(model, optimizer, {"stage": 0, **config}).engine


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
@pytest.mark.filterwarnings("ignore:OneBitAdam")
def test_steps_are_those_of_a_simulation_of_all_workers(num_ranks):
    engine = one_bit()
    assert farthest(values_after(engine, range(NUM_STEPS), loss_of), simulate(num_ranks)) < 1e-12
    assert engine.optimizer.is_frozen


@on_ranks(2)
def test_a_step_sends_a_bit_for_each_element_and_the_scales():
    model = nn.Linear(512, 256)
    optimizer = OneBitAdam(model.parameters(), freeze_step=1)
    engine = zeroshard.initialize(model, optimizer, {"stage": 0}).engine
    for step in range(3):
        engine.reset_comm_report()
        engine.backward(engine(numbers(step, 4, 512)).square().mean())
        engine.step()
        sent = engine.comm_report().bytes_sent
        exact = sent["all_gather"] + sent["reduce_scatter"]
        if step:
            scales = 2 * 2 * 4  # of two parameters, twice, in float32
            assert (exact, sent["all_to_all"]) == (0, 2 * (512 * 256 + 256) // 8 // 2 + scales)
        else:
            assert sent["all_to_all"] == 0
            assert exact >= 4 * 512 * 256  # 32 times as much


@on_ranks(1)
def test_elements_without_a_gradient_in_the_warm_up_stay_with_a_warning_and_parameters_are_refused():
    engine = one_bit()
    before = engine.module.rows.weight.detach().clone().view(6, 3)[4:]
    take_steps(engine, range(WARM_UP - 1), loss_of)
    with pytest.warns(UserWarning, match="6 elements had no gradient in the warm-up"):
        take_steps(engine, [WARM_UP - 1], loss_of)
    take_steps(engine, [WARM_UP], loss_of)
    after = engine.module.rows.weight.detach().view(6, 3)[4:]
    assert torch.allclose(after, before * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"]) ** (WARM_UP + 1))
    model = Net()
    model.few.requires_grad_(False)
    optimizer = OneBitAdam(model.parameters(), **OPTIONS)
    for step in range(WARM_UP + 1):
        if step == WARM_UP:
            model.few.requires_grad_(True)
        loss_of(model, step, rank=0).backward()
        if step < WARM_UP:
            optimizer.step()
        optimizer.zero_grad() if step < WARM_UP else None
    with pytest.raises(RuntimeError, match="had no gradient in the warm-up, and so has no variance"):
        optimizer.step()


REFUSED = [
    ({"stage": 1}, r"one_bit_adam with stage=1: expected one of \[0\]"),
    ({"clip_grad_norm": 1.0}, "one_bit_adam with clip_grad_norm=1.0: expected one of .None., as ranks go on"),
    ({"precision": {"param_dtype": "fp16"}}, "one_bit_adam with float16"),
]


@on_ranks(2)
def test_what_it_cannot_go_with_is_refused():
    for config, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            one_bit(**config)
    model = Net()
    pair = (None, lambda _, bucket: bucket)
    optimizer = OneBitAdam(model.parameters())
    with pytest.raises(ValueError, match="expected none, as OneBitAdam exchanges by itself"):
        zeroshard.initialize(model, optimizer, {"stage": 0}, gradient_hook=pair)
    with pytest.raises(ValueError, match="freeze_step: expected an integer >= 1"):
        OneBitAdam(Net().parameters(), freeze_step=0)


def save_and_resume(folder):
    found = []
    for step in (WARM_UP - 1, WARM_UP + 2):
        engine = one_bit()
        take_steps(engine, range(step), loss_of)
        engine.save_checkpoint(folder, f"{step}")
        want = values_after(engine, range(step, NUM_STEPS), loss_of)
        engine = one_bit()
        engine.load_checkpoint(folder, f"{step}")
        found.append(farthest(values_after(engine, range(step, NUM_STEPS), loss_of), want))
    return found


def resume_on_others(folder):
    engine = one_bit()
    with pytest.warns(UserWarning, match="a hook keeps its present state"):
        engine.load_checkpoint(folder, f"{WARM_UP + 2}")
    assert engine.optimizer.is_frozen
    return len(engine.optimizer.left.errors)


@pytest.mark.filterwarnings("ignore:OneBitAdam")
def test_checkpoints_keep_the_errors_of_each_rank_and_other_numbers_of_ranks_begin_without(
    ranks: Ranks, tmp_path
):
    assert ranks(2, save_and_resume, str(tmp_path)) == [[0.0, 0.0]] * 2
    assert ranks(4, resume_on_others, str(tmp_path)) == [0] * 4
