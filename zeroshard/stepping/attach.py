"""The one place that hooks an optimizer, with the order of events around a step, whoever takes it.

    ready     gradients that wait are reduced, and gathers that read main parameters end
    judge     the engine clips the gradients and may refuse the step; see `guard.py`
    step      the optimizer's own step; over parts where a tier holds the main parameters: for each part
              fetch, step, write back; see `parts.py`
    changed   main parameters have another version: replicated parameters are gathered again
    count     the engine counts the step

An engine's own `step()` judges before it calls the optimizer, since it may leave the step out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import WeakMethod, WeakSet

from torch import nn
from torch.optim import Optimizer

from zeroshard.config.pipeline import NEWEST_WEIGHTS
from zeroshard.parameters.saved import SavedSlices
from zeroshard.parameters.sharded import ShardedParameter, gradient_of
from zeroshard.parameters.state import Moment
from zeroshard.plan import pieces
from zeroshard.plan.buffers import lie_in_files
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit
from zeroshard.stepping.late import LateSteps
from zeroshard.stepping.norms import NormsOverRanks, UsesNorms
from zeroshard.stepping.parts import Home, StepByParts, is_divisible, is_known, pieces_of, steps_by_unit
from zeroshard.stepping.rounding import InPlace, Rounding, RoundsItself, Widening, has_kernels, load_states
from zeroshard.stepping.stored import StoreHome
from zeroshard.stepping.wholes import UsesWholes, WholesOverRanks
from zeroshard.stores.pieces import pieces_for

Optimizers = WeakSet[Optimizer]

Travelling = tuple[Unit, FlatBuffer, range]
"""Parameters of a unit and a buffer, by index, that are fetched together."""


@dataclass(frozen=True, slots=True)
class StepHooks:
    """An engine's part in the steps of its optimizer, which does not keep the engine alive."""

    judge: WeakMethod[Callable[[tuple[Any, ...], dict[str, Any]], None]]
    """Takes the arguments of a step; it may raise an error."""
    count: WeakMethod[Callable[[], None]]


def attach(
    runtime: Runtime, rounding: Rounding | None, *optimizers: Optimizer, engine: StepHooks | None = None
) -> list[StepByParts]:
    """Follow optimizers over the sharded parameters, whoever steps them.

    Args:
        runtime: the runtime of the parameters; the optimizers do not keep it alive.
        rounding: the rounding of updates into main parameters of bfloat16; None for wider ones.
        optimizers: optimizers that step together, one after the other: replicated parameters are gathered
            after the last of them. Attach an optimizer that steps alone by itself.
        engine: the part of the engine that owns the optimizer, if there is one.

    Returns:
        The steps by part of each optimizer that steps so.

    Raises:
        ValueError: an optimizer is one of bitsandbytes, which `zeroshard.initialize` takes over.
    """
    parts: list[StepByParts] = []
    together, left = WeakSet(optimizers), WeakSet(optimizers)
    context = runtime.context
    for optimizer in optimizers:
        _refuse_theirs(optimizer)
        if isinstance(optimizer, UsesNorms):
            optimizer.norms_of = NormsOverRanks(runtime.buffers, context.axes)
        if isinstance(optimizer, UsesWholes):
            optimizer.wholes_of = WholesOverRanks(runtime.buffers, context.axes)
        trained = [buffer for buffer in runtime.buffers if buffer.trainable]
        starts = {p: buffer.start(index) for buffer in trained for index, p in enumerate(buffer.sharded)}
        travelling = _travelling(runtime, optimizer)
        homes = _homes(runtime, optimizer, rounding, starts, travelling)
        waits = engine is not None and steps_by_unit(optimizer, context.axes) and may_wait(runtime)
        if homes or waits or context.setting.steps_in_backward:
            moved = {buffer for _, buffer, _ in travelling}
            near = [[p for b in unit.buffers if b not in moved for p in b.sharded] for unit in runtime.units]
            far = [[buffer.sharded[i] for i in indices] for _, buffer, indices in travelling]
            divides = travelling or steps_by_unit(optimizer, context.axes)
            stepped = StepByParts(optimizer, near + far if divides else [], homes, runtime.state)
            if waits:
                runtime.state.steps = LateSteps(runtime, optimizer)
            parts.append(stepped)
        _hook(runtime, optimizer, together, left, engine)
        if rounding is not None:
            load = partial(load_states, optimizer, optimizer.load_state_dict)
            optimizer.load_state_dict = load  # type: ignore[method-assign]
    return parts


def _homes(
    runtime: Runtime,
    optimizer: Optimizer,
    rounding: Rounding | None,
    starts: dict[ShardedParameter, int],
    travelling: Sequence[Travelling],
) -> list[Home]:
    """The homes that parameters pass on the way to an optimizer, the farthest first."""
    context = runtime.context
    homes: list[Home] = []
    if travelling:
        pieces = pieces_for((buffer.plan for _, buffer, _ in travelling), context.memory, context.streams)
        parts = [
            (unit, buffer, indices, pieces_of(buffer, indices) if is_divisible(optimizer) else [None])
            for unit, buffer, indices in travelling
        ]
        homes.append(StoreHome(parts, pieces, starts))
    if rounding is not None:
        has_kernels(runtime.context.device)  # a warning comes before training
        # An optimizer of another class may compute with values.
        if isinstance(optimizer, RoundsItself) and is_known(optimizer):
            in_place = InPlace(starts, rounding)
            optimizer.bits_of = in_place.bits_of
            homes.append(in_place)
        else:
            homes.append(Widening(starts, rounding))
    return homes


