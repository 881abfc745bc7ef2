"""Model, optimizer and config become an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset

from zeroshard.agreement import check_agreement
from zeroshard.assemble import open_data_parallel, own_part, shard_over, specify_units
from zeroshard.checkpoint.capture import EngineState
from zeroshard.checkpoint.manifest import describe_model
from zeroshard.comm.collectives import Axis, on_all, on_first
from zeroshard.comm.device import use_device
from zeroshard.comm.lifecycle import close_at_exit, start_world
from zeroshard.comm.mesh import Axes
from zeroshard.config.checked import flat
from zeroshard.config.sections import Config
from zeroshard.data.loader import EpochLoader
from zeroshard.data.microbatch import LossFunction
from zeroshard.engine import Engine
from zeroshard.gradient_hooks import Hook, install_hook, make_hook
from zeroshard.internals.warn import warn_first, warn_user
from zeroshard.lazy.deferred import has_memory
from zeroshard.lazy.recording import refuse_recording
from zeroshard.memory.budget import check_room
from zeroshard.memory.report import take_peak
from zeroshard.optim.adopted import OptimizerFactory, check_optimizer, read_overrides, take_over
from zeroshard.optim.muon import refuse_ignored
from zeroshard.outer import OuterStep, OuterSteps
from zeroshard.parallel.pipeline.chunked import Absent, Chunked
from zeroshard.parallel.pipeline.cut import cut_model
from zeroshard.parallel.pipeline.part import ModelPart
from zeroshard.parallel.pipeline.profile import SampleSource, sample_of
from zeroshard.parallel.pipeline.traced import TracedChunks, trace
from zeroshard.parallel.tensor.division import plan_division
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.plan.arrangement import Arrangement
from zeroshard.plan.names import find_ignored
from zeroshard.planning.search import choose_config
from zeroshard.stepping.parts import is_known


class Initialized(NamedTuple):
    """The result of `initialize`: unpacks as engine, optimizer, dataloader, lr_scheduler."""

    engine: Engine
    optimizer: Optimizer | None
    dataloader: EpochLoader | None
    lr_scheduler: Any


def initialize(  # noqa: PLR0913 - a call names what it gives
    model: nn.Module,
    optimizer: Optimizer | OptimizerFactory | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    training_data: Dataset[Any] | Sequence[Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    lr_scheduler: Any = None,
    loss_fn: LossFunction | None = None,
    tp_plan: Plan | None = None,
    outer_step: OuterStep | None = None,
    gradient_hook: tuple[Any, Hook] | None = None,
) -> Initialized:
    """Shard a model and its optimizer over the ranks.

    Starts the process group if nobody has. The model is sharded in place and moved to this rank's device;
    all ranks get rank 0's parameters and buffers. With `config.mesh.pp` above 1 each part of the model has
    the values of the first rank that holds it: give all ranks the same seed.

    Args:
        model: a module with parameters of floating-point dtypes, on any device, or of `deferred_init`.
        optimizer: an element-wise optimizer over parameters of `model`, not stepped yet; or a callable that
            makes one from the list of the model's original parameters; None to run or evaluate only.
            Bits that were registered for modules with bitsandbytes' GlobalOptimManager hold for its
            optimizers.
        config: a Config, a dict, or a path to a .json or .toml file; or "auto": the model is measured on the
            ranks that are there, and the fastest config for a step of 8 samples a rank is taken, see
            docs/planning.md.
        training_data: a Dataset. It becomes a DataLoader with a distributed sampler,
            `config.micro_batch_size` and the options of `config.loader`. Iterate over a loader of yours in
            your loop; docs/integrations.md shows how checkpoints hold its place.
        collate_fn: the function that makes a batch of samples in that DataLoader; by default torch's.
        lr_scheduler: a scheduler over `optimizer`, or a callable that makes one from it; `engine.step()`
            advances it.
        loss_fn: (output, targets) -> 0-dim mean loss, for `train_batch`.
        tp_plan: for `config.mesh.tp` above 1, the way to divide each layer, by patterns of names of modules:
            {"layers.*.up": "colwise", "layers.*.down": "rowwise"}. docs/tensor_parallel.md has the words.
            None: the plan that the model has (`tp_plan` of transformers), or one of ours.
        outer_step: for replicas that take steps of their own, the step that brings them together.
        gradient_hook: (state, hook), at stages 0 and 1: a communication hook of DistributedDataParallel that
            averages gradients in the place of the engine; `(PowerSGDState(None), powerSGD_hook)` is one. It
            gets a bucket for each unit. With one rank nothing is sent, and it is not called.

    Raises:
        ValueError: the config, the optimizer or the model is not as expected.
        RuntimeError: the ranks' models or configs differ.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module as model, got {type(model).__name__}")
    source = SampleSource(training_data, collate_fn)
    if config == "auto":
        config = _planned(model, optimizer, source, loss_fn, tp_plan, (outer_step, gradient_hook))
    config = Config.parse(config)
    _check_dataset(training_data)
    refuse_recording("initialize")
    if outer_step is not None:
        outer_step.check(config, optimizer)
    part, described, whole, device = None, None, config, use_device(config.device)
    # Opened before the checks: scripts over such a mesh ask torch for their rank after a refusal.
    world = start_world(device, config.watchdog_s) if config.mesh.pp * config.mesh.tp > 1 else None
    if world is not None and config.mesh.pp > 1:
        described = describe_model(model)
        part, config = _part_of_model(model, optimizer, config, world, source)
        model = part.chunked.model
        if part.is_frozen:  # an optimizer over nothing would be an error of torch
            optimizer = lr_scheduler = None
    specs = specify_units(model, config)
    if part is not None:
        specs = part.named(specs)
    division = plan_division(model, specs, tp_plan, config.mesh.tp, by_sequence=config.mesh.sequence)
    specs = division.specs
    names = {parameter: name for name, parameter in model.named_parameters()}
    if optimizer is not None:
        optimizer = optimizer if isinstance(optimizer, Optimizer) else optimizer(list(names))
        warn = warn_first if part is None else warn_user  # each pipeline rank has others
        check_optimizer(optimizer, names, find_ignored(model, config.ignored), warn)
    overrides = read_overrides(optimizer, names)
    lr_scheduler = _build_scheduler(lr_scheduler, optimizer)
    world = world or start_world(device, config.watchdog_s)
    hook = make_hook(gradient_hook, optimizer, whole, model, world, is_local=outer_step is not None)
    if part is None:
        others = [outer_step, hook]
        check_agreement(world, model, flat(config), specs, optimizer, overrides, training_data, others)
    axes = open_data_parallel(config, world, is_local=outer_step is not None)
    if part is not None:
        check_agreement(axes.everyone, model, flat(config), specs, optimizer, overrides, training_data)
    close_at_exit(axes, *axes.members)
    check_room(specs, config, axes, optimizer, device)
    by_parts = optimizer is not None and is_known(optimizer)
    runtime = shard_over(model, division, config, axes, steps_by_parts=by_parts, part=part)
    install_hook(hook, runtime)
    if optimizer is not None:
        pairs = (zip(buffer.originals, buffer.sharded, strict=True) for buffer in runtime.buffers)
        sharded = {original.parameter: own for both in pairs for original, own in both}
        take_over(optimizer, sharded, overrides, device)
        refuse_ignored(optimizer, runtime.ignored)
    loader = _build_loader(training_data, collate_fn, config, axes)
    parts = EngineState(
        runtime=runtime,
        # A predicate cannot be written down.
        config=(replace(whole, units=None) if callable(whole.units) else whole).to_dict(),
        checkpoint=whole.checkpoint,
        part=part,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        loader=loader,
        described=described,
        averages={} if outer_step is None else OuterSteps(outer_step, runtime).kept,
    )
    engine = Engine(model, parts, whole, loss_fn)
    if runtime.budget is not None:
        own = ref(engine)  # a module lives on without its engine
        runtime.budget.take_peak = lambda: 0 if (found := own()) is None else take_peak(found)
    engine.reset_comm_report()
    return Initialized(engine, optimizer, loader, lr_scheduler)


