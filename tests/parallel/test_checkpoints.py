"""Divided models as wholes: checkpoints under any layout, parameters shown, edited, given back, exported."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

import zeroshard
from tests.checkpoint.runs import train, without_numba
from tests.distributed.training import different, part_of, seeded
from tests.parallel import models
from tests.ranks import on_ranks
from zeroshard.optim import AdamW8bit
from zeroshard.parallel.tensor.styles import LayerPlan, Split
from zeroshard.plan.cuts import heads
from zeroshard.safetensors import FileTensor

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


def token_loss(engine, number):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number))
    tokens = part_of(engine, tokens)
    return F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def divided(stage, tp, seed=0, optimizer="AdamW", **options):
    config = {"stage": stage, "mesh": {"tp": tp}, "clip_grad_norm": 0.5} | options
    model = seeded(Model, seed=seed)
    return zeroshard.initialize(model, OPTIMIZERS[optimizer], config, tp_plan=PLAN).engine


def values_of(engine):
    """All that a checkpoint holds of tensors, whole, by name."""
    found = {}
    for name, parameter in engine.named_parameters():
        found[name] = engine.full_parameter(name)
        if parameter.requires_grad:
            state = engine.full_optimizer_state(name)
            found |= {f"{name} {key}": torch.as_tensor(value) for key, value in state.items()}
    return found


@without_numba
def save(folder, tp, kind):
    engine = divided(3, tp, optimizer=kind)
    train(engine, range(2), token_loss)
    engine.save_checkpoint(folder, "saved")
    return values_of(engine), engine.full_state_dict(), train(engine, range(2, 4), token_loss)


def load(folder, tp):
    """The values that were loaded, the losses after that; what is saved again lies in `again`."""
    engine = divided(3, tp, 1 + dist.get_rank())
    engine.load_checkpoint(folder, "saved")
    engine.save_checkpoint(folder / "again", "saved")
    return values_of(engine), engine.full_state_dict(), train(engine, range(2, 4), token_loss)


@pytest.mark.parametrize("tp", [1, pytest.param(4, marks=pytest.mark.long)])
def test_a_checkpoint_of_divided_layers_loads_under_any_layout(ranks, tmp_path, tp):
    """Save over 2 tensor and 2 data ranks, load under another layout, save there, and load again."""
    [(want, model, losses), *_] = ranks(4, save, tmp_path, 2, "AdamW")
    found = ranks(tp, load, tmp_path, tp)
    for got, _, got_losses in found:
        assert different(got, want) == []
        assert got_losses == pytest.approx(losses, rel=1e-5)  # other orders of sums in float32
    assert different(found[0][1], model) == []
    if tp == 1:
        return
    back = ranks(4, load, tmp_path / "again", 2)
    assert different(back[0][0], want) == []
    assert back[0][2] == losses  # the same layout: to the bit


@without_numba
def converts(folder, tp, optimizer, saved, again):
    """Load states into others of 32 or 8 bits, and save them; the values that were loaded."""
    engine = divided(3, tp, optimizer=optimizer)
    engine.load_checkpoint(folder, saved, convert_states=True)
    engine.save_checkpoint(folder, again)
    return values_of(engine)


def refuses_other_blocks(folder):
    engine = divided(3, 1, optimizer="8-bit")
    before = engine.full_state_dict()
    for converts in (False, True):
        with pytest.raises(ValueError, match=r"have scales for blocks of other tensor ranks: .* of 32 bits"):
            engine.load_checkpoint(folder, "saved", convert_states=converts)
    assert different(engine.full_state_dict(), before) == []


@pytest.mark.long
def test_8_bit_states_get_new_blocks_by_way_of_32_bits_alone(ranks, tmp_path):
    [(want, *_), *_] = ranks(2, save, tmp_path, 2, "8-bit")
    ranks(1, refuses_other_blocks, tmp_path)
    ranks(2, converts, tmp_path, 2, "AdamW", "saved", "wide")
    [got] = ranks(1, converts, tmp_path, 1, "8-bit", "wide", "narrow")
    for name, value in want.items():
        # A value of 8 bits may move by one code: the widest gap of the codebook is 0.02 of the largest.
        bound = 0.02 * value.abs().max().item() if "exp_avg" in name else 0.0
        torch.testing.assert_close(got[name], value, rtol=0, atol=bound, msg=name)


# ------------------------------------------------------------------------------- whole parameters

UP, SIZE = "blocks.0.up.weight", (44, 24)


def everyone(value):
    """The value on rank 0."""
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


@on_ranks(4)
def test_parameters_are_whole_inside_unsharded_by_name_and_after_a_close():
    """And edits go back into parts; what the ranks edit must be the same, and products are refused there."""
    engine, tokens = divided(3, 2), torch.arange(12).view(2, 6)
    train(engine, range(2), token_loss)
    state, output = everyone(engine.full_state_dict()), engine(tokens).detach()
    want = {name: state[name] for name, _ in engine.module.named_parameters()}
    with engine.unsharded():
        assert torch.equal(engine(tokens), output)  # its units are gathered, in parts
        text = "'blocks.0.up' is divided over tensor-parallel ranks and has its whole parameters now"
        with pytest.raises(RuntimeError, match=text):
            engine.module.blocks[0].up(torch.ones(2, 24))
    with (
        pytest.raises(RuntimeError, match="the ranks made different edits"),
        engine.unsharded(write_back=True),
        torch.no_grad(),
    ):
        engine.module.get_parameter(UP).add_(dist.get_rank())
    with engine.unsharded(write_back=True), torch.no_grad():
        for number, (name, parameter) in enumerate(engine.module.named_parameters()):
            assert torch.equal(parameter, want[name]), name
            parameter.add_(torch.arange(parameter.numel()).view(parameter.shape), alpha=0.1 * number)
            want[name] = parameter.detach().clone()
    with pytest.raises(ValueError, match=r"expected a full tensor of shape \(44, 24\), got shape \(22, 24\)"):
        engine.set_full_parameter(UP, torch.ones(22, 24))
    want[UP] = torch.arange(44.0 * 24).view(SIZE)
    engine.set_full_parameter(UP, want[UP])
    assert torch.equal(engine.full_parameter(UP), want[UP])
    module = engine.module
    engine.close()
    plain = Model()
    plain.load_state_dict(want, strict=False)
    assert different(dict(module.named_parameters()), dict(plain.named_parameters())) == []
    torch.testing.assert_close(module(tokens), plain(tokens))


@on_ranks(2)
def test_gradients_are_whole_by_name():
    """And one is set."""
    engine = divided(3, 2, clip_grad_norm=None)
    torch.manual_seed(0)
    plain = Model()
    tokens = torch.randint(44, (4, 6), generator=torch.Generator().manual_seed(5))
    for model, backward in ((engine, engine.backward), (plain, torch.Tensor.backward)):
        backward(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(engine.full_gradient(name), p.grad, rtol=1e-4, atol=1e-6, msg=name)
    ones = torch.ones(24, 44)
    engine.set_full_gradient("blocks.0.down.weight", ones)
    assert torch.equal(engine.full_gradient("blocks.0.down.weight"), ones)


# ------------------------------------------------------------------------------------------- transformers


def trained(folder):
    """Train a model that is read from files, and write it again."""
    read, original = [], FileTensor.read

    def noted(self, *spans):
        read.append(sum(span.size for span in spans))
        return original(self, *spans)

    with mock.patch.object(FileTensor, "read", noted):
        model = zeroshard.from_pretrained(transformers.LlamaForCausalLM, folder / "base")
        config = {"stage": 3, "mesh": {"tp": 2}}
        engine = zeroshard.initialize(model, OPTIMIZERS["AdamW"], config).engine
    begun = engine.full_state_dict()
    tokens = torch.arange(24).view(2, 12)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_pretrained(folder / "out")
    state = engine.full_state_dict()
    return begun, state, sum(read)


def test_a_model_is_read_in_parts_and_written_whole(ranks, tmp_path):
    base = models.build("Llama").float()
    base.save_pretrained(tmp_path / "base")
    [(begun, state, _), *others] = found = ranks(4, trained, tmp_path)
    assert different(begun, dict(base.state_dict())) == []
    assert all(other == {} for _, other, _ in others)
    written = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert different(state, dict(written.state_dict())) == []
    norms = sum(p.numel() for n, p in base.named_parameters() if "norm" in n)
    cut = sum(p.numel() for p in base.parameters()) - norms
    for *_, num_read in found:
        assert num_read <= cut / 4 + norms + 256 * 16  # shards end with whole blocks
