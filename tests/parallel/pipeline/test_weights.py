"""A backward in two halves has the bits of a whole one, and its second half only multiplies."""

import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import zeroshard
from tests.parallel.pipeline.runs import parameters_of, sgd, start, train
from tests.ranks import on_ranks
from zeroshard.parallel.pipeline.weights import Products, Waiting
from zeroshard.sharding.context import Changes

INPUTS, OUTPUTS = 24, 40
LAYERS = {
    "linear": lambda: nn.Linear(INPUTS, OUTPUTS),
    "linear without bias": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
    "convolution of transformers": lambda: Conv1D(OUTPUTS, INPUTS),
}
VALUES = {
    "rows": lambda: torch.randn(7, INPUTS),
    "sequences": lambda: torch.randn(3, 5, INPUTS),
    "four dimensions": lambda: torch.randn(2, 2, 5, INPUTS),
    "columns": lambda: torch.randn(INPUTS, 7).t(),
    "turned sequences": lambda: torch.randn(5, 3, INPUTS).transpose(0, 1),
    "one row again and again": lambda: torch.randn(1, INPUTS).expand(7, INPUTS),
    "a vector": lambda: torch.randn(INPUTS),
}
CASES = [
    (kind, values)
    for kind in LAYERS
    for values in VALUES
    if (kind, values) != ("convolution of transformers", "turned sequences")  # which the layer refuses
]


def in_halves(model, compute):
    """Run a forward and the first half of its backward; return the second half."""
    changes, waiting = Changes(), Waiting()
    products = Products(model, changes)
    with products.deferring(waiting):
        compute().backward()
    changes.undo()
    return waiting


def gradients_of(*tensors):
    return [None if tensor.grad is None else tensor.grad.clone() for tensor in tensors]


def compare(model, compute, *others):
    """Compare the gradients of a backward in halves with those of a whole one.

    Returns:
        The names of the parameters that have a gradient after the first half.
    """
    model.zero_grad()
    for tensor in others:
        tensor.grad = None
    compute().backward()
    tensors = [*model.parameters(), *others]
    want = gradients_of(*tensors)
    for tensor in tensors:
        tensor.grad = None
    waiting = in_halves(model, compute)
    early = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    waiting.compute()
    for mine, theirs in zip(gradients_of(*tensors), want, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)
        assert mine is None or mine.stride() == theirs.stride()
    return early


@pytest.mark.long_where(dtype=[torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize(("kind", "values"), CASES)
def test_the_halves_give_the_bits_of_a_whole_backward(kind, values, needs_input, dtype):
    torch.manual_seed(0)
    layer, x = LAYERS[kind]().to(dtype), VALUES[values]().to(dtype).requires_grad_(needs_input)
    early = compare(layer, lambda: layer(x).sin().sum(), x)
    waits = values != "a vector" or kind == "convolution of transformers"  # which makes it a row
    biases = ["bias"] * (kind != "linear without bias")
    assert sorted(early) == [*biases, *(["weight"] * (not waits))]


class Block(nn.Module):
    """Layers around a norm, an activation and dropout; the middle one computes twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(INPUTS, INPUTS), nn.LayerNorm(INPUTS)
        self.middle, self.last = nn.Linear(INPUTS, INPUTS, bias=False), nn.Linear(INPUTS, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = x + self.drop(F.gelu(self.first(self.norm(x))))
        return self.last(self.middle(torch.tanh(self.middle(x))))


def block(seed=0):
    torch.manual_seed(seed)
    return Block(), torch.randn(2, 5, INPUTS)


def loss_of(model, x):
    torch.manual_seed(1)
    return model(x).square().mean()


class Cut(nn.Module):
    """One whose weights are views of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, OUTPUTS))

    def forward(self, x):
        first, second = self.weight.t().chunk(2)
        return F.linear(x, first) + F.linear(x, second)


def frozen():
    model, _ = block()
    model.middle.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    return model


def under_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model.last(model.first(x)).float().square().mean()


def inside_a_checkpoint(model, x, *, use_reentrant):
    return checkpoint(lambda x: model.last(model.first(x)).sin(), x, use_reentrant=use_reentrant).sum()


def with_one_in_vain(model, x):
    model.last(x)
    return model.first(x).square().sum()


def normed():
    return parametrizations.weight_norm(nn.Linear(INPUTS, OUTPUTS))


def made_block():
    return block()[0]


def squares(model, x):
    return model(x).square().sum()


