"""A backward in two halves has the bits of a whole one, and its second half only multiplies."""

import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

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


EARLY = {
    "computes twice": (
        lambda: block()[0],
        lambda model, x: loss_of(model, x),
        ["first.bias", "norm.weight", "norm.bias", "last.bias"],
    ),
    "frozen": (
        frozen,
        lambda model, x: loss_of(model, x),
        ["first.bias", "norm.weight", "norm.bias", "last.bias"],
    ),
    "not needed by the loss": (lambda: block()[0], with_one_in_vain, ["first.bias"]),
    "views": (Cut, lambda model, x: model(x).square().sum(), []),
    "computed": (
        normed,
        lambda model, x: model(x).square().sum(),
        ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"],
    ),
    "autocast": (
        lambda: block()[0],
        under_autocast,
        ["first.weight", "first.bias", "last.weight", "last.bias"],
    ),
    "edited in place": (
        lambda: block()[0],
        lambda model, x: model.last(x).add_(1.0).relu_().sum(),
        ["last.bias"],
    ),
    **{
        f"checkpoint, reentrant: {way}": (
            lambda: block()[0],
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


def test_an_exception_ends_the_wait():
    model, x = block()
    products = Products(model, Changes())
    with pytest.raises(RuntimeError, match="shape"), products.deferring(Waiting()):
        model(x[..., 1:])
    loss_of(model, x).backward()
    assert model.last.weight.grad is not None


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
