"""Divided models as wholes: checkpoints under any layout, parameters shown, edited, given back, exported."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

import zeroshard
from tests.checkpoint.runs import without_numba
from tests.parallel import models
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
LAYOUTS = {"1x1": (1, 1), "tp 4": (4, 4)}
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


@without_numba
def save(folder, stage, tp, kind, options):
    engine = start(stage, tp, optimizer=kind, **options)
    train(engine, range(3))
    engine.save_checkpoint(folder, "saved")
    found = values_of(engine), engine.full_state_dict(), train(engine, range(3, 6))
    engine.close(restore=False)
    return found


def load(folder, stage, tp, kind, options, seed=None):
    """The values that were loaded, the losses after that; what is saved again lies in `again`."""
    engine = start(stage, tp, 1 + dist.get_rank() if seed is None else seed, kind, **options)
    engine.load_checkpoint(folder, "saved")
    engine.save_checkpoint(folder / "again", "saved")
    found = values_of(engine), engine.full_state_dict(), train(engine, range(3, 6))
    engine.close(restore=False)
    return found


def same(one, other):
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("target", ["1x1", pytest.param("tp 4", marks=pytest.mark.long)])
def test_a_checkpoint_of_divided_layers_loads_under_any_layout(ranks, tmp_path, target):
    """Save over 2 tensor and 2 data ranks, load under another layout, save there, and load again."""
    second, second_tp = LAYOUTS[target]
    [(want, model, losses), *_] = ranks(4, save, tmp_path, 3, 2, "AdamW", {})
    found = ranks(second, load, tmp_path, 3, second_tp, "AdamW", {})
    for got, _, got_losses in found:
        assert same(got, want) == []
        assert got_losses == pytest.approx(losses, rel=1e-5)  # other orders of sums in float32
    assert same(found[0][1], model) == []
    if target == "1x1":
        return
    back = ranks(4, load, tmp_path / "again", 3, 2, "AdamW", {})
    assert same(back[0][0], want) == []
    assert back[0][2] == losses  # the same layout: to the bit


@without_numba
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


def test_8_bit_states_get_new_blocks_only_on_request(ranks, tmp_path):
    [(want, _, losses), *_] = ranks(4, save, tmp_path, 3, 2, "8-bit", {})
    for got, got_losses in ranks(1, refuses_other_blocks, tmp_path, 1):
        assert got_losses == pytest.approx(losses, rel=1e-2)  # states are rounded to 8 bits once more
        for name, value in want.items():
            if "exp_avg" not in name:
                assert torch.equal(got[name], value), name
                continue
            # A value of 8 bits may move by one code: the widest gap of the codebook is 0.02 of the largest.
            bound = 0.02 * value.abs().max()
            torch.testing.assert_close(got[name], value, rtol=0, atol=bound.item(), msg=name)


# ------------------------------------------------------------------------------- whole parameters


def shown_and_edited(stage, tp):
    engine = start(stage, tp)
    train(engine, range(2))
    want = engine.full_state_dict()
    with engine.unsharded(write_back=True), torch.no_grad():
        found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        for number, (_, parameter) in enumerate(engine.module.named_parameters()):
            parameter.add_(torch.arange(parameter.numel()).view(parameter.shape), alpha=0.1 * number)
    edited = engine.full_state_dict()
    for name in want if dist.get_rank() == 0 else ():
        if name in found:
            assert torch.equal(found[name], want[name]), name
    engine.close(restore=False)
    return found, edited


@pytest.mark.long_where(stage=[0])
@pytest.mark.parametrize("stage", [0, 3])
def test_unsharded_shows_whole_parameters_and_writes_each_rank_its_part_back(ranks, stage):
    [(first, edited), *others] = ranks(4, shown_and_edited, stage, 2)
    for number, (name, value) in enumerate(first.items()):
        step = torch.arange(value.numel()).view(value.shape)
        assert torch.equal(edited[name], value.add(step, alpha=0.1 * number)), name
    for found, _ in others:
        assert same(found, first) == []


def whole_gradients():
    """By name, and one that was set; the model and its batch in one process."""
    engine = start(3, 2, clip_grad_norm=None)
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
    engine.close(restore=False)


def test_gradients_are_whole_by_name(ranks):
    ranks(2, whole_gradients)


def given_back(stage, tp):
    engine = start(stage, tp)
    train(engine, range(2))
    want, module = engine.full_state_dict(), engine.module
    engine.close()
    output = module(torch.arange(12).view(2, 6))
    want.pop("mean", None)  # each rank goes on with its own, as in DistributedDataParallel without buffers
    return want, dict(module.named_parameters()), output.detach()


def test_a_closed_engine_gives_whole_parameters_and_layers_back(ranks):
    found = ranks(4, given_back, 3, 2)
    want = found[0][0]
    for _, state, output in found:
        assert same({"head.weight": state["tokens.weight"]} | state, want) == []
        module = Model()
        module.load_state_dict(want, strict=False)
        torch.testing.assert_close(output, module(torch.arange(12).view(2, 6)))


def refusals(tp):
    engine = start(3, tp)
    tokens = torch.arange(12).view(2, 6)
    want = engine(tokens).detach()
    with engine.unsharded():
        assert torch.equal(engine(tokens), want)  # its units are gathered, in parts
        text = "'blocks.0.up' is divided over tensor-parallel ranks and has its whole parameters now"
        with pytest.raises(RuntimeError, match=text):
            engine.module.blocks[0].up(torch.ones(2, 24))
    with (
        pytest.raises(RuntimeError, match="the ranks made different edits"),
        engine.unsharded(write_back=True),
        torch.no_grad(),
    ):
        engine.module.blocks[0].up.weight.add_(dist.get_rank())
    with pytest.raises(ValueError, match=r"expected a full tensor of shape \(44, 24\), got shape \(22, 24\)"):
        engine.set_full_parameter("blocks.0.up.weight", torch.ones(22, 24))
    values = torch.arange(44.0 * 24).view(44, 24)
    engine.set_full_parameter("blocks.0.up.weight", values)
    assert torch.equal(engine.full_parameter("blocks.0.up.weight"), values)
    engine.close(restore=False)


def test_products_with_whole_parameters_and_edits_that_differ_between_tensor_ranks_are_refused(ranks):
    ranks(2, refusals, 2)


# ------------------------------------------------------------------------------------------- transformers


def trained(folder, tp, stage):
    """Train a model that is read from files, and write it again."""
    read = []
    original = FileTensor.read

    def noted(self, *spans):
        read.append(sum(span.size for span in spans))
        return original(self, *spans)

    FileTensor.read = noted
    try:
        model = zeroshard.from_pretrained(transformers.LlamaForCausalLM, folder / "base")
        config = {"stage": stage, "mesh": {"tp": tp}}
        engine = zeroshard.initialize(model, lambda p: torch.optim.AdamW(p, lr=1e-2), config).engine
    finally:
        FileTensor.read = original
    begun = engine.full_state_dict()
    tokens = torch.arange(24).view(2, 12)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_pretrained(folder / "out")
    state = engine.full_state_dict()
    engine.close(restore=False)
    return begun, state, sum(read)


def test_a_model_is_read_in_parts_and_written_whole(ranks, tmp_path):
    base = models.build("Llama").float()
    base.save_pretrained(tmp_path / "base")
    [(begun, state, _), *others] = found = ranks(4, trained, tmp_path, 2, 3)
    assert same(begun, dict(base.state_dict())) == []
    assert all(other == {} for _, other, _ in others)
    written = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert same(state, dict(written.state_dict())) == []
    norms = sum(p.numel() for n, p in base.named_parameters() if "norm" in n)
    cut = sum(p.numel() for p in base.parameters()) - norms
    for *_, num_read in found:
        assert num_read <= cut / 4 + norms + 256 * 16  # shards end with whole blocks
