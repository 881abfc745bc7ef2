"""The schedule ZBV: two chunks a rank in the form of a V, and backwards in halves.

    rank 0   chunk 0      chunk 7        Rank 0 has the first and the last chunk, so the loss is computed
    rank 1   chunk 1      chunk 6        where the batch begins. The last rank has two chunks that follow
    rank 2   chunk 2      chunk 5        each other, so nothing is sent between them.
    rank 3   chunk 3  ->  chunk 4

If the three parts of a chunk take the same time, a rank waits neither in the middle nor at the end.

Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6, and Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory" (V-shaped schedules). The number of actions in each phase is that of
torch.distributed.pipelining.
"""

from __future__ import annotations

from collections import Counter

from zeroshard.parallel.pipeline.actions import Action, Kind, Schedule

_DOWN, _UP = 0, 1  # the first and the second chunk of a rank
_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

_Word = tuple[Kind, int]
_FORWARD_DOWN: list[_Word] = [(_F, _DOWN)]
_FORWARD_UP: list[_Word] = [(_F, _UP)]
_BACKWARD_DOWN: list[_Word] = [(_I, _DOWN), (_W, _DOWN)]
_BACKWARD_UP: list[_Word] = [(_I, _UP), (_W, _UP)]


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule ZBV over 2 * p chunks.

    The pipeline is full from 2 * p - 1 micro-batches on. The lists of fewer are those of 2 * p - 1 without
    the others' actions.
    """
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    full = max(num_microbatches, 2 * num_ranks - 1)
    lists = []
    for rank in range(num_ranks):
        chunks = (rank, 2 * num_ranks - 1 - rank)
        numbers: Counter[_Word] = Counter()
        actions = []
        for kind, half in _words(rank, num_ranks, full):
            microbatch = numbers[kind, half]
            numbers[kind, half] += 1
            if microbatch < num_microbatches:
                actions.append(Action(kind, chunks[half], microbatch))
        lists.append(tuple(actions))
    return Schedule(placement, num_microbatches, tuple(lists))


def _words(rank: int, num_ranks: int, full: int) -> list[_Word]:
    """Return the actions of a rank without micro-batches: each word takes them in the order 0, 1, 2, ..."""
    behind = num_ranks - rank
    warm = [
        *(2 * behind - 1) * _FORWARD_DOWN,
        *rank * (_FORWARD_UP + _FORWARD_DOWN),
        *behind * (_FORWARD_UP + _BACKWARD_UP),
    ]
    begun = 2 * num_ranks - 1 - rank  # forwards in the first chunk so far; in the second one there are p
    steady = [
        *(full - begun) * (_FORWARD_DOWN + _BACKWARD_DOWN + _FORWARD_UP + _BACKWARD_UP),
        *(begun - num_ranks) * (_BACKWARD_DOWN + _FORWARD_UP + _BACKWARD_UP),
    ]
    drain: list[_Word] = [
        *rank * [(_I, _DOWN), (_I, _UP)],
        *behind * [(_I, _DOWN), (_W, _DOWN)],
        *rank * [(_W, _UP)],
        *rank * [(_W, _DOWN)],
    ]
    return warm + steady + drain
