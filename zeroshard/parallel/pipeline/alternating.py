"""Schedules in which each rank alternates between forwards and backwards: 1F1B, interleaved, and ZB-H1.

They differ in three things: the number of forwards before the first backward, the order in which a rank
goes through its chunks, and the weight gradients, which ZB-H1 runs later.

    interleaved, 2 ranks with 2 chunks each, rank 0:   0F0 0F1 2F0 2F1 | 0F2 2B0 | 0F3 2B1 | ...
                                                       round 0           round 1 begins

Sources: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", section 2.2 (1F1B with a flush, and interleaved); Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 2.1 (ZB-H1). The rounds of other than p micro-batches, and ZB-H1 with several chunks,
are those of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.parallel.pipeline.actions import Action, Schedule, backward, forward, loop, split_backward

_Place = tuple[int, int]
"""A chunk and a micro-batch."""


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule.

    Rank r of p runs p - 1 - r forwards, then a forward and a backward in turn, then the backwards that are
    left.
    """
    lists = []
    for rank in range(num_ranks):
        places = [(rank, microbatch) for microbatch in range(num_microbatches)]
        lists.append(_alternate(places, places, num_ranks - 1 - rank))
    return Schedule(loop(num_ranks, 1), num_microbatches, tuple(lists))


def interleaved(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Schedule:
    """Return the interleaved schedule: each rank has several chunks and goes through them in rounds.

    A rank runs the micro-batches of a round in its first chunk, then in its second one, and so on. A round
    has p micro-batches, or a few more if that divides them; fewer would not fill the pipeline.

    Raises:
        ValueError: the micro-batches cannot be divided into rounds of the same size.
    """
    size = _round_size("interleaved", num_ranks, num_microbatches, chunks_per_rank)
    lists = []
    for rank in range(num_ranks):
        forwards, backwards = _in_rounds(rank, num_ranks, num_microbatches, chunks_per_rank, size)
        warm = (chunks_per_rank - 1) * size + 2 * (num_ranks - 1 - rank)
        lists.append(_alternate(forwards, backwards, warm))
    return Schedule(loop(num_ranks, chunks_per_rank), num_microbatches, tuple(lists))


def zb_h1(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Schedule:
    """Return the schedule ZB-H1, in which weight gradients fill the time that 1F1B waits.

    The gradient of the weights of a micro-batch comes r micro-batches after that of its input on rank r. So
    each rank holds the activations of at most p micro-batches, as rank 0 of 1F1B does.

    Raises:
        ValueError: with several chunks a rank, the micro-batches cannot be divided into rounds.
    """
    size = _round_size("zb-h1", num_ranks, num_microbatches, chunks_per_rank)
    lists = []
    for rank in range(num_ranks):
        forwards, backwards = _in_rounds(rank, num_ranks, num_microbatches, chunks_per_rank, size)
        warm = (chunks_per_rank - 1) * size + num_ranks - 1 - rank
        lists.append(_alternate(forwards, backwards, warm, weights_behind=rank))
    return Schedule(loop(num_ranks, chunks_per_rank), num_microbatches, tuple(lists))


def _alternate(
    forwards: Sequence[_Place], backwards: Sequence[_Place], warm: int, weights_behind: int | None = None
) -> tuple[Action, ...]:
    """Return `warm` forwards, then a forward and a backward in turn, then the backwards that are left.

    With `weights_behind` a backward is two actions, and the second one comes that many backwards later.
    """
    warm = min(warm, len(forwards))
    actions = [forward(*place) for place in forwards[:warm]]
    for index, place in enumerate(backwards):
        actions.extend(forward(*other) for other in forwards[warm + index : warm + index + 1])
        if weights_behind is None:
            actions.append(backward(*place))
            continue
        actions.append(split_backward(*place)[0])
        if index >= weights_behind:
            actions.append(split_backward(*backwards[index - weights_behind])[1])
    if weights_behind:
        actions.extend(split_backward(*place)[1] for place in backwards[-weights_behind:])
    return tuple(actions)


def _round_size(name: str, num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> int:
    """Return the micro-batches of a round: as many rounds as there are full pipelines of micro-batches."""
    rounds = max(1, num_microbatches // num_ranks)
    if chunks_per_rank > 1 and num_microbatches % rounds:
        raise ValueError(
            f"{name} with {chunks_per_rank} chunks a rank: expected {num_ranks} pipeline ranks to divide the "
            f"micro-batches, or {rounds} rounds of the same size, got {num_microbatches} micro-batches"
        )
    return num_microbatches // rounds


def _in_rounds(
    rank: int, num_ranks: int, num_microbatches: int, chunks_per_rank: int, size: int
) -> tuple[list[_Place], list[_Place]]:
    """Return the forwards and the backwards of a rank, round by round."""
    chunks = [rank + local * num_ranks for local in range(chunks_per_rank)]
    starts = range(0, num_microbatches, size)

    def places(order: Sequence[int]) -> list[_Place]:
        return [
            (chunk, microbatch)
            for start in starts
            for chunk in order
            for microbatch in range(start, min(start + size, num_microbatches))
        ]

    return places(chunks), places(chunks[::-1])
