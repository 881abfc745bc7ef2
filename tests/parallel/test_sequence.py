"""Norms and dropout on parts of the sequence: values, gradients and parameters of one process."""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import zeroshard
from zeroshard.comm.collectives import Axis
from zeroshard.parallel.tensor.styles import LayerPlan, Split

WIDTH, HEAD, VOCABULARY, LENGTH, BATCH, STEPS = 16, 4, 24, 8, 4, 4
PLAN = {
    "tokens": "rowwise",
    "places": "replicate",
    "blocks.0": "sequence_split",
    "blocks.*.norm": "sequence",
    "blocks.*.second": "sequence_parallel",
    "blocks.*.after": "sequence_parts",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
    "blocks.*.router": "replicate",
    "norm": "sequence",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    """One with a norm after its attention, and a layer that each rank computes of whole values."""

    def __init__(self):
        super().__init__()
        self.norm, self.second, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = self.norm(x)
        shape = (*h.shape[:2], -1, HEAD)
        q, k, v = (layer(h).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.after(self.out(mixed.transpose(1, 2).flatten(2))))
        h = self.second(x)
        return x + self.drop(self.down(F.gelu(self.up(h)))), self.router(h).square().mean(1, keepdim=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.through(self.tokens(tokens) + self.places.weight[: tokens.shape[1]])

    def through(self, x):
        scale = 1.0
        for block in self.blocks:
            x, routed = block(x)
            scale = scale + routed
        return self.head(self.norm(x)) * scale


class WithoutPlaces(Model):
    def forward(self, tokens):
        return self.through(self.tokens(tokens))


def build(cls, seed=0):
    torch.manual_seed(seed)
    model = cls().double()
    model.places.requires_grad_(cls is Model)
    return model


def llama(kind):
    options = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "use_cache": False,
    }
    options |= {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    if kind not in ("GPTNeoX", "Phi"):
        options |= {"num_key_value_heads": 2, "head_dim": 8}
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).double().train()


def tokens_of(number, own=slice(None), length=LENGTH):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (BATCH, length), generator=generator)[own]


def loss_of(model, number, own=slice(None), length=LENGTH):
    tokens = tokens_of(number, own, length)
    outputs = model(tokens)
    if not isinstance(outputs, torch.Tensor):
        return model(input_ids=tokens, labels=tokens).loss
    return F.cross_entropy(outputs.flatten(0, 1), tokens.roll(-1, 1).flatten())


def adamw(parameters):
    # Adam with a small eps divides the smallest gradients by their own size, and so it enlarges roundings.
    return torch.optim.AdamW((p for p in parameters if p.requires_grad), lr=1e-2, eps=1e-3)


def sharded(model, config, plan):
    return zeroshard.initialize(model, adamw, config | {"clip_grad_norm": 0.5}, tp_plan=plan).engine


def plain(model):
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for number in range(STEPS):
        loss = loss_of(model, number)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def divided(make, arguments, config, plan):
    engine, losses, norms = sharded(make(*arguments), config, plan), [], []
    axis = engine._axes.dp
    size = BATCH // axis.size
    for number in range(STEPS):
        loss = loss_of(engine, number, slice(axis.rank * size, (axis.rank + 1) * size))
        engine.backward(loss)
        engine.step()
        norms.append(engine.grad_norm.item())
        losses.append((axis.sum(loss.detach(), "test") / axis.size).item())
    state = engine.full_state_dict()
    replicated = {name: p.detach().clone() for name, p in engine.module.named_parameters() if "norm" in name}
    engine.close(restore=False)
    return losses, norms, state, replicated


def check(found, want_losses, want_norms, want, tolerance):
    for losses, norms, state, _ in found:
        assert losses == pytest.approx(want_losses, rel=1e-6)  # the factor of clipping is rounded to float32
        assert norms == pytest.approx(want_norms, rel=1e-5)  # the norm is rounded to float32
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=tolerance, msg=name)


MESHES = [(2, 2), (4, 4), (4, 2)]


