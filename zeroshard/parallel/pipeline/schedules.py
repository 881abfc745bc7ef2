"""All schedules by name, and GPipe, the simplest of them.

Sources: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
section 2. The other builders name their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zeroshard.parallel.pipeline.actions import Schedule, backward, forward, loop
from zeroshard.parallel.pipeline.alternating import interleaved, one_f_one_b, zb_h1
from zeroshard.parallel.pipeline.costs import Costs
from zeroshard.parallel.pipeline.recompute import with_recompute
from zeroshard.parallel.pipeline.varuna import varuna
from zeroshard.parallel.pipeline.zbv import zbv


def gpipe(num_ranks: int, num_microbatches: int, *, is_last_first: bool = False) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards.

    Backwards begin with the first micro-batch, as in torch.distributed.pipelining. With `is_last_first` they
    begin with the last one, as in the paper. Then the last micro-batch needs no recompute.
    """
    order = range(num_microbatches)
    lists = tuple(
        (
            *(forward(rank, microbatch) for microbatch in order),
            *(backward(rank, microbatch) for microbatch in (reversed(order) if is_last_first else order)),
        )
        for rank in range(num_ranks)
    )
    return Schedule(loop(num_ranks, 1), num_microbatches, lists)


class Request(NamedTuple):
    """The arguments of every builder."""

    num_ranks: int
    num_microbatches: int
    chunks_per_rank: int
    recompute: bool
    costs: Costs


class Builder(NamedTuple):
    """A row of the table of schedules.

    `min_chunks` and `max_chunks` limit the chunks a rank, None: without limit. The smallest number is the
    default.
    """

    build: Callable[[Request], Schedule]
    min_chunks: int
    max_chunks: int | None


def _gpipe(request: Request) -> Schedule:
    schedule = gpipe(request.num_ranks, request.num_microbatches, is_last_first=request.recompute)
    return _recomputed(schedule, request)


def _recomputed(schedule: Schedule, request: Request) -> Schedule:
    return with_recompute(schedule) if request.recompute else schedule


SCHEDULES: dict[str, Builder] = {
    "gpipe": Builder(_gpipe, 1, 1),
    "1f1b": Builder(lambda r: _recomputed(one_f_one_b(*r[:2]), r), 1, 1),
    "interleaved": Builder(lambda r: _recomputed(interleaved(*r[:3]), r), 2, None),
    "zb-h1": Builder(lambda r: _recomputed(zb_h1(*r[:3]), r), 1, None),
    "zbv": Builder(lambda r: _recomputed(zbv(*r[:2]), r), 2, 2),
    "varuna": Builder(lambda r: varuna(*r[:2], r.costs), 1, 1),
}
"""The builders by the names that a user writes."""


def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks_per_rank: int | None = None,
    *,
    recompute: bool = False,
    costs: Costs | None = None,
) -> Schedule:
    """Return the schedule with a name.

    Args:
        name: one of `SCHEDULES`.
        num_ranks: pipeline ranks.
        num_microbatches: micro-batches of a batch.
        chunks_per_rank: chunks on each rank. None: the smallest number of the schedule.
        recompute: activations are recomputed before the backward. Varuna's schedule always does.
        costs: durations, on which only the order of Varuna's schedule depends. None: the defaults.

    Raises:
        ValueError: there is no such schedule, or it does not exist with these numbers.
    """
    if name not in SCHEDULES:
        raise ValueError(f"expected a schedule among {', '.join(SCHEDULES)}, got {name!r}")
    builder = SCHEDULES[name]
    chunks = builder.min_chunks if chunks_per_rank is None else chunks_per_rank
    for noun, number in (("pipeline rank", num_ranks), ("micro-batch", num_microbatches)):
        if number < 1:
            raise ValueError(f"{name}: expected at least 1 {noun}, got {number}")
    if chunks < builder.min_chunks or (builder.max_chunks is not None and chunks > builder.max_chunks):
        least, most = builder.min_chunks, builder.max_chunks
        expected = f"{least}" if least == most else f"at least {least}"
        raise ValueError(f"{name}: expected {expected} chunk{'s' * (least > 1)} a rank, got {chunks}")
    return builder.build(Request(num_ranks, num_microbatches, chunks, recompute, costs or Costs()))
