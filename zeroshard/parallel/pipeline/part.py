"""The part of a model that a pipeline rank holds; the schedule by which all ranks compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import torch
from torch import nn

from zeroshard.config.pipeline import Pipeline
from zeroshard.parallel.pipeline.actions import Kind, Schedule, with_sharding
from zeroshard.parallel.pipeline.chunked import Chunked
from zeroshard.parallel.pipeline.cut import ModelCut
from zeroshard.parallel.pipeline.simulate import count_activations
from zeroshard.parallel.pipeline.traced import TracedChunks
from zeroshard.plan.names import Ignored
from zeroshard.plan.originals import Original
from zeroshard.plan.units import UnitSpec


@dataclass(frozen=True)
class Holders:
    """A parameter that several chunks use, such as a tied embedding and head."""

    name: str
    """Its name in the whole model."""
    ranks: tuple[int, ...]
    """The pipeline ranks of these chunks, in order; there may be one alone."""
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class ModelPart:
    """A rank's part of a model."""

    chunked: Chunked | TracedChunks
    chunks: tuple[int, ...]
    """The chunks of this rank."""
    holders: Mapping[nn.Parameter, Holders]
    """By parameter of this rank that several chunks use."""
    is_frozen: bool
    """True if no parameter of this rank is trained: then it has no optimizer."""
    is_trained: bool
    """True if any parameter of the whole model is trained."""
    pairs: tuple[tuple[int, int], ...]
    """The pipeline ranks that send messages, and those that get them."""
    cut: ModelCut
    gathers_once: bool
    """True if each chunk is unsharded once a batch, where the batch has one step."""

    def schedule(self, num_microbatches: int, *, has_backward: bool, steps_taken: int = 0) -> Schedule:
        """Return the schedule of a batch, or of its forwards alone.

        Args:
            num_microbatches: micro-batches of the batch.
            has_backward: False for the forwards alone.
            steps_taken: the steps of training before it; the first ones may be synchronous.

        Raises:
            ValueError: it does not exist with this number of micro-batches.
        """
        schedule = self.cut.schedule(num_microbatches, steps_taken)
        if not has_backward:
            schedule = schedule.forwards
        if self.gathers_once and all(a.is_compute for _, a in schedule):
            return with_sharding(schedule)
        return schedule

    @property
    def in_flight(self) -> float:
        """The most micro-batches whose activations this rank holds at a time; a chunk counts as its part."""
        schedule = self.cut.schedule(self.cut.pipeline.num_microbatches)
        rank = schedule.placement[self.chunks[0]]
        return count_activations(schedule).per_rank[rank] / len(self.chunks)

    @property
    def has_halves(self) -> bool:
        """True if the backwards of a batch come in two halves."""
        schedule = self.cut.schedule(self.cut.pipeline.num_microbatches)
        return any(action.kind is Kind.WEIGHT_GRADIENT for _, action in schedule)

    def named(self, specs: Sequence[UnitSpec]) -> list[UnitSpec]:
        """Return units whose shared parameters have their names in the whole model, and their holders."""
        return [replace(spec, originals=list(map(self._named, spec.originals))) for spec in specs]

    def _named(self, original: Original) -> Original:
        found = self.holders.get(original.parameter)
        return original if found is None else replace(original, fqn=found.name, holders=found.ranks)


