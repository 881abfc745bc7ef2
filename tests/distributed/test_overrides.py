"""Modules that compute in another dtype than the rest, as if wrapped by hand in plain PyTorch."""

import copy
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard
from tests.distributed.training import (
    ALL_STAGES,
    STAGES,
    build,
    by_hand,
    differences,
    numbers,
    only,
    start,
    token_loss,
    train,
    train_replicated,
    train_sharded,
)
from tests.ranks import on_ranks
from zeroshard import Config, Precision

NORMS = ("norm", *(f"blocks.{block}.norm_{place}" for block in range(3) for place in (1, 2)))


def bf16(overrides, **options):
    return {"precision": {"param_dtype": "bf16", "overrides": overrides, **options}}


CASES = {
    "norms": ("GPT", "AdamW", {"*norm*": "fp32"}, NORMS),
    "a tied head": ("tied GPT", "SGD", {"head": "fp32"}, ("tokens", "head")),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_overridden_modules_compute_as_wrapped_by_hand_to_the_bit(case):
    kind, optimizer, overrides, wide = CASES[case]
    model = build(kind)
    want = by_hand(model, optimizer, range(3), token_loss, torch.bfloat16, wide=wide)
    if dist.get_rank():
        want.parameters = {}
    found = []
    for stage in STAGES:
        made = start(copy.deepcopy(model), optimizer, stage=stage, **bf16(overrides))
        found += differences(f"stage {stage}", only(train(*made, 3), want.parameters), want)
    return found


@pytest.mark.long
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler on CPUs",
)
@on_ranks(2, timeout=240)
def test_compiled_units_cast_as_well():
    stage = 3
    losses = {}
    for compiles in (False, True):
        model = build("GPT", num_blocks=2)
        engine, optimizer = start(model, stage=stage, compile=compiles, **bf16({"*norm*": "fp32"}))
        losses[compiles] = train(engine, optimizer, 2).losses
    assert losses[True] == pytest.approx(losses[False], rel=4e-3)  # bf16 has 8 bits


# ------------------------------------------------------------------------------------------------ dtypes


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
    for stage in STAGES:
        torch.manual_seed(0)
        engine, optimizer = start(Mixture(), "SGD", stage=stage, **bf16(OVERRIDES))
        output = engine(numbers(0, 5, 8))
        output.float().sum().backward()
        grads = {p.grad.dtype for p in engine.parameters() if p.requires_grad}
        optimizer.step()
        seen, in_router, output = engine.module.seen, engine.module.router.seen, output.dtype
        assert seen == {
            "table": half, "frozen": half, "scores": half, "chosen": torch.int64,
            "total": torch.float64, "decay": wide,
        }  # fmt: skip
        assert in_router == [(wide, wide, wide)]
        assert output == half
        assert grads == {wide}


@on_ranks(2)
def test_reports_and_estimates_count_the_bytes_of_each_dtype():
    shapes = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    padded = 512  # 256 elements, for two ranks a block each
    for stage in ALL_STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        engine, _ = start(model, "SGD", stage=stage, **bf16({"1": "fp32"}))
        engine(numbers(0, 5, 16)).float().sum().backward()
        engine.step()
        config = Config(stage=stage, precision=Precision(param_dtype="bf16", overrides={"1": "fp32"}))
        report = engine.memory_report()
        estimate = zeroshard.estimate(shapes, 2, config, host_computes=True)
        unsharded = padded * 2 + padded * 4
        assert report.peak_unsharded == estimate.peak_unsharded == (unsharded if stage == 3 else 0)
        assert report.parameters == estimate.parameters


@pytest.mark.parametrize(
    "overrides", [{"*norm*": "fp32"}, {"layers.1": "fp32"}, {"layers.1.self_attn": "fp32"}]
)
@on_ranks(2)
def test_torchs_encoder_evaluates_as_it_trains(overrides):
    """The outputs of torch's encoder in training and in evaluation, where nothing is padded."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    engine, _ = start(nn.TransformerEncoder(layer, 2), "SGD", stage=3, **bf16(overrides))
    x, padded = numbers(0, 3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 3:] = True
    trained = engine(x, src_key_padding_mask=padded)[~padded]
    trained.float().sum().backward()
    engine.eval()
    with torch.no_grad():
        trained, evaluated = trained.detach(), engine(x, src_key_padding_mask=padded)[~padded]
        assert trained.dtype == evaluated.dtype == torch.bfloat16
        assert (trained - evaluated).abs().max() <= 2**-5  # values up to 3, and bf16 has 8 bits


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


# ------------------------------------------------------------------------------------------------ the rest


@on_ranks(2)
def test_a_closed_engine_leaves_no_cast_behind():
    engine, _ = start(build("GPT"), stage=3, **bf16({"*norm*": "fp32"}))
    model = engine.module
    engine.close()
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


@on_ranks(2)
def test_registered_methods_of_such_a_module_cast_as_its_forward_does():
    """The dtypes inside and outside of a method of a module that is cast."""
    want = [torch.float32], torch.bfloat16, torch.bfloat16
    model, seen = Mixture(), []
    model.router.score = lambda x: seen.append(x.dtype) or model.router.layers(x)
    engine, _ = start(model, "SGD", stage=3, **bf16(OVERRIDES))
    engine.register_forward_method("router.score")
    engine.register_forward_method("router.layers.forward")
    output = engine.module.router.score(numbers(0, 5, 8).bfloat16())
    assert (seen, output.dtype, engine.module.router.layers.forward(numbers(0, 5, 8)).dtype) == want
