"""The part of a model that a pipeline rank holds, and the schedule by which all ranks compute it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from zeroshard.config.sections import Config
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.outline import Outline
from zeroshard.parallel.pipeline.partition import Block, partition
from zeroshard.parallel.pipeline.schedules import build_schedule


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a model."""

    chunked: Chunked
    schedule: Schedule


def take_part(model: nn.Module, outline: Outline, config: Config, rank: int) -> Part:
    """Take the modules of other pipeline ranks out of a model.

    Args:
        model: the whole model; it is changed.
        outline: the order of its modules.
        config: the config.
        rank: this rank's place on the axis pp.

    Raises:
        ValueError: there are fewer blocks than chunks, or no such schedule.
    """
    settings, num_ranks = config.pipeline, config.mesh.pp
    schedule = build_schedule(settings.schedule, num_ranks, settings.num_microbatches, settings.num_chunks)
    sizes = [_bytes_of(model.get_submodule(name)) for name in outline.blocks]
    blocks = [Block(time=size, parameter_bytes=size) for size in sizes]
    runs = partition(blocks, schedule.num_chunks, "memory")
    return Part(Chunked(model, outline, runs, schedule.chunks[rank]), schedule)


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
