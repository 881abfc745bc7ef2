"""Single layers of bitsandbytes: sizes, biases and compute dtypes, compared with one process to the bit."""

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import zeroshard
from tests.ranks import on_ranks
from tests.sharding.quantized import adamw, build, quantized, same_state, tokens_of

STEPS = 3


class Block(nn.Module):
    def __init__(self, kind, width, compute_dtype, trains_bias):
        super().__init__()
        self.up = self._layer(kind, width, width + 32, compute_dtype, trains_bias)
        self.down = self._layer(kind, width + 32, width, compute_dtype, trains_bias)

    def _layer(self, kind, width, height, compute_dtype, trains_bias):
        linear = nn.Linear(width, height)
        layer = quantized(linear, kind)
        layer.compute_dtype = compute_dtype
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=trains_bias)
        return layer

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind, width=64, compute_dtype=torch.float32, trains_bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(kind, width, compute_dtype, trains_bias) for _ in range(2))
        self.last = nn.Linear(width, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Cast(bitsandbytes.nn.Linear4bit):
    """A layer that casts its bias. The forward of bitsandbytes rounds the parameter itself."""

    def forward(self, x):
        bias, quant_state = self.bias.to(self.compute_dtype), self.weight.quant_state
        y = bitsandbytes.matmul_4bit(
            x.to(self.compute_dtype), self.weight, bias=bias, quant_state=quant_state
        )
        return y.to(x.dtype)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


def plain(model, num_parts):
    optimizer, losses = adamw(model.parameters()), []
    for number in range(STEPS):
        total = torch.zeros(())
        for x, y in zip(*(part.chunk(num_parts) for part in batch(number)), strict=True):
            loss = cross_entropy(model(x), y) / num_parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "nf4 twice", "width": 65},  # blocks of 64 lie across rows, and the last one is not full
        {"kind": "int8", "width": 65},
        {"kind": "nf4 twice", "compute_dtype": torch.bfloat16, "trains_bias": True},
        {"kind": "nf4", "compute_dtype": torch.bfloat16, "trains_bias": False},
    ],
)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
@on_ranks(2, timeout=180)  # bitsandbytes compiles kernels for each kind once
def test_layers_of_any_size_with_biases_train_as_in_one_process(options, stage):
    model = Net(**options)
    for layer in model.modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            layer.__class__ = Cast
    want = plain(model, 2)
    engine = zeroshard.initialize(Net(**options), adamw, {"stage": stage}).engine
    for number in range(STEPS):
        x, y = (part.chunk(2)[engine.dp_rank] for part in batch(number))
        loss = cross_entropy(engine(x), y)
        engine.backward(loss)
        engine.step()
        total = loss.detach() / 2
        dist.all_reduce(total)
        assert total.item() == want[number]
    if state := engine.full_state_dict():
        same_state(state, dict(model.state_dict()))


@on_ranks(2)
def test_a_layer_with_8_bits_computes_in_a_dtype_of_its_own():
    precision = {"param_dtype": "bfloat16", "overrides": {"*up_proj*": "float32"}}
    engine = zeroshard.initialize(build("int8"), adamw, {"stage": 3, "precision": precision}).engine
    dtypes, matmul = [], bitsandbytes.matmul

    def noting(x, *args, **kwargs):
        dtypes.append(x.dtype)
        return matmul(x, *args, **kwargs)

    bitsandbytes.matmul = noting
    try:
        engine(input_ids=tokens_of(0))
    finally:
        bitsandbytes.matmul = matmul
    assert dtypes.count(torch.float32) == 2  # up_proj of each block
    assert dtypes.count(torch.bfloat16) == 12
