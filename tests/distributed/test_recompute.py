"""Recomputation and compilation of units: the same bits, and compile's own tolerance."""

import copy
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from tests.distributed.training import (
    SOME_STAGES,
    build,
    differences,
    distance_of_all,
    numbers,
    padded_size,
    start,
    step,
    token_loss,
    train,
    train_replicated,
    train_sharded,
)
from tests.ranks import on_ranks


class Normalized(nn.Module):
    """A block with running statistics, which a forward changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 7), nn.BatchNorm1d(7)

    def forward(self, x):
        return x + self.norm(self.linear(x)).tanh()


@on_ranks(2)
def test_a_graph_is_recomputed_in_each_backward_through_it():
    """The second through the graph of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(Normalized(), Normalized())

    def loss(net, number):
        x = numbers(number, 5, 7).requires_grad_()
        value = net(x).square().mean()
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
        return value * gradient.square().sum()

    want = train_replicated(model, "SGD", 2, loss).losses
    runs = [train_sharded(model, "SGD", 2, loss, stage=stage, recompute="unit") for stage in SOME_STAGES]
    assert [run.losses == want for run in runs] == [True] * len(SOME_STAGES)


class Averaging(nn.Module):
    """Its forward reads a moving average, then updates it; one that is assigned anew, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 7))
        self.register_buffer("average", torch.ones(7))
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        y = self.layer(x) / self.average.clone() * self.count
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(x.abs().mean(0))
                self.count = self.count + 1
        return y.tanh()


@on_ranks(2)
def test_buffers_that_a_forward_reads_and_changes_are_read_again_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(*[Averaging() for _ in range(3)])

    def loss(net, number):
        first = net(numbers(number, 5, 7)).square().mean()  # two forwards before a backward
        return first + net(numbers(number + 50, 5, 7)).square().mean()

    want = train_sharded(model, "SGD", 3, loss)
    runs = [train_sharded(model, "SGD", 3, loss, stage=stage, recompute="unit") for stage in (1, 3)]
    return [line for run in runs for line in differences("recomputed", run, want)]


def _same(tensor):
    return tensor


@on_ranks(2)
def test_recomputation_gathers_nothing_twice_and_keeps_fewer_activations():
    found = {}
    for recompute in ("none", "unit"):
        engine, optimizer = start(build("GPT"), "SGD", recompute=recompute)
        saved = []
        step(engine, optimizer, token_loss, 0)
        engine.reset_comm_report()
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, _same):
            loss = token_loss(engine, 1)
        own = {p.untyped_storage()._cdata for b in engine._runtime.buffers for p in b.unsharded}
        kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in saved}
        num_bytes = sum(size for pointer, size in kept.items() if pointer not in own)
        loss.backward()
        optimizer.step()
        sent = engine.comm_report().bytes_sent
        found[recompute] = num_bytes, sent["all_gather"] // 4, sent["reduce_scatter"] // 4
    P, last = padded_size(engine), [unit.numel for unit in engine.units if unit.kept]
    gathered, reduced = (2 * P - sum(last)) // 2, P // 2
    assert found["none"][1:] == found["unit"][1:] == (gathered, reduced)
    assert found["unit"][0] < 0.5 * found["none"][0]


@on_ranks(1)
def test_the_units_of_an_engine_show_all_that_lies_around_their_forwards():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    precision = {"param_dtype": "bf16", "overrides": {"1": "fp32"}}
    engine, _ = start(model, "SGD", units=["Sequential"], recompute="unit", precision=precision)
    around = {unit.name: unit.around for unit in engine.units}
    assert around == {"": ("gather",), "1": ("gather", "recompute", "cast")}


def test_no_other_place_puts_something_around_a_forward():
    sources = {path.name: path.read_text() for path in Path(zeroshard.__file__).parent.rglob("*.py")}
    set_there = {name for name, text in sources.items() if re.search(r"set\(\s*[\w.]+,\s*.forward", text)}
    assert set_there == {"context.py"}


# ------------------------------------------------------------------------------------------------ compile


@pytest.mark.long
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler on CPUs",
)
@on_ranks(2, timeout=240)
def test_compiled_units_are_close_and_are_not_compiled_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build("tied GPT")
    want = train_replicated(model, "SGD", 5)
    engine, optimizer = start(copy.deepcopy(model), "SGD", compile=True, recompute="unit")
    losses = [step(engine, optimizer, token_loss, number) for number in range(2)]
    with torch.compiler.set_stance("fail_on_recompile"):
        losses += [step(engine, optimizer, token_loss, number) for number in range(2, 5)]
    got = train(engine, optimizer, 0)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    far = distance_of_all(got.parameters, want.parameters) if got.parameters else 0.0
    losses, parameters = max(abs(a - b) / b for a, b in zip(losses, want.losses, strict=True)), far
    assert losses <= 1e-5
    assert parameters <= 1e-5
    assert graphs == 1  # for all blocks, which are alike
