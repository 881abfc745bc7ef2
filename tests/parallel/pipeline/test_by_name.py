"""Full tensors by name where pipeline ranks hold parts: each rank reads and writes the whole model."""

import re

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.runs import LAYOUTS, adamw, build, config_of, plain, start, tokens_of, train

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"


def begin(layout, stage=3, make=adamw):
    return start("tied gpt", config_of(layout, stage), make)


def read(layout):
    engine = begin(layout)
    train(engine, range(2))
    names = [name for name, _ in build("tied gpt").named_parameters(remove_duplicate=False)]
    parameters = {name: engine.full_parameter(name) for name in names}
    moments = {name: engine.full_optimizer_state(name)["exp_avg"] for name in names}
    gradients = [engine.full_gradient(name) for name in names]
    found = engine.full_state_dict(), parameters, moments, gradients
    engine.close(restore=False)
    return found


@pytest.mark.parametrize("layout", ["pp 2", pytest.param("pp 2 x tp 2", marks=pytest.mark.long)])
def test_every_rank_reads_parameters_and_states_of_all_parts(ranks, layout):
    _, _, want = plain("tied gpt", range(2), make=adamw)
    model = build("tied gpt")
    optimizer = adamw(model.parameters())
    for number in range(2):
        tokens = tokens_of(number)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    runs = ranks(LAYOUTS[layout][0], read, layout)
    keys = build("tied gpt").state_dict().keys()
    assert [state.keys() for state, *_ in runs] == [keys, *[{}.keys()] * (len(runs) - 1)]
    for name, value in runs[0][0].items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=1e-6, msg=name)
    for _, parameters, moments, gradients in runs:
        assert gradients == [None] * len(want)  # the batch has ended with a step
        for name, parameter in model.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(parameters[name], want[name], rtol=0, atol=1e-6, msg=name)
            moment = optimizer.state[parameter]["exp_avg"]
            torch.testing.assert_close(moments[name], moment, rtol=0, atol=1e-6, msg=name)


def written(layout, stage):
    """The model after writes by names of both ends of the tie, and of a block of each part."""
    engine = begin(layout, stage)
    train(engine, range(1))
    values = torch.arange(40 * 32, dtype=torch.float64).view(40, 32)
    engine.set_full_parameter(EMBEDDING, values)
    embedding = [engine.full_parameter(name) for name in (EMBEDDING, HEAD)]
    engine.set_full_parameter(HEAD, values + 1)
    embedding += [engine.full_parameter(name) for name in (EMBEDDING, HEAD)]
    for number in (0, 3):
        bias = torch.full((32,), float(number), dtype=torch.float64)
        engine.set_full_parameter(f"transformer.h.{number}.ln_1.bias", bias)
        engine.set_full_optimizer_state(f"transformer.h.{number}.ln_1.bias", {"exp_avg": bias})
    held = [p.detach().sum().item() for p in engine.parameters() if p.fqn == EMBEDDING]
    found = [engine.full_parameter(f"transformer.h.{number}.ln_1.bias") for number in (0, 3)]
    found += [
        engine.full_optimizer_state(f"transformer.h.{number}.ln_1.bias")["exp_avg"] for number in (0, 3)
    ]
    engine.close(restore=False)
    return embedding, held, found


def test_a_write_reaches_all_parts_that_hold_the_parameter(ranks):
    values = torch.arange(40 * 32, dtype=torch.float64).view(40, 32)
    for embedding, held, found in ranks(2, written, "pp 2", 1):
        assert all(map(torch.equal, embedding, [values, values, values + 1, values + 1]))
        assert held == [(values + 1).sum().item()]  # the copy of each of the two ranks
        assert [one.tolist() for one in found] == [[0.0] * 32, [3.0] * 32] * 2


NAMES = {
    ("transformer.h.3.ln_1.bia",) * 2: "expected the name of a parameter of the model, got "
    "'transformer.h.3.ln_1.bia'",
    ("transformer.h.0.ln_1.bias", "transformer.h.3.ln_1.bias"): "expected one name on all ranks, got "
    "['transformer.h.0.ln_1.bias', 'transformer.h.3.ln_1.bias']",
}
"""The names that the two ranks ask for, and the error."""


def refused():
    engine = begin("pp 2")
    for names, text in NAMES.items():
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            engine.full_parameter(names[dist.get_rank()])
    assert engine.full_parameter(HEAD).shape == (40, 32)  # the ranks go on together
    engine.close(restore=False)


def test_names_of_no_parameter_or_of_several_are_refused_on_all_ranks(ranks):
    ranks(2, refused)


def edited(differs):
    engine = begin("pp 2")
    message = ""
    try:
        with engine.unsharded(write_back=True), torch.no_grad():
            shown = dict(engine.module.named_parameters(remove_duplicate=False))
            name = EMBEDDING if EMBEDDING in shown else HEAD
            shown[name].fill_(1.0 + dist.get_rank() * differs)
    except RuntimeError as error:
        message = str(error)
    values = engine.full_parameter(HEAD)
    engine.close(restore=False)
    return message, values


def test_edits_of_a_shared_parameter_must_be_the_same_in_all_parts(ranks):
    for message, values in ranks(2, edited, False):
        assert message == ""
        assert torch.equal(values, torch.ones(40, 32))
    want = build("tied gpt").get_parameter(EMBEDDING).detach()
    for message, values in ranks(2, edited, True):
        assert f"the ranks made different edits to '{EMBEDDING}'" in message
        assert torch.equal(values, want)
