"""A checkpoint becomes the state of an engine, whatever layout wrote it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from zeroshard.agreement import require_equal, require_same
from zeroshard.checkpoint import rng
from zeroshard.checkpoint.capture import EngineState, averaged_buffers, sums_of, with_averages
from zeroshard.checkpoint.files import TENSORS, VALUES, as_folder, find
from zeroshard.checkpoint.manifest import NUM_PARTS, check_sums
from zeroshard.checkpoint.optimizers import (
    SavedStates,
    Targets,
    convert_groups,
    make_targets,
    match_groups,
    match_states,
    place_scalar,
    read_converted,
    reorder_schedule,
    restore_groups,
)
from zeroshard.checkpoint.tensors import (
    Stored,
    TensorReader,
    blocks_by_name,
    check_buffers,
    open_checkpoint,
    read_buffer,
    read_model,
    slices,
)
from zeroshard.checkpoint.values import SavedValues, read_values
from zeroshard.codec import dtype_name, naming_damage, typed
from zeroshard.comm.collectives import on_all
from zeroshard.internals.warn import warn_user
from zeroshard.optim.adopted import from_common
from zeroshard.optim.eightbit.rules import rule_named
from zeroshard.outer import check_kept, find_folder, on_replicas
from zeroshard.parallel.pipeline.asynchronous.method import noted_change
from zeroshard.parameters.sharded import ShardedParameter, only_sharded
from zeroshard.parameters.state import IN_BATCH, Moment
from zeroshard.sharding.runtime import Runtime

if TYPE_CHECKING:
    from zeroshard.engine import Engine


_KEEP = "To keep the present hyperparameters and schedule, load with restore_hyperparameters=False"


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
    engine._runtime.state.refuse("load_checkpoint()", *IN_BATCH, Moment.AVERAGED)
    engine._saver.finish()
    parts = engine._parts
    if not optimizer:
        parts = replace(parts, optimizer=None, lr_scheduler=None, loader=None)
    outer = parts.runtime.context.axes.outer
    with torch.inference_mode(False):  # tensors that are made here are trained
        loading = on_replicas(outer, lambda: _load(parts, dir, tag, restore_hyperparameters, convert_states))
    require_same(
        outer,
        [f"step {loading.stored.manifest.global_step}"],
        lambda found: RuntimeError(
            f"'{dir}': the replicas have checkpoints of other steps: {found}: give a tag"
        ),
        "steps of checkpoints",
    )
    engine._runtime.state.end_step()
    engine.zero_grad()
    if optimizer:
        manifest, guard = loading.stored.manifest, engine._guard
        engine.global_step, engine.skipped_steps = manifest.global_step, manifest.skipped_steps
        if (scale := manifest.loss_scale) is not None and scale.is_dynamic:
            guard.loss_scale = guard.loss_scale.resumed(scale.value, scale.num_steps, scale.num_spared)
        if guard.rounding is not None:
            guard.rounding.resume(manifest.rounding or replace(guard.rounding, step=manifest.global_step))
        loading.restore_rng()
    return loading.values.client_state


def _load(
    parts: EngineState, dir: object, tag: str | None, restore_hyperparameters: bool, convert_states: bool
) -> _Loading:
    """Read parameters, states and all else; collective. Return what was found."""
    runtime = parts.runtime
    axis, outer = runtime.context.axes.savers, runtime.context.axes.outer
    runtime.wait("load_checkpoint()", Moment.SHOWN)
    prepared: list[_Loading] = []

    def prepare() -> tuple[str, PartNames | None]:
        folder = find_folder(as_folder(dir), outer)
        loading = _Loading(parts, find(folder, tag), restore_hyperparameters, convert_states)
        if folder != as_folder(dir):
            check_kept(folder, loading.stored.manifest.averages, parts.averages)
            loading.readers = runtime.context.axes.dp
        prepared.append(loading)
        return loading.stored.directory.name, loading.own if runtime.context.axes.pp.size > 1 else None

    answers = on_all(axis, "start of loading a checkpoint", prepare)
    require_equal(
        [name for name, _ in answers],
        lambda found: ValueError(f"'{dir}': the ranks see different checkpoints: {found}"),
    )
    [loading] = prepared
    stored = loading.stored
    everyone = [names for _, names in answers if names is not None] or [loading.own]
    loading.check_all_found(everyone)
    if parts.checkpoint.verify:
        share = sorted(stored.manifest.files)[axis.rank :: axis.size]
        on_all(axis, "verifying a checkpoint", lambda: check_sums(stored.directory, stored.manifest, share))
    _check_frozen(runtime, stored, loading.names)
    try:
        on_all(axis, "loading a checkpoint", loading.restore)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"{error}. Parameters and states are loaded only in part: load another checkpoint"
        ) from error
    finally:
        runtime.changed()
        runtime.passes.refresh()
    return loading


PartNames = tuple[dict[str, str], set[str]]
"""The stored names of the parameters of a part of the model, by their own; and all else that it has."""


class _Loading:
    """Checks a checkpoint, as far as that changes nothing, and then lets the engine take it over.

    Args:
        parts: the parts of the engine.
        directory: the directory of the checkpoint.
        hyperparameters: False keeps the hyperparameters and the LR schedule.
        convert_states: True accepts states of another form.

    Raises:
        ValueError: it belongs to another model or optimizer.
        RuntimeError: a file is missing or damaged.
    """

    def __init__(
        self, parts: EngineState, directory: Path, hyperparameters: bool, convert_states: bool
    ) -> None:
        self._parts, self._runtime, optimizer = parts, parts.runtime, parts.optimizer
        self.stored = stored = open_checkpoint(directory)
        self.values = _read_values(stored, self._runtime.context.device)
        model = read_model(self._runtime)
        self.readers = self._runtime.context.axes.readers
        """The ranks of whose places in data and random numbers it has one each."""
        self.names = self._match_parameters(model.aliases)
        """The stored name of each parameter."""
        self.own: PartNames = self.names, _others(model.buffers, model.extra)
        self._others = _others(stored.manifest.buffers, self.values.extra)
        self._check_names("the model", self.own[1], self._others)
        check_buffers(stored, self._runtime, model.buffers)
        if names := sorted(stored.manifest.averages.keys() ^ parts.averages.keys()):
            warn_user(
                f"'{directory}' and the engine do not both have the averages or values of outer steps "
                f"{', '.join(map(repr, names))}: they are not loaded, or begin anew with the loaded values. "
                "Make the EMA of the engine before load_checkpoint(), or give initialize that outer_step"
            )
        self._groups: list[dict[str, Any] | None] = []
        """The hyperparameters of each parameter group; None: they stay."""
        self._states: SavedStates = {}
        self._schedule: dict[str, Any] | None = None
        """The state of the LR scheduler."""
        if optimizer is not None and stored.manifest.optimizer is None:
            warn_user(f"'{directory}' holds no optimizer state: the optimizer keeps its present state")
        elif optimizer is not None:
            _check_optimizer(stored, parts, convert_states, hyperparameters)
            if hyperparameters:
                with naming_damage(directory / VALUES, _KEEP):
                    matches = match_groups(optimizer, self.values.groups, self.names)
                    self._groups = convert_groups(optimizer, self.values.groups, matches)
                    if parts.lr_scheduler is not None and self.values.lr_scheduler is not None:
                        present = parts.lr_scheduler.state_dict()
                        self._schedule = reorder_schedule(self.values.lr_scheduler, present, matches)
                if parts.lr_scheduler is not None and self._schedule is None:
                    warn_user(f"'{directory}' holds no LR schedule: the LR scheduler keeps its present state")
            noted = None if parts.part is None else noted_change(parts.part)
            blocks, scalars = blocks_by_name(self._runtime), self.values.scalars
            self._states = match_states(optimizer, stored, scalars, self.names, blocks, convert_states, noted)
        self._record = None if optimizer is None else self._match_hook()
        """What the checkpoint has of the gradient hook of this rank."""

    def check_all_found(self, parts: Sequence[PartNames]) -> None:
        """Refuse a checkpoint with more than all parts of the model together have.

        Args:
            parts: the names that the parts have.

        Raises:
            ValueError: with the name of the first surplus; or several parameters have one stored name.
        """
        known: dict[str, str] = {}
        for fqn, name in (pair for names, _ in parts for pair in names.items()):
            if (other := known.setdefault(name, fqn)) != fqn:
                why = f"the checkpoint ties '{other}' and '{fqn}'; the model has them as separate parameters"
                raise self.stored.refusal(why)
        surplus = self.stored.manifest.parameters.keys() - known.keys()
        self._check_names("the checkpoint", {f"parameter '{name}'" for name in surplus}, set())
        self._check_names("the checkpoint", self._others, set().union(*(others for _, others in parts)))

    def _match_parameters(self, aliases: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """The stored name of each parameter of the model."""
        stored, records = self.stored, self.stored.manifest.parameters
        home = {name: first for first, record in records.items() for name in (first, *record.aliases)}
        names: dict[str, str] = {}
        for parameter in self._runtime.parameters:
            fqn, expected = parameter.fqn, tuple(parameter.full_shape)
            homes = sorted({home[name] for name in (fqn, *aliases.get(fqn, ())) if name in home})
            if not homes:
                raise stored.refusal(f"expected parameter '{fqn}' of the model, found none")
            if len(homes) > 1:
                ties = " and ".join(map(repr, homes))
                raise stored.refusal(f"the model ties {ties}; the checkpoint has them as separate parameters")
            if (shape := records[homes[0]].shape) != expected:
                raise stored.refusal(f"parameter '{fqn}' has shape {shape}; the model expects {expected}")
            names[fqn] = homes[0]
        return names

    def _match_hook(self) -> dict[str, Any] | None:
        """The record of this rank's gradient hook; None, with a warning, if it is of another one."""
        hook, saved, axis = self._runtime.state.hook, self.values.hooks, self._runtime.context.axes.world
        with naming_damage(self.stored.directory / VALUES):
            if hook is not None and len(saved) == axis.size and hook.fits(saved[axis.rank]):
                record = dict(saved[axis.rank])
                if not set(record["tensors"]) <= self.stored.tensors.keys():
                    raise ValueError("a gradient hook with tensors that are not there")
                return record
        if saved or (hook is not None and hook.saved()):
            warn_user(
                f"'{self.stored.directory}' holds the state of a gradient hook on {len(saved)} ranks, and "
                f"the engine has none or another, other units or groups, or {axis.size} ranks: it is not "
                "loaded, and a hook keeps its present state"
            )
        return None

    def _check_names(self, owner: str, names: set[str], others: set[str]) -> None:
        """Raise a ValueError with the first name that only its owner has, of the checkpoint and the model."""
        for name in sorted(names - others):
            raise self.stored.refusal(f"only {owner} has {name}")

    def restore(self) -> None:
        """Take over everything that was found but counts of steps and generators; no other rank is needed."""
        parts, runtime, memory = self._parts, self._runtime, self._runtime.context.memory
        tiers = {p: buffer.plan.state_tier for buffer in runtime.buffers for p in buffer.sharded}
        optimizer = parts.optimizer
        targets = {} if optimizer is None else make_targets(optimizer, self._states, memory, tiers)
        states = (tensor for tensors in targets.values() for tensor in tensors.values())
        for tensor in (*(buffer.main for buffer in runtime.buffers), *states):
            memory.renew(tensor)
        self._read_tensors(targets)
        if optimizer is not None and self.stored.manifest.optimizer is not None:
            self._restore_optimizer(optimizer, targets)
        if optimizer is not None and self._groups:
            restore_groups(optimizer, self._groups)
        if self._schedule is not None:
            parts.lr_scheduler.load_state_dict(self._schedule)
        self._restore_place()

    @torch.no_grad()
    def _read_tensors(self, targets: Targets) -> None:
        runtime, names = self._runtime, self.names
        converted = {names[p.fqn]: p for p, saved in self._states.items() if saved.converted is not None}
        as_they_are = {p: targets[p] for p in targets.keys() - set(converted.values())}
        with TensorReader(self.stored, runtime.context.memory.evict) as reader:
            for part in slices(runtime, names, as_they_are):
                if part.name in self.stored.manifest.frozen:
                    continue
                reader.read(part)
                if (parameter := converted.get(part.name)) is not None:
                    read_converted(reader, part, self._states[parameter], targets[parameter])
            for name, buffer in read_model(runtime).buffers.items():
                read_buffer(reader, runtime.module, name, buffer)
            self._read_averages(reader)
            if (record := self._record) is not None:
                tensors = [reader.read_whole(name, runtime.context.device) for name in record["tensors"]]
                runtime.state.hook.from_files(record, tensors)
        for name in read_model(runtime).extra:
            module = runtime.module.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(self.values.extra[name])

    def _read_averages(self, reader: TensorReader) -> None:
        """Read averages, after the parameters. Those that the checkpoint lacks begin anew with these."""
        stored, averages = self.stored, self._parts.averages
        for own in averages.values():
            own.begin_anew()
        for part in slices(self._runtime, self.names, with_averages({}, averages)):
            if part.name in stored.tensors and part.name not in stored.manifest.parameters:
                reader.read(part)
        for name, copy in averaged_buffers(read_model(self._runtime).buffers, averages).items():
            if name in stored.tensors:
                copy.copy_(reader.read_whole(name, copy.device))
        for name, own in averages.items():
            own.num_updates = stored.manifest.averages.get(name, 0)

    @torch.no_grad()
    def _restore_optimizer(self, optimizer: Optimizer, targets: Targets) -> None:
        known = {name for group in self.values.groups for name in group["names"]}
        for parameter in list(optimizer.state):  # Adagrad needs the state that it made when it was built
            if not isinstance(parameter, nn.Parameter) or (
                isinstance(parameter, ShardedParameter) and self.names[parameter.fqn] in known
            ):
                del optimizer.state[parameter]
        others: dict[Any, Any] = self.values.other
        optimizer.state.update(others)
        for group in optimizer.param_groups:
            for parameter in only_sharded(group["params"]):
                scalars = self._states[parameter].scalars
                placed = {key: place_scalar(key, value, parameter, group) for key, value in scalars.items()}
                if state := placed | targets[parameter]:
                    optimizer.state[parameter] = from_common(optimizer, state)

    def _restore_place(self) -> None:
        """Let the DataLoader go on at its place."""
        loader, data = self._parts.loader, self.stored.manifest.data
        if loader is not None and data is not None:
            loader.load_state_dict(asdict(data))

    def restore_rng(self) -> None:
        """Let the random numbers of this rank go on, or begin where the checkpoint has none for it."""
        axes, saved, manifest = self._runtime.context.axes, self.values.rng, self.stored.manifest
        rank, num_parts = self.readers.rank, manifest.written_by.get(NUM_PARTS, 1)
        num_saved = len(saved) // num_parts
        if rank < num_saved:
            part = axes.pp.rank if axes.pp.size == num_parts else 0
            rng.restore(saved[part * num_saved + rank], self._runtime.context.device)
        else:
            rng.derive(manifest.seed, rank, manifest.global_step)


