"""Micro-batches at one data-parallel rank: habits of users give what they give in one process.

Sums over micro-batches are taken in another order than in one process, which is 1e-15 of a value in float64.
Under autocast a product is rounded to bfloat16, 2^-8 of it, and float32 sums in another order may round to
the other side.
"""

from contextlib import nullcontext

import pytest
import torch

import zeroshard
from tests.parallel.pipeline.runs import (
    agree,
    build,
    language_loss,
    parameters_of,
    sgd,
    tokens_of,
    train_plainly,
)

STEPS, MICRO_BATCHES = 3, 4
HABITS = ("checkpoints", "ignored", "autocast")


def model_of(habit):
    model = build("llama")
    return model.float() if habit == "autocast" else model


def take_up(habit, model):
    """Change a model, or the part of it that a pipeline rank has, after its engine was made."""
    if habit == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()


def inside(habit):
    return torch.autocast("cpu", torch.bfloat16) if habit == "autocast" else nullcontext()


def over_ranks(habit):
    """Losses and parameters."""
    pipeline = {"schedule": "1f1b", "num_microbatches": MICRO_BATCHES, "balance": "memory"}
    config = {"stage": 3, "mesh": {"pp": 2}, "pipeline": pipeline}
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

    def loss_of(model, inputs, labels):
        with inside(habit):
            return language_loss(model, inputs, labels)

    batches = (({"input_ids": tokens}, tokens) for tokens in map(tokens_of, range(STEPS)))
    losses, _ = train_plainly(model, batches, loss_of, num=MICRO_BATCHES)
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("habit", HABITS)
def test_habits_give_what_they_give_in_one_process(ranks, habit):
    want_losses, want = in_one_process(habit)
    exact = habit != "autocast"
    found = [(losses, [], state) for losses, state in ranks(2, over_ranks, habit)]
    apart = {"rel": 1e-6, "absolute": 1e-12} if exact else {"rel": 2e-3, "absolute": 2e-3}
    agree(found, (want_losses, [], want), **apart)
