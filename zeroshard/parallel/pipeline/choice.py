"""The schedule that a config chooses: one of ours by its name, or a list of the user's.

A list of the user's is the text of a schedule, or the path of a file with it. Rank 0 alone reads the file.
Its text takes the place of the path before the other ranks see it, so all ranks have the same list.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from zeroshard.config.pipeline import ASYNCHRONOUS
from zeroshard.config.sections import Config
from zeroshard.parallel.pipeline.actions import Schedule, parse_schedule, without_steps
from zeroshard.parallel.pipeline.schedules import SCHEDULES, build_schedule, require_steps, steady
from zeroshard.parallel.pipeline.simulate import simulate

_build = functools.lru_cache(maxsize=32)(build_schedule)
_steady = functools.lru_cache(maxsize=32)(steady)


def read_schedule(config: Config) -> str:
    """Return the name of a schedule of ours, or the text of the user's list, from a file or as it is.

    Raises:
        ValueError: the file cannot be read.
    """
    given = config.pipeline.schedule
    if given in SCHEDULES or given in ASYNCHRONOUS or _is_text(given):
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"pipeline.schedule: expected a file of lists, got {given}: {error}") from None
    return text + "\n"  # the end of a line shows that it is a text, not a name


def with_schedule(config: Config, schedule: str) -> Config:
    """Return the config with a name or a text as its schedule."""
    return replace(config, pipeline=replace(config.pipeline, schedule=schedule))


def schedule_of(config: Config, num_microbatches: int, steps_taken: int = 0) -> Schedule:
    """Return the schedule that a config names, or whose text it has, for so many micro-batches.

    Args:
        config: the config.
        num_microbatches: micro-batches of the batch.
        steps_taken: the steps of the optimizer before the batch; the first ones may be synchronous.

    Raises:
        ValueError: it does not exist with these numbers, or the user's list cannot run.
    """
    pipeline, num_ranks = config.pipeline, config.mesh.pp
    name, num_chunks = pipeline.schedule, pipeline.num_chunks
    if name in ASYNCHRONOUS:
        num_synchronous = count_synchronous(config, num_microbatches, steps_taken)
        return _steady(num_ranks, num_microbatches, pipeline.step_size(num_ranks), num_synchronous)
    if not _is_text(name):
        return _build(name, num_ranks, num_microbatches, num_chunks)
    return _parse(name, num_ranks, num_microbatches, num_chunks, pipeline.is_asynchronous)


def count_synchronous(config: Config, num_microbatches: int, steps_taken: int) -> int:
    """Return the synchronous steps of an asynchronous list; arguments as in `schedule_of`."""
    pipeline = config.pipeline
    left = max(0, pipeline.synchronous_steps - steps_taken)
    return min(left, -(-num_microbatches // pipeline.step_size(config.mesh.pp)))


def full_schedule_of(config: Config) -> Schedule:
    """Return lists of an asynchronous pipeline that is full, with as many steps crossed as in any others.

    The lists that a batch runs may be shorter, or have synchronous steps. Lists of the user are as they are.
    """
    return schedule_of(config, _num_until_full(config), config.pipeline.synchronous_steps)


def largest_schedule_of(config: Config) -> Schedule:
    """Return the lists that take the most memory, after the synchronous steps.

    They are the lists of a batch. But `train_batches` makes one list of many batches, so an asynchronous
    pipeline may be full with few micro-batches in each. It has the most versions when later versions replace
    the versions of the micro-batches that filled it.
    """
    num = config.pipeline.num_microbatches
    if config.pipeline.schedule in ASYNCHRONOUS:
        num = max(num, 2 * _num_until_full(config))
    return schedule_of(config, num, config.pipeline.synchronous_steps)


def _num_until_full(config: Config) -> int:
    """The micro-batches in which an asynchronous pipeline fills, and a step begins and ends."""
    pipeline, num_ranks = config.pipeline, config.mesh.pp
    if pipeline.schedule not in ASYNCHRONOUS:
        return pipeline.num_microbatches
    return num_ranks + pipeline.step_size(num_ranks)


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