def _travelling(runtime: Runtime, optimizer: Optimizer) -> list[Travelling]:
    """The parameters with states on a farther tier that are fetched together.

    An optimizer that is not known steps values on the host where they are.

    Raises:
        ValueError: an optimizer that is not known, and values in files.
    """
    filled = [(unit, buffer) for unit in runtime.units for buffer in unit.buffers if buffer.main.numel()]
    if is_known(optimizer):
        return [(unit, b, indices) for unit, b in filled for indices in pieces.near_parts(b.plan)]
    if lie_in_files(b.plan for b in runtime.buffers if b.trainable):
        raise ValueError(
            f"offload.optimizer='nvme': expected an optimizer of torch, zeroshard or bitsandbytes, got "
            f"{type(optimizer).__qualname__} of {type(optimizer).__module__}, which may hold states that no "
            "dict of states shows: set offload.optimizer='cpu'"
        )
    return []


def may_wait(runtime: Runtime) -> bool:
    """True if the steps of units, or the host, may wait, as whoever looks at values goes through us."""
    setting, trained = runtime.context.setting, [b.plan for b in runtime.buffers if b.trainable]
    if setting.weights not in NEWEST_WEIGHTS:
        return False
    return any(plan.travels for plan in trained) and not any(
        plan.is_resident and plan.gathers for plan in trained
    )


def _refuse_theirs(optimizer: Optimizer) -> None:
    is_theirs = any(base.__module__.startswith("bitsandbytes.") for base in type(optimizer).__mro__)
    if is_theirs and "update_step" not in vars(optimizer):  # of its class: nobody took it over
        raise ValueError(
            f"{type(optimizer).__name__} would choose the precision of its states by the sizes of this "
            "rank's slices: give it to zeroshard.initialize, which takes it over, or use an optimizer of "
            "zeroshard.optim"
        )


def _hook(
    runtime: Runtime, optimizer: Optimizer, together: Optimizers, left: Optimizers, engine: StepHooks | None
) -> None:
    """Lay the events of a step around the method `step`, outside of torch's hooks.

    Of the optimizers that step `together`, those that are `left` have not stepped since the last one did.
    """
    step, zero_grad = optimizer.step, optimizer.zero_grad
    runtime.state.attached.add(optimizer)
    of_runtime = weakref.ref(runtime)

    @wraps(step)  # with the mark of an LR scheduler that has wrapped it
    def whole_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (runtime := of_runtime()) is None:
            return step(*args, **kwargs)
        runtime.check_additions()
        _check_sharded(optimizer, runtime.ignored)
        runtime.before_step()
        runtime.here.enter("the optimizer step")
        if engine is not None and (judge := engine.judge()) is not None:
            judge(args, kwargs)
        result = step(*args, **kwargs)
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        stepped = {p for p in parameters if p not in runtime.ignored and gradient_of(p) is not None}
        left.discard(optimizer)
        if is_last := not left:
            left.update(together)
        runtime.after_step(stepped, is_last)
        runtime.here.enter(runtime.here.OUTSIDE)
        if engine is not None and (count := engine.count()) is not None:
            count()
        return result

    @wraps(zero_grad)
    def zero_all(set_to_none: bool = True) -> None:
        if (runtime := of_runtime()) is not None:
            runtime.state.refuse("zero_grad()", Moment.STEPPED)
            runtime.drop_deferred()
            if set_to_none and type(optimizer).zero_grad is Optimizer.zero_grad:
                runtime.clear_gradients([p for group in optimizer.param_groups for p in group["params"]])
                return
        zero_grad(set_to_none)

    def mark(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        return None if of_runtime() is None else SavedSlices(state_dict)

    optimizer.step = MethodType(whole_step, optimizer)  # type: ignore[method-assign]
    optimizer.register_state_dict_post_hook(mark)
    optimizer.zero_grad = zero_all  # type: ignore[method-assign]


def _check_sharded(optimizer: Optimizer, ignored: Mapping[nn.Parameter, str]) -> None:
    """Refuse a parameter that came after sharding: its gradient is this rank's alone."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not isinstance(parameter, ShardedParameter) and parameter not in ignored:
                raise RuntimeError(
                    f"group {number} of the optimizer holds a parameter that is not the model's, of shape "
                    f"{list(parameter.shape)}, added after the model was sharded: its gradient is this "
                    "rank's alone. Add layers to the model, and their parameters to the optimizer, before "
                    "initialize; to train some of them later, freeze them with requires_grad_(False) after "
                    "initialize until then"
                )
