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
    def __init__(self, kind, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width + 32), nn.Linear(width + 32, width)
        for name, linear in self.named_children():
            layer = quantized(linear, kind)
            layer.bias = nn.Parameter(linear.bias.detach().clone())
            setattr(self, name, layer)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def net(kind, width=65):
    """Blocks of 64 lie across rows, and the last one is not full."""
    torch.manual_seed(0)
    blocks = Block(kind, width), Block(kind, width)
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))


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


@pytest.mark.parametrize("kind", ["nf4 twice", "int8"])
@on_ranks(2)
def test_layers_of_any_size_with_biases_train_as_in_one_process(kind):
    model = net(kind)
    want = plain(model, 2)
    engine = zeroshard.initialize(net(kind), adamw, {"stage": 3}).engine
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