@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.long_where(stage=[1])
@pytest.mark.long_where(cls=[WithoutPlaces], stage=[1])
@pytest.mark.long_where(cls=[WithoutPlaces], num_ranks=[4])
@pytest.mark.long_where(tp=[4])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), MESHES)
@pytest.mark.parametrize("cls", [Model, WithoutPlaces])
def test_a_model_trains_as_in_one_process(ranks, cls, num_ranks, tp, stage):
    plan = PLAN if cls is Model else {name: word for name, word in PLAN.items() if name != "blocks.0"}
    want = plain(build(cls))
    config = {"stage": stage, "mesh": {"tp": tp}}
    found = ranks(num_ranks, divided, build, (cls,), config, plan)
    check(found, *want, 1e-7)
    for place, (*_, replicated) in enumerate(found):
        *_, first = found[place // tp * tp]
        assert all(torch.equal(value, first[name]) for name, value in replicated.items())


@pytest.mark.long_where(kind=["Qwen3", "GPTNeoX", "Phi", "Gemma", "Mistral", "Qwen2"])
@pytest.mark.long_where(num_ranks=[4])
@pytest.mark.long_where(stage=[3])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), MESHES)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPTNeoX", "Phi", "Gemma", "Mistral", "Qwen2"])
def test_a_model_of_transformers_trains_as_in_one_process(ranks, kind, num_ranks, tp, stage):
    want = plain(llama(kind))
    config = {"stage": stage, "mesh": {"tp": tp, "sequence": True}}
    # Norms, softmax and the loss of transformers are in float32: their roundings differ in the last bit.
    check(ranks(num_ranks, divided, llama, (kind,), config, None), *want, 1e-6)


def recomputed(config):
    """Gradients with dropout on parts, and the outputs of the blocks."""
    model = build(Model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    engine = sharded(model, config, PLAN)
    axis = engine._axes.tp
    torch.manual_seed(axis.rank)
    kept = []
    model.blocks[0].drop.register_forward_hook(lambda module, args, output: kept.append(output == 0))
    engine.backward(loss_of(engine, 0))
    found = {name: p.grad.clone() for name, p in model.named_parameters()}, kept[0]
    engine.close(restore=False)
    return found


def test_ranks_drop_other_elements_of_their_parts_and_the_same_ones_again(ranks):
    config = {"stage": 1, "mesh": {"tp": 2}}
    plain_run = ranks(2, recomputed, config)
    assert not torch.equal(plain_run[0][1], plain_run[1][1])
    assert plain_run[0][1].shape == (BATCH, LENGTH // 2, WIDTH)
    for (want, _), (got, _) in zip(
        plain_run, ranks(2, recomputed, config | {"recompute": "unit"}), strict=True
    ):
        assert all(torch.equal(value, want[name]) for name, value in got.items())


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


def generated(sequence):
    tokens, model = torch.arange(10).view(2, 5), llama("Llama").eval()
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    want = model.generate(tokens, **options)
    engine = sharded(llama("Llama"), {"stage": 1, "mesh": {"tp": 2, "sequence": sequence}}, None)
    engine.eval()
    got = engine.module.generate(tokens, **options)
    engine.close(restore=False)
    return torch.equal(got, want)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_divided_model_generates_the_tokens_of_one_process(ranks, sequence):
    assert ranks(2, generated, sequence) == [True, True]


def sent(plan):
    return sent_by(build(Model), plan)


def sent_by(model, plan):
    """The exchanges of activations in a training step: (kind, label, bytes)."""
    notes, note = [], Axis.note

    def noted(axis, kind, num_bytes, label, *line):
        if "activations" in label:
            notes.append((kind, label, num_bytes))
        note(axis, kind, num_bytes, label, *line)

    engine = sharded(model, {"stage": 1, "mesh": {"tp": 2}}, plan)
    with mock.patch.object(Axis, "note", noted):
        engine.backward(loss_of(engine, 0))
    engine.close(restore=False)
    return notes


def test_a_gather_and_a_reduce_scatter_take_the_place_of_each_all_reduce(ranks):
    hidden = BATCH * LENGTH * WIDTH * 8
    for notes in ranks(2, sent, PLAN):
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
def test_plans_that_would_compute_something_else_are_refused(ranks, plan, text):
    ranks(2, refused, plan, text)


def refused(plan, text):
    if text is None:
        sharded(build(Model), {"stage": 1, "mesh": {"tp": 2}}, plan).close(restore=False)
        return
    with pytest.raises(ValueError, match=re.escape(text)):
        sharded(build(Model), {"stage": 1, "mesh": {"tp": 2}}, plan)


def of_another_kind():
    config = transformers.Olmo2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=24
    )
    config.num_attention_heads = config.num_key_value_heads = 4
    model = transformers.Olmo2ForCausalLM(config)
    with pytest.raises(ValueError, match=r"mesh.sequence: expected .* got Olmo2ForCausalLM: give a tp_plan"):
        sharded(model, {"stage": 1, "mesh": {"tp": 2, "sequence": True}}, None)


def test_a_model_whose_norms_are_not_known_is_refused(ranks):
    ranks(2, of_another_kind)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_units_train_as_in_one_process(ranks, stage):
    config = {"stage": stage, "mesh": {"tp": 2}, "compile": True}
    check(ranks(2, divided, build, (Model,), config, PLAN, timeout=200), *plain(build(Model)), 1e-7)


def frozen_norms(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)


TOGETHER = {
    "two micro-batches": {"gradient_accumulation_steps": 2},
    "states on the host": {"offload": {"optimizer": "cpu"}},
    "parameters on the host": {"offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "groups of one": {"shard_group_size": 1},
    "recomputed": {"recompute": "unit"},
    "frozen norms": {},
}


def divided_by(case, stage, tp):
    """Losses are those of each micro-batch of this rank."""
    model, config = build(Model), TOGETHER[case] | {"stage": stage, "mesh": {"tp": tp}}
    if case == "frozen norms":
        frozen_norms(model)
    engine, norms = sharded(model, config, PLAN), []
    axis, num = engine._axes.dp, config.get("gradient_accumulation_steps", 1)
    size = BATCH // (axis.size * num)
    for number in range(STEPS):
        for micro in range(num):
            start = (micro * axis.size + axis.rank) * size
            engine.backward(loss_of(engine, number, slice(start, start + size)))
            engine.step()
        norms.append(engine.grad_norm.item())
    state = engine.full_state_dict()
    engine.close(restore=False)
    return norms, state


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "stage"),
    [
        (case, stage)
        for case in TOGETHER
        for stage in {"parameters on the host": (3,), "groups of one": (1, 2, 3)}.get(case, (0, 1, 2, 3))
    ],
)
def test_parts_of_the_sequence_go_together_with_the_rest(ranks, case, stage):
    model = build(Model)
    if case == "frozen norms":
        frozen_norms(model)
    _, want_norms, want = plain(model)
    for norms, state in ranks(4, divided_by, case, stage, 2, timeout=100):
        assert norms == pytest.approx(want_norms, rel=1e-5)  # the norm is rounded to float32
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-7, msg=name)


