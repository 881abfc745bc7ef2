"""The part of a model that this rank takes, where pipeline ranks share a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from zeroshard.agreement import check_agreement
from zeroshard.assemble import specify_units
from zeroshard.checkpoint.manifest import describe_model
from zeroshard.comm.collectives import Axis, on_all
from zeroshard.config.sections import Config
from zeroshard.forwards.composed import form_of
from zeroshard.lazy.deferred import has_memory
from zeroshard.lazy.recording import record_resets
from zeroshard.parallel.pipeline.chunked import Absent, Outline, outline_of
from zeroshard.parallel.pipeline.cut import ModelCut, cut_model
from zeroshard.parallel.pipeline.part import ModelPart, find_chosen, narrowed, take_part
from zeroshard.parallel.pipeline.profile import SampleSource, sample_of
from zeroshard.parallel.pipeline.traced import TracedModel, trace
from zeroshard.plan.arrangement import Arrangement


class Stage(NamedTuple):
    """This rank's part of a model."""

    part: ModelPart
    model: nn.Module
    """The model that has the part: the given one, or the tree of its trace."""
    config: Config
    """The config, with those names of modules and parameters that this part has."""
    described: dict[str, Any]
    """The description of the whole model, see `describe_model`."""


def stage_of_model(
    model: nn.Module, optimizer: object, config: Config, world: Axis, source: SampleSource
) -> Stage:
    """Take this rank's part of a model, which rank 0 cuts for all ranks; collective.

    Args:
        model: the whole model. The modules of other pipeline ranks are taken out.
        optimizer: as `initialize` was given it.
        config: the config.
        world: all ranks.
        source: the samples and the loss, with which blocks are measured.

    Raises:
        ValueError: the model cannot be cut, as the message says; or the optimizer is there already.
        RuntimeError: the ranks' models or configs differ.
    """
    if isinstance(optimizer, Optimizer):
        raise ValueError(
            f"mesh.pp={config.mesh.pp}: expected a callable that makes the optimizer from the parameters of "
            f"this rank's part of the model, got a {type(optimizer).__name__} over all of them"
        )
    if any(isinstance(module, Absent) for module in model.modules()):
        raise ValueError(
            f"mesh.pp={config.mesh.pp}: expected a whole model, got a part of one, which an engine has taken "
            "out of it: build the model again"
        )
    described = describe_model(model)
    if config.pipeline.trace:
        model, outline = _traced(model, config, world, source)
    else:
        outline = outline_of(model)
        record_resets(model)  # before modules are taken out: each reset draws random numbers after the last
    chosen = find_chosen(model, config)
    specs = specify_units(model, config)
    check_agreement(world, model, config, specs, None, {}, source.training_data)

    def cut() -> ModelCut | None:
        return cut_model(model, outline, config, source, world.device) if world.rank == 0 else None

    made = on_all(world, "cut of the model into chunks", cut)[0]
    assert made is not None, "rank 0 has cut the model"
    arrangement = Arrangement(world.size, config.mesh.pp, config.mesh.tp, config.shard_group_size)
    part = take_part(model, config, made, arrangement.coordinates(world.rank).pp)
    part = replace(part, is_frozen=part.is_frozen and optimizer is not None)
    return Stage(part, model, narrowed(config, model, chosen), described)


def _traced(
    model: nn.Module, config: Config, world: Axis, source: SampleSource
) -> tuple[TracedModel, Outline]:
    """Trace a model on each rank; return its tree, and an outline with one block for each chunk.

    Raises:
        ValueError: the model cannot be traced, on any rank.
    """
    names = tuple(config.pipeline.split or ())
    found: list[TracedModel] = []
    if (
        layer := next((name for name, m in model.named_modules() if form_of(m) is not None), None)
    ) is not None:
        raise ValueError(
            f"pipeline.trace: '{layer}.weight' wraps other tensors, which a trace would take for its own: "
            "expected plain weights, or a pipeline without a trace"
        )

    def trace_it() -> None:
        sample = None if source.training_data is None else sample_of(model, source, config.micro_batch_size)
        if sample is None:
            raise ValueError(
                "pipeline.trace: expected training_data at initialize: its first samples trace the model"
            )
        if any(not has_memory(tensor) for tensor in (*model.parameters(), *model.buffers())):
            raise ValueError("pipeline.trace: expected a model with values, got one under deferred_init")
        found.append(TracedModel(trace(model, sample, names), range(len(names) + 1)))

    on_all(world, "trace of the model", trace_it)
    return found[0], Outline((), ("beginning", *names), ())
