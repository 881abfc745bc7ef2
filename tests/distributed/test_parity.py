"""The numbers of zeroshard are those of DistributedDataParallel, and on one rank of plain PyTorch.

To the bit where the order of all additions is the same: fp32 on one or two ranks. A step whose numbers differ
shows in the loss of the next one. With three or more ranks DDP adds in another order: there the fuzz compares
all stages with plain PyTorch that adds in the order of the ranks.
"""

import copy
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.distributed.models import GPT, Tiny, tiny
from tests.distributed.training import (
    OPTIMIZERS,
    SOME_STAGES,
    Loss,
    Maker,
    build,
    distance_of_all,
    lora,
    numbers,
    padded_size,
    same_as_replicated,
    square_loss,
    start,
    step,
    token_loss,
    tokens,
    train,
    train_replicated,
)
from tests.ranks import on_ranks


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained; the reference is DDP."""

    make: Callable[[], nn.Module]
    loss: Loss = square_loss
    optimizer: Maker = "SGD"
    num_steps: int = 2
    stages: tuple[int, ...] = SOME_STAGES
    options: dict[str, Any] = field(default_factory=dict)
    """Of `same_as_replicated`; `averages` where DDP does not take the model or its loss."""

    def differences(self) -> list[str]:
        torch.manual_seed(0)
        model = self.make()
        return same_as_replicated(
            model, self.optimizer, self.num_steps, self.loss, stages=self.stages, **self.options
        )


def differences(cases: dict[str, Case]) -> list[str]:
    return [f"{name}: {line}" for name, case in cases.items() for line in case.differences()]


@on_ranks(2, timeout=200)
def test_steps_on_two_ranks_equal_those_of_ddp_to_the_bit_at_every_stage():
    found = []
    for kind, optimizer in (
        *((kind, "AdamW") for kind in ("GPT", "tied transformers Llama")),
        *(("tied GPT", optimizer) for optimizer in ("fused AdamW", "SGD")),
    ):
        found += [f"{kind}: {line}" for line in same_as_replicated(build(kind), optimizer, 2)]
    return found


@on_ranks(1)
def test_steps_on_one_rank_equal_those_of_plain_pytorch_to_the_bit():
    found = []
    for kind, optimizer in (("tied GPT", "AdamW"), ("Llama", "SGD")):
        found += [f"{kind}: {line}" for line in same_as_replicated(build(kind), optimizer, 3)]
    return found


# --------------------------------------------------------------------------------------------- optimizers


@on_ranks(2)
def test_parameters_of_one_element_train_as_in_ddp_to_the_bit():
    torch.manual_seed(0)
    models = [(Tiny(3), "AdamW"), *((nn.PReLU(), optimizer) for optimizer in OPTIMIZERS)]
    models.append((nn.Sequential(nn.Linear(7, 1)), "SGD"))
    return [line for m, o in models for line in same_as_replicated(m, o, 2, square_loss)]


ELEMENT_WISE = [  # the fuzz draws others
    ("ASGD", {}),
    ("Adadelta", {"lr": 0.3}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Rprop", {}),
    ("Adam", {"foreach": True, "weight_decay": 0.1}),
]


@on_ranks(2)
def test_every_element_wise_optimizer_of_torch_trains_as_in_ddp_to_the_bit():
    """An element-wise update of a slice that starts on a block gives the bits of the whole tensor's."""

    def maker(name, options):
        return lambda parameters: getattr(torch.optim, name)(parameters, **({"lr": 1e-2} | options))

    cases = {
        f"{name} {options}": Case(make=tiny, optimizer=maker(name, options), stages=(3,))
        for name, options in ELEMENT_WISE
    }
    return differences(cases)


# -------------------------------------------------------------------------------------- kinds of modules


class ListAndDict(nn.Module):
    """Parameters in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(7, 5), torch.randn(5, 7)])
        self.named = nn.ParameterDict({"scale": torch.randn(7), "popped": torch.randn(7)})
        self.inner = nn.Identity()

    def forward(self, x):
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return self.inner(x * self.named["scale"] + self.named["popped"])


class Methods(Tiny):
    """Has methods that call its parts, beside its forward, and read a parameter of the root."""

    def encode(self, x, *, factor=1.0):
        x = self.inner(x)
        for block in self.blocks:
            x = x + block(x)
        return {"x": x * factor}

    def decode(self, encoded):
        return self.outer(encoded["x"]) * self.gain

    def through_forward(self, x):
        return self(x) + self.gain


def loss_by_methods(net, number):
    x = numbers(number, 5, 7)
    if number == 1:
        return net(x).square().mean()
    return net.decode(net.encode(x, factor=2.0)).mean() + net.through_forward(x).square().mean()


def over_blocks(parameters):
    return torch.optim.AdamW(list(parameters)[2:6], lr=1e-2)


def edited_loss(model, number):
    """Edits of sharded parameters between steps are seen by the next forward, also without a graph."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5)
        first = square_loss(model, number)
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
    return first + square_loss(model, number)