# -------------------------------------------------------------------------------------------- checking


def _others(buffers: Iterable[str], extra: Iterable[str]) -> set[str]:
    """The buffers and extra states of a model or a checkpoint, for messages."""
    return {f"a buffer '{name}'" for name in buffers} | {f"extra state '{name}'" for name in extra}


def _read_values(stored: Stored, device: torch.device) -> SavedValues:
    """Return the values that are no tensors, checked."""
    check_sums(stored.directory, stored.manifest, (VALUES, TENSORS))
    found = read_values(stored.directory)
    with naming_damage(stored.directory / VALUES):
        values: SavedValues = typed(SavedValues, found, "values")
        for states in values.rng:
            rng.check(states, device)
        return values


def _check_optimizer(stored: Stored, parts: EngineState, convert_states: bool, hyperparameters: bool) -> None:
    saved, present = stored.manifest.optimizer, type(parts.optimizer).__name__
    can_convert = rule_named(saved) is not None and rule_named(saved) is rule_named(present)
    if saved != present and not (can_convert and convert_states):
        remedy = ": expected the same optimizer, or convert_states=True" if can_convert else ""
        raise stored.refusal(f"holds states of {saved}; the engine has {present}{remedy}")
    schedule, present = stored.manifest.lr_scheduler, type(parts.lr_scheduler).__name__
    if hyperparameters and parts.lr_scheduler is not None and schedule not in (None, present):
        raise stored.refusal(
            f"holds the state of a {schedule}; the engine has a {present}: expected the same LR scheduler, "
            "or restore_hyperparameters=False to keep the present schedule"
        )


def _check_frozen(runtime: Runtime, stored: Stored, names: Mapping[str, str]) -> None:
    """Compare the parameters that a checkpoint leaves out with the present ones; collective if there are any.

    Args:
        runtime: of the model.
        stored: the checkpoint.
        names: the stored name of each parameter.

    Raises:
        ValueError: naming the first one that is not.
    """
    saved, records = stored.manifest.frozen, stored.manifest.parameters
    if not saved:
        return
    left_out = [parameter for parameter in runtime.parameters if names[parameter.fqn] in saved]
    present = sums_of(runtime, [parameter.fqn for parameter in left_out])
    for parameter in left_out:
        name = names[parameter.fqn]
        if records[name].dtype != parameter.dtype or present[parameter.fqn] != saved[name]:
            raise stored.refusal(
                f"leaves out the frozen parameter '{parameter.fqn}', and its present values "
                f"({dtype_name(parameter.dtype)}) are others ({dtype_name(records[name].dtype)}): expected "
                "the frozen parameters of saving. Build the same base, or save with Checkpoint(frozen=True)"
            )