def _planned(
    model: nn.Module,
    optimizer: object,
    source: SampleSource,
    loss_fn: object,
    tp_plan: Plan | None,
    others: tuple[object, ...],
) -> Config:
    """Return the config of `config="auto"`; collective. See `choose_config`.

    Tensor ranks get the same samples, so they need training_data; pipeline ranks need a loss function, and a
    callable that makes the optimizer.
    """
    data = source.training_data
    _check_dataset(data)
    if any(others) or hasattr(optimizer, "hook_over"):
        raise ValueError("config='auto': expected no outer_step, gradient_hook or OneBitAdam: give a config")
    world = start_world(use_device(None), Config().watchdog_s)
    has_parts = loss_fn is not None and callable(optimizer) and not isinstance(optimizer, Optimizer)
    kind = getattr(optimizer, "func", optimizer)  # of a functools.partial
    name = getattr(kind, "__name__", type(kind).__name__)
    most = (8 if data is not None else 1), (64 if has_parts else 1)
    bits = 8 if name.endswith("8bit") else 32
    return choose_config(world, model, source, bits=bits, tp_plan=tp_plan, most=most)


def _part_of_model(
    model: nn.Module, optimizer: object, config: Config, world: Axis, source: SampleSource
) -> tuple[ModelPart, Config]:
    """Take this rank's part of a model, which rank 0 cuts for all ranks; collective.

    Args:
        model: the whole model. The modules of other pipeline ranks are taken out.
        optimizer: as `initialize` was given it.
        config: the config.
        world: all ranks.
        source: the samples, with which operations are counted.

    Returns:
        The part, and the config with those names of modules and parameters that it has.

    Raises:
        ValueError: the model cannot be cut, as the message says; or the optimizer is there already.
        RuntimeError: the ranks' models or configs differ.
    """
    if isinstance(optimizer, Optimizer):
        raise ValueError(
            f"mesh.pp={config.mesh.pp}: expected a callable that makes the optimizer from the parameters of "
            f"this rank's part of the model, got {type(optimizer).__name__} over all of them"
        )
    if any(isinstance(module, Absent) for module in model.modules()):
        raise ValueError(
            f"mesh.pp={config.mesh.pp}: expected a whole model, got a part of one, which an engine has taken "
            "out of it: build the model again"
        )
    chunked = _traced(model, config, world, source) if config.pipeline.trace else Chunked(model)
    model = chunked.model
    specs = specify_units(model, config)
    check_agreement(world, model, flat(config), specs, None, {}, source.training_data)
    read = partial(sample_of, model, source, config.micro_batch_size)
    make = partial(cut_model, chunked, config.pipeline, config.mesh.pp, world.device, read)
    made = on_first(world, "cut of the model into chunks", make)
    arrangement = Arrangement(world.size, config.mesh.pp, config.mesh.tp, config.shard_group_size)
    part, narrowed = own_part(chunked, config, made, arrangement.coordinates(world.rank).pp)
    return replace(part, is_frozen=part.is_frozen and optimizer is not None), narrowed