REST = ["first.bias", "norm.weight", "norm.bias", "last.bias"]
ALL = ["first.weight", "first.bias", "last.weight", "last.bias"]
ORIGINALS = [f"parametrizations.weight.original{number}" for number in range(2)]
EARLY = {
    "computes twice": (made_block, loss_of, REST),
    "frozen": (frozen, loss_of, REST),
    "not needed by the loss": (made_block, with_one_in_vain, ["first.bias"]),
    "views": (Cut, squares, []),
    "computed": (normed, squares, ["bias", *ORIGINALS]),
    "autocast": (made_block, under_autocast, ALL),
    "edited in place": (made_block, lambda model, x: model.last(x).add_(1.0).relu_().sum(), ["last.bias"]),
    **{
        f"checkpoint, reentrant: {way}": (
            made_block,
            functools.partial(inside_a_checkpoint, use_reentrant=way),
            ["first.bias", "last.bias"],
        )
        for way in (False, True)
    },
}
"""A model, a loss, and the parameters that have a gradient after the first half."""


@pytest.mark.parametrize("case", EARLY)
def test_the_halves_of_a_model_give_the_bits_of_a_whole_backward(case):
    make, compute, early = EARLY[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, INPUTS, requires_grad="checkpoint" in case)
    assert compare(model, lambda: compute(model, x), *([x] if x.requires_grad else [])) == early


def kept_bytes(waiting):
    """The bytes of the operands that are kept for weight gradients."""
    kept = {one.untyped_storage() for _, operands in waiting._weights for one in operands.kept}
    return sum(storage.nbytes() for storage in kept)


def test_operands_live_until_the_second_half_and_no_longer():
    model, x = block()
    seen = []
    model.drop.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    waiting = in_halves(model, lambda: loss_of(model, x))
    gc.collect()
    rows = 2 * 5
    widths = [INPUTS, INPUTS, INPUTS, INPUTS, INPUTS, INPUTS, INPUTS, 3]
    assert kept_bytes(waiting) == 4 * rows * sum(widths)
    assert seen[0]() is None
    waiting.compute()
    assert not kept_bytes(waiting)


# ----------------------------------------------------------------------------------------- over ranks

WIDTH, STEPS, NUM = 32, 2, 4


class Twice(nn.Module):
    """A layer that computes twice, between two others."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.outer(nn.functional.gelu(self.inner(torch.tanh(self.inner(self.norm(x)))))))


def config_of(schedule):
    return {"stage": 3, "mesh": {"pp": 2}, "pipeline": {"schedule": schedule, "num_microbatches": NUM}}


def trained(schedule):
    torch.manual_seed(0)
    blocks = nn.Linear(WIDTH, WIDTH), *(Twice() for _ in range(5)), nn.LayerNorm(WIDTH)
    model, config = nn.Sequential(*blocks).double(), config_of(schedule)
    engine = zeroshard.initialize(model, sgd, config, loss_fn=nn.functional.mse_loss).engine
    torch.manual_seed(5)
    for _ in range(STEPS):
        x = torch.randn(NUM, 6, WIDTH, dtype=torch.float64)
        engine.train_batch(x, x.flip(1))
    return parameters_of(engine)


@on_ranks(2)
def test_divided_backwards_draw_no_random_numbers():
    want, found = trained("1f1b"), trained("zb-h1")
    assert found.keys() == want.keys()
    assert all(torch.equal(value, want[name]) for name, value in found.items())


@on_ranks(2)
def test_the_weight_gradients_of_all_linear_layers_wait():
    noted, note = [], Waiting.note
    with mock.patch.object(Waiting, "note", lambda self, *args: noted.append(args) or note(self, *args)):
        engine = start("llama", config_of("zb-h1"))
        train(engine, range(STEPS))
    engine.close(restore=False)
    assert len(noted) / (STEPS * NUM) == 2 * 7 + torch.distributed.get_rank()  # the last rank has the head


class Activated(nn.Linear):
    """A layer with a module inside: its unit has a choice of a budget, and a product that may wait."""

    def __init__(self):
        super().__init__(4, 4)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(super().forward(x))


@on_ranks(2)
def test_a_unit_that_is_a_layer_has_backwards_in_halves_within_a_budget_of_memory():
    pipeline, losses = {"schedule": "zb-h1", "num_microbatches": 4}, []
    for more in ({}, {"recompute": "auto", "memory_budget": "1GB"}):
        config = {"mesh": {"pp": 2}, "pipeline": pipeline, "units": ["Activated"], **more}
        torch.manual_seed(0)
        model = nn.Sequential(*(Activated() for _ in range(4)))
        engine = zeroshard.initialize(model, sgd, config, loss_fn=F.mse_loss).engine
        assert {unit.around[-1] for unit in engine.units if unit.name} == {"products"}
        losses.append([engine.train_batch(torch.ones(8, 4), torch.ones(8, 4)).item() for _ in range(3)])
        engine.close(restore=False)
    assert losses[0] == losses[1]