def saved_along_the_sequence(folder):
    """A checkpoint of parts of the sequence, loaded without tensor ranks: the state of both."""
    engine = sharded(build(Model), {"stage": 3, "mesh": {"tp": 2}}, PLAN)
    engine.backward(loss_of(engine, 0))
    engine.step()
    engine.save_checkpoint(folder)
    want = engine.full_state_dict()
    engine.close(restore=False)
    other = sharded(build(Model, 1), {"stage": 2}, None)
    other.load_checkpoint(folder)
    got = other.full_state_dict()
    other.close(restore=False)
    return all(torch.equal(value, want[name]) for name, value in got.items())


def test_a_checkpoint_of_parts_of_the_sequence_loads_under_another_layout(ranks, tmp_path):
    assert ranks(2, saved_along_the_sequence, str(tmp_path)) == [True, True]


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


def planned_by_styles():
    plan = {
        "model.embed_tokens": "rowwise",
        "model.layers.*.self_attn.[qkv]_proj": "colwise",
        "model.layers.*.self_attn.o_proj": LayerPlan(Split.ROWS),
        "model.layers.*.mlp.down_proj": LayerPlan(Split.ROWS),
        "model.layers.*.mlp.*_proj": "colwise",
        "lm_head": "colwise_gather_output",
    }
    engine = sharded(llama("Llama"), {"stage": 1, "mesh": {"tp": 2, "sequence": True}}, plan)
    loss = loss_of(engine, 0).item()
    engine.close(restore=False)
    return loss


def test_styles_in_a_plan_are_read_as_their_words(ranks):
    want = loss_of(llama("Llama"), 0).item()
    assert ranks(2, planned_by_styles) == pytest.approx([want, want], rel=1e-6)
