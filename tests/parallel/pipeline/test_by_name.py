"""Full tensors by name where pipeline ranks hold parts: each rank reads and writes the whole model."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.runs import adamw, build, config_of, start, tokens_of, train, train_plainly
from tests.ranks import on_ranks

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
BIASES = [f"transformer.h.{number}.ln_1.bias" for number in (0, 3)]
"""Parameters of the first and the second part."""


@on_ranks(2)
def test_every_rank_reads_parameters_and_states_of_all_parts():
    engine, model, made = start("tied gpt", config_of("pp 2"), adamw), build("tied gpt"), []
    train(engine, range(2))
    batches = (({"input_ids": tokens}, tokens) for tokens in map(tokens_of, range(2)))
    train_plainly(model, batches, make=lambda own: made.append(adamw(own)) or made[0], max_norm=0.5)
    state = engine.full_state_dict()
    assert state.keys() == ({} if dist.get_rank() else model.state_dict()).keys()
    for name, value in state.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-6, msg=name)
    for name, parameter in [*model.named_parameters(remove_duplicate=False)][::3]:
        assert engine.full_gradient(name) is None  # the batch has ended with a step
        moment, want = engine.full_optimizer_state(name)["exp_avg"], made[0].state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, want, rtol=0, atol=1e-6, msg=name)
        value = engine.full_parameter(name)
        torch.testing.assert_close(value, parameter.detach(), rtol=0, atol=1e-6, msg=name)


NAMES = {
    ("transformer.h.3.ln_1.bia",) * 2: "expected the name of a parameter of the model, got "
    "'transformer.h.3.ln_1.bia'",
    tuple(BIASES): f"one name on all ranks: rank(s) 0 have {BIASES[0]}; rank(s) 1 have {BIASES[1]}",
}
"""The names that the two ranks ask for, and the error."""


@on_ranks(2)
def test_a_shared_parameter_has_the_same_hyperparameters_on_its_ranks():
    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1 * (1 + dist.get_rank()))

    text = rf"'{EMBEDDING}' is shared by pipeline ranks.*: rank\(s\) 0 have .*0\.1.*; rank\(s\) 1 have .*0\.2"
    with pytest.raises(ValueError, match=text):
        start("tied gpt", config_of("pp 2", 1), make)


@on_ranks(2)
def test_a_write_reaches_all_parts_that_hold_the_parameter():
    """By the names of both ends of the tie, and of a block of each part; and by an edit, the same on all."""
    engine = start("tied gpt", config_of("pp 2", 1), adamw)
    train(engine, range(1))
    for names, text in NAMES.items():
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            engine.full_parameter(names[dist.get_rank()])
    values = torch.arange(40 * 32, dtype=torch.float64).view(40, 32)
    for written, added in ((EMBEDDING, 0), (HEAD, 1)):
        engine.set_full_parameter(written, values + added)
        for name in (EMBEDDING, HEAD):
            assert torch.equal(engine.full_parameter(name), values + added)
    held = [p.detach().sum().item() for p in engine.parameters() if p.fqn == EMBEDDING]
    assert held == [(values + 1).sum().item()]  # the copy of each of the two ranks
    for number, name in enumerate(BIASES):
        bias = torch.full((32,), float(number), dtype=torch.float64)
        engine.set_full_parameter(name, bias)
        engine.set_full_optimizer_state(name, {"exp_avg": bias})
        assert torch.equal(engine.full_parameter(name), bias)
        assert torch.equal(engine.full_optimizer_state(name)["exp_avg"], bias)

    def edit(value):
        with engine.unsharded(write_back=True), torch.no_grad():
            shown = dict(engine.module.named_parameters(remove_duplicate=False))
            shown[EMBEDDING if EMBEDDING in shown else HEAD].fill_(value)

    edit(2.0)
    with pytest.raises(RuntimeError, match=f"the ranks made different edits to '{EMBEDDING}'"):
        edit(3.0 + dist.get_rank())
    assert torch.equal(engine.full_parameter(HEAD), torch.full((40, 32), 2.0))
