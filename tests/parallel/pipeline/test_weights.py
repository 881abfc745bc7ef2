"""A backward in two halves has the bits of a whole one, and its second half only multiplies."""

import gc
import weakref

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from zeroshard.parallel.pipeline.actions import Kind
from zeroshard.parallel.pipeline.schedules import build_schedule
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


@pytest.mark.long_where(dtype=[torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
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


def test_a_weight_that_computes_twice_gets_the_sum():
    model, x = block()
    early = compare(model, lambda: loss_of(model, x))
    assert early == ["first.bias", "norm.weight", "norm.bias", "last.bias"]


def test_frozen_layers_hand_gradients_on_and_get_none():
    model, x = block()
    model.middle.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    assert "first.bias" in compare(model, lambda: loss_of(model, x))
    assert model.middle.weight.grad is None


def test_a_product_that_the_loss_does_not_need_has_no_gradient():
    model, x = block()

    def compute():
        model.last(x)
        return model.first(x).square().sum()

    compare(model, compute)
    assert model.last.weight.grad is None


def test_views_of_parameters_are_weights_too():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(INPUTS, OUTPUTS))

        def forward(self, x):
            first, second = self.weight.t().chunk(2)
            return F.linear(x, first) + F.linear(x, second)

    torch.manual_seed(0)
    model, x = Cut(), torch.randn(4, INPUTS)
    assert compare(model, lambda: model(x).square().sum()) == []


def test_a_weight_that_is_computed_does_not_wait():
    torch.manual_seed(0)
    model, x = parametrizations.weight_norm(nn.Linear(INPUTS, OUTPUTS)), torch.randn(4, INPUTS)
    early = compare(model, lambda: model(x).square().sum())
    assert len(early) == 3


def test_products_under_autocast_do_not_wait():
    model, x = block()

    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            return model.last(model.first(x)).float().square().mean()

    assert "first.weight" in compare(model, compute)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_layers_inside_an_activation_checkpoint_wait_too(use_reentrant):
    model, x = block()
    x.requires_grad_()

    def compute():
        inner = checkpoint(lambda x: model.last(model.first(x)).sin(), x, use_reentrant=use_reentrant)
        return inner.square().mean()

    assert compare(model, compute, x) == ["first.bias", "last.bias"]


def test_adapters_wait_too():
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=3, target_modules=["first", "middle"], init_lora_weights=False)
    model, x = peft.get_peft_model(Block(), lora), torch.randn(2, 5, INPUTS)
    assert compare(model, lambda: loss_of(model, x)) == []
    assert sum(parameter.grad is not None for parameter in model.parameters()) == 4


def test_the_result_of_a_product_may_be_edited_in_place():
    model, x = block()
    compare(model, lambda: model.last(x).add_(1.0).relu_().sum())


def kept_bytes(waiting):
    """The bytes of the operands that are kept for weight gradients."""
    kept = {one.untyped_storage() for _, operands in waiting._weights for one in operands.kept}
    return sum(storage.nbytes() for storage in kept)


def test_nothing_waits_outside_of_a_forward_that_is_asked_for_it():
    model, x = block()
    products, waiting = Products(model, Changes()), Waiting()
    with products.deferring(waiting), torch.no_grad():
        model(x)
    assert not kept_bytes(waiting)
    loss_of(model, x).backward()
    assert model.last.weight.grad is not None


def test_an_exception_ends_the_wait():
    model, x = block()
    products = Products(model, Changes())
    with pytest.raises(RuntimeError, match="shape"), products.deferring(Waiting()):
        model(x[..., 1:])
    loss_of(model, x).backward()
    assert model.last.weight.grad is not None


def test_the_two_halves_multiply_as_much_as_a_whole_backward():
    model, x = block()
    x.requires_grad_()
    loss = loss_of(model, x)
    with FlopCounterMode(display=False) as whole:
        loss.backward()
    changes, waiting = Changes(), Waiting()
    with Products(model, changes).deferring(waiting):
        loss = loss_of(model, x)
        with FlopCounterMode(display=False) as first:
            loss.backward()
    with FlopCounterMode(display=False) as second:
        waiting.compute()
    assert first.get_total_flops() == second.get_total_flops() == whole.get_total_flops() / 2


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


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("name", "chunks"), [("zb-h1", 1), ("zb-h1", 2), ("zbv", 2)])
def test_weight_gradients_of_a_chunk_come_in_the_order_of_micro_batches(
    name, chunks, num_ranks, num_microbatches
):
    schedule = build_schedule(name, num_ranks, num_microbatches, chunks)
    for actions in schedule.lists:
        for chunk in range(schedule.num_chunks):
            for kind in (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
                found = [a.microbatch for a in actions if (a.chunk, a.kind) == (chunk, kind)]
                assert found == sorted(found)
