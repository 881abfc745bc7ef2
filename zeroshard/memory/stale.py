"""The memory that asynchronous pipelines take for weights of several ages, read from their schedules."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.config.sections import Config
from zeroshard.memory.planned import Pipelined
from zeroshard.parallel.pipeline.asynchronous.ages import Ages
from zeroshard.parallel.pipeline.asynchronous.method import noted_change
from zeroshard.parallel.pipeline.asynchronous.uses import WEIGHTS, count_live
from zeroshard.parallel.pipeline.sharding import ends_of_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """The weights of a pipeline rank beside the newest ones."""

    versions: int = 0
    """The most older versions that it keeps at a time."""
    states: int = 0
    """States, each like the main parameters, for a direction along which weights are moved."""
    moves: bool = False
    """True if actions have weights that are moved along a direction."""
    microbatches_per_step: int | None = None
    """The most micro-batches of a step; None: all of the batch."""


def staleness_of(pipelined: Pipelined | None, config: Config) -> list[Staleness] | None:
    """Return the weights of each pipeline rank; None for a synchronous pipeline, and without one."""
    if pipelined is None or not config.pipeline.is_asynchronous:
        return None
    schedule, method = pipelined.schedule, WEIGHTS[config.pipeline.chosen_weights]
    ages = Ages(schedule)
    uses = method.uses(ages)
    live = count_live(ages, uses)
    moved = {action.chunk for action, use in uses.items() if use.ahead}
    return [
        Staleness(
            versions=number - 1,
            states=int(noted_change(config, rank) is not None),
            moves=chunk in moved,
            microbatches_per_step=max(ends_of_steps(own).values()),
        )
        for rank, (number, (chunk,), own) in enumerate(
            zip(live, schedule.chunks, schedule.lists, strict=True)
        )
    ]
