"""The builders of all schedules by name, each with its source, and the schedule that a config chooses.

Recomputation and steps are additions to lists of forwards and backwards.

A list of the user's is the text of a schedule, or the path of a file with it. Rank 0 alone reads the file.
Its text takes the place of the path before the other ranks see it, so all ranks have the same list.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

from zeroshard.config.pipeline import ASYNCHRONOUS, Pipeline
from zeroshard.parallel.pipeline.actions import (
    BEGIN_BACKWARD,
    END_BACKWARD,
    STEP,
    Action,
    Kind,
    Place,
    Schedule,
    backward,
    backwards_by_step,
    forward,
    frozen,
    loop,
    parse_schedule,
    without_steps,
)
from zeroshard.parallel.pipeline.simulate import ActionCosts, simulate


def with_recompute(schedule: Schedule) -> Schedule:
    """Return a schedule that recomputes the activations of each micro-batch before its backward.

    A backward directly after its forward finds the activations still there and needs no recompute: a backward
    of the last rank in 1F1B, and the first one of a GPipe that goes back from the last micro-batch. A
    recompute does not need the gradient, so a rank runs it while the gradient is on its way. A schedule that
    has recomputes stays as it is.
    """
    if any(action.kind is Kind.RECOMPUTE for _, action in schedule):
        return schedule
    lists = []
    for actions in schedule.lists:
        lists.append(list(actions[:1]))
        for before, action in pairwise(actions):
            if action.kind in BEGIN_BACKWARD and before != action._replace(kind=Kind.FORWARD):
                lists[-1].append(action._replace(kind=Kind.RECOMPUTE))
            lists[-1].append(action)
    return schedule.with_lists(lists)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule.

    Rank r of p runs p - 1 - r forwards, then a forward and a backward in turn, then the backwards that are
    left.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2 (1F1B with a flush, and interleaved).
    """
    return _in_rounds("1f1b", num_ranks, num_microbatches, 1, hops=1)


