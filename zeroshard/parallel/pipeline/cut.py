"""The cut of a model into chunks, and its report: at modules that are named, or by a balance of its blocks.

split    ["layers.3"]       blocks 0 1 2 | 3 4 5 6
balance  "time"             runs of blocks with about the same number of parameters that multiply
         "memory"           runs with about the same bytes of parameters

A product of matrices takes almost all of the time, and does the same number of operations for each of its
weights. So weights stand for times: nothing runs, and a cut does not depend on the data. Modules before the
blocks count as a part of the first block, those after them as a part of the last one.

A balance has the least variance over the chunks. As the total is the same for every division, the least
variance is the least sum of squares, and a sum over chunks can be minimized from the last chunk on (dynamic
programming): for n blocks and k chunks in O(n^2 k). Numbers are integers, so the result is exact.

    weights   4 1 1 1 1      of each block
    chunks    4 | 1 1 1 1    2 chunks: the variance is least
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from zeroshard.config.sections import Config
from zeroshard.lazy.deferred import is_known, values_of
from zeroshard.parallel.pipeline.chunked import Chunked, Outline, base_of, unknown_model, without_adapters
from zeroshard.parallel.pipeline.schedules import read_schedule, schedule_of, with_schedule
from zeroshard.parallel.random import forked
from zeroshard.tables import format_bytes, render

if TYPE_CHECKING:
    from zeroshard.engine import Engine

_LENGTH = 2
"""Tokens of the input of a check: a forward that takes the first token alone is found."""


class BlockSize(NamedTuple):
    """The size of a block, with the modules before the first one, or after the last one."""

    weights: int
    """Elements of its parameters, without tables of embeddings: these are read, and multiply nothing."""
    parameter_bytes: int


class ModelCut(NamedTuple):
    """The cut of a model. It is made on one rank and holds for all."""

    outline: Outline
    schedule: str
    """The name of the schedule, or the text of the user's list."""
    runs: tuple[range, ...]
    """The blocks of each chunk."""
    blocks: tuple[BlockSize, ...]


def cut_model(chunks: Chunked, config: Config, device: torch.device) -> ModelCut:
    """Return the cut that a config asks for.

    Args:
        chunks: the whole model; it does not change.
        config: the config.
        device: the device of a check, see `require_handed_on`.

    Raises:
        ValueError: there is no such schedule or no such block, their numbers do not fit, or the model
            computes outside of its modules.
    """
    schedule = read_schedule(config)
    config = with_schedule(config, schedule)
    num_chunks = schedule_of(config, config.pipeline.num_microbatches).num_chunks
    outline, split = chunks.outline, config.pipeline.split
    require_handed_on(chunks, device)
    blocks = weigh_blocks(chunks)
    if split is None:
        is_memory = config.pipeline.balance == "memory"
        sizes = [block.parameter_bytes if is_memory else block.weights for block in blocks]
        runs = partition(sizes, num_chunks)
    else:
        runs = split_at(split, outline, num_chunks)
    return ModelCut(outline, schedule, runs, blocks)


def weigh_blocks(chunks: Chunked) -> tuple[BlockSize, ...]:
    """Return the size of each block of a model."""
    found = []
    for number in range(len(chunks.outline.blocks)):
        names = chunks.outline.chunk(range(number, number + 1))
        inside = [module for name in names for module in chunks.model.get_submodule(name).modules()]
        own, read = (
            {p for module in modules for p in module.parameters(recurse=False)}
            for modules in (inside, [module for module in inside if isinstance(module, nn.Embedding)])
        )
        found.append(BlockSize(sum(p.numel() for p in own - read), sum(p.nbytes for p in own)))
    return tuple(found)


