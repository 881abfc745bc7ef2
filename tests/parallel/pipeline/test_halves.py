"""Sharded models train by schedules with divided backwards as in one process, to the bit."""

import peft
import pytest
import torch
import transformers
from torch import nn

import zeroshard
from tests.parallel.pipeline.runs import (
    GPT2,
    LENGTH,
    VOCABULARY,
    llama,
    mixtral,
    rows_of,
)
from zeroshard.parallel.pipeline.weights import Waiting

WIDTH, STEPS, NUM = 32, 2, 4


class Twice(nn.Module):
    """A layer that computes twice, between two others."""

    def __init__(self, dropout):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(torch.tanh(self.inner(self.norm(x)))))))


def sequence(dropout=0.0):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Twice(dropout) for _ in range(5)), nn.LayerNorm(WIDTH))


def partly_frozen():
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" not in name and "layers.2" not in name and "embed" not in name)
    return model


def adapted():
    lora = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.inject_adapter_in_model(lora, llama())  # add_adapter of transformers wants a newer peft


def gpt2():
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **dropout, tie_word_embeddings=False))


MODELS = {
    "Llama": llama,
    "GPT-2": gpt2,
    "sequence": sequence,
    "sequence with dropout": lambda: sequence(0.2),
    "partly frozen Llama": partly_frozen,
    "Llama with adapters": adapted,
    "Mixtral": mixtral,
}


def build(kind):
    torch.manual_seed(0)
    return MODELS[kind]().double().train()


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9)


def batch_of(kind, number, num_ranks):
    """The batch of all ranks, with one sample a micro-batch."""
    generator, size = torch.Generator().manual_seed(number), NUM * num_ranks
    if "sequence" in kind:
        x = torch.randn(size, LENGTH, WIDTH, generator=generator).double()
        return x, x.flip(1)
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": tokens}, tokens


def square(output, targets):
    return (output - targets).square().mean()


def plain(kind, num_ranks):
    """Train in one process; gradients of the ranks' parts of a batch are averaged.

    A rank of the tests runs it, with as many threads as the others: sums of a norm are cut among threads.
    """
    model = build(kind)
    optimizer = sgd(model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for number in range(STEPS):
        batch, sums = batch_of(kind, number, num_ranks), []
        for rank in range(num_ranks):
            inputs, targets = (rows_of(value, num_ranks, rank) for value in batch)
            for place in range(NUM):
                piece, target = rows_of(inputs, NUM, place), rows_of(targets, NUM, place)
                whole = isinstance(piece, dict)
                loss = model(**piece, labels=target).loss if whole else square(model(piece), target)
                (loss / NUM).backward()
            sums.append([parameter.grad / num_ranks for parameter in trained])
            optimizer.zero_grad()
        for parameter, *gradients in zip(trained, *sums, strict=True):
            parameter.grad = torch.stack(gradients).sum(0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(kind, config):
    loss_fn = square if "sequence" in kind else None
    engine = zeroshard.initialize(build(kind), sgd, config, loss_fn=loss_fn).engine
    torch.manual_seed(5)
    for number in range(STEPS):
        batch = batch_of(kind, number, engine.dp_world_size)
        inputs, targets = (rows_of(value, engine.dp_world_size, engine.dp_rank) for value in batch)
        engine.train_batch(inputs, targets)
    with engine.unsharded():
        state = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    engine.close(restore=False)
    return state


def pipelined(schedule, stage=1, **options):
    return {"stage": stage, "pipeline": {"schedule": schedule, "num_microbatches": NUM}, **options}


def require_bits(found, want):
    assert {name for state in found for name in state} == set(want)
    for state in found:
        for name, value in state.items():
            assert torch.equal(value, want[name]), name


def joined(found):
    return {name: value for state in found for name, value in state.items()}


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(
    ("kind", "schedule", "num_ranks", "stage"),
    [
        ("Llama", "zbv", 2, 3),
        ("sequence", "zb-h1", 2, 3),
        ("GPT-2", "zb-h1", 4, 2),
        ("Llama", "1f1b", 4, 0),
    ],
)
def test_schedules_have_the_bits_of_one_process(ranks, kind, schedule, num_ranks, stage):
    found = ranks(num_ranks, trained, kind, pipelined(schedule, stage, mesh={"pp": 2}))
    require_bits(found, *ranks(1, plain, kind, num_ranks // 2))


@pytest.mark.long_where(kind=["Mixtral", "Llama with adapters"])
@pytest.mark.parametrize("kind", ["partly frozen Llama", "Llama with adapters", "Mixtral"])
def test_frozen_layers_adapters_and_experts_train_by_divided_backwards(ranks, kind):
    found = ranks(2, trained, kind, pipelined("zbv", 3, mesh={"pp": 2}))
    require_bits(found, *ranks(1, plain, kind, 1))


def test_divided_backwards_draw_no_random_numbers(ranks):
    want, found = (
        ranks(2, trained, "sequence with dropout", pipelined(name, 3, mesh={"pp": 2}))
        for name in ("1f1b", "zb-h1")
    )
    require_bits(found, joined(want))


def num_waiting(mesh):
    """The products of a batch whose weight gradients wait on this rank."""
    noted, note = [], Waiting.note
    Waiting.note = lambda self, *args: noted.append(args) or note(self, *args)
    try:
        trained("Llama", pipelined("zb-h1", mesh=mesh))
    finally:
        Waiting.note = note
    return len(noted) / (STEPS * NUM)


def test_the_weight_gradients_of_all_linear_layers_wait(ranks):
    assert ranks(4, num_waiting, {"pp": 2, "tp": 2})[::2] == [2 * 7, 2 * 7 + 1]