def interleaved(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Schedule:
    """Return the interleaved schedule: each rank has several chunks and goes through them in rounds.

        2 ranks with 2 chunks each, rank 0:   0F0 0F1 2F0 2F1 | 0F2 2B0 | 0F3 2B1 | ...
                                              round 0           round 1 begins

    A rank runs the micro-batches of a round in its first chunk, then in its second one, and so on. A round
    has p micro-batches, or a few more if that divides them; fewer would not fill the pipeline. Rounds of
    other than p micro-batches, and ZB-H1 with several chunks, are as in torch.distributed.pipelining.

    Raises:
        ValueError: the micro-batches cannot be divided into rounds of the same size.
    """
    return _in_rounds("interleaved", num_ranks, num_microbatches, chunks_per_rank, hops=2)


def zb_h1(num_ranks: int, num_microbatches: int, chunks_per_rank: int) -> Schedule:
    """Return the schedule ZB-H1, in which weight gradients fill the time that 1F1B waits.

    The gradient of the weights of a micro-batch comes r micro-batches after the gradient of its input on rank
    r. So each rank holds the activations of at most p micro-batches, as rank 0 of 1F1B does.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.1.

    Raises:
        ValueError: with several chunks a rank, the micro-batches cannot be divided into rounds.
    """
    return _in_rounds("zb-h1", num_ranks, num_microbatches, chunks_per_rank, hops=1, has_halves=True)


def _in_rounds(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks_per_rank: int,
    *,
    hops: int,
    has_halves: bool = False,
) -> Schedule:
    """Return lists that alternate between forwards and backwards, round by round.

    Args:
        name: the name of the schedule.
        num_ranks, num_microbatches, chunks_per_rank: as `build_schedule` has them.
        hops: the forwards that a rank begins earlier than the next one.
        has_halves: the gradient of the weights comes r micro-batches after the input's on rank r.
    """
    rounds = max(1, num_microbatches // num_ranks)
    if chunks_per_rank > 1 and num_microbatches % rounds:
        raise ValueError(
            f"{name} with {chunks_per_rank} chunks a rank: expected {num_ranks} pipeline ranks to divide the "
            f"micro-batches, or {rounds} rounds of the same size, got {num_microbatches} micro-batches"
        )
    size = num_microbatches // rounds  # as many rounds as there are full pipelines of micro-batches
    lists = []
    for rank in range(num_ranks):
        forwards, backwards = (
            [
                (rank + local * num_ranks, microbatch)
                for start in range(0, num_microbatches, size)
                for local in order
                for microbatch in range(start, min(start + size, num_microbatches))
            ]
            for order in (range(chunks_per_rank), range(chunks_per_rank)[::-1])
        )
        warm = (chunks_per_rank - 1) * size + hops * (num_ranks - 1 - rank)
        halves = (Kind.INPUT_GRADIENT, 0), (Kind.WEIGHT_GRADIENT, rank)
        lists.append(_alternate(forwards, backwards, warm, halves if has_halves else _WHOLE))
    return Schedule(loop(num_ranks, chunks_per_rank), num_microbatches, tuple(lists))


_WHOLE = ((Kind.BACKWARD, 0),)
"""The parts of a backward, and the number of backwards after which each part comes, in order."""


def _alternate(
    forwards: Sequence[Place],
    backwards: Sequence[Place],
    warm: int,
    parts: Sequence[tuple[Kind, int]] = _WHOLE,
) -> tuple[Action, ...]:
    """Return `warm` forwards, then a forward and a backward in turn, then the backwards that are left."""
    actions = [forward(*place) for place in forwards[:warm]]
    for number in range(len(backwards) + parts[-1][1]):
        actions += [forward(*place) for place in forwards[warm + number :][:1]]
        begun = ((kind, number - later) for kind, later in parts)
        actions += [Action(kind, *backwards[at]) for kind, at in begun if 0 <= at < len(backwards)]
    return tuple(actions)


_KINDS = (Kind.FORWARD, Kind.BACKWARD)
"""The kinds of compute actions of an asynchronous list."""


@functools.lru_cache(maxsize=32)
def steady(
    num_ranks: int, num_microbatches: int, microbatches_per_step: int = 1, num_synchronous: int = 0
) -> Schedule:
    """Return the steady schedule of an asynchronous pipeline: 1F1B that never drains between steps.

        rank 0    0F0 0F1 0B0 STEP 0F2 0B1 STEP 0F3 0B2 STEP 0B3 STEP
        rank 1        1F0 1B0 STEP 1F1 1B1 STEP 1F2 1B2 STEP 1F3 1B3 STEP

    The list fills the pipeline once, at its beginning, and drains it once, at its end. So each rank takes its
    steps by itself, while micro-batches are under way on the others. The first steps may be synchronous,
    since weights change fast at first and delays then harm most (Yang et al. 2021, "PipeMare", section 3.3,
    technique 3).

    Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training", section
    3.2.

    Args:
        num_ranks: pipeline ranks.
        num_microbatches: all micro-batches of the list. The last step takes those that are left over.
        microbatches_per_step: backwards of a rank before each of its steps.
        num_synchronous: the first steps, each of which begins when the one before has ended on all ranks.
    """
    flushed = min(num_synchronous * microbatches_per_step, num_microbatches)
    starts = [*range(0, flushed, microbatches_per_step), flushed, num_microbatches]
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    for start, end in pairwise(starts):
        if start < end:
            for own, actions in zip(lists, one_f_one_b(num_ranks, end - start).lists, strict=True):
                own.extend(_with_steps(actions, start, microbatches_per_step))
    return Schedule(loop(num_ranks, 1), num_microbatches, frozen(lists))


def _with_steps(actions: tuple[Action, ...], start: int, per_step: int) -> Iterator[Action]:
    """The actions, whose micro-batches are counted from `start`, with a step after some backwards."""
    num_backwards, done = sum(action.kind in END_BACKWARD for action in actions), 0
    for action in actions:
        assert action.microbatch is not None, "only compute actions"
        yield action._replace(microbatch=start + action.microbatch)
        if action.kind in END_BACKWARD:
            done += 1
            if not done % per_step or done == num_backwards:
                yield STEP


def require_steps(schedule: Schedule) -> None:
    """Check that an asynchronous pipeline can train with a list of the user's.

    Raises:
        ValueError: a rank has several chunks, or actions other than compute and steps; or gradients are left
            that no step applies, or a step that applies none; or ranks take different numbers of steps.
    """
    numbers = []
    for rank, actions in enumerate(schedule.lists):
        where = f"pipeline rank {rank}"
        if len(schedule.chunks[rank]) != 1:
            got = ", ".join(map(str, schedule.chunks[rank]))
            raise ValueError(f"{where}: expected one chunk in an asynchronous list, got {got}")
        if others := [action for action in actions if action.kind not in (*_KINDS, Kind.STEP)]:
            kinds = ", ".join(kind.value for kind in _KINDS)
            raise ValueError(f"{where}: expected {kinds} and STEP in an asynchronous list, got {others[0]}")
        *steps, left = backwards_by_step(actions)
        if not all(steps):
            raise ValueError(f"{where}: expected a backward before each step, got none")
        if left:
            raise ValueError(f"{where}: expected a STEP after the last backward of the list, got none")
        numbers.append(len(steps))
    if len(set(numbers)) > 1:  # else schedules of the learning rate, and `global_step`, would differ
        got = ", ".join(map(str, numbers))
        raise ValueError(
            f"expected the same number of steps in all lists of an asynchronous pipeline, got {got}"
        )


_DOWN, _UP = 0, 1  # the first and the second chunk of a rank
_F, _I, _W = Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

_Word = tuple[Kind, int]
_FORWARD_DOWN: list[_Word] = [(_F, _DOWN)]
_FORWARD_UP: list[_Word] = [(_F, _UP)]
_BACKWARD_DOWN: list[_Word] = [(_I, _DOWN), (_W, _DOWN)]
_BACKWARD_UP: list[_Word] = [(_I, _UP), (_W, _UP)]


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule ZBV: two chunks a rank in the form of a V, and backwards in halves.

        rank 0   chunk 0      chunk 7        Rank 0 has the first and the last chunk, so the loss is computed
        rank 1   chunk 1      chunk 6        where the batch begins. The last rank has two chunks that follow
        rank 2   chunk 2      chunk 5        each other, so nothing is sent between them.
        rank 3   chunk 3  ->  chunk 4

    If the three parts of a chunk take the same time, a rank waits neither in the middle nor at the end. The
    pipeline is full from 2 * p - 1 micro-batches on. Fewer micro-batches have the lists of 2 * p - 1,
    without the actions of the others.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6, and Qi et al. 2024, "Pipeline
    Parallelism with Controllable Memory" (V-shaped schedules). Each phase has as many actions as in
    torch.distributed.pipelining.
    """
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    full = max(num_microbatches, 2 * num_ranks - 1)
    lists = []
    for rank in range(num_ranks):
        chunks = (rank, 2 * num_ranks - 1 - rank)
        numbers = defaultdict[_Word, Iterator[int]](count)
        actions = []
        for kind, half in _words(rank, num_ranks, full):
            microbatch = next(numbers[kind, half])
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


_PRIORITY = {Kind.BACKWARD: 0, Kind.RECOMPUTE: 1, Kind.FORWARD: 2}


def varuna(num_ranks: int, num_microbatches: int, costs: ActionCosts) -> Schedule:
    """Return Varuna's schedule: all ranks but the last one recompute, and do so while they would wait anyway.

    A rank that is free takes a backward before a recompute, and a recompute before a forward. A recompute
    begins so that the gradient arrives as it ends. Between its recompute and its backward a rank runs nothing
    else, so the activations of one micro-batch are there at a time. The last rank runs the backward of a
    micro-batch directly after its forward, and has nothing to recompute.

    The order depends on the durations, so the builder simulates: it gives the next action to the rank that
    can begin one first. The lists keep the order alone. A rank that reaches a recompute early begins it
    early.

    Source: Athlur et al. 2022, "Varuna: Scalable, Low-cost Training of Massive Deep Learning Models", the
    part on the schedule of micro-batches.
    """
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    ends: dict[Action, float] = {}
    done = Counter[tuple[Kind, int]]()

    def arrival(action: Action) -> float:
        """The time at which the message of an action arrives; infinite if it is in no list yet."""
        return ends[action] + costs.transfer if action in ends else inf

    def next_of(rank: int) -> tuple[float, int, int, Action] | None:
        """The start, priority and rank of the action that a rank would run next; None if it has to wait."""
        times: dict[Action, float] = {}
        number, next_forward = done[Kind.BACKWARD, rank], forward(rank, done[Kind.FORWARD, rank])
        own, again = backward(rank, number), Action(Kind.RECOMPUTE, rank, number)
        if number < done[Kind.FORWARD, rank]:
            if rank == num_ranks - 1:
                times[own] = 0.0
            else:
                gradient = arrival(backward(rank + 1, number))
                times |= {own: gradient} if again in ends else {again: gradient - costs.of(again)}
        # By its time a backward comes directly after its recompute, but for the rounding of floats.
        if done[Kind.FORWARD, rank] < num_microbatches and again not in ends:
            before = next_forward._replace(chunk=rank - 1)
            times[next_forward] = arrival(before) if rank else 0.0
        free_from = ends[lists[rank][-1]] if lists[rank] else 0.0
        options = [
            (max(free_from, time), _PRIORITY[action.kind], rank, action)
            for action, time in times.items()
            if time < inf
        ]
        return min(options, default=None)

    options = [next_of(rank) for rank in range(num_ranks)]
    while found := [option for option in options if option is not None]:
        start, _, taker, action = min(found)
        lists[taker].append(action)
        ends[action] = start + costs.of(action)
        done[action.kind, taker] += 1
        for rank in range(max(0, taker - 1), min(num_ranks, taker + 2)):  # who exchanges with it
            options[rank] = next_of(rank)
    return Schedule(loop(num_ranks, 1), num_microbatches, frozen(lists))


def gpipe(num_ranks: int, num_microbatches: int, *, is_last_first: bool = False) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards.

    Backwards begin with the first micro-batch, as in torch.distributed.pipelining. With `is_last_first` they
    begin with the last one, as in the paper. Then the last micro-batch needs no recompute.

    Source: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", section 2.
    """
    lists = []
    for rank in range(num_ranks):
        places = [(rank, microbatch) for microbatch in range(num_microbatches)]
        lists.append(_alternate(places, places[::-1] if is_last_first else places, num_microbatches))
    return Schedule(loop(num_ranks, 1), num_microbatches, tuple(lists))


class Builder(NamedTuple):
    """A row of the table of schedules.

    `min_chunks` and `max_chunks` limit the chunks a rank, None: without limit. The smallest number is the
    default.
    """

    build: Callable[[int, int, int, bool, ActionCosts], Schedule]
    """(pipeline ranks, micro-batches, chunks a rank, with recomputation, costs) -> the schedule."""
    min_chunks: int
    max_chunks: int | None


SCHEDULES: dict[str, Builder] = {
    "gpipe": Builder(lambda p, m, _, recompute, __: gpipe(p, m, is_last_first=recompute), 1, 1),
    "1f1b": Builder(lambda p, m, *_: one_f_one_b(p, m), 1, 1),
    "interleaved": Builder(lambda p, m, chunks, *_: interleaved(p, m, chunks), 2, None),
    "zb-h1": Builder(lambda p, m, chunks, *_: zb_h1(p, m, chunks), 1, None),
    "zbv": Builder(lambda p, m, *_: zbv(p, m), 2, 2),
    "varuna": Builder(lambda p, m, _, __, costs: varuna(p, m, costs), 1, 1),
}
"""The builders by the names that a user writes."""


@functools.lru_cache(maxsize=32)
def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks_per_rank: int | None = None,
    *,
    recompute: bool = False,
    costs: ActionCosts | None = None,
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
    schedule = builder.build(num_ranks, num_microbatches, chunks, recompute, costs or ActionCosts())
    return with_recompute(schedule) if recompute else schedule


# ------------------------------------------------------------------------ the schedule of a config


def read_schedule(pipeline: Pipeline) -> Pipeline:
    """Return settings that have the text of the user's list, if they name its file.

    Raises:
        ValueError: the file cannot be read.
    """
    given = pipeline.schedule
    if given in SCHEDULES or given in ASYNCHRONOUS or _is_text(given):
        return pipeline
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"pipeline.schedule: expected a file of lists, got {given}: {error}") from None
    return replace(pipeline, schedule=text + "\n")  # the end of a line shows that it is a text, not a name


def schedule_of(pipeline: Pipeline, num_ranks: int, num_microbatches: int, steps_taken: int = 0) -> Schedule:
    """Return the schedule that a config names, or whose text it has, for so many micro-batches.

    Args:
        pipeline: the settings, with a list as its text.
        num_ranks: the pipeline ranks.
        num_microbatches: micro-batches of the batch.
        steps_taken: the steps of the optimizer before the batch; the first ones may be synchronous.

    Raises:
        ValueError: it does not exist with these numbers, or the user's list cannot run.
    """
    name, num_chunks = pipeline.schedule, pipeline.num_chunks
    if name in ASYNCHRONOUS:
        num_synchronous = count_synchronous(pipeline, num_ranks, num_microbatches, steps_taken)
        return steady(num_ranks, num_microbatches, pipeline.step_size(num_ranks), num_synchronous)
    if not _is_text(name):
        return build_schedule(name, num_ranks, num_microbatches, num_chunks)
    return _parse(name, num_ranks, num_microbatches, num_chunks, pipeline.is_asynchronous)


def count_synchronous(pipeline: Pipeline, num_ranks: int, num_microbatches: int, steps_taken: int) -> int:
    """Return the synchronous steps of an asynchronous list; arguments as in `schedule_of`."""
    left = max(0, pipeline.synchronous_steps - steps_taken)
    return min(left, -(-num_microbatches // pipeline.step_size(num_ranks)))


def full_schedule_of(pipeline: Pipeline, num_ranks: int) -> Schedule:
    """Return lists of an asynchronous pipeline that is full, with as many steps crossed as in any others.

    The lists that a batch runs may be shorter, or have synchronous steps. Lists of the user are as they are.
    """
    num = pipeline.num_microbatches
    if pipeline.schedule in ASYNCHRONOUS:  # the pipeline fills, and a step begins and ends
        num = num_ranks + pipeline.step_size(num_ranks)
    return schedule_of(pipeline, num_ranks, num, pipeline.synchronous_steps)


def _is_text(schedule: str) -> bool:
    return "\n" in schedule


@functools.lru_cache(maxsize=32)
def _parse(
    text: str, num_ranks: int, num_microbatches: int, num_chunks: int | None, is_asynchronous: bool
) -> Schedule:
    """Return the schedule of a text, checked against the numbers of a config.

    A synchronous one has no steps: each batch of training ends with one.
    """
    try:
        schedule = parse_schedule(text)
        if is_asynchronous:
            require_steps(schedule)
        else:
            schedule = without_steps(schedule)
        simulate(schedule)
    except ValueError as error:
        raise ValueError(f"pipeline.schedule: {error}") from None
    numbers = (
        ("mesh.pp", {schedule.num_ranks}, num_ranks),
        ("pipeline.num_microbatches", {schedule.num_microbatches}, num_microbatches),
        ("pipeline.num_chunks", {len(chunks) for chunks in schedule.chunks}, num_chunks),
    )
    for key, listed, got in numbers:
        if got is not None and listed != {got}:
            expected = " and ".join(map(str, sorted(listed)))
            raise ValueError(f"{key}: expected {expected}, as in the lists of pipeline.schedule, got {got}")
    return schedule
