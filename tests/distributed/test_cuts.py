"""How many packed gradients there are at once."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.distributed.training import numbers, start
from tests.ranks import on_ranks

WIDTH = 12


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Blocks of these sizes; the outputs of those numbered `cut` have no gradient."""

    def __init__(self, sizes):
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(size) for size in sizes)

    def forward(self, x, cut=()):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            y = block(x)
            x = x + (y.detach() if number in cut else y)
        return self.last(x)


class PackedBytes:
    """Counts the bytes of packed gradients from when a buffer is taken to when it is given back."""

    def __init__(self, engine):
        self.most, self.pooled, self._live = 0, 0, {}
        pool = engine._runtime.reducer.pool
        for buffer in engine._runtime.buffers:
            self._count_takes(buffer.layout.total, pool)
        drop = pool.drop

        def dropped(buffer):
            self._live.pop(id(buffer), None)
            drop(buffer)

        pool.drop = dropped
        self._pool = pool

    def _count_takes(self, size, pool):
        take = pool.take

        def taken(dtype, num):
            buffer = take(dtype, num)
            if num == size:
                self._live[id(buffer)] = buffer.nbytes
                self.most = max(self.most, sum(self._live.values()))
            self.pooled = max(self.pooled, pool.num_bytes)
            return buffer

        pool.take = taken


@pytest.mark.parametrize(
    ("sizes", "stage", "cut"), [((40,) * 8, 3, (3, 4)), (tuple(range(420, 20, -50)), 2, ())]
)
@on_ranks(2)
def test_no_more_gradients_are_packed_at_once_than_those_of_two_units_and_the_root(sizes, stage, cut):
    """The pool also holds what two ranks receive, half of each unit whose reduction is under way."""
    torch.manual_seed(0)
    engine, _ = start(Chain(sizes), "SGD", stage=stage)
    packed = PackedBytes(engine)
    for number in range(3):
        engine.backward(engine(numbers(number, 5, 7), cut).square().mean())
        engine.step()
    root, *blocks = (4 * unit.numel for unit in engine.units)
    allowed = root + max(a + b for a, b in pairwise(blocks))
    assert 0 < packed.most <= allowed
    assert packed.pooled <= 1.5 * allowed
