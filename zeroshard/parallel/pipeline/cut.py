"""The cut of a model into chunks, and its report: at modules that are named, or by a balance of its blocks.

split    ["layers.3"]       blocks 0 1 2 | 3 4 5 6
balance  "time"             runs of blocks with about the same measured time
         "bottleneck"       the same, with the least time of the slowest run
         "memory"           runs with about the same bytes of parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from zeroshard.config.sections import Config
from zeroshard.internals.warn import warn_user
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.chunked import Chunked, Outline, base_of, unknown_model, without_adapters
from zeroshard.parallel.pipeline.partition import Balance, BlockProfile, partition
from zeroshard.parallel.pipeline.profile import (
    Profiler,
    SampleSource,
    measure_blocks,
    same_random_numbers,
    sample_of,
    weigh_blocks,
)
from zeroshard.parallel.pipeline.schedules import read_schedule, schedule_of, with_schedule
from zeroshard.parallel.pipeline.traced import TracedChunks
from zeroshard.tables import format_bytes, render

_LENGTH = 2
"""Tokens of the input of a check: a forward that takes the first token alone is found."""


class ModelCut(NamedTuple):
    """The cut of a model. It is made on one rank and holds for all."""

    outline: Outline
    schedule: str
    """The name of the schedule, or the text of the user's list."""
    runs: tuple[range, ...]
    """The blocks of each chunk."""
    blocks: tuple[BlockProfile, ...]
    is_measured: bool
    """True if times are seconds; False if they are numbers of parameters."""


def cut_model(
    chunks: Chunked | TracedChunks,
    config: Config,
    source: SampleSource,
    device: torch.device,
    *,
    measures: bool = True,
) -> ModelCut:
    """Return the cut that a config asks for; the blocks are measured if it depends on their times.

    Args:
        chunks: the whole model; it does not change.
        config: the config.
        source: the samples of a micro-batch, and the loss.
        device: the device on which blocks are measured, one at a time.
        measures: False takes numbers of parameters in place of times.

    Raises:
        ValueError: there is no such schedule or no such block, their numbers do not fit, or the model
            computes outside of its modules.
    """
    schedule = read_schedule(config)
    config = with_schedule(config, schedule)
    num_chunks = schedule_of(config, config.pipeline.num_microbatches).num_chunks
    outline, split = chunks.outline, config.pipeline.split
    weighed = measured = weigh_blocks(chunks)
    if isinstance(chunks, Chunked):
        require_handed_on(chunks, device)
        if split is None and measures and config.pipeline.balance != "memory":
            measured = _measure(chunks, config, source, device) or weighed
    if split is None:
        runs = partition(measured, num_chunks, cast(Balance, config.pipeline.balance))
    else:
        runs = split_at(split, outline, num_chunks)
    return ModelCut(outline, schedule, runs, measured, measured is not weighed)


def require_handed_on(chunks: Chunked, device: torch.device) -> None:
    """Check that a model computes nothing between its modules; it does not change.

    A chunk is the whole model, in which the modules of other chunks hand on what they are given. So a model
    whose modules all hand on their input must return its input. One that scales embeddings or logits in a
    forward of its own would scale them in every chunk. One whose blocks return tuples would take them apart.

    Args:
        chunks: a `Sequential`, which is not checked, or a causal language model of transformers.
        device: the device of the check, which needs a few kilobytes.

    Raises:
        ValueError: the model computes something outside of its modules.
    """
    model, outline = chunks.model, chunks.outline
    if isinstance(model, nn.Sequential):
        return
    inside = {p for name in outline.names for p in model.get_submodule(name).parameters()}
    if outside := [name for name, parameter in model.named_parameters() if parameter not in inside]:
        raise unknown_model(model, f"its parameter '{outside[0]}' is in none of these")
    causal: Any = without_adapters(model)
    embedding = causal.get_input_embeddings()
    with same_random_numbers(device), torch.no_grad(), Profiler(device, None).inside(model, outline):
        value = torch.rand(1, _LENGTH, embedding.weight.shape[-1], device=device)
        whole = Chunked(model)
        whole.keep([range(len(outline.blocks))], [0])
        try:  # all modules are in chunk 0, so in any other chunk all of them hand on
            found = whole(1, [value.clone()], {})[0]
        except Exception as error:  # of any kind: the model takes apart what its blocks return
            why = f"its forward does not run without its blocks ({type(error).__name__}: {error})"
            raise unknown_model(model, why) from error
    if not (isinstance(found, Tensor) and torch.equal(found, value)):
        why = "its forward computes outside of these, such as a factor of embeddings or logits"
        raise unknown_model(model, why)
    for module in (causal, base_of(causal)):
        if not type(module).forward.__globals__["__name__"].startswith(("transformers", "torch.")):
            why = f"the forward of {type(module).__name__} may use what the first chunk gets, as input_ids"
            raise unknown_model(model, why)


