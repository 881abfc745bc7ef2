"""All ranks call the same blocks, and each rank cuts the gradients of others.

The reference is plain PyTorch on each rank, with gradients averaged in rank order, to the bit. Zeros count
for a parameter without a gradient on one rank; one without a gradient on any rank keeps none.
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from tests.distributed.training import numbers, start
from tests.ranks import on_ranks

WIDTH = 12


class Block(nn.Module):
    def __init__(self, hidden=20, *, nested=False):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.inner = nn.ModuleList(Block(16) for _ in range(3 if nested else 0))

    def forward(self, x):
        for inner in self.inner:
            x = inner(x)
        return self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """`cut`: the calls whose output has no gradient; `how`: by detach, no_grad, or a factor of 0."""

    def __init__(self, num_blocks, *, order=None, checkpoints=False, nested=False, sizes=(20,)):
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(
            Block(sizes[number % len(sizes)], nested=nested) for number in range(num_blocks)
        )
        self.order, self.checkpoints = order or range(num_blocks), checkpoints

    def forward(self, x, cut=(), how="detach"):
        x = self.first(x)
        for place, number in enumerate(self.order):
            x = x + self.call(self.blocks[number], x, place in cut, how)
        return self.last(x)

    def call(self, block, x, is_cut, how):
        if is_cut and how == "no_grad":
            with torch.no_grad():
                return block(x)
        y = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return y.detach() if is_cut and how == "detach" else y * 0.0 if is_cut else y


@dataclass(frozen=True)
class Plan:
    """What each rank cuts in each step, drawn from a seed."""

    seed: int
    num_steps: int = 4

    def cut(self, step, rank, num_calls):
        random = Random(self.seed * 10007 + step * 101 + rank)
        part = random.choice((0.0, 0.2, 0.5, 0.9, 1.0)) if step else 0.0
        return tuple(place for place in range(num_calls) if random.random() < part)

    def how(self, step, rank):
        return Random(self.seed * 31 + step * 7 + rank).choice(("detach", "detach", "no_grad", "zero"))


def reference(model, plan):
    """Losses and parameters of plain PyTorch with a hand-written average."""
    num, optimizer, losses = dist.get_world_size(), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(plan.num_steps):
        loss = loss_of(model, plan, step)
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * (1 / num)
            parts = [torch.empty_like(own) for _ in range(num)]
            dist.all_gather(parts, own)
            used = torch.tensor(parameter.grad is not None, dtype=torch.uint8)
            dist.all_reduce(used, dist.ReduceOp.MAX)
            parameter.grad = sum(parts[1:], parts[0]) if used else None
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def loss_of(net, plan, step):
    model = net.module if isinstance(net, zeroshard.Engine) else net
    rank = dist.get_rank()
    cut = plan.cut(step, rank, len(model.order))
    return net(numbers(step, 5, 7), cut, plan.how(step, rank)).square().mean()


def follow(model, plan, **config):
    """Where sharded training differs from the reference by a bit."""
    want_losses, want = reference(copy.deepcopy(model), plan)
    engine, _ = start(model, torch.optim.AdamW(model.parameters(), lr=1e-2), watchdog_s=20.0, **config)
    losses = []
    for step in range(plan.num_steps):
        loss = loss_of(engine, plan, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    got = engine.full_state_dict()
    found = [name for name, value in got.items() if not torch.equal(value, want[name])]
    return found + (["losses", losses, want_losses] if losses != want_losses else [])


class Once(Plan):
    """The second rank cuts block 4 from the second step on."""

    def cut(self, step, rank, num_calls):
        return (4,) if rank == 1 and step else ()

    def how(self, step, rank):
        return "detach"


@on_ranks(2)
def test_one_rank_may_detach_a_block_that_all_ranks_call():
    for stage, recompute in ((2, "none"), (3, "none"), (3, "unit")):
        torch.manual_seed(0)
        assert not follow(Chain(6), Once(0), stage=stage, recompute=recompute)


class Segments(Chain):
    """Checkpoints around several blocks each, one of which is in a checkpoint of its own as well."""

    def __init__(self, num_blocks, size):
        super().__init__(num_blocks)
        self.size = size

    def forward(self, x, cut=(), how="detach"):
        x = self.first(x)
        for begin in range(0, len(self.blocks), self.size):
            x = checkpoint(self.run_segment, x, begin, cut, how, use_reentrant=False)
        return self.last(x)

    def run_segment(self, x, begin, cut, how):
        for number, block in enumerate(self.blocks[begin : begin + self.size], begin):
            inner = Chain.call if number % 3 else Segments.call_checkpointed
            x = x + inner(self, block, x, number in cut, how)
        return x

    def call_checkpointed(self, block, x, is_cut, how):
        return checkpoint(self.call, block, x, is_cut, how, use_reentrant=False)


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


class Funnel(Chain):
    """Blocks of as many sizes as there are blocks, as in a U-Net."""

    def __init__(self, sizes):
        super().__init__(len(sizes), sizes=sizes)


class TwoSegments(Segments):
    """A block is in two checkpoints."""

    def forward(self, x, cut=(), how="detach"):
        x = self.first(x)
        for numbers_of_blocks in ((0, 1, 2), (1, 3, 4)):
            x = checkpoint(self.run_blocks, x, numbers_of_blocks, cut, how, use_reentrant=False)
        return self.last(x)

    def run_blocks(self, x, numbers_of_blocks, cut, how):
        for number in numbers_of_blocks:
            x = x + self.call(self.blocks[number], x, number in cut, how)
        return x


class SomeCheckpoint(Segments):
    """Only rank 1 recomputes, and nothing is cut."""

    def forward(self, x, cut=(), how="detach"):
        x = self.first(x)
        for begin in (0, 2, 4):
            segment = begin, (), how
            run = self.run_segment
            x = checkpoint(run, x, *segment, use_reentrant=False) if dist.get_rank() else run(x, *segment)
        return self.last(x)


@on_ranks(2)
def test_a_block_in_two_checkpoints_and_checkpoints_on_one_rank_alone():
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        found += follow(TwoSegments(5, 3), Plan(seed), stage=3)
        found += follow(SomeCheckpoint(6, 2), Plan(seed), stage=3)
    return found


class Grouped(Chain):
    """Each shard group calls its blocks in another order."""

    def forward(self, x, cut=(), how="detach"):
        x = self.first(x)
        for block in self.blocks if dist.get_rank() < 2 else reversed(self.blocks):
            x = x + block(x)
        return self.last(x)


@pytest.mark.long
@on_ranks(4)
def test_shard_groups_may_call_blocks_in_different_orders():
    """1e-5: two groups of two are summed in another order than four ranks."""
    torch.manual_seed(0)
    model = Grouped(4)
    _, want = reference(copy.deepcopy(model), Plan(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _ = start(model, optimizer, stage=3, shard_group_size=2)
    for step in range(Plan(0).num_steps):
        engine.backward(loss_of(engine, Plan(0), step))
        engine.step()
    got = engine.full_state_dict()
    return {name for name, value in got.items() if not torch.allclose(value, want[name], atol=1e-5, rtol=0)}


@pytest.mark.parametrize(
    ("stage", "how"), [(3, "dropped"), pytest.param(2, "reversed", marks=pytest.mark.long)]
)
@on_ranks(2)
def test_other_forwards_leave_no_more_gradients_packed(stage, how):
    """Than those of a forward alone, where other forwards have had no backward."""
    torch.manual_seed(0)
    engine, _ = start(Chain(8), "SGD", stage=stage)

    def loss(number):
        return engine(numbers(number, 5, 7)).square().mean()

    found = []
    for other in (None, how):
        packed = PackedBytes(engine)
        for number in range(3):
            first = loss(10 + number) if other else None
            if other == "dropped":
                del first
            loss(number).backward()
            if other == "reversed":
                first.backward()
            engine.step()
        found.append(packed.most)
    alone, most = found
    assert most <= alone


@pytest.mark.parametrize(
    ("sizes", "stage", "cut"),
    [((40,) * 8, 2, ()), ((40,) * 8, 3, (3, 4)), (tuple(range(420, 20, -50)), 3, ())],
)
@on_ranks(2)
def test_no_more_gradients_are_packed_at_once_than_those_of_two_units_and_the_root(sizes, stage, cut):
    """The pool also holds what two ranks receive, half of each unit whose reduction is under way."""
    torch.manual_seed(0)
    engine, _ = start(Funnel(sizes), "SGD", stage=stage)
    packed = PackedBytes(engine)
    for number in range(3):
        engine.backward(engine(numbers(number, 5, 7), cut).square().mean())
        engine.step()
    root, *blocks = (4 * unit.numel for unit in engine.units)
    allowed = root + max(a + b for a, b in pairwise(blocks))
    assert 0 < packed.most <= allowed
    assert packed.pooled <= 1.5 * allowed
