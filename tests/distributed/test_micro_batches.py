"""A backward over two engines, the value of engine.backward, and steps of other numbers of micro-batches."""

import torch
from torch import nn

from tests.distributed.training import SOME_STAGES, caught, full_gradients, numbers, start
from tests.ranks import on_ranks


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7))


def loss_of(model, number):
    return model(numbers(number, 4, 7)).float().square().mean()


def full(engine):
    with engine.unsharded():
        return {name: p.detach().clone() for name, p in engine.named_parameters()}


def unequal(got, want):
    return [name for name in want if not torch.equal(got[name], want[name])]


# ------------------------------------------------------------------------------------- several engines


def pair(stage, scales):
    return [
        start(
            net(seed),
            stage=stage,
            units=["Linear"],
            **({"precision": {"param_dtype": "fp16", "loss_scale": scale}} if scale else {}),
        )[0]
        for seed, scale in enumerate(scales)
    ]


def together_and_apart(stage):
    """Two engines with one plain backward over both losses, against a backward for each."""
    pairs, problems = (pair(stage, (None, None)), pair(stage, (None, None))), []
    for number in range(2):
        first, second = pairs[0]
        (loss_of(first, number) + loss_of(second, number)).backward()
        for engine in pairs[1]:
            engine.backward(loss_of(engine, number))
        for together, apart in zip(*pairs, strict=True):
            problems += unequal(full_gradients(together), full_gradients(apart))
            if together.step() != apart.step():
                problems.append("step")
    for together, apart in zip(*pairs, strict=True):
        problems += unequal(full(together), full(apart))
    return problems


@on_ranks(2)
def test_one_plain_backward_over_the_losses_of_two_engines_is_one_for_each():
    return {stage: problems for stage in SOME_STAGES if (problems := together_and_apart(stage))}


@on_ranks(2)
def test_a_scaled_backward_may_come_through_a_frozen_engine():
    """The gradients of an engine in float16 whose loss comes through another engine, and without a scale."""
    found = []
    for stage in SOME_STAGES:
        for scales in ((2.0**8, None), (2.0**8, 2.0**8), (None, None)):
            first, second = pair(stage, scales)
            second.requires_grad_(False)
            first.backward(second(first(numbers(0, 4, 7)).float()).float().square().mean())
            found.append(full_gradients(first))
    for half, halves, want in zip(found[::3], found[1::3], found[2::3], strict=True):
        for name, gradient in want.items():
            torch.testing.assert_close(half[name], gradient, atol=1e-2, rtol=1e-2)
            torch.testing.assert_close(halves[name], gradient, atol=1e-2, rtol=1e-2)


@on_ranks(2)
def test_a_scaled_backward_that_comes_to_another_engine_is_refused():
    found = []
    for stage in SOME_STAGES:
        for scales in ((2.0**8, None), (2.0**8, 2.0**8)):
            first, second = engines = pair(stage, scales)
            found.append(caught(lambda: first.backward(loss_of(first, 0) + loss_of(second, 0))))  # noqa: B023
            for engine, alone in zip(engines, pair(stage, scales), strict=True):
                engine.zero_grad()
                for one in (engine, alone):
                    one.backward(loss_of(one, 1))
                found += unequal(full_gradients(engine), full_gradients(alone))
    assert len(found) == 2 * len(SOME_STAGES)
    assert all("of another engine, which does not know the scale" in text for text in found)


# ----------------------------------------------------------------------- other numbers of micro-batches


def assignments(stage):
    engine, _ = start(net(), stage=stage, gradient_accumulation_steps=2)

    def assign(value):
        return caught(lambda: engine.set_gradient_accumulation_steps(value))

    wrong = [assign(value) for value in (0, -1, 1.5, True, None, "2")]
    engine.backward(loss_of(engine, 0))
    inside = [assign(3)]
    engine.step()
    inside.append(assign(3))
    engine.zero_grad()
    return (
        wrong,
        inside,
        assign(3),
        engine.gradient_accumulation_steps(),
        engine.config.gradient_accumulation_steps,
    )


@on_ranks(2)
def test_the_number_of_micro_batches_is_checked_and_kept_within_a_step():
    stages = [assignments(stage) for stage in SOME_STAGES]
    for wrong, inside, after, number, configured in stages:
        assert all("expected an integer >= 1" in text for text in wrong)
        assert all("in the middle of a step: its gradients are divided by 2" in text for text in inside)
        assert (after, number, configured) == ("nothing was raised", 3, 2)
