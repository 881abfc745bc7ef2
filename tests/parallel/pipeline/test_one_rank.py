"""Micro-batches at one data-parallel rank: habits of users give what they give in one process.

Sums over micro-batches are taken in another order than in one process, which is 1e-15 of a value in float64.
Under autocast a product is rounded to bfloat16, 2^-8 of it, and float32 sums in another order may round to
the other side.
"""

from contextlib import nullcontext

import pytest
import torch

import zeroshard
from tests.parallel.pipeline.runs import build, parameters_of, sgd, tokens_of

STEPS, MICRO_BATCHES = 3, 4
HABITS = ("checkpoints", "hooks", "frozen", "ignored", "autocast")


def model_of(habit):
    model = build("llama")
    if habit == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" not in name and "layers.1." not in name)
    return model.float() if habit == "autocast" else model


def take_up(habit, model):
    """Change a model, or the part of it that a pipeline rank has, after its engine was made."""
    if habit == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    for name, module in model.named_modules():
        if habit == "hooks" and name.endswith("mlp"):
            module.register_forward_hook(lambda module, args, output: output * 1.25)


def inside(habit):
    return torch.autocast("cpu", torch.bfloat16) if habit == "autocast" else nullcontext()


def over_ranks(habit, stage, schedule):
    """Losses and parameters."""
    pipeline = {"schedule": schedule, "num_microbatches": MICRO_BATCHES, "balance": "memory"}
    config = {"stage": stage, "mesh": {"pp": 2}, "pipeline": pipeline}
    if habit == "ignored":
        config["ignored"] = ["*input_layernorm*"]
    engine = zeroshard.initialize(model_of(habit), sgd, config).engine
    take_up(habit, engine.module)
    losses = []
    for number in range(STEPS):
        tokens = tokens_of(number)
        with inside(habit):
            losses.append(engine.train_batch({"input_ids": tokens}, tokens).item())
    found = losses, parameters_of(engine)
    engine.close(restore=False)
    return found


def in_one_process(habit):
    model = model_of(habit)
    take_up(habit, model)
    optimizer, losses = sgd(p for p in model.parameters() if p.requires_grad), []
    for number in range(STEPS):
        total = 0.0
        for piece in tokens_of(number).chunk(MICRO_BATCHES):
            with inside(habit):
                loss = model(input_ids=piece, labels=piece).loss / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.long_where(schedule=["interleaved", "zb-h1"])
@pytest.mark.long_where(stage=[0])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved"])
def test_habits_give_what_they_give_in_one_process(ranks, habit, stage, schedule):
    want_losses, want = in_one_process(habit)
    exact = habit != "autocast"
    names = set()
    for losses, parameters in ranks(2, over_ranks, habit, stage, schedule):
        assert losses == pytest.approx(want_losses, rel=1e-6 if exact else 2e-3)
        names |= parameters.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-12 if exact else 2e-3, msg=name)
    assert names == want.keys()
