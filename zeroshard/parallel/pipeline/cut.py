"""The cut of a model into chunks, and its report: at modules that are named, or by a balance of its blocks.

split    ["layers.3"]       blocks 0 1 2 | 3 4 5 6
balance  "time"             runs of blocks with about the same number of operations
         "memory"           runs with about the same bytes of parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroshard.config.pipeline import Pipeline
from zeroshard.internals.nested import find_tensors
from zeroshard.internals.warn import warn_user
from zeroshard.lazy.deferred import is_known, values_of
from zeroshard.parallel.pipeline.actions import Schedule
from zeroshard.parallel.pipeline.chunked import (
    Absent,
    Chunked,
    Outline,
    base_of,
    unknown_model,
    without_adapters,
)
from zeroshard.parallel.pipeline.partition import Balance, BlockProfile, partition
from zeroshard.parallel.pipeline.profile import (
    SampleBatch,
    count_blocks,
    same_modes,
    same_random_numbers,
    weigh_blocks,
)
from zeroshard.parallel.pipeline.schedules import read_schedule, schedule_of
from zeroshard.parallel.pipeline.traced import TracedChunks, find_begin
from zeroshard.tables import format_bytes, render

if TYPE_CHECKING:
    from zeroshard.engine import Engine

_LENGTH = 2
"""Tokens of the input of a check: a forward that takes the first token alone is found."""


class ModelCut(NamedTuple):
    """The cut of a model. It is made on one rank and holds for all."""

    outline: Outline
    pipeline: Pipeline
    """The settings, with the name of the schedule or the text of the user's list."""
    num_ranks: int
    """The pipeline ranks."""
    runs: tuple[range, ...]
    """The blocks of each chunk."""
    blocks: tuple[BlockProfile, ...]
    is_measured: bool
    """True if times are operations; False if they are numbers of parameters."""

    def schedule(self, num_microbatches: int, steps_taken: int = 0) -> Schedule:
        """Return the schedule of a batch, see `schedule_of`."""
        return schedule_of(self.pipeline, self.num_ranks, num_microbatches, steps_taken)


def cut_model(
    chunks: Chunked | TracedChunks,
    pipeline: Pipeline,
    num_ranks: int,
    device: torch.device,
    read_sample: Callable[[], SampleBatch | None] | None,
) -> ModelCut:
    """Return the cut that a config asks for; operations are counted if it depends on them.

    Args:
        chunks: the whole model; it does not change.
        pipeline: the settings of the cut and of its schedule.
        num_ranks: the pipeline ranks.
        device: the device of a check, see `require_handed_on`.
        read_sample: returns a micro-batch, if there is one. None: parameters are counted, not operations.

    Raises:
        ValueError: there is no such schedule or no such block, their numbers do not fit, or the model
            computes outside of its modules.
    """
    pipeline = read_schedule(pipeline)
    num_chunks = schedule_of(pipeline, num_ranks, pipeline.num_microbatches).num_chunks
    outline, split = chunks.outline, pipeline.split
    weighed = counted = weigh_blocks(chunks)
    if isinstance(chunks, Chunked):
        require_handed_on(chunks, device)
        if split is None and read_sample is not None and pipeline.balance != "memory":
            counted = _count(chunks, read_sample) or weighed
    if split is None:
        runs = partition(counted, num_chunks, cast(Balance, pipeline.balance))
    else:
        runs = split_at(split, outline, num_chunks)
    return ModelCut(outline, pipeline, num_ranks, runs, counted, counted is not weighed)


