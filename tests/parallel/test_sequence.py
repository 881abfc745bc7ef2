"""Norms and dropout on parts of the sequence: values, gradients and parameters of one process."""

import functools
import re
from contextlib import nullcontext

import pytest
import torch

from tests.parallel.runs import compare, divided, plain
from tests.parallel.sequences import (
    BATCH,
    LENGTH,
    PLAN,
    WIDTH,
    Model,
    WithoutPlaces,
    adamw,
    build,
    kind_of,
    llama,
    loss_of,
    sent_by,
    sharded,
    tokens_of,
)
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.sequence import install_regions
from zeroshard.plan.units import find_units
from zeroshard.sharding.context import Changes

CLIP = {"clip_grad_norm": 0.5}


def train(ranks, num_ranks, kind, config, change=None, **more):
    """Train over ranks and in one process; the factor of clipping and the norm are rounded to float32."""
    want = plain(adamw, change, kind=kind, max_norm=0.5)
    found = ranks(num_ranks, divided, config | CLIP, adamw, change, kind=kind, timeout=200)
    compare(found, want, **({"losses": 1e-6, "norms": 1e-5, "values": 1e-7} | more))


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.parametrize(
    ("cls", "num_ranks", "tp", "stage"), [(Model, 2, 2, 3), (Model, 4, 2, 1), (WithoutPlaces, 2, 2, 3)]
)
def test_a_model_trains_as_in_one_process(ranks, cls, num_ranks, tp, stage):
    plan = PLAN if cls is Model else {name: word for name, word in PLAN.items() if name != "blocks.0"}
    kind = kind_of(functools.partial(build, cls), plan)
    train(ranks, num_ranks, kind, {"stage": stage, "mesh": {"tp": tp}})


@pytest.mark.parametrize(
    ("name", "num_ranks", "tp", "stage"),
    [
        ("Llama", 2, 2, 1),
        *(
            pytest.param(name, 4, 2, 3, marks=pytest.mark.long)
            for name in ("Qwen3", "GPTNeoX", "Phi", "Gemma", "Mistral", "Qwen2")
        ),
    ],
)
def test_a_model_of_transformers_trains_as_in_one_process(ranks, name, num_ranks, tp, stage):
    config = {"stage": stage, "mesh": {"tp": tp, "sequence": True}}
    # Norms, softmax and the loss of transformers are in float32: their roundings differ in the last bit.
    train(ranks, num_ranks, kind_of(functools.partial(llama, name)), config, values=1e-6)


def in_evaluation():
    engine = sharded(build(Model), {"stage": 1, "mesh": {"tp": 2}}, PLAN)
    engine.eval()
    with torch.no_grad():
        found = [engine(tokens_of(1, length=length)) for length in (1, 7, LENGTH)]
    text = (
        "over mesh.tp=2 ranks, except in evaluation under no_grad: expected [batch, a multiple of 2, hidden]"
    )
    for is_training in (True, False):
        engine.train(is_training)
        with pytest.raises(ValueError, match=re.escape(f"{text}, got shape [4, 7, 16]")):
            loss_of(engine, 0, length=7)
    engine.backward(loss_of(engine, 0))
    gradient = engine.module.blocks[0].norm.weight.grad.clone()
    engine.close(restore=False)
    return found, gradient


def test_sequences_have_any_length_where_there_are_no_gradients(ranks):
    model = build(Model).eval()
    want = [model(tokens_of(1, length=length)).detach() for length in (1, 7, LENGTH)]
    loss_of(model, 0).backward()
    for found, gradient in ranks(2, in_evaluation):
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, model.blocks[0].norm.weight.grad, rtol=0, atol=1e-12)


def generated():
    tokens, model = torch.arange(10).view(2, 5), llama("Llama").eval()
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    want = model.generate(tokens, **options)
    engine = sharded(llama("Llama"), {"stage": 1, "mesh": {"tp": 2, "sequence": True}}, None)
    engine.eval()
    got = engine.module.generate(tokens, **options)
    engine.close(restore=False)
    return torch.equal(got, want)


def test_a_divided_model_generates_the_tokens_of_one_process(ranks):
    assert ranks(2, generated) == [True, True]


def sent():
    return sent_by(build(Model), PLAN)


def test_a_gather_and_a_reduce_scatter_take_the_place_of_each_all_reduce(ranks):
    hidden = BATCH * LENGTH * WIDTH * 8
    for notes in ranks(2, sent):
        in_blocks = [note for note in notes if "blocks" in note[1] and "blocks.0" not in note[1].split()]
        # In a block: two gathers in norms and two sums, each with its opposite in the backward.
        assert sorted(kind for kind, *_ in in_blocks) == 8 * ["all_gather"] + 8 * ["reduce_scatter"]
        assert {num_bytes for *_, num_bytes in in_blocks} == {hidden // 2}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {name: word for name, word in PLAN.items() if name != "blocks.*.after"},
            "with 'sequence' each layer with parameters needs an entry, and 'blocks.0.after.weight' has none",
        ),
        (PLAN | {"blocks.0": "replicate", "blocks.?": "sequence_split"}, None),
        (
            {"blocks.?": "sequence_split", **PLAN},
            "expected 'sequence_split' for the first block only, got ['blocks.0', 'blocks.1']",
        ),
    ],
)
def test_plans_that_would_compute_something_else_are_refused(plan, text):
    model = build(Model)
    with nullcontext() if text is None else pytest.raises(ValueError, match=re.escape(text)):
        install_regions(plan_division(model, find_units(model, None), plan, 2).layers, None, Changes())


def test_a_model_whose_norms_are_not_known_is_refused():
    model = llama("Olmo2")
    with pytest.raises(ValueError, match=r"mesh.sequence: expected .* got Olmo2ForCausalLM: give a tp_plan"):
        plan_division(model, find_units(model, None), None, 2, by_sequence=True)


def freeze_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)


TOGETHER = {
    "compiled": ({"compile": True}, None),
    "recomputed": ({"recompute": "unit"}, None),
    "frozen norms": ({}, freeze_norms),
}


@pytest.mark.long
@pytest.mark.parametrize("case", TOGETHER)
def test_parts_of_the_sequence_go_together_with_the_rest(ranks, case):
    config, change = TOGETHER[case]
    kind = kind_of(functools.partial(build, Model), PLAN)
    train(ranks, 4, kind, config | {"stage": 3, "mesh": {"tp": 2}}, change)


def asked_for_parts():
    engine = sharded(llama("Llama"), {"stage": 1, "mesh": {"tp": 2, "sequence": True}}, None)
    tokens = tokens_of(0)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"^{name}: .*each tensor rank has"):
            engine(input_ids=tokens, labels=tokens, **{name: True})
    with torch.inference_mode():
        logits = engine(input_ids=tokens).logits
    engine.eval()
    with torch.no_grad():
        states = engine(input_ids=tokens, output_hidden_states=True).hidden_states
    engine.close(restore=False)
    return logits.clone(), [state.shape for state in states]


def test_outputs_that_would_be_parts_are_refused(ranks):
    want = llama("Llama")(input_ids=tokens_of(0)).logits.detach()
    for logits, shapes in ranks(2, asked_for_parts):
        torch.testing.assert_close(logits, want, rtol=0, atol=1e-12)
        assert shapes == [(BATCH, LENGTH, 32)] * 3
