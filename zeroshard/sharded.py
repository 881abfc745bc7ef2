"""The composable layer: a module is sharded in place, with calls for uses other than training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zeroshard.assemble import shard_in_place
from zeroshard.comm import collectives
from zeroshard.comm.streams import mark_here
from zeroshard.config.sections import Config
from zeroshard.full import parameters as full
from zeroshard.hf.quantize import count_elements
from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.muon import refuse_ignored
from zeroshard.parallel.tensor.styles import Plan
from zeroshard.parameters.saved import NotCopied
from zeroshard.parameters.sharded import ShardedParameter, carry_attributes, set_gradients
from zeroshard.parameters.state import IN_BATCH, Moment, Phase, Steps
from zeroshard.parameters.unsharded import revive
from zeroshard.plan.originals import Original, is_packed
from zeroshard.sharding.context import Changes
from zeroshard.sharding.runtime import DRAIN_S, Runtime
from zeroshard.sharding.unit import UnitState
from zeroshard.stepping.attach import attach
from zeroshard.stepping.guard import StepGuard
from zeroshard.tables import LINE, format_count, render

if TYPE_CHECKING:
    from zeroshard.engine import Engine


T = TypeVar("T")


class Closed:
    """A stand-in for the parts of a closed engine: any use is an error."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            "the engine is closed and its model is an ordinary module again: to go on sharded, give the "
            "model to zeroshard.initialize or zeroshard.shard once more, with a new optimizer"
        )


def restore_module(runtime: Runtime) -> None:
    """Give the module its original parameters back, with the values of the main parameters; collective.

    They are the objects that the module had before it was sharded, of full shape, in the main dtype and on
    the device of the runtime; those from the meta device are new objects. The engine keeps frozen ones in the
    compute dtype; they come in the main dtype, too, so that a plain forward works. One unit is gathered at a
    time.

    Raises:
        RuntimeError: a forward, a backward or `unsharded()` is running; or a parameter was replaced on any
            rank since the module was sharded. Then nothing has changed.
    """
    runtime.wait("close()", Moment.FAILED, Moment.SHOWN, Moment.AVERAGED)

    def check() -> None:
        for unit in runtime.units:
            unit.slots.check()

    collectives.on_all(runtime.context.axes.world, "agreement on close()", check)
    runtime.drop_deferred()
    runtime.passes.reshard_all()
    for unit in runtime.units:
        for buffer in unit.buffers:
            views = buffer.gather_wholes()
            for original, sharded, view in zip(buffer.originals, buffer.sharded, views, strict=True):
                _give_back(original, sharded, view.to(_dtype_of(original, view, runtime), copy=True))
    release(
        runtime,
        "belongs to an engine that was closed, and its model has the whole parameter again: make a new "
        "optimizer over model.parameters(), or give the model to zeroshard.initialize once more",
    )


def drop_module(runtime: Runtime) -> None:
    """Drop everything without an exchange; the module is not usable afterwards."""
    runtime.state.steps = Steps()  # those that wait are not taken
    runtime.context.axes.drain(DRAIN_S)  # a wait that ends too early would close connections of all engines
    runtime.context.streams.join()
    mark_here(runtime.context.device).synchronize()  # copies from and to memory that goes may be under way
    for unit in runtime.units:
        unit.slots.uninstall()
    release(runtime, "belongs to an engine that was closed with restore=False: its model cannot be used")


def release(runtime: Runtime, refusal: str) -> None:
    """Take the hooks away, and the memory of parameters and gradients.

    Args:
        runtime: a runtime that is not used any more.
        refusal: the end of the sentence "the sharded parameter 'a.weight' ...", for a later use of one.
    """
    runtime.changes.undo()
    with past_guards():
        for sharded in runtime.parameters:  # the optimizer and the user may keep them
            set_gradients([(sharded, None)])
            sharded.data = sharded.new_empty(0)
    for unit in runtime.units:
        unit.release()
    runtime.state.move(Phase.CLOSED)
    runtime.state.refusal = refusal


def _dtype_of(original: Original, view: Tensor, runtime: Runtime) -> torch.dtype:
    if is_packed(original.parameter):
        return view.dtype
    main = runtime.context.setting.dtypes.main_dtype or torch.promote_types(
        original.parameter.dtype, torch.float32
    )
    return torch.promote_types(view.dtype, main)


