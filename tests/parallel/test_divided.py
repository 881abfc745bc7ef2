"""Models that are divided over tensor ranks train to the values of one process."""

import math
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard

WIDTH, HEAD, VOCABULARY, LENGTH, BATCH = 16, 4, 24, 6, 8
PLAN = {
    "tokens": "rowwise",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.each_head": "replicated_with_grad_allreduce",
    "blocks.*.up": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather_output",
}
STEPS = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.each_head = nn.LayerNorm(HEAD)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.each_head(q), self.each_head(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(seed):
    torch.manual_seed(seed)
    return Model().double()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def loss_of(model, number, own=slice(None)):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))[own]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def plain(max_norm):
    """Losses, norms and parameters of one process."""
    model = build(0)
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for number in range(STEPS):
        loss = loss_of(model, number)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


def divided(config):
    """The same of a divided model; ranks begin with other values, and those of rank 0 count."""
    model = build(dist.get_rank())
    initialized = zeroshard.initialize(model, adamw, config, tp_plan=PLAN)
    engine, losses, norms = initialized.engine, [], []
    axes = engine._axes
    size = BATCH // axes.dp.size
    own = slice(axes.dp.rank * size, (axes.dp.rank + 1) * size)
    for number in range(STEPS):
        loss = loss_of(engine, number, own)
        engine.backward(loss)
        engine.step()
        norms.append(engine.grad_norm.item())
        losses.append((axes.dp.sum(loss.detach(), "test") / axes.dp.size).item())
    state = engine.full_state_dict()
    num = sum(p.numel() for p in engine.parameters())
    engine.close(restore=False)
    return losses, norms, state, num


@pytest.mark.long_where(num_ranks=[4], tp=[2])
@pytest.mark.long_where(stage=[0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("num_ranks", "tp"), [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4)])
def test_losses_norms_and_parameters_are_those_of_one_process(ranks, num_ranks, tp, stage):
    want_losses, want_norms, want = plain(0.5)
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 0.5}
    for rank, (losses, norms, state, _) in enumerate(ranks(num_ranks, divided, config)):
        assert losses == pytest.approx(want_losses, rel=1e-7)  # the factor of clipping is rounded to float32
        assert norms == pytest.approx(want_norms, rel=1e-6)  # the norm is rounded to float32
        assert (state == {}) == (rank > 0)
        for name, value in state.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-7, msg=name)


@pytest.mark.long
def test_stages_agree_to_the_bit(ranks):
    found = [
        ranks(4, divided, {"stage": stage, "mesh": {"tp": 2}, "clip_grad_norm": 0.5}) for stage in range(4)
    ]
    (losses, norms, state, _), *others = (stage[0] for stage in found)
    for other_losses, other_norms, other, _ in others:
        assert (other_losses, other_norms) == (losses, norms)
        assert all(torch.equal(value, other[name]) for name, value in state.items())


def test_a_rank_holds_its_part(ranks):
    whole = sum(p.numel() for p in Model().parameters())
    cut = sum(
        p.numel()
        for name, p in Model().named_parameters()
        if not any(kind in name for kind in ("norm", "second", "each_head"))
    )
    cut -= 2 * 2 * WIDTH  # the biases of layers that are divided by rows
    for *_, num in ranks(2, divided, {"stage": 0, "mesh": {"tp": 2}, "clip_grad_norm": 0.5}):
        assert num == whole - cut / 2
    assert math.isclose(cut / whole, 0.9, abs_tol=0.1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32)
        self.down, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.head(self.down(F.gelu(self.up(self.norm(x)))))


def with_a_divided_last_layer():
    torch.manual_seed(0)
    plan = {"up": "colwise", "down": "rowwise", "head": "colwise"}
    engine = zeroshard.initialize(Classifier(), adamw, {"stage": 1, "mesh": {"tp": 2}}, tp_plan=plan).engine
    before = engine.module.up.weight.detach().clone()
    engine.backward(F.cross_entropy(engine(torch.randn(6, WIDTH)), torch.arange(6) % 4))
    text = "the tensor ranks [0, 1] have different losses"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        engine.step()
    is_same = torch.equal(engine.module.up.weight, before)
    engine.close(restore=False)
    return is_same


def test_a_loss_of_parts_is_an_error_at_the_first_step(ranks):
    assert ranks(2, with_a_divided_last_layer) == [True, True]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ([("up", "colwise")], "tp_plan: expected words by pattern, {'layers.*.up': 'colwise', ...}, got [("),
        ({}, "tp_plan: expected words by pattern, {'layers.*.up': 'colwise', ...}, got {}"),
        ({"up": ["colwise"]}, "got {'up': ['colwise']}"),
        ({"up": "columns"}, "got 'columns' for 'up'"),
    ],
)
def test_a_plan_of_another_form_is_refused_at_any_size(plan, text, tp):
    with pytest.raises(ValueError, match=re.escape(text)):
        zeroshard.initialize(Classifier(), adamw, {"mesh": {"tp": tp}}, tp_plan=plan)
