"""A checkpoint becomes the state of an engine, whatever layout wrote it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.agreement import require_equal
from zeroshard.checkpoint import rng
from zeroshard.checkpoint.capture import (
    NUM_PARTS,
    EngineState,
    SavedValues,
    check_averages,
    read_averages,
)
from zeroshard.checkpoint.codec import Count, naming_damage, typed
from zeroshard.checkpoint.files import MANIFEST, TENSORS, VALUES, as_folder, find
from zeroshard.checkpoint.frozen import check_frozen
from zeroshard.checkpoint.manifest import check_sums
from zeroshard.checkpoint.optimizers import (
    HOW,
    check_group,
    check_schedule,
    match_groups,
    place_scalar,
    reorder_schedule,
    restore_groups,
)
from zeroshard.checkpoint.states import (
    SavedStates,
    Targets,
    convert_group,
    family_of,
    make_targets,
    match_states,
    read_converted,
)
from zeroshard.checkpoint.tensors import (
    Offsets,
    Stored,
    TensorReader,
    cuts_of,
    is_description,
    open_checkpoint,
    read_model,
    read_offsets,
    set_offset,
    slices,
)
from zeroshard.checkpoint.values import read_values
from zeroshard.comm.collectives import on_all
from zeroshard.data.given import GivenLoader, parse_place
from zeroshard.data.loader import parse_state
from zeroshard.internals.warn import warn_user
from zeroshard.optim.adopted import from_common
from zeroshard.optim.eightbit.base import BlockwiseOptimizer
from zeroshard.optim.layerwise import LayerWise
from zeroshard.parallel.pipeline.asynchronous.method import noted_change
from zeroshard.parameters.sharded import ShardedParameter, only_sharded
from zeroshard.parameters.state import refuse_averages, refuse_in_batch
from zeroshard.sharding.runtime import Runtime
from zeroshard.stepping.guard import LossScale

if TYPE_CHECKING:
    from zeroshard.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadPlan:
    """All that will be loaded, checked as far as that changes nothing."""

    stored: Stored
    values: SavedValues
    names: Mapping[str, str]
    """The stored name of each parameter."""
    offsets: Offsets
    groups: list[dict[str, Any] | None]
    """The hyperparameters of each parameter group; None: they stay."""
    states: SavedStates
    schedule: dict[str, Any] | None
    """The state of the LR scheduler."""
    loss_scale: LossScale | None
    """The dynamic scale of float16 in the checkpoint."""
    own: PartNames


def load_checkpoint(
    engine: Engine,
    dir: str | os.PathLike[str],
    tag: str | None = None,
    *,
    restore_hyperparameters: bool = True,
    convert_states: bool = False,
    optimizer: bool = True,
) -> dict[str, Any]:
    """Go on from a checkpoint, whatever layout wrote it; collective. Gradients are dropped.

    Args:
        dir: the folder, or the directory of one checkpoint.
        tag: the tag of the checkpoint; None: the latest.
        restore_hyperparameters: False keeps the present learning rates, decays, ... and LR schedule.
        convert_states: accept states of another optimizer of the same family, or number of bits.
        optimizer: False loads the model alone: parameters, buffers and the extra states of modules.
            Optimizer, LR scheduler, counts of steps, generators and the place in the data stay.

    Returns:
        The `client_state` that was saved; {} if none was given.

    Raises:
        ValueError: there is no checkpoint, or it belongs to another model or optimizer; nothing has
            changed.
        RuntimeError: a file is missing or damaged; nothing has changed unless the message says so. Or the
            call is in the middle of a batch, or a list of an asynchronous pipeline has failed.
    """
    refuse_in_batch(engine._runtime.state, "load_checkpoint()")
    refuse_averages(engine._runtime.state, "load_checkpoint()")
    engine._saver.finish()
    parts = engine._parts
    if not optimizer:
        parts = replace(parts, optimizer=None, lr_scheduler=None, loader=None)
    with torch.inference_mode(False):  # tensors that are made here are trained
        plan = _load(parts, dir, tag, restore_hyperparameters, convert_states)
    engine._runtime.state.end_step()
    engine.zero_grad()
    if optimizer:
        manifest, guard = plan.stored.manifest, engine._guard
        engine.global_step, engine.skipped_steps = manifest.global_step, manifest.skipped_steps
        guard.loss_scale = guard.loss_scale.resumed(plan.loss_scale)
        if guard.rounding is not None:
            guard.rounding.resume(manifest.rounding or replace(guard.rounding, step=manifest.global_step))
        _restore_rng(engine._runtime, plan)
    return plan.values.client_state


def _load(
    parts: EngineState, dir: object, tag: str | None, restore_hyperparameters: bool, convert_states: bool
) -> _LoadPlan:
    """Read parameters, states and all else; collective. Return what was found."""
    runtime = parts.runtime
    axis = runtime.context.axes.world
    runtime.wait()
    runtime.require_slices("load_checkpoint()")
    plans: list[_LoadPlan] = []

    def prepare() -> tuple[str, PartNames | None]:
        plan = _prepare(parts, find(as_folder(dir), tag), restore_hyperparameters, convert_states)
        plans.append(plan)
        return plan.stored.directory.name, plan.own if runtime.context.axes.pp.size > 1 else None

    answers = on_all(axis, "start of loading a checkpoint", prepare)
    require_equal(
        [name for name, _ in answers],
        lambda found: ValueError(f"'{dir}': the ranks see different checkpoints: {found}"),
    )
    [plan] = plans
    stored = plan.stored
    everyone = [names for _, names in answers if names is not None] or [plan.own]
    check_all_found(stored, plan.values.extra, everyone)
    if parts.config.checkpoint.verify:
        share = sorted(stored.manifest.files)[axis.rank :: axis.size]
        on_all(axis, "verifying a checkpoint", lambda: check_sums(stored.directory, stored.manifest, share))
    check_frozen(runtime, stored, plan.names)
    try:
        on_all(axis, "loading a checkpoint", lambda: _restore(parts, plan))
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"{error}. Parameters and states are loaded only in part: load another checkpoint"
        ) from error
    finally:
        runtime.changed()
        for unit in runtime.units:
            unit.refresh()
    return plan


def _restore(parts: EngineState, plan: _LoadPlan) -> None:
    """Take over everything that was found; nothing of it needs another rank."""
    runtime = parts.runtime
    memory = runtime.context.memory
    tiers = {p: buffer.plan.state_tier for buffer in runtime.buffers for p in buffer.sharded}
    targets = {} if parts.optimizer is None else make_targets(parts.optimizer, plan.states, memory, tiers)
    for tensor in (*(b.main for b in runtime.buffers), *(t for s in targets.values() for t in s.values())):
        memory.renew(tensor)
    _read_tensors(parts, plan, targets)
    _restore_optimizer(parts.optimizer, plan, targets)
    if plan.groups:
        assert parts.optimizer is not None, "its groups were matched"
        restore_groups(parts.optimizer, plan.groups)
    if plan.schedule is not None:
        parts.lr_scheduler.load_state_dict(plan.schedule)
    _restore_place(parts, plan)


def _restore_place(parts: EngineState, plan: _LoadPlan) -> None:
    """Let the DataLoader go on at its place."""
    loader, axes = parts.loader, parts.runtime.context.axes
    places, data = plan.values.places_in_data, plan.stored.manifest.data
    if isinstance(loader, GivenLoader):
        loader.load_states(places, axes.dp.rank, axes.dp.size)
    elif loader is not None and data is not None:
        loader.load_state_dict(data)
    elif loader is not None and places:
        warn_user(
            "training_data: expected a DataLoader, as when the checkpoint was saved, got a Dataset; the data "
            "begin where they are"
        )


# -------------------------------------------------------------------------------------------- checking


def _prepare(parts: EngineState, directory: Path, hyperparameters: bool, convert_states: bool) -> _LoadPlan:
    stored, optimizer, runtime = open_checkpoint(directory), parts.optimizer, parts.runtime
    values = _read_values(stored, runtime.context.device)
    model = read_model(runtime)
    names = match_parameters(stored, runtime, model.aliases)
    check_buffers(stored, model.buffers)
    offsets = read_offsets(stored, runtime, model.buffers)
    check_names(stored, "the model", "extra state", model.extra, values.extra)
    check_averages(stored, parts.averages)
    groups: list[dict[str, Any] | None] = []
    states: SavedStates = {}
    schedule = None
    if optimizer is not None and stored.manifest.optimizer is None:
        warn_user(f"'{directory}' holds no optimizer state: the optimizer keeps its present state")
    elif optimizer is not None:
        _check_optimizer(stored, parts, convert_states, hyperparameters)
        if hyperparameters:
            with naming_damage(directory / VALUES, passed=ValueError):
                matches = match_groups(optimizer, values.groups, names)
                groups = _convert_groups(optimizer, values.groups, matches)
                schedule = _match_schedule(stored, parts.lr_scheduler, values.lr_scheduler, matches)
        noted = noted_change(parts.config, runtime.context.axes.pp.rank)
        states = match_states(
            optimizer, stored, values.scalars, names, cuts_of(runtime), convert_states, noted
        )
    with naming_damage(directory / MANIFEST):
        if stored.manifest.data is not None:
            parse_state(stored.manifest.data)
        loss_scale = _read_loss_scale(stored.manifest.loss_scale)
    return _LoadPlan(
        stored=stored,
        values=values,
        names=names,
        offsets=offsets,
        groups=groups,
        states=states,
        schedule=schedule,
        loss_scale=loss_scale,
        own=PartNames([(name, fqn) for fqn, name in names.items()], set(model.buffers), set(model.extra)),
    )


def _convert_groups(
    optimizer: Optimizer, saved: Sequence[Mapping[str, Any]], matches: Sequence[int | None]
) -> list[dict[str, Any] | None]:
    groups: list[dict[str, Any] | None] = []
    for number, (group, source) in enumerate(zip(optimizer.param_groups, matches, strict=True)):
        values = {} if source is None else convert_group(optimizer, saved[source], group)
        check_group(number, values, group)
        if isinstance(optimizer, BlockwiseOptimizer | LayerWise):
            optimizer.check_group({**group, **values})
        groups.append(None if source is None else values)
    return groups


def _is_scale(value: float) -> bool:
    limits = torch.finfo(torch.float32)  # in which gradients are divided by it
    return limits.tiny <= value <= limits.max


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedScale:
    """The loss scale in a checkpoint."""

    value: Annotated[float, _is_scale]
    is_dynamic: bool
    num_steps: Count
    num_spared: Count = 0


def _read_loss_scale(saved: dict[str, Any] | None) -> LossScale | None:
    """Return the loss scale, if it is a dynamic one."""
    scale: _SavedScale | None = typed(_SavedScale | None, saved, "loss_scale")
    if scale is None or not scale.is_dynamic:
        return None
    return LossScale(value=scale.value, num_steps=scale.num_steps, num_spared=scale.num_spared)


def _match_schedule(
    stored: Stored, scheduler: Any, saved: dict[str, Any] | None, matches: Sequence[int | None]
) -> dict[str, Any] | None:
    """The state that is to be loaded into the LR scheduler."""
    if scheduler is None:
        return None
    if saved is None:
        warn_user(f"'{stored.directory}' holds no LR schedule: the LR scheduler keeps its present state")
        return None
    schedule = reorder_schedule(saved, scheduler.state_dict(), matches)
    check_schedule(schedule, scheduler)
    return schedule


def _read_values(stored: Stored, device: torch.device) -> SavedValues:
    """Return the values that are no tensors, checked."""
    for name in (VALUES, TENSORS):
        if name not in stored.manifest.files:
            raise RuntimeError(f"{stored.directory / MANIFEST}: damaged (its list of files has no '{name}')")
    check_sums(stored.directory, stored.manifest, (VALUES, TENSORS))
    found = read_values(stored.directory)
    with naming_damage(stored.directory / VALUES):
        values: SavedValues = typed(SavedValues, found, "values")
        for group in values.groups:
            names = set(typed(list[str], group["names"], "names of a group"))
            if HOW & group.keys() or not names <= stored.manifest.parameters.keys():
                raise ValueError("expected groups of parameters in the manifest, with hyperparameters alone")
        for states in values.rng:
            rng.check(states, device)
        for place in values.places_in_data:
            parse_place(place)
        return values


def _check_optimizer(stored: Stored, parts: EngineState, convert_states: bool, hyperparameters: bool) -> None:
    saved, present = stored.manifest.optimizer, type(parts.optimizer).__name__
    can_convert = family_of(saved) is not None and family_of(saved) is family_of(present)
    if saved != present and not (can_convert and convert_states):
        remedy = ": expected the same optimizer, or convert_states=True" if can_convert else ""
        raise ValueError(f"'{stored.directory}': holds states of {saved}; the engine has {present}{remedy}")
    schedule, present = stored.manifest.lr_scheduler, type(parts.lr_scheduler).__name__
    if hyperparameters and parts.lr_scheduler is not None and schedule not in (None, present):
        raise ValueError(
            f"'{stored.directory}': holds the state of a {schedule}; the engine has a {present}: expected "
            "the same LR scheduler, or restore_hyperparameters=False to keep the present schedule"
        )


# ------------------------------------------------------------------------------------------- restoring


@torch.no_grad()
def _read_tensors(parts: EngineState, plan: _LoadPlan, targets: Targets) -> None:
    runtime = parts.runtime
    converted = {plan.names[p.fqn]: p for p, saved in plan.states.items() if saved.converted is not None}
    as_they_are = {p: targets[p] for p in targets.keys() - set(converted.values())}
    with TensorReader(plan.stored, runtime.context.memory.evict) as reader:
        for part in slices(runtime, plan.names, as_they_are):
            if part.name in plan.stored.manifest.frozen:
                continue
            reader.read(part)
            if (parameter := converted.get(part.name)) is not None:
                read_converted(reader, part, plan.states[parameter], targets[parameter])
        for name, buffer in read_model(runtime).buffers.items():
            if name in plan.offsets:
                set_offset(runtime.module, name, plan.offsets[name])
                continue
            reader.read_into(name, buffer)
        read_averages(reader, runtime, plan.stored, parts.averages, plan.names)
    for name in read_model(runtime).extra:
        value = plan.values.extra[name]
        runtime.module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


@torch.no_grad()
def _restore_optimizer(optimizer: Optimizer | None, plan: _LoadPlan, targets: Targets) -> None:
    if optimizer is None or plan.stored.manifest.optimizer is None:
        return
    known = {name for group in plan.values.groups for name in group["names"]}
    for parameter in list(optimizer.state):  # Adagrad needs the state that it made when it was built
        if not isinstance(parameter, nn.Parameter) or (
            isinstance(parameter, ShardedParameter) and plan.names[parameter.fqn] in known
        ):
            del optimizer.state[parameter]
    others: dict[Any, Any] = plan.values.other
    optimizer.state.update(others)
    for group in optimizer.param_groups:
        for parameter in only_sharded(group["params"]):
            scalars = plan.states[parameter].scalars
            placed = {key: place_scalar(key, value, parameter, group) for key, value in scalars.items()}
            if state := placed | targets[parameter]:
                optimizer.state[parameter] = from_common(optimizer, state)


def _restore_rng(runtime: Runtime, plan: _LoadPlan) -> None:
    axes, saved = runtime.context.axes, plan.values.rng
    rank, num_parts = axes.dp.rank, plan.stored.manifest.written_by.get(NUM_PARTS, 1)
    num_saved = len(saved) // num_parts
    if rank < num_saved:
        part = axes.pp.rank if axes.pp.size == num_parts else 0
        rng.restore(saved[part * num_saved + rank], runtime.context.device)
    else:
        rng.derive(plan.stored.manifest.seed, rank, plan.stored.manifest.global_step)


# ------------------------------------------------------------------------------------------------ names


class PartNames(NamedTuple):
    """The names that a part of the model has."""

    parameters: list[tuple[str, str]]
    """The stored name and the name in the model."""
    buffers: set[str]
    extra: set[str]


def check_all_found(stored: Stored, extra: Collection[str], parts: Sequence[PartNames]) -> None:
    """Refuse a checkpoint with more than all parts of the model together have.

    Args:
        stored: the checkpoint.
        extra: the names of its extra states.
        parts: the names that the parts have.

    Raises:
        ValueError: with the name of the first surplus; or several parameters have one stored name.
    """
    known: dict[str, str] = {}
    for name, fqn in (pair for part in parts for pair in part.parameters):
        if (other := known.setdefault(name, fqn)) != fqn:
            raise ValueError(
                f"'{stored.directory}': the checkpoint ties '{other}' and '{fqn}'; the model has them as "
                "separate parameters"
            )
    check_names(stored, "the checkpoint", "parameter", stored.manifest.parameters, known)
    buffers = {name for part in parts for name in part.buffers}
    others = {name for part in parts for name in part.extra}
    check_names(stored, "the checkpoint", "a buffer", stored.manifest.buffers, buffers)
    check_names(stored, "the checkpoint", "extra state", extra, others)


def match_parameters(
    stored: Stored, runtime: Runtime, aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    """The stored name of each parameter of the model."""
    records, directory = stored.manifest.parameters, stored.directory
    home = {name: first for first, record in records.items() for name in (first, *record.aliases)}
    names: dict[str, str] = {}
    for parameter in runtime.parameters:
        known = (parameter.fqn, *aliases.get(parameter.fqn, ()))
        homes = sorted({home[name] for name in known if name in home})
        if not homes:
            raise ValueError(f"'{directory}': expected parameter '{parameter.fqn}' of the model, found none")
        if len(homes) > 1:
            raise ValueError(
                f"'{directory}': the model ties {' and '.join(map(repr, homes))}; the "
                "checkpoint has them as separate parameters"
            )
        shape, expected = records[homes[0]].shape, tuple(parameter.full_shape)
        if shape != expected:
            raise ValueError(
                f"'{directory}': parameter '{parameter.fqn}' has shape {shape}; the model expects {expected}"
            )
        names[parameter.fqn] = homes[0]
    return names


def check_names(
    stored: Stored, owner: str, kind: str, names: Collection[str], others: Collection[str]
) -> None:
    """Raise a ValueError with the first name that only its owner has, of the checkpoint and the model."""
    for name in sorted(set(names) - set(others)):
        raise ValueError(f"'{stored.directory}': only {owner} has {kind} '{name}'")


def check_buffers(stored: Stored, buffers: Mapping[str, Tensor]) -> None:
    """Raise a ValueError with the first buffer that the checkpoint lacks, or has in another shape."""
    check_names(stored, "the model", "a buffer", buffers, stored.manifest.buffers)
    for name, buffer in buffers.items():
        if (shape := stored.tensors[name].shape) != tuple(buffer.shape) and not is_description(name):
            raise ValueError(
                f"'{stored.directory}': buffer '{name}' has shape {shape}; the model expects "
                f"{tuple(buffer.shape)}"
            )