@torch.no_grad()
def _give_back(original: Original, sharded: ShardedParameter, values: Tensor) -> None:
    parameter = original.parameter
    revive(parameter)
    if parameter.is_meta:  # it has no memory to take values
        parameter = nn.Parameter(values, requires_grad=False)
        parameter.__class__ = type(original.parameter)
        carry_attributes(original.parameter, parameter)
    else:
        parameter.data = values
    parameter.grad = None
    parameter.requires_grad_(sharded.requires_grad)
    for owner, attribute in original.owners:
        if type(owner).__setattr__ is nn.Module.__setattr__:
            owner._parameters[attribute] = parameter
        else:  # an RNN keeps a list of its weights, too
            setattr(owner, attribute, parameter)


def no_sync(owner: Engine | Sharded) -> AbstractContextManager[None]:
    """Return a context in which backward adds gradients up on this rank and sends nothing."""
    return owner._runtime.reducer.next_backward(True)


def clip_grad_norm_(
    owner: Engine | Sharded, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients by min(1, max_norm / (norm + 1e-6)); collective.

    Args:
        max_norm: the norm that is left at most.
        norm_type: the order of the norm, above 0; inf gives the largest magnitude.
        error_if_nonfinite: True raises if the norm is inf or nan.

    Returns:
        The norm over the gradients of all parameters before that; 0-dim, float32.

    Raises:
        ValueError: `max_norm` is below 0, or `norm_type` is not above it.
        RuntimeError: the norm is not finite, with `error_if_nonfinite`; the message names parameters.
            Gradients are as they were. Or a backward has stepped units, whose gradients are gone, with
            `offload.step_in_backward`.
    """
    order = float(norm_type)
    if not (max_norm >= 0 and order > 0):
        raise ValueError(
            "clip_grad_norm_: expected max_norm >= 0 and norm_type above 0, or inf, got "
            f"{max_norm!r} and {norm_type!r}"
        )
    if (hook := owner._runtime.state.hook) is not None and hook.is_local:
        raise RuntimeError(
            f"clip_grad_norm_: with {hook.name} ranks have different gradients, and so different norms: "
            "leave clipping out, in a Trainer by max_grad_norm=0"
        )
    owner._runtime.state.refuse("clip_grad_norm_()", Moment.STEPPED)
    owner._runtime.before_step()
    return owner._guard.clip(max_norm, order, error_if_nonfinite)


@contextmanager
def unsharded(owner: Engine | Sharded, *modules: Any, write_back: bool = False) -> Iterator[None]:
    """Show full parameters, in the main dtype, on every rank: to read and to edit, not for a loss.

    Args:
        modules: modules that are parts of the model; none means all of it. Whole units are gathered.
        write_back: keep edits; every rank must make the same ones.

    Raises:
        ValueError: a module is not part of the model.
        RuntimeError: the ranks made different edits; or a batch of a pipeline is under way.
    """
    owner._runtime.state.refuse("unsharded()", *IN_BATCH)
    if write_back:
        owner._runtime.state.refuse("unsharded(write_back=True)", Moment.AVERAGED)
    root = owner._runtime.module
    inside = set(root.modules())
    parts = [root if module is owner else module for module in modules or (root,)]
    for part in parts:
        if part not in inside:
            raise ValueError(f"unsharded: expected modules of the model, got {type(part).__name__}")
    with full.unsharded(owner._runtime, parts, write_back):
        yield


def full_state_dict(owner: Engine | Sharded) -> dict[str, Tensor]:
    """Return on rank 0 CPU tensors under the original names, parameters in float32; {} on other ranks."""
    return full.full_state_dict(owner._runtime)


def num_parameters(owner: Engine | Sharded, only_trainable: bool = False) -> int:
    """Count the elements of the whole model, tied parameters once. `numel()` of a sharded one is less."""
    return count_elements(owner._runtime.module.parameters(), only_trainable=only_trainable)


def close(owner: Engine | Sharded, restore: bool = True) -> None:
    """Make the model an ordinary module again; collective. A second call does nothing.

    The model has its original parameters again, with the trained values, whole on every rank, in the
    main dtype. Hooks are gone and methods are its own. It may be used as it is, or given to `initialize` or
    `shard` again. Gradients are dropped. The optimizer cannot step any more: its states are of slices.

    Args:
        restore: False only gives back memory and waits for no other rank. The model cannot be used then.

    Raises:
        RuntimeError: a forward, backward or `unsharded()` is running, or a parameter was replaced; then
            nothing is closed. Or the last save in the background has failed; then the engine is closed.
    """
    if isinstance(owner._runtime, Closed):
        return
    runtime = owner._runtime
    restore_module(runtime) if restore else drop_module(runtime)
    runtime.context.axes.world.unwatch()
    closed: Any = Closed()
    owner._runtime = owner._guard = closed  # any use is an error from now on
    if not isinstance(owner, Sharded):
        owner._release(restore, closed)


def on_all(owner: Engine | Sharded, label: str, call: Callable[[], T]) -> list[T]:
    """Call a function on each rank, and give all ranks the results, or the first error; collective.

    Args:
        label: the name of the call in errors.
        call: returns a small value that can be pickled.

    Returns:
        The results in the order of ranks.

    Raises:
        ValueError, RuntimeError: the error of the first rank that failed, on all ranks.
    """
    return collectives.on_all(owner._runtime.context.axes.world, label, call)


_OF_UNITS = {"unshard": "gather", "wait": "wait of gather", "reshard": "free", "reduce": "reduce"}
"""The work of each verb of a unit."""
_OF_GRADIENTS = {"pack": "reduce", "deliver": "reduce"}


def _verbs(runtime: Runtime) -> Iterator[tuple[Any, str, str]]:
    """Yield the objects that work for units, each with a verb, and with its work and unit."""
    for unit in runtime.units:
        verbs: list[tuple[Any, str, str]] = [(unit, verb, work) for verb, work in _OF_UNITS.items()]
        verbs += [(one, verb, work) for one in unit.gradients for verb, work in _OF_GRADIENTS.items()]
        # The streams of an accelerator copy during compute, which notes nothing of it.
        for buffer in unit.buffers if runtime.context.device.type == "cpu" else ():
            verbs += [(store, "load", "copy") for store in (buffer.store, buffer.store.copy) if store]
        yield from ((holder, verb, f"{work} of {unit.described}") for holder, verb, work in verbs)


@contextmanager
def subscribe(
    owner: Engine | Sharded,
    around: Callable[[str], AbstractContextManager[object]],
    stepped: Callable[[], object] = object,
) -> Iterator[None]:
    """Enter a context around each piece of work of this rank, as long as the block lasts.

    Verbs are replaced in the objects that have them, so that nothing is asked where nobody has subscribed.

    Args:
        around: (work) -> a context: "forward of unit 'blocks.0'", or of a backward, gather, free, reduce,
            copy or wait. A forward, a backward, the "step" of the optimizer, and "other" outside of these,
            last until the next of them begins; the others are inside.
        stepped: is called at the end of each step of the optimizers.

    Raises:
        RuntimeError: another subscription is under way in this process.
    """
    runtime, here, changes, phase = owner._runtime, owner._runtime.here, Changes(), ExitStack()
    thread, waits, after_step = threading.get_ident(), runtime.context.axes.dp.waits, runtime.after_step

    def is_here() -> bool:
        """True in the program's thread, and in the thread of its backward, for which the program waits."""
        return threading.get_ident() == thread or is_in_backward()

    def do(call: Callable[..., Any], work: str, *args: Any, **kwargs: Any) -> Any:
        with around(work) if is_here() else nullcontext():
            return call(*args, **kwargs)

    def wait_for(call: Callable[..., Any], works: Any, label: str, *kind: str) -> None:
        do(call, f"wait of {label}", works, label, *kind)

    def enter(call: Callable[..., Any], name: str, where: str = "") -> None:
        call(name, where)
        if is_here():
            phase.close()
            work = name.removeprefix("the ").removeprefix("optimizer ")
            phase.enter_context(around(f"{work}{where}" or "other"))

    def end_step(parameters: Container[nn.Parameter] = (), is_last: bool = True) -> None:
        after_step(parameters, is_last)
        if is_last:
            stepped()

    if "enter" in vars(here):  # all engines of a process have one status
        raise RuntimeError("another subscription is under way in this process: end it before")
    try:
        for holder, verb, work in _verbs(runtime):
            changes.set(holder, verb, partial(do, getattr(holder, verb), work))
        changes.set(waits, "wait_for", partial(wait_for, waits.wait_for))
        changes.set(here, "enter", partial(enter, here.enter))
        changes.set(runtime, "after_step", end_step)
        here.enter(here.OUTSIDE)
        yield
    finally:
        changes.undo()
        phase.close()
        # An exchange that ends after torch's profiler (2.11 to 2.14) would write into memory that is freed.
        for unit in runtime.units:
            if unit.state is UnitState.GATHERING:
                unit.wait()


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """An entry of `engine.units`."""

    name: str
    """The module's name; the root unit's is empty."""
    numel: int
    """Elements, padding included."""
    kept: bool
    """True if backward needs no second gather: it stays gathered, or backward needs no parameters."""
    reason: str = ""
    """The reason why its module is a unit."""
    around: tuple[str, ...] = ()
    """All that lies around the forward of its module, from the outside in."""
    seconds: float = 0.0
    """The seconds of its forward and backward that the plan of a memory budget predicts; 0 without one.

    Those of the root are all that is in no other unit; it is listed then even if it has no parameters.
    """


class Units(list[UnitInfo]):
    """The units; as text a table."""

    inside: dict[str, tuple[str, ...]]
    """By name of a module that is no unit: all that lies around its forward, from the outside in."""

    def __str__(self) -> str:
        total = sum(unit.seconds for unit in self)
        rows = [
            (unit.name or "(root)", format_count(unit.numel), ", ".join(unit.around), f"{unit.seconds:.4g} s")
            for unit in self
        ] + [(name, "", ", ".join(around), "") for name, around in self.inside.items()]
        columns = ("unit", "elements", "around its forward", "predicted")
        return render("units", columns, [*rows, LINE, ("forward and backward", "", "", f"{total:.4g} s")])


def units(owner: Engine | Sharded) -> Units:
    """The units, each with the facts of `UnitInfo`: name, size, reason, and what lies around its forward."""
    runtime = owner._runtime
    placements, infos, stacks = runtime.context.setting.placements, Units(), {**runtime.changes.stacks}
    seconds = {} if runtime.budget is None else runtime.budget.seconds
    for unit in (unit for unit in runtime.units if unit.plan.buffers or unit.module in seconds):
        kept = unit.plan.is_kept(
            placements, is_root=unit is runtime.root, ends_forward=unit in runtime.passes.last
        )
        hooks = {"gather": unit.buffers, "cast": runtime.hooked_dtype(unit.module)}
        around = *(name for name in hooks if hooks[name]), *reversed(stacks.pop(unit.module, ()))
        predicted = seconds.get(unit.module, 0.0)
        infos.append(UnitInfo(unit.plan.name, unit.plan.numel, kept, unit.plan.reason, around, predicted))
    infos.inside = {
        name: tuple(reversed(stacks[module]))
        for name, module in runtime.module.named_modules()
        if module in stacks
    }
    return infos


class Sharded(NotCopied):
    """A module that `zeroshard.shard` has sharded in place, with more calls than its forward and backward.

    The module is called as before, and `loss.backward()` makes the gradients. It has no checkpoints,
    accumulation, loss scale or nonfinite steps: these belong to an engine.
    """

    module: nn.Module
    """The module that was given."""
    device: torch.device
    """The device that this rank computes on."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._guard = runtime, StepGuard(runtime)
        self.module, self.device = runtime.module, runtime.context.device
        zero_grad = self.module.zero_grad

        def zero_all(set_to_none: bool = True) -> None:
            runtime.drop_deferred()
            zero_grad(set_to_none)

        runtime.changes.set(self.module, "zero_grad", zero_all)

    no_sync, unsharded = no_sync, unsharded
    clip_grad_norm_, full_state_dict = clip_grad_norm_, full_state_dict
    num_parameters, close = num_parameters, close
    subscribe, on_all = subscribe, on_all
    units = property(units)

    def attach(self, *optimizers: Optimizer) -> None:
        """Follow optimizers over the sharded parameters, whoever steps them.

        Args:
            optimizers: optimizers that step together, one after the other: replicated parameters are gathered
                after the last of them. Attach an optimizer that steps alone by itself.

        Raises:
            ValueError: an optimizer is one of bitsandbytes, which `zeroshard.initialize` takes over; or an
                ignored parameter is in a group of Muon.
        """
        for optimizer in optimizers:
            refuse_ignored(optimizer, self._runtime.ignored)
        attach(self._runtime, self._guard.rounding, *optimizers)


def shard(
    module: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh: DeviceMesh | None = None,
    tp_plan: Plan | None = None,
) -> Sharded:
    """Shard a module in place over the ranks of the default process group.

    Afterwards `module.parameters()` yields this rank's sharded parameters; make an optimizer over them
    and hand it to `attach(optimizer)` of the result.

    Args:
        module: a module. Its parameters get the values of rank 0, or the values that `deferred_init`
            has recorded.
        config: stage, precision, units, prefetch; a Config, a dict or a path, as `initialize` takes it.
        mesh: a mesh of one axis of any name, or with the axes `dp_replicate` and `dp_shard` for hybrid
            sharding, and `tp` for tensor parallelism; None: over all ranks, as `config` says. Its device type
            is used if neither `config` nor the module has one.
        tp_plan: as `initialize` takes it.

    Raises:
        ValueError: the `config` does not fit the module, the mesh or the ranks; or there is no process group.
    """
    return Sharded(shard_in_place(module, Config.parse(config), mesh, tp_plan))
