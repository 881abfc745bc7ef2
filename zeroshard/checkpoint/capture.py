"""The parts of an engine that go into a checkpoint.

Pipeline ranks hold parts of a model, which are one model in a checkpoint. The first rank of each part sends
all ranks what its part has; rank 0 writes it down as one model. A parameter that several parts hold comes
from the first one. Parameter groups stand one after another, since parts may have made different ones:
whoever loads finds hyperparameters by the names of parameters.
"""

from __future__ import annotations

import os
import zlib
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.agreement import require_equal, require_same
from zeroshard.checkpoint import rng
from zeroshard.checkpoint.files import as_folder, check_tag
from zeroshard.checkpoint.manifest import NUM_PARTS, Manifest, ParameterRecord, SavedScale, describe_model
from zeroshard.checkpoint.optimizers import join_schedules, read_optimizer
from zeroshard.checkpoint.save import Snapshot, write
from zeroshard.checkpoint.tensors import ModelState, States, TensorSlice, blocks_by_name, read_model, slices
from zeroshard.checkpoint.values import SavedValues, check_plain, to_files
from zeroshard.comm.collectives import Axis, on_all
from zeroshard.config.sections import Checkpoint
from zeroshard.data.loader import DataPosition, EpochLoader
from zeroshard.internals.warn import warn_user
from zeroshard.outer import Kept, folder_of, on_replicas
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parameters.state import IN_BATCH, Moment
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.runtime import Runtime
from zeroshard.version import installed_version

if TYPE_CHECKING:
    from zeroshard.engine import Engine

KIND = "ema"
"""The first part of their names: ema/PARAMETER/NAME."""


def with_averages(states: States, averages: Mapping[str, Kept]) -> States:
    """Return the states of parameters, together with the averages."""
    joined = {parameter: dict(tensors) for parameter, tensors in states.items()}
    for name, own in averages.items():
        for parameter, values in own.parameters.items():
            joined.setdefault(parameter, {})[f"{KIND}/{name}"] = values
    return joined


