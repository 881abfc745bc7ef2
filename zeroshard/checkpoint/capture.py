"""The parts of an engine that go into a checkpoint.

Pipeline ranks hold parts of a model, which are one model in a checkpoint. The first rank of each part sends
all ranks what its part has; rank 0 writes it down as one model. A parameter that several parts hold comes
from the first one. Parameter groups stand one after another, since parts may have made different ones:
whoever loads finds hyperparameters by the names of parameters.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.agreement import require_equal
from zeroshard.checkpoint import rng
from zeroshard.checkpoint.files import as_folder, check_free, check_tag
from zeroshard.checkpoint.frozen import SliceSum, frozen_names, join_pieces, measure_pieces
from zeroshard.checkpoint.manifest import Manifest, ParameterRecord, describe_model
from zeroshard.checkpoint.optimizers import PER_GROUP, OptimizerState, read_optimizer
from zeroshard.checkpoint.save import Snapshot
from zeroshard.checkpoint.tensors import ModelState, States, TensorSlice, blocks_by_name, read_model, slices
from zeroshard.checkpoint.values import Given, check_plain, to_files
from zeroshard.comm.collectives import on_all
from zeroshard.config.sections import Config
from zeroshard.data.given import GivenLoader
from zeroshard.data.loader import EpochLoader
from zeroshard.internals.warn import warn_user
from zeroshard.parameters.state import IN_BATCH, Moment
from zeroshard.plan.tiers import Tier
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.averages import Averages
from zeroshard.version import installed_version

if TYPE_CHECKING:
    from zeroshard.engine import Engine

KIND = "ema"
"""The first part of their names: ema/PARAMETER/NAME."""


def with_averages(states: States, averages: Mapping[str, Averages]) -> States:
    """Return the states of parameters, together with the averages."""
    joined = {parameter: dict(tensors) for parameter, tensors in states.items()}
    for name, own in averages.items():
        for parameter, values in own.parameters.items():
            joined.setdefault(parameter, {})[f"{KIND}/{name}"] = values
    return joined


def averaged_buffers(buffers: Mapping[str, Tensor], averages: Mapping[str, Averages]) -> dict[str, Tensor]:
    """Return the copies that averages have of some buffers, by their names in a checkpoint."""
    return {
        f"{KIND}/{buffer}/{name}": own.buffers[buffer]
        for name, own in averages.items()
        for buffer in buffers
        if buffer in own.buffers
    }


NUM_PARTS = "num_parts"
"""The key of a manifest's `written_by` for the number of pipeline ranks, if there were several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The parts of an engine."""

    runtime: Runtime
    config: Config
    optimizer: Optimizer | None
    lr_scheduler: Any
    loader: EpochLoader | GivenLoader | None
    """The DataLoader that `initialize` made, or the one around the user's."""
    described: dict[str, Any] | None = None
    """The description of the whole model, where this rank has only a part of it."""
    averages: dict[str, Averages] = field(default_factory=dict)
    """Moving averages of the parameters, by name; `EMA` adds its own."""


@dataclass(frozen=True, kw_only=True)
class SavedValues:
    """The values of a checkpoint that are neither in tensors nor in the manifest."""

    groups: list[dict[str, Any]]
    scalars: dict[str, dict[Any, Any]]
    other: dict[str, Any]
    lr_scheduler: dict[Any, Any] | None
    rng: list[dict[str, Any]]
    """The generators of each data-parallel rank: of the first of its tensor ranks."""
    places_in_data: list[Any] = field(default_factory=list)
    """The places in the user's DataLoader, of the same ranks. Older checkpoints have none."""
    extra: dict[str, Any]
    """The values that modules' get_extra_state() gave."""
    client_state: dict[Any, Any]


