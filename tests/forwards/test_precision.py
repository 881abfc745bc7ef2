"""Compute in bf16 with fp32 main parameters, and modules that compute in another dtype than the rest."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import (
    ALL_STAGES,
    differences,
    full_gradients,
    numbers,
    small_gpt,
    start,
    token_loss,
    train_replicated,
    train_sharded,
    unequal,
)
from tests.ranks import on_ranks
from zeroshard import Config, Precision

BF16 = {"param_dtype": "bf16"}


class Probe(nn.Module):
    """Notes the dtypes that its forward sees."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.full((7,), 1 / 3))
        self.seen = {}

    def forward(self, x, mask, *, options):
        self.seen = {
            "x": x.dtype,
            "mask": mask.dtype,
            "option": options["scale"].dtype,
            "gain": self.gain.dtype,
            "table": self.table.dtype,
        }
        for block in self.blocks:
            x = block(x) * self.gain
        return {"x": x * options["scale"], "mask": mask, "list": [x.sum()]}


HALF, WIDE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("precision", "inside", "outside"),
    [(BF16, HALF, HALF), (BF16 | {"output_dtype": "fp32"}, HALF, WIDE), ({}, None, WIDE)],
)
@on_ranks(2)
def test_float_inputs_and_outputs_are_cast_and_buffers_and_main_parameters_are_not(
    precision, inside, outside
):
    model = Probe()
    engine, optimizer = start(model, precision=precision)
    x, mask = numbers(0, 5, 7), torch.ones(5, dtype=torch.bool)
    out = engine(x, mask, options={"scale": torch.tensor(2.0, dtype=torch.float64)})
    out["x"].float().square().mean().backward()
    assert model.seen == {
        "x": inside or WIDE,
        "mask": torch.bool,
        "option": inside or torch.float64,
        "gain": inside or WIDE,
        "table": WIDE,
    }
    assert (out["x"].dtype, out["mask"].dtype, out["list"][0].dtype) == (outside, torch.bool, outside)
    kept = {p.grad.dtype for p in engine.parameters()}
    optimizer.step()
    kept |= {v.dtype for state in optimizer.state.values() for v in state.values() if v.numel() > 1}
    kept |= {p.dtype for p in engine.parameters()} | {v.dtype for v in engine.full_state_dict().values()}
    assert kept == {WIDE}
    assert torch.equal(model.table, torch.full((7,), 1 / 3))


@on_ranks(2)
def test_micro_batches_are_added_in_fp32_and_rounded_once_on_the_wire():
    compute = small_gpt()
    engine, _ = start(copy.deepcopy(compute), stage=1, precision={**BF16, "reduce_dtype": "bf16"})
    sums = {}
    for parameter in compute.parameters():
        parameter.data = parameter.data.bfloat16()
    for number in range(4):
        with engine.no_sync():
            token_loss(engine, number).backward()
        token_loss(compute, number).backward()
        for name, parameter in compute.named_parameters():
            sums[name] = sums.get(name, 0.0) + parameter.grad.float().flatten()
        compute.zero_grad()
    engine.clip_grad_norm_(1e9)  # reduces what was added up
    found = full_gradients(engine)
    for name, total in sums.items():
        parts = [torch.empty_like(total, dtype=torch.bfloat16) for _ in range(2)]
        dist.all_gather(parts, (total / 2).bfloat16())
        sums[name] = parts[0].float() + parts[1].float()
    return list(unequal("gradients", found, sums))


def bf16(overrides, **options):
    return {"precision": {"param_dtype": "bf16", "overrides": overrides, **options}}


class Router(nn.Module):
    """Scores of experts: two layers, and a bias of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.bias = nn.Parameter(torch.zeros(4))
        self.seen = []

    def forward(self, x, *, mask=None):
        hidden = self.layers(x) + self.bias
        self.seen.append((x.dtype, None if mask is None else mask.dtype, hidden.dtype))
        return hidden.softmax(-1), hidden.argmax(-1), [hidden.double().sum()]


class Mixture(nn.Module):
    """A router beside layers, one of them frozen, and a table of numbers that the forward adds."""

    def __init__(self):
        super().__init__()
        self.table, self.router, self.out = nn.Embedding(9, 8), Router(), nn.Linear(8, 4)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.decay = nn.Parameter(torch.zeros(8))
        self.seen = {}

    def forward(self, x):
        row = self.table(torch.arange(5))
        x = self.frozen(x) + row
        scores, chosen, (total,) = self.router(x, mask=torch.ones(5, 1, dtype=torch.float64))
        self.seen = {
            "table": row.dtype,
            "frozen": x.dtype,
            "scores": scores.dtype,
            "chosen": chosen.dtype,
            "total": total.dtype,
            "decay": self.decay.dtype,
        }
        return self.out(x * self.decay.exp().to(x.dtype)) * scores


OVERRIDES = {"router": "fp32", "frozen": "fp32", "table": "fp32", "decay": "fp32"}


@on_ranks(2)
def test_inputs_of_a_module_are_cast_once_around_all_of_it_and_its_outputs_back():
    half, wide = torch.bfloat16, torch.float32
    engine, _ = start(Mixture(), "SGD", **bf16(OVERRIDES))
    output = engine(numbers(0, 5, 8))
    output.float().sum().backward()
    assert engine.module.seen == {
        "table": half, "frozen": half, "scores": half, "chosen": torch.int64,
        "total": torch.float64, "decay": wide,
    }  # fmt: skip
    assert engine.module.router.seen == [(wide, wide, wide)]
    assert output.dtype == half
    assert {p.grad.dtype for p in engine.parameters() if p.requires_grad} == {wide}


@on_ranks(2)
def test_reports_and_estimates_count_the_bytes_of_each_dtype():
    shapes = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    padded = 512  # 256 elements, for two ranks a block each
    for stage in ALL_STAGES:
        engine, _ = start(copy.deepcopy(shapes), "SGD", stage=stage, **bf16({"1": "fp32"}))
        engine(numbers(0, 5, 16)).float().sum().backward()
        engine.step()
        config = Config(stage=stage, precision=Precision(param_dtype="bf16", overrides={"1": "fp32"}))
        report = engine.memory_report()
        estimate = zeroshard.estimate(shapes, 2, config, host_computes=True)
        unsharded = padded * 2 + padded * 4
        assert report.peak_unsharded == estimate.peak_unsharded == (unsharded if stage == 3 else 0)
        assert report.parameters == estimate.parameters


class Routed(nn.Module):
    """A router among layers to which autocast gives another dtype."""

    def __init__(self):
        super().__init__()
        self.up, self.router, self.down = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.down(self.route(self.up(x)).softmax(-1))

    def route(self, x):
        return self.router(x)


class RoutedByHand(Routed):
    def route(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.router(x.float()).to(x.dtype)


def loss_under_autocast(model, number):
    with torch.autocast("cpu", torch.bfloat16):
        return model(numbers(number, 5, 8)).float().square().sum()


@on_ranks(2)
def test_autocast_leaves_such_a_module_in_its_dtype():
    torch.manual_seed(0)
    model, by_hand, found = Routed(), RoutedByHand(), []
    by_hand.load_state_dict(model.state_dict())
    want = train_replicated(by_hand, "AdamW", 3, loss_under_autocast)
    for recompute, stage in (("none", 1), ("unit", 3)):
        config = {"recompute": recompute, "precision": {"overrides": {"router": "fp32"}}}
        run = train_sharded(model, "AdamW", 3, loss_under_autocast, stage=stage, **config)
        found += differences(f"stage {stage}", run, want)
    return found