def averaged_buffers(buffers: Mapping[str, Tensor], averages: Mapping[str, Kept]) -> dict[str, Tensor]:
    """Return the copies that averages have of some buffers, by their names in a checkpoint."""
    return {
        f"{KIND}/{buffer}/{name}": own.buffers[buffer]
        for name, own in averages.items()
        for buffer in buffers
        if buffer in own.buffers
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The parts of an engine."""

    runtime: Runtime
    config: dict[str, Any]
    """All settings, as a checkpoint has them."""
    checkpoint: Checkpoint
    part: ModelPart | None
    optimizer: Optimizer | None
    lr_scheduler: Any
    loader: EpochLoader | None
    """The DataLoader that `initialize` made."""
    described: dict[str, Any] | None = None
    """The description of the whole model, where this rank has only a part of it."""
    averages: dict[str, Kept] = field(default_factory=dict)
    """Moving averages of the parameters by name, to which `EMA` adds its own, and values of outer steps."""


class _Answer(NamedTuple):
    """A rank's message to the others about its part of a checkpoint."""

    place: str
    rng: list[dict[str, Any]]
    hooks: list[Any]
    part: tuple[Manifest, SavedValues] | None
    """From the first rank of each part, if pipeline ranks have parts of the model."""


class _Reading(NamedTuple):
    """This rank's part of a checkpoint, checked. Its tensors are those that the engine goes on to change."""

    folder: Path
    buffers: dict[str, Tensor]
    states: States
    manifest: Manifest
    values: SavedValues


def save_checkpoint(
    engine: Engine,
    dir: str | os.PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    blocking: bool = True,
    *,
    optimizer: bool = True,
) -> None:
    """Save all that training goes on from, for any number of ranks, stage and precision; collective.

    Args:
        dir: a folder that all ranks share. The checkpoint appears in it at once, when it is complete.
        tag: the name of the checkpoint; None: "step-<global_step>". An older one of that name is
            replaced.
        client_state: the user's values on rank 0: tensors, numbers, strings, lists and dicts of them.
            Numbers of NumPy come back as Python's, arrays as tensors.
        blocking: True returns when the checkpoint is there, False when its values are copied. A thread
            then writes it while training goes on. A failure is a warning at once, and is raised, on all
            ranks, by a later step, save or load; with sharded parameters also by a forward. With values on
            the nvme tier, which may not fit into memory, or with `outer_step`, the call returns when the
            checkpoint is there.
        optimizer: False leaves out the states of the optimizer and of the LR scheduler.

    Raises:
        ValueError: a bad tag or path; a value that can't be saved, by its key; other places on
            other ranks.
        RuntimeError: the checkpoint could not be written; the call is in the middle of a step or a
            batch; a list of an asynchronous pipeline has failed; or the last save failed.
    """
    refused = (*IN_BATCH, Moment.BEGUN, Moment.FAILED, Moment.AVERAGED)
    engine._runtime.state.refuse("save_checkpoint()", *refused)
    engine._saver.finish()
    tag = f"step-{engine.global_step}" if tag is None else tag
    parts = engine._parts if optimizer else replace(engine._parts, optimizer=None, lr_scheduler=None)
    axes = parts.runtime.context.axes
    snapshot = on_replicas(axes.outer, lambda: capture(engine, parts, dir, tag, client_state))
    tiers = engine._runtime.context.setting.tiers
    is_blocking = blocking or axes.outer.size > 1 or Tier.DISK in (tiers.optimizer, tiers.parameters)
    if is_blocking:
        on_replicas(axes.outer, lambda: write(snapshot, axes.savers))
    else:
        engine._saver.start(snapshot)


def capture(engine: Engine, parts: EngineState, dir: object, tag: str, client_state: Any) -> Snapshot:
    """A snapshot whose slices are views of what the engine goes on to change; collective.

    Raises:
        RuntimeError: in a `with` block of full parameters, or with gradients that no checkpoint keeps.
        ValueError: the ranks were given different places; or, on any rank, no path, a bad tag, or a value
            that can't be loaded again without running code, by its key.
    """
    runtime, axes = parts.runtime, parts.runtime.context.axes
    axis, tells_part = axes.savers, axes.pp.size > 1 and axes.everyone.rank == 0
    runtime.wait("save_checkpoint()", Moment.SHOWN)
    runtime.check_slots()
    if engine._micro_step or runtime.state.has_sums:
        raise RuntimeError(
            "save_checkpoint() in an unfinished step: a checkpoint does not save gradients. End the step "
            "with backward() and step(), or drop it with zero_grad()"
        )
    keeps_frozen = parts.checkpoint.frozen
    # Of parameters that were frozen at initialize: no optimizer can have changed them.
    frozen = [] if keeps_frozen else [buffer for buffer in runtime.buffers if not buffer.trainable]
    left_out = [parameter.fqn for buffer in frozen for parameter in buffer.sharded]
    readings: list[_Reading] = []

    def read() -> _Answer:
        """Read and check this rank's part, before any rank writes."""
        reading = _read(engine, parts, dir, tag, client_state, left_out)
        readings.append(reading)
        part = replace(reading.manifest, model={}, config={}), replace(reading.values, client_state={})
        place = f"'{reading.folder}' with tag '{tag}'"
        values, own = reading.values, part if tells_part else None
        return _Answer(place, values.rng, values.hooks, own)

    answers = on_all(axis, "agreement on a checkpoint", read)
    require_equal(
        [answer.place for answer in answers],
        lambda found: ValueError(f"save_checkpoint: expected one place on all ranks, got: {found}"),
    )
    [reading] = readings
    earlier = [answer.part for answer in answers[: axis.rank] if answer.part is not None]
    before = {name for manifest, _ in earlier for name in manifest.buffers}
    buffers = {name: buffer for name, buffer in reading.buffers.items() if name not in before}
    manifest, values = _join(answers, reading, {} if keeps_frozen else sums_of(runtime, left_out))
    names = {p.fqn: p.fqn for p in runtime.parameters if p.fqn not in left_out}
    states, hook = with_averages(reading.states, parts.averages), runtime.state.hook
    if hook is not None and hook.lets_go_apart:
        alike = axes.dp_replicate if runtime.context.setting.placements.optimizer else axis
        own = slices(runtime, names, states)
        on_all(axis, "comparison of replicas", lambda: _require_replicas(alike, own))
    written = list(slices(runtime, names, states, written=True))
    whole = {} if hook is None or parts.optimizer is None else hook.to_files()[1]
    if axes.everyone.rank == 0:
        whole = {**whole, **buffers, **averaged_buffers(buffers, parts.averages)}
    written += [TensorSlice(name, tuple(t.shape), 0, t.reshape(-1)) for name, t in whole.items()]
    files = to_files(vars(values)) if axis.rank == 0 else {}
    return Snapshot(
        folder=reading.folder,
        tag=tag,
        keep_last=parts.checkpoint.keep_last,
        slices=written,
        manifest=manifest,
        values=files,
        memory=runtime.context.memory,
    )


def _require_replicas(axis: Axis, held: Iterable[TensorSlice]) -> None:
    """Refuse to save one value for all ranks where ranks have different ones; collective."""
    facts = [f"'{part.name}' with checksum {_crc_of(part.data)}" for part in held]
    why = "save_checkpoint: the gradient hook has let ranks go apart: {}. Average whole parameters in "
    why += "unsharded(write_back=True) before, and leave out states that differ with optimizer=False"
    require_same(axis, facts, lambda found: RuntimeError(why.format(found)))


def _read(
    engine: Engine, parts: EngineState, dir: object, tag: str, client_state: Any, left_out: list[str]
) -> _Reading:
    """Read and check all that a checkpoint keeps, without exchanges."""
    if client_state is not None and not isinstance(client_state, Mapping):
        raise ValueError(f"client_state: expected a dict, got {type(client_state).__name__}")
    runtime, axes = parts.runtime, parts.runtime.context.axes
    folder = folder_of(as_folder(dir), axes.outer)
    check_tag(tag)
    model = read_model(runtime)
    if model.ignored:
        warn_user(
            f"the checkpoint leaves out parameters that each rank keeps for itself (Config.ignored), and "
            f"their optimizer states: {', '.join(map(repr, model.ignored))}. Give them as client_state "
            "if they are the same on all ranks, or write a file for each rank"
        )
    hook = runtime.state.hook
    values = SavedValues(
        groups=[],
        scalars={},
        other={},
        lr_scheduler=None if parts.lr_scheduler is None else parts.lr_scheduler.state_dict(),
        extra=model.extra,
        rng=[rng.capture(runtime.context.device)] if axes.tp.rank == 0 else [],
        hooks=[] if parts.optimizer is None or hook is None else [hook.to_files()[0]],
        client_state=dict(client_state or {}),
    )
    states = {} if parts.optimizer is None else read_optimizer(parts.optimizer, values)
    own = ("groups", "scalars", "other", "lr_scheduler", "extra")
    check_plain({key: getattr(values, key) for key in own}, "checkpoint")
    check_plain(values.hooks, "state of gradient_hook")
    check_plain(values.client_state, "client_state")
    manifest = _describe(engine, parts, model, left_out)
    return _Reading(folder, model.buffers, states, manifest, values)


def _describe(engine: Engine, parts: EngineState, model: ModelState, left_out: list[str]) -> Manifest:
    runtime, optimizer, scheduler = parts.runtime, parts.optimizer, parts.lr_scheduler
    rounding, blocks, aliases = engine._guard.rounding, blocks_by_name(runtime), model.aliases
    axes, is_half = runtime.context.axes, runtime.reducer.is_half
    written_by = {"zeroshard": installed_version(), "torch": torch.__version__, "num_ranks": axes.savers.size}
    return Manifest(
        written_by=written_by if axes.pp.size == 1 else {**written_by, NUM_PARTS: axes.pp.size},
        model=parts.described or describe_model(runtime.module),
        config=parts.config,
        global_step=engine.global_step,
        skipped_steps=engine.skipped_steps,
        loss_scale=SavedScale(**engine._guard.loss_scale.state()) if is_half else None,
        rounding=None if rounding is None else replace(rounding),  # which training changes
        seed=torch.initial_seed(),
        data=None if parts.loader is None else DataPosition(**parts.loader.state_dict()),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        lr_scheduler=None if scheduler is None else type(scheduler).__name__,
        parameters={
            p.fqn: ParameterRecord(tuple(p.full_shape), p.dtype, aliases.get(p.fqn, ()), blocks[p.fqn])
            for p in runtime.parameters
        },
        buffers=tuple(model.buffers),
        frozen=dict.fromkeys(left_out, 0),
        averages={name: averages.num_updates for name, averages in parts.averages.items()},
    )


# --------------------------------------------------------------------------- frozen parameters, left out

# A parameter is known by the crc32 of its whole bytes: the same at any number of ranks and stage. The ranks
# gather a unit at a time, and share the checksums of its parameters among each other.


def sums_of(runtime: Runtime, names: Collection[str]) -> dict[str, int]:
    """Return the crc32 of parameters by name, the parameters of all pipeline ranks together; collective."""
    axes, sums = runtime.context.axes, dict[str, int]()
    for buffer in runtime.buffers:
        if not {p.fqn for p in buffer.sharded}.isdisjoint(names):
            for number, (p, whole) in enumerate(zip(buffer.sharded, buffer.gather_wholes(), strict=True)):
                if p.fqn in names and number % axes.everyone.size == axes.everyone.rank:
                    sums[p.fqn] = _crc_of(whole)
    everyone = axes.savers.all_gather_object(sums, "checksums of frozen parameters")
    return {name: crc for each in everyone for name, crc in each.items()}


def _crc_of(values: Tensor) -> int:
    return zlib.crc32(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


# ----------------------------------------------------------------------------------- parts of pipelines


def _join(answers: Sequence[_Answer], own: _Reading, sums: Mapping[str, int]) -> tuple[Manifest, SavedValues]:
    """Put the parts of a model together, in their order; other facts come from the manifest of this rank."""
    parts = [answer.part for answer in answers if answer.part is not None] or [(own.manifest, own.values)]
    parameters: dict[str, ParameterRecord] = {}
    for name, record in (item for each, _ in parts for item in each.parameters.items()):
        known = parameters.get(name, record)
        aliases = dict.fromkeys((*known.aliases, *record.aliases))
        parameters[name] = replace(known, aliases=tuple(aliases))
    manifest = replace(
        own.manifest,
        parameters=parameters,
        buffers=tuple(dict.fromkeys(name for each, _ in parts for name in each.buffers)),
        frozen={name: sums[name] for each, _ in parts for name in each.frozen},
        optimizer=next((each.optimizer for each, _ in parts if each.optimizer is not None), None),
    )
    values = [each for _, each in parts]
    schedules = [each.lr_scheduler for each in values if each.lr_scheduler is not None]
    return manifest, SavedValues(
        groups=[group for each in values for group in each.groups],
        scalars=dict(ChainMap(*(each.scalars for each in values))),
        other=dict(ChainMap(*(each.other for each in values))),
        lr_scheduler=join_schedules(schedules, lambda lists: [*chain(*lists)]) if schedules else None,
        rng=[states for answer in answers for states in answer.rng],
        hooks=[record for answer in answers for record in answer.hooks],
        extra=dict(ChainMap(*(each.extra for each in values))),
        client_state=own.values.client_state,
    )