class _Answer(NamedTuple):
    """A rank's message to the others about its part of a checkpoint."""

    place: str
    frozen: list[SliceSum]
    """Slices of the parameters that are left out."""
    manifest: Manifest | None
    """None from a rank that has no more to tell of its part of the model than values of its own."""
    values: SavedValues


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
            Some other kinds come back as these: numbers of NumPy as Python's, arrays as tensors, paths as
            strings, dataclasses as dicts, enums as their values, NamedTuples as tuples.
        blocking: True returns when the checkpoint is there, False when its values are copied. A thread
            then writes it while training goes on. A failure is raised, on all ranks, by a later step,
            save or load; with sharded parameters also by a forward. With values on the nvme
            tier, which may not fit into memory, the call returns when the checkpoint is there.
        optimizer: False leaves out the states of the optimizer and of the LR scheduler.

    Raises:
        ValueError: a bad tag or path; a value that can't be saved, by its key; other places on
            other ranks.
        RuntimeError: the checkpoint could not be written; the call is in the middle of a step or a
            batch; a list of an asynchronous pipeline has failed; or the last save failed.
    """
    refused = (*IN_BATCH, Moment.BEGUN, Moment.FAILED, Moment.AVERAGED)
    engine._runtime.state.refuse("save_checkpoint()", *refused)
    if engine._micro_step:
        raise RuntimeError(
            f"save_checkpoint() after {engine._micro_step} micro-batches of an unfinished step: a "
            "checkpoint does not save gradients. End the step with backward() and step(), or drop it "
            "with zero_grad()"
        )
    engine._saver.finish()
    tag = f"step-{engine.global_step}" if tag is None else tag
    parts = engine._parts if optimizer else replace(engine._parts, optimizer=None, lr_scheduler=None)
    snapshot = capture(engine, parts, dir, tag, client_state)
    tiers = engine._runtime.context.setting.tiers
    is_blocking = blocking or Tier.DISK in (tiers.optimizer, tiers.parameters)
    (engine._saver.save if is_blocking else engine._saver.start)(snapshot)


def capture(engine: Engine, parts: EngineState, dir: object, tag: str, client_state: Any) -> Snapshot:
    """A snapshot whose slices are views of what the engine goes on to change; collective.

    Raises:
        ValueError: the ranks were given different places; or, on any rank, no path, a bad tag, or a value
            that can't be loaded again without running code, by its key.
    """
    runtime, axes = parts.runtime, parts.runtime.context.axes
    axis, tells_part = axes.world, axes.pp.size > 1 and axes.everyone.rank == 0
    _check_moment(runtime)
    left_out = [] if parts.config.checkpoint.frozen else frozen_names(runtime)
    readings: list[_Reading] = []

    def read() -> _Answer:
        """Read and check this rank's part, before any rank writes."""
        reading = _read(engine, parts, dir, tag, client_state, left_out)
        readings.append(reading)
        values, manifest = replace(reading.values, client_state={}), None
        if tells_part:
            manifest = replace(reading.manifest, model={}, config={})
        else:
            values = replace(values, groups=[], scalars={}, other={}, lr_scheduler=None, extra={})
        place = f"'{reading.folder}' with tag '{tag}'"
        return _Answer(place, measure_pieces(runtime, left_out), manifest, values)

    answers = on_all(axis, "agreement on a checkpoint", read)
    require_equal(
        [answer.place for answer in answers],
        lambda found: ValueError(f"save_checkpoint: expected one place on all ranks, got: {found}"),
    )
    [reading] = readings
    earlier = [answer.manifest for answer in answers[: axis.rank] if answer.manifest is not None]
    before = {name for manifest in earlier for name in manifest.buffers}
    buffers = {name: buffer for name, buffer in reading.buffers.items() if name not in before}
    answers[axis.rank] = answers[axis.rank]._replace(manifest=reading.manifest, values=reading.values)
    manifest, values = _join(answers, reading.manifest)
    names = {p.fqn: p.fqn for p in runtime.parameters if p.fqn not in left_out}
    written = list(slices(runtime, names, with_averages(reading.states, parts.averages), written=True))
    if axes.everyone.rank == 0:
        buffers |= averaged_buffers(buffers, parts.averages)
        written += [TensorSlice(name, tuple(b.shape), 0, b.reshape(-1)) for name, b in buffers.items()]
    files = to_files(vars(values) | {"client_state": Given(values.client_state)}) if axis.rank == 0 else {}
    return Snapshot(
        folder=reading.folder,
        tag=tag,
        keep_last=parts.config.checkpoint.keep_last,
        slices=written,
        manifest=manifest,
        values=files,
        memory=runtime.context.memory,
    )


def _check_moment(runtime: Runtime) -> None:
    """Finish what is under way.

    Raises:
        RuntimeError: in a `with` block of full parameters, or with gradients that no checkpoint keeps.
    """
    runtime.wait("save_checkpoint()", Moment.SHOWN)
    runtime.check_slots()
    if any(gradients.has_deferred for unit in runtime.units for gradients in unit.gradients):
        raise RuntimeError(
            "save_checkpoint() after a backward under no_sync(): a checkpoint does not save gradients. "
            "Take the step first, or drop the gradients with zero_grad()"
        )