METHODS = {"methods": ("encode", "decode", "through_forward"), "averages": True}
MODULES = {
    "lists and dicts of parameters": Case(make=lambda: nn.Sequential(ListAndDict(), ListAndDict())),
    "registered methods": Case(make=lambda: Methods(2), loss=loss_by_methods, options=METHODS),
    "an optimizer over a part": Case(make=lambda: tiny(3), optimizer=over_blocks),
    "edits between steps": Case(make=tiny, loss=edited_loss),
    "adapters": Case(make=lora, loss=token_loss),
    "adapters of the last layer": Case(make=lambda: lora(layers_to_transform=[1]), loss=token_loss),
    "adapters, checkpoints, frozen in bf16": Case(
        make=lambda: lora(dtype=torch.bfloat16, checkpoints=True), loss=token_loss
    ),
}


@on_ranks(2, timeout=120)
def test_modules_of_all_kinds_train_as_in_ddp_to_the_bit():
    return differences(MODULES)


# ----------------------------------------------------------------------------------- what leaves a forward


class Block(nn.Module):
    """Keeps a loss of its own beside the output."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate = nn.RMSNorm(7), nn.Linear(7, 7), nn.Linear(7, 4, bias=False)

    def forward(self, x):
        hidden = self.norm(x)
        self.aside = self.gate(hidden).square().mean()
        return x + self.up(hidden).tanh()


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 7))

    def forward(self, length):
        return self.weight[:length]


class ReturnsView(Stack):
    """Uses a part of a unit's parameter after other units have run."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()

    def forward(self, x):
        positions = self.positions(len(x))
        return super().forward(x) + positions


def and_without_a_graph(loss):
    """The loss, and the same of the model in evaluation."""

    def both(model, number):
        with torch.no_grad():
            value = loss(model, number)
        return loss(model, number) + value

    return both


def loss_aside(model, number):
    model(numbers(number, 5, 7))
    return sum(block.aside for block in (model.blocks[0], model.blocks[2]))


def loss_through_a_cache(model, number):
    """The first forward's outputs are dropped; its keys and values are not."""
    batch = tokens(number)
    first = model(input_ids=batch[:, :6], use_cache=True)
    second = model(input_ids=batch[:, 6:], past_key_values=first.past_key_values, use_cache=True)
    del first
    return F.cross_entropy(second.logits[:, :-1].flatten(0, 1), batch[:, 7:].flatten())


AVERAGED = {"averages": True}
OUTPUTS = {
    "keys and values": Case(
        make=lambda: build("transformers Llama"), loss=loss_through_a_cache, options=AVERAGED
    ),
    "losses of blocks": Case(make=Stack, loss=loss_aside, options=AVERAGED),
    "a view of a parameter": Case(
        make=ReturnsView,
        loss=and_without_a_graph(square_loss),
        options={"units": ["Positions", "Block"], "averages": True},
    ),
}


@on_ranks(2, timeout=150)
def test_a_loss_on_what_leaves_a_unit_trains_as_in_plain_pytorch_to_the_bit():
    return differences(OUTPUTS)


# ------------------------------------------------------------------------------------------ recomputation


class Checkpointed(GPT):
    """Two blocks at a time are recomputed in backward."""

    def forward(self, batch):
        x = self.tokens(batch) + self.positions.weight[: batch.shape[1]]
        for begin in range(0, len(self.blocks), 2):
            x = checkpoint(self._run, x, begin, begin + 2, use_reentrant=False)
        return self.head(self.norm(x) * self.gain)

    def _run(self, x, begin, end):
        for block in self.blocks[begin:end]:
            x = block(x)
        return x


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


def of_two_forwards(model, number):
    return square_loss(model, number) + square_loss(model, number + 50)


def twice_through_the_graph(net, number):
    """A second backward goes through the graph of the first."""
    x = numbers(number, 5, 7).requires_grad_()
    value = net(x).square().mean()
    (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
    return value * gradient.square().sum()


UNIT = {"recompute": "unit", "averages": True}
RECOMPUTED = {
    "checkpoints around units": Case(make=lambda: Checkpointed(tied=True, num_blocks=4), loss=token_loss),
    "buffers that a forward reads": Case(
        make=lambda: nn.Sequential(*[Averaging() for _ in range(3)]), loss=of_two_forwards, options=UNIT
    ),
    "backwards through one graph": Case(
        make=lambda: nn.Sequential(Averaging(), Averaging()), loss=twice_through_the_graph, options=UNIT
    ),
}


@on_ranks(2)
def test_recomputed_forwards_change_no_number():
    return differences(RECOMPUTED)


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
    assert around == {"": ("gather", "cast"), "1": ("gather", "recompute", "cast")}


@on_ranks(1)
def test_the_units_show_what_lies_around_the_forwards_of_modules_inside():
    precision = {"param_dtype": "bf16", "overrides": {"norm": "fp32"}}
    engine, _ = start(GPT(tied=False), "SGD", units=["Block"], precision=precision)
    assert engine.units.inside == {"norm": ("cast",)}
    assert re.search(r"^ norm +cast *$", str(engine.units), re.MULTILINE)
    assert "norm" not in [unit.name for unit in engine.units]


# ------------------------------------------------------------------------------------------------ compile


@pytest.mark.long
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler on CPUs",
)
@on_ranks(2, timeout=600)
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