def _measure(
    chunks: Chunked, config: Config, source: SampleSource, device: torch.device
) -> tuple[BlockProfile, ...] | None:
    """Return the measured profile of the blocks; None without samples, or if they cannot be measured."""
    dtype = config.precision.param_dtype
    try:
        sample = sample_of(chunks.model, source, config.micro_batch_size)
        if sample is None:
            return None
        return measure_blocks(chunks, sample, source.loss_fn, device=device, dtype=dtype)
    except Exception as error:  # of any kind: training can do without times
        warn_user(
            f"pipeline.balance='{config.pipeline.balance}': the blocks of the model could not be measured; "
            f"their numbers of parameters stand for their times: {type(error).__name__}: {error}"
        )
        return None


def split_at(names: Sequence[str], outline: Outline, num_chunks: int) -> tuple[range, ...]:
    """Return the blocks of each chunk, given the names of the blocks that each begin a new one.

    Raises:
        ValueError: a name is no block, the names are not in the order of the model, or there are not as many
            as the chunks need.
    """
    places = {name: place for place, name in enumerate(outline.blocks)}
    first, last = outline.blocks[0], outline.blocks[-1]
    for name in names:
        if name not in places:
            raise ValueError(f"pipeline.split: expected blocks from '{first}' to '{last}', got '{name}'")
    if len(names) != num_chunks - 1:
        raise ValueError(
            f"pipeline.split: expected {num_chunks - 1} names, which begin all but the first of {num_chunks} "
            f"chunks, got {len(names)}: {', '.join(names)}"
        )
    ends = [*(places[name] for name in names), len(outline.blocks)]
    if any(one >= other for one, other in pairwise([0, *ends])):
        raise ValueError(
            f"pipeline.split: expected blocks after '{first}', which begins the first chunk, in the order of "
            f"the model, each once, got {', '.join(names)}"
        )
    return tuple(map(range, [0, *ends[:-1]], ends))


class ChunkReport(NamedTuple):
    """A chunk of the model."""

    rank: int
    blocks: tuple[str, ...]
    time_share: float
    """Its part of the time of all chunks, 0 to 1. Without a measurement parameters stand for time."""
    parameter_bytes: int
    """Bytes of its parameters, as the model has them; with modules before or after the blocks."""


class PipelineReport(NamedTuple):
    """The chunks of a model, in its order; the same on all ranks."""

    chunks: tuple[ChunkReport, ...]
    is_measured: bool
    """True if times were measured. False: parameters stand for them."""

    def __str__(self) -> str:
        origin = "measured" if self.is_measured else "by number of parameters"
        rows = [
            (
                f"chunk {number}",
                str(chunk.rank),
                chunk.blocks[0] if len(chunk.blocks) == 1 else f"{chunk.blocks[0]} to {chunk.blocks[-1]}",
                f"{chunk.time_share:.1%}",
                format_bytes(chunk.parameter_bytes),
            )
            for number, chunk in enumerate(self.chunks)
        ]
        columns = ("", "pipeline rank", "blocks", "time", "parameters")
        return render(f"chunks of the model; time {origin}", columns, rows)


def report_cut(cut: ModelCut, schedule: Schedule) -> PipelineReport:
    """Return the report of a cut whose chunks are placed as in a schedule."""
    total = sum(block.time for block in cut.blocks)
    chunks = []
    for chunk, run in enumerate(cut.runs):
        own = [cut.blocks[number] for number in run]
        names = tuple(cut.outline.blocks[number] for number in run)
        share = sum(block.time for block in own) / total if total else 0.0
        num_bytes = sum(block.parameter_bytes for block in own)
        chunks.append(ChunkReport(schedule.placement[chunk], names, share, num_bytes))
    return PipelineReport(tuple(chunks), cut.is_measured)
