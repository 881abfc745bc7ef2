"""The activations of each pipeline rank, and the bytes that it sends to its neighbours and tensor ranks.

    chunk       input | what its modules keep | if it is the last one: the loss
    rank        the sum over the micro-batches of its chunks that are in flight, at most

A chunk keeps its input, which has come from another rank, up to its backward; values such as rotary tables
and masks are made by each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeroshard.memory.activations import Blocks, MicroBatch
from zeroshard.memory.dryrun import DryRun
from zeroshard.memory.planned import Pipelined
from zeroshard.parallel.pipeline.chunked import Outline
from zeroshard.parallel.pipeline.runner import AHEAD
from zeroshard.parallel.pipeline.simulate import most_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of one rank for activations."""

    held: int = 0
    """The most bytes that it holds at a time."""
    sent: int = 0
    """Bytes that it sends in a micro-batch, or in a batch of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes of a micro-batch on one rank of each part of a model."""

    blocks: tuple[int, ...]
    """Bytes that each block keeps for its backward, its output included."""
    freed: tuple[int, ...]
    """Bytes that go when a block is over, its input: not negative; of each block but the last one."""
    first: int
    """Bytes that the modules before the blocks keep."""
    last: int
    """Bytes that the modules behind the blocks and the loss add to those of the blocks."""
    shared: int = 0
    """Bytes that the model keeps outside of these modules; each chunk has them."""
    inside: int = 0
    """Bytes beyond those at the end of a block that are there inside it, at most; in a recomputation, too."""
    loss: int = 0
    """Bytes beyond those at the end that are there in the modules behind the blocks and the loss, at most."""
    between: int
    """Bytes of the tensor that a block hands on."""
    sent: int = 0
    """Bytes that all of the model sends to tensor ranks."""


def costs_of_run(whole: DryRun, kept: DryRun, outline: Outline) -> Costs:
    """Return the costs of the parts of a model.

    Args:
        whole: its dry run without recomputation.
        kept: its dry run as it is trained.
        outline: the order of its modules.
    """
    before = [kept.calls[name] for name in outline.before]
    blocks = [kept.calls[name] for name in outline.blocks]
    first = sum(call.after - call.before for call in before)
    return Costs(
        blocks=tuple(call.after - call.before for call in blocks),
        freed=tuple(max(0, call.after - later.before) for call, later in pairwise(blocks)),
        first=first,
        last=max(0, kept.held - blocks[-1].after),
        shared=blocks[0].before - first,
        inside=max(
            _most_inside(whole, name) - (call.after - call.before)
            for name, call in zip(outline.blocks, blocks, strict=True)
        ),
        loss=whole.peak - whole.held,
        between=blocks[0].output,
        sent=kept.sent,
    )


def _most_inside(run: DryRun, block: str) -> int:
    """The most bytes that a block adds, at the end of any module in it."""
    ends = (call.after for name, call in run.calls.items() if name == block or name.startswith(f"{block}."))
    return max(ends) - run.calls[block].before


def costs_of_blocks(blocks: Blocks, batch: MicroBatch) -> Costs:
    """Return the costs of the parts of a transformer by the formulas of `activations`."""
    kept = blocks.bytes_kept(batch)
    return Costs(
        blocks=(kept,) * blocks.depth,
        freed=(0,) * (blocks.depth - 1),
        first=0,
        last=blocks.bytes_of_head(batch),
        inside=blocks.bytes_of_block(batch) if batch.recomputes else 0,
        between=batch.num_tokens * blocks.width * batch.itemsize,
        sent=blocks.bytes_sent(batch),
    )


def usage_of_ranks(pipelined: Pipelined, costs: Costs) -> list[Usage]:
    """Return the usage of each pipeline rank in a batch."""
    schedule, runs = pipelined.schedule, pipelined.runs
    most = most_bytes(schedule, [_bytes_of_chunk(costs, run) for run in runs])
    usages = []
    for rank, chunks in enumerate(schedule.chunks):
        num_blocks = sum(len(runs[chunk]) for chunk in chunks)
        sums = pipelined.num_microbatches * costs.sent * num_blocks // len(costs.blocks)
        messages = sum(_num_messages(schedule.placement, chunk, rank) for chunk in chunks)
        sent = pipelined.num_microbatches * messages * costs.between
        # Some are received ahead of their use, and some are sent while their sender goes on.
        under_way = min(schedule.num_microbatches, 2 * AHEAD) * costs.between if messages else 0
        is_last = len(runs) - 1 in chunks
        beyond = max(costs.inside, under_way, costs.loss if is_last else 0)
        usages.append(Usage(held=most[rank] + beyond, sent=sums + sent))
    return usages


def _bytes_of_chunk(costs: Costs, run: range) -> int:
    """Bytes of a chunk, whose input and output stay there up to its backward."""
    before = costs.first if run.start == 0 else costs.between
    after = costs.last if run.stop == len(costs.blocks) else 0
    freed = sum(costs.freed[number] for number in run[1:-1])
    return before + costs.shared + sum(costs.blocks[number] for number in run) - freed + after


def _num_messages(placement: Sequence[int], chunk: int, rank: int) -> int:
    """Messages of a chunk to other ranks: its output to the next one, a gradient to the one before."""
    near = (chunk - 1, chunk + 1)
    return sum(0 <= other < len(placement) and placement[other] != rank for other in near)