def take_part(
    chunked: Chunked | TracedChunks,
    cut: ModelCut,
    rank: int,
    ignored: Ignored,
    param_dtype: torch.dtype | None,
    *,
    gathers_once: bool,
) -> ModelPart:
    """Take the modules of other pipeline ranks out of a model.

    Args:
        chunked: the whole model; it is changed.
        cut: the cut of the model into chunks, the same on all ranks.
        rank: this rank's place on the axis pp.
        ignored: the parameters that each rank keeps for itself.
        param_dtype: the compute dtype; None: that of each parameter.
        gathers_once: see `ModelPart`.

    Raises:
        ValueError: several chunks share a parameter that each rank is to keep for itself, or a buffer that
            they may write.
    """
    model, pipeline = chunked.model, cut.pipeline
    schedule = cut.schedule(pipeline.num_microbatches)
    is_trained = any(parameter.requires_grad for parameter in model.parameters())
    holders = _find_holders(chunked, cut.runs, schedule)
    _refuse_shared(holders, ignored, pipeline)
    if pipeline.is_asynchronous and param_dtype is None:  # a Config has refused float16 already
        _refuse_half(model)
    chunked.keep(cut.runs, schedule.chunks[rank])
    return ModelPart(
        chunked=chunked,
        chunks=schedule.chunks[rank],
        holders={parameter: holders[parameter] for parameter in model.parameters() if parameter in holders},
        is_frozen=not any(parameter.requires_grad for parameter in model.parameters()),
        is_trained=is_trained,
        pairs=_pairs(schedule, holders),
        cut=cut,
        gathers_once=gathers_once,
    )


def _pairs(schedule: Schedule, holders: Mapping[nn.Parameter, Holders]) -> tuple[tuple[int, int], ...]:
    """The pairs of ranks of chunks that follow each other, and of those that share a parameter, sorted."""
    both_ways = [pair for pair in pairwise(schedule.placement) if pair[0] != pair[1]]
    for found in holders.values():
        both_ways += combinations(found.ranks, 2)
    return tuple(sorted({*both_ways, *((other, one) for one, other in both_ways)}))


def _refuse_shared(holders: Mapping[nn.Parameter, Holders], ignored: Ignored, pipeline: Pipeline) -> None:
    """Refuse parameters that several chunks share, and that each rank is to keep or to step for itself."""
    for parameter, found in holders.items():
        if parameter in ignored:
            raise ValueError(
                f"config key 'ignored': expected a parameter of one chunk, got '{ignored[parameter]}', which "
                f"chunks {', '.join(map(str, found.chunks))} share: its gradients would not be added up"
            )
        if pipeline.is_asynchronous and len(found.ranks) > 1:
            raise ValueError(
                "an asynchronous pipeline: expected parameters of one pipeline rank each, got "
                f"'{found.name}', which pipeline ranks {', '.join(map(str, found.ranks))} share: they step "
                "at different times. Give each its own, such as tie_word_embeddings=False of transformers"
            )


def _refuse_half(model: nn.Module) -> None:
    """Refuse float16, whose loss scale follows from the gradients of the whole model."""
    for name, parameter in model.named_parameters():
        if parameter.dtype is torch.float16:
            raise ValueError(
                f"an asynchronous pipeline: expected parameters of another dtype than float16, got '{name}'; "
                "set precision.param_dtype to bfloat16 or float32, in which all of them then compute"
            )


def _find_holders(
    chunked: Chunked | TracedChunks, runs: Sequence[range], schedule: Schedule
) -> dict[nn.Parameter, Holders]:
    """Find the parameters that modules of several chunks use; refuse buffers, which each would write."""
    chunks: dict[torch.Tensor, set[int]] = {}
    for chunk, run in enumerate(runs):
        for tensor in chunked.tensors_of(run):
            chunks.setdefault(tensor, set()).add(chunk)
    for name, buffer in chunked.model.named_buffers():
        if len(users := sorted(chunks.get(buffer, ()))) > 1:
            raise ValueError(
                f"mesh.pp: expected a buffer of one chunk, got '{name}', which chunks {users} may write. "
                "Copy its module (copy.deepcopy), or register it with persistent=False if it is only read"
            )
    holders: dict[nn.Parameter, Holders] = {}
    for name, parameter in chunked.model.named_parameters():
        if len(users := sorted(chunks.get(parameter, ()))) > 1:
            ranks = sorted({schedule.placement[chunk] for chunk in users})
            holders[parameter] = Holders(name, tuple(ranks), tuple(users))
    return holders