def partition(sizes: Sequence[int], num_chunks: int) -> tuple[range, ...]:
    """Return the blocks of each chunk: contiguous, at least one, with the least variance of their sums.

    Of several such divisions the one with the fewest blocks in the first chunk is taken, then in the second,
    and so on, because in 1F1B the first ranks hold the most activations.

    Args:
        sizes: the size of each block, in the order of the model.
        num_chunks: chunks to make.

    Raises:
        ValueError: there are fewer blocks than chunks.
    """
    num_blocks = len(sizes)
    if not 1 <= num_chunks <= num_blocks:
        raise ValueError(
            f"pipeline.schedule: expected 1 to {num_blocks} chunks, as each has a block or more, got "
            f"{num_chunks}"
        )
    before = list(accumulate(sizes, initial=0))

    @cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        """The least sum of squares for the blocks from `first` on, and the ends of the chunks that are left.

        Of several such divisions it is the first one in the order of the tie rule.
        """
        if left == 1:
            return (before[num_blocks] - before[first]) ** 2, (num_blocks,)
        rests = ((end, *best(end, left - 1)) for end in range(first + 1, num_blocks - left + 2))
        return min(((before[end] - before[first]) ** 2 + rest, (end, *ends)) for end, rest, ends in rests)

    _, ends = best(0, num_chunks)
    return tuple(map(range, [0, *ends[:-1]], ends))


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
    with forked(device), torch.no_grad():
        placed = {
            name: (values_of(one) if is_known(one) else torch.zeros_like(one, device="cpu")).to(
                device, copy=True
            )
            for name, one in model.named_buffers()
        }
        value = torch.rand(1, _LENGTH, embedding.weight.shape[-1], device=device)
        whole = Chunked(model)
        whole.keep([range(len(outline.blocks))], [0])
        try:  # all modules are in chunk 0, so in any other chunk all of them hand on
            tensors = {f"module.{name}": one for name, one in placed.items()}
            found = functional_call(_With(model), tensors, (lambda: whole(1, value.clone(), {}),))
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


class _With(nn.Module):
    """A model whose buffers `functional_call` replaces during a call of anything."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def split_at(names: Sequence[str], outline: Outline, num_chunks: int) -> tuple[range, ...]:
    """Return the blocks of each chunk, given the names of the blocks that each begin a new one.

    Raises:
        ValueError: a name is no block, the names are not in the order of the model, or there are not as many
            as the chunks need.
    """
    places = {name: place for place, name in enumerate(outline.blocks)}
    ends = [*(places.get(name, 0) for name in names), len(outline.blocks)]
    if len(names) != num_chunks - 1 or any(one >= other for one, other in pairwise([0, *ends])):
        raise ValueError(
            f"pipeline.split: expected {num_chunks - 1} blocks that begin all but the first of {num_chunks} "
            f"chunks, after '{outline.blocks[0]}', up to '{outline.blocks[-1]}', in the order of the model, "
            f"got {len(names)}: {', '.join(names)}"
        )
    return tuple(map(range, [0, *ends[:-1]], ends))


class ChunkReport(NamedTuple):
    """A chunk of the model."""

    rank: int
    blocks: tuple[str, ...]
    time_share: float
    """Its part of the parameters of all chunks that multiply, 0 to 1; see `weigh_blocks`."""
    parameter_bytes: int
    """Bytes of its parameters, as the model has them; with modules before or after the blocks."""


class PipelineReport(NamedTuple):
    """The chunks of a model, in its order; the same on all ranks."""

    chunks: tuple[ChunkReport, ...]

    def __str__(self) -> str:
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
        return render("chunks of the model; time by weights", columns, rows)


def pipeline_report(engine: Engine) -> PipelineReport:
    """Blocks, share of the time and parameters of each chunk of the pipeline.

    Raises:
        RuntimeError: the model is not cut into chunks.
    """
    if engine._part is None:
        raise RuntimeError("pipeline_report(): expected mesh.pp above 1, got 1")
    cut, config = engine._part.cut, engine._part.config
    placement = schedule_of(config, config.pipeline.num_microbatches).placement
    total = sum(block.weights for block in cut.blocks)
    chunks = []
    for chunk, run in enumerate(cut.runs):
        own = [cut.blocks[number] for number in run]
        names = tuple(cut.outline.blocks[number] for number in run)
        share = sum(block.weights for block in own) / total if total else 0.0
        chunks.append(
            ChunkReport(placement[chunk], names, share, sum(block.parameter_bytes for block in own))
        )
    return PipelineReport(tuple(chunks))
