"""Checkpoints of models that are divided over tensor ranks: read and written under any layout."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroshard
from tests.checkpoint.runs import read_whole
from zeroshard.checkpoint.files import find
from zeroshard.checkpoint.tensors import open_checkpoint
from zeroshard.optim import AdamW8bit
from zeroshard.parallel.tensor.styles import LayerPlan, Split
from zeroshard.plan.cuts import heads

WIDTH, HEAD, VOCABULARY, LENGTH, BATCH = 24, 6, 44, 6, 8
PLAN = {
    "tokens": "rowwise",
    "blocks.*.qkv": LayerPlan(Split.COLUMNS, heads(4, 4, 4, size=HEAD)),
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.frozen.0": "colwise",
    "blocks.*.frozen.1": "rowwise",
    "head": "colwise_gather_output",
}
LAYOUTS = {"1x1": (1, 1), "tp 4": (4, 4), "dp 4": (4, 1), "tp 2": (2, 2), "tp 2 x dp 2": (4, 2)}
"""(ranks, tensor ranks)."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 44), nn.Linear(44, WIDTH)
        self.frozen = nn.Sequential(nn.Linear(WIDTH, 44), nn.Linear(44, WIDTH)).requires_grad_(False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x))) + self.frozen(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return self.head(x)


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "8-bit": lambda parameters: AdamW8bit(parameters, lr=1e-2, min_8bit_size=0),
}


def start(stage, tp, seed=0, optimizer="AdamW", **options):
    torch.manual_seed(seed)
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 0.5} | options
    return zeroshard.initialize(Model(), OPTIMIZERS[optimizer], config, tp_plan=PLAN).engine


def train(engine, numbers):
    """The mean loss of each step over the data-parallel ranks."""
    axis, losses = engine._axes.dp, []
    for number in numbers:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
        tokens = tokens.chunk(axis.size)[axis.rank]
        loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append((axis.sum(loss.detach(), "test") / axis.size).item())
    return losses