def require_handed_on(chunks: Chunked, device: torch.device) -> None:
    """Check that a model computes nothing between its modules; it does not change.

    A chunk is the whole model, in which the modules of other chunks hand on what they are given. So a model
    whose modules all hand on their input must return its input. One that scales embeddings or logits in a
    forward of its own would scale them in every chunk. One whose blocks return tuples would take them apart.
    One that gives its blocks the embeddings as well would give them the output of the chunk before.

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
    with same_random_numbers(device), same_modes(model), torch.enable_grad():
        model.train()  # from_pretrained gives it in eval mode, in which dropout does nothing
        placed = {
            name: (values_of(one) if is_known(one) else torch.zeros_like(one, device="cpu")).to(
                device, copy=True
            )
            for name, one in model.named_buffers()
        }
        value = torch.rand(1, _LENGTH, embedding.weight.shape[-1], device=device, requires_grad=True)
        whole = Chunked(model)
        whole.keep([range(len(outline.blocks))], [0], _OfOneValue)
        try:  # all modules are in chunk 0, so in any other chunk all of them hand on
            found = _call_with(model, placed, lambda: whole(1, [value.clone()], {}))[0]
        except Exception as error:  # of any kind: the model takes apart what its blocks return
            why = f"its forward does not run without its blocks ({type(error).__name__}: {error})"
            raise unknown_model(model, why) from error
    if not (isinstance(found, Tensor) and torch.equal(found, value)):
        why = "its forward computes outside of these, such as dropout, or a factor of embeddings or logits"
        raise unknown_model(model, why)
    for module in (causal, base_of(causal)):
        if not type(module).forward.__globals__["__name__"].startswith(("transformers", "torch.")):
            why = f"the forward of {type(module).__name__} may use what the first chunk gets, as input_ids"
            raise unknown_model(model, why)


class _OfOneValue(Absent):
    """A stand-in that refuses a second value that needs a gradient."""

    def forward(self, value: Tensor, *others: Any, **named: Any) -> Tensor:
        if any(one.requires_grad for one in find_tensors((others, named))[0]):
            raise RuntimeError(f"'{self._name}' gets the embeddings, too, which only the first chunk has")
        return super().forward(value)

    __call__ = forward


def _call_with(model: nn.Module, placed: Mapping[str, Tensor], run: Callable[[], Any]) -> Any:
    """Call a function while a model has other parameters and buffers, by their names."""
    tensors = {f"module.{name}": value for name, value in placed.items()}
    return functional_call(_With(model), tensors, (run,))  # it puts them under the other names of tied ones


class _With(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _count(chunks: Chunked, read_sample: Callable[[], SampleBatch | None]) -> tuple[BlockProfile, ...] | None:
    """Return the profile of the blocks; None without samples, or if their operations cannot be counted."""
    try:
        sample = read_sample()
        return None if sample is None else count_blocks(chunks, sample)
    except Exception as error:  # of any kind: training can do without
        warn_user(
            "pipeline.balance='time': the operations of the blocks could not be counted; their numbers of "
            f"parameters stand for these: {type(error).__name__}: {error}"
        )
        return None


def split_at(names: Sequence[str], outline: Outline, num_chunks: int) -> tuple[range, ...]:
    """Return the blocks of each chunk, given patterns for the blocks that each begin a new one.

    Raises:
        ValueError: a pattern does not fit one block, the blocks are not in the order of the model, or there
            are not as many as the chunks need.
    """
    blocks = outline.blocks
    ends = [*(blocks.index(find_begin(name, blocks)) for name in names), len(blocks)]
    if len(names) != num_chunks - 1 or any(one >= other for one, other in pairwise([0, *ends])):
        raise ValueError(
            f"pipeline.split: expected {num_chunks - 1} blocks that begin all but the first of {num_chunks} "
            f"chunks, after '{blocks[0]}', up to '{blocks[-1]}', in the order of the model, "
            f"got {len(names)}: {', '.join(names)}"
        )
    return tuple(map(range, [0, *ends[:-1]], ends))


class ChunkReport(NamedTuple):
    """A chunk of the model."""

    rank: int
    blocks: tuple[str, ...]
    time_share: float
    """Its part of the operations of all chunks, 0 to 1. Without a count parameters stand for these."""
    parameter_bytes: int
    """Bytes of its parameters, as the model has them; with modules before or after the blocks."""


class PipelineReport(NamedTuple):
    """The chunks of a model, in its order; the same on all ranks."""

    chunks: tuple[ChunkReport, ...]
    is_measured: bool
    """True if operations were counted. False: parameters stand for them."""

    def __str__(self) -> str:
        origin = "by operations" if self.is_measured else "by number of parameters"
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


def pipeline_report(engine: Engine) -> PipelineReport:
    """Blocks, share of the time and parameters of each chunk of the pipeline.

    Raises:
        RuntimeError: the model is not cut into chunks.
    """
    if engine._part is None:
        raise RuntimeError("pipeline_report(): expected mesh.pp above 1, got 1")
    cut = engine._part.cut
    placement = cut.schedule(cut.pipeline.num_microbatches).placement
    total = sum(block.time for block in cut.blocks)
    chunks = []
    for chunk, run in enumerate(cut.runs):
        own = [cut.blocks[number] for number in run]
        names = tuple(cut.outline.blocks[number] for number in run)
        share = sum(block.time for block in own) / total if total else 0.0
        chunks.append(
            ChunkReport(placement[chunk], names, share, sum(block.parameter_bytes for block in own))
        )
    return PipelineReport(tuple(chunks), cut.is_measured)
