"""Batches that run by a schedule have the losses and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zeroshard.comm.collectives import Axis
from zeroshard.comm.counter import Counter
from zeroshard.comm.messages import Messages
from zeroshard.parallel.pipeline.runner import Runner, room_for_sends
from zeroshard.parallel.pipeline.schedules import build_schedule
from zeroshard.parallel.pipeline.weights import Products
from zeroshard.sharding.context import Changes

WIDTH, CLASSES = 6, 5


class Layer(nn.Module):
    """A layer that hands on a second tensor, of integers, and one that not every layer uses."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH).double(), nn.Dropout(0.2)
        self.number = number

    def forward(self, x, ids, gate):
        scale = gate if self.number % 2 else 1.0
        return self.drop(torch.tanh(self.linear(x))) * scale + x, ids, gate


class Parts:
    """The chunks of a rank, of plain modules."""

    def __init__(self, num_chunks, batch):
        self.layers = [Layer(number) for number in range(num_chunks)]
        self.batch, self.order, self.ended, self.losses = batch, [], [], {}
        self.products = Products(nn.ModuleList(self.layers), Changes())

    def forward(self, chunk, microbatch, inputs):
        x, ids, gate, targets = self.batch[microbatch]
        if chunk == 0:
            inputs = x, ids, gate.requires_grad_()
        torch.manual_seed(100 * chunk + microbatch)
        x, ids, gate = self.layers[chunk](*inputs)
        if chunk == len(self.layers) - 1:
            loss = ((x - targets).square().mean() + gate.sum() * ids.sum()) / len(self.batch)
            self.losses[microbatch] = loss.item()
            return [loss]
        return x, ids, gate

    def backward(self, chunk, is_last, run):
        run()
        if is_last:
            self.ended.append(chunk)

    def deferring(self, waiting):
        return self.products.deferring(waiting)

    def act(self, action):
        raise AssertionError(action)

    def enter(self, action):
        self.order.append(action)


def batch_of(num_microbatches, *, uneven):
    generator = torch.Generator().manual_seed(7)
    sizes = [2 + (number % 3 if uneven else 0) for number in range(num_microbatches)]
    return [
        (
            torch.randn(size, WIDTH, generator=generator).double(),
            torch.randint(CLASSES, (size,), generator=generator),
            torch.randn(size, 1, generator=generator).double(),
            torch.randn(size, WIDTH, generator=generator).double(),
        )
        for size in sizes
    ]


def plain(num_chunks, batch):
    parts, losses = Parts(num_chunks, batch), []
    for number in range(len(batch)):
        inputs = ()
        for chunk in range(num_chunks):
            inputs = parts.forward(chunk, number, inputs)
        inputs[0].backward()
        losses.append(inputs[0].item())
    return losses, [layer.linear.weight.grad for layer in parts.layers]


@pytest.mark.parametrize(
    ("name", "options", "room"),
    [("gpipe", {}, 1), ("1f1b", {}, 1), ("interleaved", {"chunks_per_rank": 2}, 2), ("varuna", {}, 3)],
)
def test_the_sends_under_way_are_bounded_by_the_need_of_the_schedule(name, options, room):
    # Where micro-batches are not a multiple of the ranks, some need more; see docs/decisions.md.
    found = {
        room_for_sends(build_schedule(name, num_ranks, rounds * num_ranks, **options))
        for num_ranks in (2, 3, 4)
        for rounds in (1, 2, 3)
    }
    assert max(found) == room


def run(name, options, num_microbatches, uneven):
    """Losses and gradients of two batches; the second one knows the forms of all tensors."""
    group = dist.group.WORLD
    axis = Axis(group, device=torch.device("cpu"), counter=Counter(), timeout_s=20.0)
    schedule = build_schedule(name, axis.size, num_microbatches, **options)
    parts = Parts(schedule.num_chunks, batch_of(num_microbatches, uneven=uneven))
    runner, found = Runner(schedule, Messages(axis), parts), []
    for _ in range(2):
        parts.losses = {}
        runner.run(lambda: "shapes")
        gradients = {
            chunk: layer.linear.weight.grad.clone()
            for chunk, layer in enumerate(parts.layers)
            if layer.linear.weight.grad is not None
        }
        for layer in parts.layers:
            layer.linear.weight.grad = None
        found.append((parts.losses, gradients))
    sent = axis.counter.bytes_sent["point_to_point"]
    return found, schedule.placement, axis.rank, sorted(parts.ended), sent


CASES = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", {"chunks_per_rank": 2}),
    ("zb-h1", {}),
    ("zbv", {}),
    ("varuna", {}),
    ("1f1b", {"recompute": True}),
    ("interleaved", {"chunks_per_rank": 2, "recompute": True}),
    ("zb-h1", {"recompute": True}),
    ("zb-h1", {"chunks_per_rank": 2}),
    ("zbv", {"recompute": True}),
]


def run_cases():
    return [run(name, options, 4, uneven) for name, options in CASES for uneven in (False, True)]


@pytest.mark.long_where(num_ranks=[1, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_losses_and_gradients_are_those_of_one_process_to_the_bit(ranks, num_ranks):
    cases = [(*case, uneven) for case in CASES for uneven in (False, True)]
    for case, *results in zip(cases, *ranks(num_ranks, run_cases, timeout=120), strict=True):
        num_chunks = len(results[0][1])
        want_losses, want = plain(num_chunks, batch_of(4, uneven=case[-1]))
        for found, placement, rank, ended, _ in results:
            own = [chunk for chunk, place in enumerate(placement) if place == rank]
            assert ended == sorted(own * 2), case
            for losses, gradients in found:
                assert losses == (dict(enumerate(want_losses)) if num_chunks - 1 in own else {}), case
                assert sorted(gradients) == own, case
                assert all(torch.equal(gradient, want[chunk]) for chunk, gradient in gradients.items()), case