def _read(
    engine: Engine, parts: EngineState, dir: object, tag: str, client_state: Any, left_out: list[str]
) -> _Reading:
    """Read and check all that a checkpoint keeps, without exchanges."""
    if client_state is not None and not isinstance(client_state, Mapping):
        raise ValueError(f"client_state: expected a dict, got {type(client_state).__name__}")
    folder, runtime, axes = as_folder(dir), parts.runtime, parts.runtime.context.axes
    check_tag(tag)
    if axes.world.rank == 0:
        check_free(folder, tag)
    model = read_model(runtime)
    if model.ignored:
        warn_user(
            f"the checkpoint leaves out parameters that each rank keeps for itself (Config.ignored), and "
            f"their optimizer states: {', '.join(map(repr, model.ignored))}. Give them as client_state "
            "if they are the same on all ranks, or write a file for each rank"
        )
    state = OptimizerState([], {}, {}, {}) if parts.optimizer is None else read_optimizer(parts.optimizer)
    place = parts.loader.state_dict() if isinstance(parts.loader, GivenLoader) else None
    values = SavedValues(
        groups=state.groups,
        scalars=state.scalars,
        other=state.other,
        lr_scheduler=None if parts.lr_scheduler is None else parts.lr_scheduler.state_dict(),
        extra=model.extra,
        rng=[rng.capture(runtime.context.device)] if axes.tp.rank == 0 else [],
        places_in_data=[] if place is None or axes.tp.rank else [Given(place)],
        client_state=dict(client_state or {}),
    )
    own = ("groups", "scalars", "other", "lr_scheduler", "extra")
    check_plain({key: getattr(values, key) for key in own}, "checkpoint")
    check_plain(Given(place), "state of training_data")
    check_plain(Given(values.client_state), "client_state")
    manifest = _describe(engine, parts, model, left_out)
    return _Reading(folder, model.buffers, state.tensors, manifest, values)


def _describe(engine: Engine, parts: EngineState, model: ModelState, left_out: list[str]) -> Manifest:
    runtime, optimizer, scheduler = parts.runtime, parts.optimizer, parts.lr_scheduler
    rounding, blocks, aliases = engine._guard.rounding, blocks_by_name(runtime), model.aliases
    axes, is_half, config = runtime.context.axes, runtime.reducer.is_half, parts.config
    is_plain = config.units is None or isinstance(config.units, tuple)  # a predicate can't be written down
    written_by = {"zeroshard": installed_version(), "torch": torch.__version__, "num_ranks": axes.world.size}
    return Manifest(
        written_by=written_by if axes.pp.size == 1 else {**written_by, NUM_PARTS: axes.pp.size},
        model=parts.described or describe_model(runtime.module),
        config=(config if is_plain else replace(config, units=None)).to_dict(),
        global_step=engine.global_step,
        skipped_steps=engine.skipped_steps,
        loss_scale=engine._guard.loss_scale.state() if is_half else None,
        rounding=None if rounding is None else replace(rounding),  # which training changes
        seed=torch.initial_seed(),
        data=parts.loader.state_dict() if isinstance(parts.loader, EpochLoader) else None,
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


# ----------------------------------------------------------------------------------- parts of pipelines


def _join(answers: Sequence[_Answer], own: Manifest) -> tuple[Manifest, SavedValues]:
    """Put the parts of a model together, in their order; other facts come from the manifest of this rank."""
    manifests = [answer.manifest for answer in answers if answer.manifest is not None]
    sums = join_pieces(piece for answer in answers for piece in answer.frozen)
    parameters: dict[str, ParameterRecord] = {}
    for name, record in (item for each in manifests for item in each.parameters.items()):
        known = parameters.get(name, record)
        aliases = dict.fromkeys((*known.aliases, *record.aliases))
        parameters[name] = replace(known, aliases=tuple(aliases))
    manifest = replace(
        own,
        parameters=parameters,
        buffers=tuple(dict.fromkeys(name for each in manifests for name in each.buffers)),
        frozen={name: sums.get(name, 0) for each in manifests for name in each.frozen},
        optimizer=next((each.optimizer for each in manifests if each.optimizer is not None), None),
    )
    values = [answer.values for answer in answers]
    return manifest, SavedValues(
        groups=[group for each in values for group in each.groups],
        scalars=dict(ChainMap(*(each.scalars for each in values))),
        other=dict(ChainMap(*(each.other for each in values))),
        lr_scheduler=_join_schedules([e.lr_scheduler for e in values if e.lr_scheduler is not None]),
        rng=[states for each in values for states in each.rng],
        places_in_data=[place for each in values for place in each.places_in_data],
        extra=dict(ChainMap(*(each.extra for each in values))),
        client_state=values[0].client_state,
    )


def _join_schedules(states: Sequence[Any]) -> Any:
    """The state of the LR schedulers of all parts, with lists for the groups of all of them."""
    if len(states) < 2:
        return states[0] if states else None
    joined = dict(states[0])
    for key, value in joined.items():
        if key in PER_GROUP and isinstance(value, list):
            joined[key] = [item for state in states for item in state[key]]
        elif key == "_schedulers":
            joined[key] = [_join_schedules(group) for group in zip(*(s[key] for s in states), strict=True)]
    return joined