def values_of(engine):
    """All that a checkpoint holds of tensors, whole, by name."""
    found = {}
    for name, parameter in engine.named_parameters():
        found[name] = engine.full_parameter(name)
        if parameter.requires_grad:
            state = engine.full_optimizer_state(name)
            found |= {f"{name} {key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def save(folder, stage, tp, kind, options):
    engine = start(stage, tp, optimizer=kind, **options)
    train(engine, range(3))
    engine.save_checkpoint(folder, "saved")
    found = values_of(engine), engine.full_state_dict(), train(engine, range(3, 6))
    engine.close(restore=False)
    return found


def load(folder, stage, tp, kind, options, arguments):
    """The values that were loaded, the losses after that; what is saved again lies in `again`."""
    engine = start(stage, tp, seed=1 + dist.get_rank(), optimizer=kind, **options)
    engine.load_checkpoint(folder, "saved", **arguments)
    engine.save_checkpoint(folder / "again", "saved")
    found = values_of(engine), engine.full_state_dict(), train(engine, range(3, 6))
    engine.close(restore=False)
    return found


def same(one, other):
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


def check(ranks, folder, source, target, stages, kind="AdamW", options=(), arguments=()):
    """Save under one layout, load under another, save there, and load under the first one again."""
    options, arguments = dict(options), dict(arguments)
    (first, first_tp), (second, second_tp) = LAYOUTS[source], LAYOUTS[target]
    [(want, model, losses), *_] = ranks(first, save, folder, stages[0], first_tp, kind, options)
    found = ranks(second, load, folder, stages[1], second_tp, kind, options, arguments)
    for got, _, got_losses in found:
        assert same(got, want) == []
        assert got_losses == pytest.approx(losses, rel=1e-5)  # other orders of sums in float32
    assert same(found[0][1], model) == []
    back = ranks(first, load, folder / "again", stages[0], first_tp, kind, options, arguments)
    assert same(back[0][0], want) == []
    assert back[0][2] == losses  # the same layout: to the bit


@pytest.mark.long_where(target=["tp 4", "dp 4", "tp 2"])
@pytest.mark.parametrize("target", ["1x1", "tp 4", "dp 4", "tp 2"])
def test_a_checkpoint_of_divided_layers_loads_under_any_layout(ranks, tmp_path, target):
    check(ranks, tmp_path, "tp 2 x dp 2", target, (3, 3))


@pytest.mark.long
@pytest.mark.parametrize("target", ["1x1", "tp 4"])
def test_frozen_parameters_that_are_left_out_are_compared_by_their_whole_bytes(ranks, tmp_path, target):
    options = {"checkpoint": {"frozen": False}}
    num_ranks, tp = LAYOUTS[target]
    ranks(4, save, tmp_path, 3, 2, "AdamW", options)
    [(want, _, losses), *_] = ranks(4, load_same_base, tmp_path, 3, 2, "AdamW", options)
    for got, _, got_losses in ranks(num_ranks, load_same_base, tmp_path, 3, tp, "AdamW", options):
        assert same(got, want) == []
        assert got_losses == pytest.approx(losses, rel=1e-5)
    ranks(num_ranks, refuses_another_base, tmp_path, tp, options)


def load_same_base(folder, stage, tp, kind, options):
    engine = start(stage, tp, optimizer=kind, **options)
    engine.load_checkpoint(folder, "saved")
    found = values_of(engine), engine.full_state_dict(), train(engine, range(3, 6))
    engine.close(restore=False)
    return found


def refuses_another_base(folder, tp, options):
    engine = start(3, tp, seed=1, **options)
    with pytest.raises(ValueError, match=r"leaves out the frozen parameter 'blocks\.0\.frozen"):
        engine.load_checkpoint(folder, "saved")
    engine.close(restore=False)


def refuses_other_blocks(folder, tp):
    engine = start(3, tp, optimizer="8-bit")
    before = engine.full_state_dict()
    with pytest.raises(ValueError, match=r"states of '.*' in the 8 bits .* in the blocks of this layout"):
        engine.load_checkpoint(folder, "saved")
    assert same(engine.full_state_dict(), before) == []
    engine.load_checkpoint(folder, "saved", convert_states=True)
    found = values_of(engine), train(engine, range(3, 6))
    engine.close(restore=False)
    return found


@pytest.mark.long_where(target=["tp 4", "dp 4"])
@pytest.mark.parametrize("target", ["1x1", "tp 4", "dp 4"])
def test_8_bit_states_get_new_blocks_only_on_request(ranks, tmp_path, target):
    num_ranks, tp = LAYOUTS[target]
    [(want, _, losses), *_] = ranks(4, save, tmp_path, 3, 2, "8-bit", {})
    for got, got_losses in ranks(num_ranks, refuses_other_blocks, tmp_path, tp):
        assert got_losses == pytest.approx(losses, rel=1e-2)  # states are rounded to 8 bits once more
        for name, value in want.items():
            if "exp_avg" not in name:
                assert torch.equal(got[name], value), name
                continue
            # A value of 8 bits may move by one code: the widest gap of the codebook is 0.02 of the largest.
            bound = 0.02 * value.abs().max()
            torch.testing.assert_close(got[name], value, rtol=0, atol=bound.item(), msg=name)


def saved_whole(folder, tp):
    engine = start(3, tp)
    train(engine, range(2))
    engine.save_checkpoint(folder, "saved")
    found = engine.full_state_dict(), values_of(engine)
    engine.close(restore=False)
    return found


def test_a_reader_without_ranks_finds_whole_tensors(ranks, tmp_path):
    [(model, values), *_] = ranks(4, saved_whole, tmp_path, 2)
    stored = read_whole(open_checkpoint(find(tmp_path, "saved")))
    for name, value in model.items():
        if name != "head.weight":  # tied to the embedding
            assert torch.equal(stored[name], value), name
    for name in ("blocks.0.qkv.weight", "blocks.1.down.weight", "tokens.weight"):
        assert torch.equal(stored[f"optimizer/{name}/exp_avg"], values[f"{name} exp_avg"])
