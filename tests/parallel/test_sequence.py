"""Norms and dropout on parts of the sequence: values, gradients and parameters of one process."""

import functools
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from tests.parallel.models import build
from tests.parallel.runs import compare, divided, plain
from tests.parallel.sequences import (
    BATCH,
    LENGTH,
    PLAN,
    WIDTH,
    Model,
    WithoutPlaces,
    adamw,
    kind_of,
    loss_of,
    model_of,
    sharded,
    tokens_of,
)
from tests.ranks import on_ranks
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.sequence import install_regions
from zeroshard.plan.units import find_units
from zeroshard.sharding.context import Changes

CLIP = {"clip_grad_norm": 0.5}


def trains_alike(ranks, num_ranks, kind, config, change=None, **more):
    """Train over ranks and in one process; the factor of clipping and the norm are rounded to float32."""
    want = plain(adamw, change, kind=kind, max_norm=0.5)
    found = ranks(num_ranks, divided, config | CLIP, adamw, change, kind=kind, timeout=200)
    compare(found, want, **({"losses": 1e-6, "norms": 1e-5, "values": 1e-7} | more))


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.long_where(cls=[WithoutPlaces])
@pytest.mark.parametrize(
    ("cls", "num_ranks", "tp", "stage"), [(Model, 2, 2, 3), (Model, 4, 2, 1), (WithoutPlaces, 2, 2, 3)]
)
def test_a_model_trains_as_in_one_process(ranks, cls, num_ranks, tp, stage):
    plan = PLAN if cls is Model else {name: word for name, word in PLAN.items() if name != "blocks.0"}
    kind = kind_of(functools.partial(model_of, cls), plan)
    trains_alike(ranks, num_ranks, kind, {"stage": stage, "mesh": {"tp": tp}})


NAMES = ("Llama", "Qwen3", "GPT-NeoX", "Phi", "Gemma", "Mistral", "Qwen2")


@pytest.mark.long_where(name=NAMES[1:])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_build_trains_as_in_one_process(ranks, name):
    config = {"stage": 3, "mesh": {"tp": 2, "sequence": True}}
    # Norms, softmax and the loss of transformers are in float32: their roundings differ in the last bit.
    trains_alike(ranks, 2, kind_of(functools.partial(build, name)), config, values=1e-6)


@on_ranks(2)
def test_sequences_have_any_length_where_there_are_no_gradients():
    model, engine = model_of(Model).eval(), sharded(model_of(Model), {"stage": 1, "mesh": {"tp": 2}}, PLAN)
    engine.eval()
    with torch.no_grad():
        for length in (1, 7, LENGTH):
            tokens = tokens_of(1, length=length)
            torch.testing.assert_close(engine(tokens), model(tokens), rtol=0, atol=1e-12)
    text = (
        "over mesh.tp=2 ranks, except in evaluation under no_grad: expected [batch, a multiple of 2, hidden]"
    )
    for is_training in (True, False):
        engine.train(is_training)
        with pytest.raises(ValueError, match=re.escape(f"{text}, got shape [4, 7, 16]")):
            loss_of(engine, 0, length=7)
    engine.backward(loss_of(engine, 0))
    loss_of(model, 0).backward()
    found, want = (one.blocks[0].norm.weight.grad for one in (engine.module, model))
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)


@on_ranks(2)
def test_a_divided_model_generates_the_tokens_of_one_process_and_outputs_that_would_be_parts_are_refused():
    tokens, model = tokens_of(0), build("Llama").eval()
    engine = sharded(build("Llama"), {"stage": 1, "mesh": {"tp": 2, "sequence": True}}, None)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"^{name}: .*each tensor rank has"):
            engine(input_ids=tokens, labels=tokens, **{name: True})
    with torch.inference_mode():
        logits = engine(input_ids=tokens).logits
    want = model(input_ids=tokens).logits.detach()
    torch.testing.assert_close(logits.clone(), want, rtol=0, atol=1e-12)
    engine.eval()
    with torch.no_grad():
        states = engine(input_ids=tokens, output_hidden_states=True).hidden_states
    assert [state.shape for state in states] == [(BATCH, LENGTH, 32)] * 3
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    found = engine.module.generate(tokens, **options)
    assert torch.equal(found, model.generate(tokens, **options))


@on_ranks(2)
def test_a_gather_and_a_reduce_scatter_take_the_place_of_each_all_reduce():
    notes = []

    def noted(label, line, kind, num_bytes):
        if "activations" in label:
            notes.append((kind, label, num_bytes))
        return label

    engine = sharded(model_of(Model), {"stage": 1, "mesh": {"tp": 2}}, PLAN)
    with mock.patch.object(engine._axes.tp, "note", noted):
        engine.backward(loss_of(engine, 0))
    engine.close(restore=False)
    in_blocks = [note for note in notes if "blocks" in note[1] and "blocks.0" not in note[1].split()]
    # In a block: two gathers in norms and two sums, each with its opposite in the backward.
    assert sorted(kind for kind, *_ in in_blocks) == 8 * ["all_gather"] + 8 * ["reduce_scatter"]
    assert {num_bytes for *_, num_bytes in in_blocks} == {BATCH * LENGTH * WIDTH * 8 // 2}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {name: word for name, word in PLAN.items() if name != "blocks.*.after"},
            "with 'sequence' each layer with parameters needs an entry, and 'blocks.0.after.weight' has none",
        ),
        (PLAN | {"blocks.0": "replicate", "blocks.?": "sequence_split"}, None),
        ({at.removeprefix("blocks.*.") if "after" in at else at: word for at, word in PLAN.items()}, None),
        (
            {"blocks.?": "sequence_split", **PLAN},
            "expected 'sequence_split' for the first block only, got ['blocks.0', 'blocks.1']",
        ),
    ],
)
def test_plans_that_would_compute_something_else_are_refused(plan, text):
    model = model_of(Model)
    with nullcontext() if text is None else pytest.raises(ValueError, match=re.escape(text)):
        install_regions(plan_division(model, find_units(model, None), plan, 2).layers, None, Changes())


def test_a_model_whose_norms_are_not_known_is_refused():
    model = build("OLMo 2, gathered")
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
    kind = kind_of(functools.partial(model_of, Model), PLAN)
    trains_alike(ranks, 4, kind, config | {"stage": 3, "mesh": {"tp": 2}}, change)


@on_ranks(2)
def test_norms_on_parts_of_a_sequence_cast_and_gather_what_goes_on():
    found = []
    for overrides in (None, dict.fromkeys(("norm", "second", "after"), "fp32")):
        config = {"stage": 3, "mesh": {"tp": 2}, "precision": {"overrides": overrides}}
        engine, losses = sharded(model_of(Model), config, PLAN), []
        for number in range(2):
            engine.reset_comm_report()
            loss = loss_of(engine, number)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((losses, sum(engine.comm_report().bytes_sent.values())))
        engine.close(restore=False)
    (want, sent), (losses, moved) = found
    assert losses == pytest.approx(want, rel=1e-5)
    assert losses != want
    assert moved <= sent  # what is gathered lies in the dtype of the layers around