def _traced(model: nn.Module, config: Config, world: Axis, source: SampleSource) -> TracedChunks:
    """Trace a model on each rank.

    Raises:
        ValueError: the model cannot be traced, on any rank.
    """
    names = tuple(config.pipeline.split or ())
    found: list[TracedChunks] = []

    def trace_it() -> None:
        sample = None if source.training_data is None else sample_of(model, source, config.micro_batch_size)
        if sample is None:
            raise ValueError(
                "pipeline.trace: expected training_data at initialize: its first samples trace the model"
            )
        if any(not has_memory(tensor) for tensor in (*model.parameters(), *model.buffers())):
            raise ValueError("pipeline.trace: expected a model with values, got one under deferred_init")
        found.append(trace(model, sample, names))

    on_all(world, "trace of the model", trace_it)
    return found[0]


def _check_dataset(data: Any) -> None:
    """Refuse data of which no DataLoader can be made, before anything is started."""
    if data is not None and not (hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data)):
        raise ValueError(
            f"training_data: expected a Dataset with a length above 0, got {data!r}. Iterate over a loader "
            "of yours in your loop; client_state of save_checkpoint() takes its state"
        )


def _build_loader(
    training_data: Any, collate_fn: Callable[..., Any] | None, config: Config, axes: Axes
) -> EpochLoader | None:
    """Make the DataLoader over the data, if there are any."""
    if training_data is None:
        return None
    size, rank, num_ranks = config.micro_batch_size, axes.readers.rank, axes.readers.size
    if config.mesh.pp > 1:  # a pipeline takes whole batches
        size *= config.pipeline.num_microbatches
    options = {"batch_size": size, "collate_fn": collate_fn, **vars(config.loader)}
    return EpochLoader(training_data, rank=rank, num_ranks=num_ranks, device=axes.world.device, **options)


def _build_scheduler(lr_scheduler: Any, optimizer: Optimizer | None) -> Any:
    """Return the LR scheduler over the optimizer, checked."""
    if lr_scheduler is None:
        return None
    if optimizer is None:
        raise ValueError("lr_scheduler: expected an optimizer to go with it, got None")
    if isinstance(lr_scheduler, type) or (callable(lr_scheduler) and not hasattr(lr_scheduler, "step")):
        lr_scheduler = lr_scheduler(optimizer)
    if not hasattr(lr_scheduler, "step") or isinstance(lr_scheduler, ReduceLROnPlateau):
        name = type(lr_scheduler).__name__
        raise ValueError(f"lr_scheduler: expected a scheduler whose step() needs no argument, got {name}")
    if getattr(lr_scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("lr_scheduler belongs to another optimizer than the one given")
    return lr_scheduler
