"""One full parameter, gradient or optimizer state by the parameter's name, to read and to write; collective.

Ranks hold slices of each. A read gathers the slices of a shard group. Where pipeline ranks hold parts of the
model, the first one with the parameter sends the result to the others. For a write every rank gives the same
full tensor and keeps its slice of it.

All ranks call the methods of the engine with the same name, outside of forward and backward. Names are the
names of `named_parameters()`, and the other names of tied parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.agreement import require_equal
from zeroshard.checkpoint.tensors import is_codes, is_scales, read_model
from zeroshard.comm.collectives import Axis, on_all
from zeroshard.comm.mesh import Axes
from zeroshard.full.parameters import Whole, spread, wholes_of, write
from zeroshard.optim.adopted import rule_of, to_common
from zeroshard.optim.eightbit.blocks import ABSMAX, QuantizedState, codebook
from zeroshard.parameters.state import Moment
from zeroshard.sharding.runtime import Runtime

if TYPE_CHECKING:
    from zeroshard.engine import Engine


def full_parameter(engine: Engine, name: str) -> Tensor:
    """Copy a parameter to every rank; collective.

    Returns:
        Its full shape, from the main parameter, in float32 or wider, on the engine's device.

    Raises:
        ValueError: the model has no such parameter, or ranks give different names.
    """
    agreed = _agree(engine._runtime, "full_parameter()", name, lambda _: None)
    found: Tensor = agreed.read(lambda place: {name: place.gather(place.values)})[name]
    return found


def set_full_parameter(engine: Engine, name: str, values: Tensor) -> None:
    """Give a parameter other values; collective.

    Args:
        name: the name of the parameter.
        values: its full shape, the same on every rank.

    Raises:
        ValueError: no such parameter; values of another shape, or other ones on other ranks.
    """
    call = "set_full_parameter()"
    engine._runtime.state.refuse(call, Moment.AVERAGED)
    agreed = _agree(engine._runtime, call, name, lambda place: place.digest(values))
    if (place := agreed.place) is not None:
        write(engine._runtime, [(place, values.detach())])
        engine._runtime.passes.refresh()


def full_gradient(engine: Engine, name: str) -> Tensor | None:
    """Copy a parameter's gradient, averaged over the ranks and unscaled, to every rank; collective.

    Micro-batches of an unfinished step are reduced first, as `clip_grad_norm_` does.

    Returns:
        The parameter's full shape, in float32 or wider. None if no rank has a gradient: for a frozen or
        unused parameter, and after `step()` and `zero_grad()`.

    Raises:
        ValueError: the model has no such parameter, ranks give different names, or only some ranks have a
            gradient.
    """
    agreed = _agree(
        engine._runtime,
        "full_gradient()",
        name,
        lambda place: "no gradient" if place.gradient is None else "a gradient",
        reduces=True,
    )

    def read(place: Whole) -> dict[str, Tensor]:
        return {} if (gradient := place.gradient) is None else {name: place.gather(gradient)}

    return agreed.read(read).get(name)


def set_full_gradient(engine: Engine, name: str, values: Tensor) -> None:
    """Give a parameter another gradient, for the next step; collective.

    Args:
        name: the name of the parameter.
        values: its full shape, unscaled, the same on every rank.

    Raises:
        ValueError: no such parameter; a frozen one; values of another shape, or other ones elsewhere.
        RuntimeError: a backward has stepped units, with `offload.step_in_backward`.
    """
    call = "set_full_gradient()"
    engine._runtime.state.refuse(call, Moment.STEPPED)

    def tell(place: Whole) -> str:
        if not place.sharded.requires_grad:
            raise ValueError(f"{call}: '{name}' is frozen: expected a parameter that is trained")
        return place.digest(values)

    agreed = _agree(engine._runtime, call, name, tell, reduces=True)
    if (place := agreed.place) is not None:
        place.sharded.grad = place.cut(values).to(place.buffer.plan.main_dtype, copy=True)


def full_optimizer_state(engine: Engine, name: str) -> dict[str, Any]:
    """Copy the optimizer's states of a parameter to every rank; collective.

    Returns:
        The states by the names that torch's optimizers use. Element-wise states come in the parameter's
        full shape, in float32 or wider (8-bit ones too); others, such as `step`, as they are. {} before
        the first step, and for a parameter that the optimizer does not hold.

    Raises:
        ValueError: the model has no such parameter, or ranks give different names.
        RuntimeError: the engine has no optimizer.
    """
    agreed, states = _states(engine, "full_optimizer_state()", name, {})
    return agreed.read(lambda place: {key: state.read(place) for key, state in states.items()})


def set_full_optimizer_state(engine: Engine, name: str, values: Mapping[str, Any]) -> None:
    """Give states of a parameter other values; collective. States that are not given stay.

    Args:
        name: the name of the parameter.
        values: states as `full_optimizer_state` returns them, the same on every rank.

    Raises:
        ValueError: no such parameter or state; values of another shape, or other ones on other ranks.
        RuntimeError: the engine has no optimizer.
    """
    call = "set_full_optimizer_state()"
    agreed, states = _states(engine, call, name, values)
    if (place := agreed.place) is not None and engine.optimizer is not None:
        own = engine.optimizer.state.get(place.sharded, {})
        with torch.no_grad():
            for key, value in values.items():
                states[key].write(place, own, value)


def _states(
    engine: Engine, call: str, name: str, given: Mapping[str, Any]
) -> tuple[_NamedParameter, dict[str, _NamedState]]:
    """Return the place and the states of a parameter; values of states that are given are compared."""
    optimizer, pp = engine.optimizer, engine._runtime.context.axes.pp
    states: dict[str, _NamedState] = {}
    has_optimizer = pp.any([optimizer is not None], f"agreement on {call}")()  # a frozen part has none
    if not any(has_optimizer):
        raise RuntimeError(f"{call} needs an optimizer: give one to zeroshard.initialize")

    def tell(place: Whole) -> str:
        states.update({} if optimizer is None else _read_states(optimizer, place))
        if unknown := [key for key in given if key not in states]:
            there = ", ".join(states) or "none before the first step"
            raise ValueError(f"{call}: expected states of '{name}' ({there}), got {unknown[0]!r}")
        digests = [place.digest(given[k]) if states[k].is_wise else repr(given[k]) for k in sorted(given)]
        return ", ".join([*sorted(states), *digests]) or "no states"

    agreed = _agree(engine._runtime, call, name, tell)
    own = {key: state.is_wise for key, state in states.items()}
    kinds = agreed.axes.world.all_gather_object(own, f"kinds of states of {call}")
    for key, state in states.items():  # a slice of one element looks like one value, and the other way
        states[key] = replace(state, is_wise=all(kind.get(key, True) for kind in kinds))
    return agreed, states


# ------------------------------------------------------------------------------------------- parameters


class _NamedParameter(NamedTuple):
    """A parameter that all ranks have named."""

    axes: Axes
    place: Whole | None
    """None where other pipeline ranks hold it."""
    first: int
    """The first pipeline rank that holds it."""

    def read(self, get: Callable[[Whole], dict[str, Any]]) -> dict[str, Any]:
        """Return on all ranks the result of the ranks of the first part; collective."""
        place = self.place if self.axes.pp.rank == self.first else None
        return spread(self.axes, self.first, {} if place is None else get(place))


def _agree(
    runtime: Runtime, call: str, name: str, tell: Callable[[Whole], str | None], *, reduces: bool = False
) -> _NamedParameter:
    """Find a parameter, on all ranks the same.

    Args:
        runtime: the runtime of the model.
        call: the name of the method, for errors.
        name: the name of the parameter.
        tell: makes the fact that must be the same on all ranks with a slice; its errors are raised on all
            ranks.
        reduces: True reduces gradients first that were not reduced yet.

    Raises:
        ValueError: there is no parameter of that name, or the ranks give different names or facts.
    """
    runtime.wait(call, Moment.FAILED, Moment.SHOWN)
    if reduces:
        runtime.before_step()
    axes, places = runtime.context.axes, _places(runtime)
    place = places.get(_resolve(axes.world, call, name, places))

    def look() -> tuple[int, str | None] | None:
        return None if place is None else (axes.pp.rank, tell(place))

    found = on_all(axes.world, f"agreement on {call}", look)
    require_equal(
        [None if answer is None else answer[1] for answer in found],
        lambda versions: ValueError(
            f"{call}: expected the same for '{name}' on every rank: {versions}. Nothing was changed"
        ),
    )
    return _NamedParameter(axes, place, min(answer[0] for answer in found if answer is not None))


def _places(runtime: Runtime) -> dict[str, Whole]:
    """Return the parameters of this rank's part of the model, by all of their names."""
    places = {whole.sharded.fqn: whole for whole in wholes_of(runtime.context.axes, runtime.buffers)}
    for fqn, others in read_model(runtime).aliases.items():
        places |= dict.fromkeys(others, places[fqn])
    return places


def _resolve(world: Axis, call: str, name: str, places: Mapping[str, Whole]) -> str:
    """Return the first name in the whole model of a parameter that some part of it holds; collective.

    A tied parameter has another name in each part.

    Raises:
        ValueError: no part holds it, or the ranks give names of different ones.
    """
    own = places[name].sharded.fqn if name in places else None
    answers = world.all_gather_object((name, own), f"agreement on {call}")
    known: dict[str, str] = {given: fqn for given, fqn in answers if fqn is not None}
    if unknown := [given for given, _ in answers if given not in known]:
        raise ValueError(f"{call}: expected the name of a parameter of the model, got {unknown[0]!r}")
    require_equal(
        [known[given] for given, _ in answers],
        lambda found: ValueError(f"{call}: expected one name on all ranks: {found}"),
    )
    return known[name]


# ----------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class _NamedState:
    """One state of a parameter, as this rank has it."""

    key: str
    value: Any
    is_wise: bool
    """True for a state with a value for each element of the slice."""
    quantized: QuantizedState | None = None

    def read(self, place: Whole) -> Any:
        """Return the full state, in memory of its own; collective for an element-wise one."""
        if self.is_wise:
            return place.gather(self.value if self.quantized is None else self.quantized.load())
        return self.value.detach().clone() if isinstance(self.value, Tensor) else self.value

    def write(self, place: Whole, own: dict[str, Any], value: Any) -> None:
        """Keep this rank's slice of a full state.

        Args:
            place: the place of the parameter.
            own: the optimizer's state of the slice.
            value: the full state.
        """
        if self.quantized is not None:
            if self.quantized.codes.numel():
                self.quantized.store(place.cut(value).float())
        elif isinstance(self.value, Tensor):
            self.value.copy_(
                place.cut(value) if self.is_wise else torch.as_tensor(value, dtype=self.value.dtype)
            )
        else:
            own[self.key] = type(self.value)(value) if isinstance(self.value, int | float) else value


def _read_states(optimizer: Optimizer, place: Whole) -> dict[str, _NamedState]:
    """Return the states of this rank's slice by their common names, without scales of quantized states."""
    saved = to_common(optimizer, optimizer.state.get(place.sharded, {}))
    states: dict[str, _NamedState] = {}
    for key, value in saved.items():
        if is_scales(key, saved):
            continue
        if is_codes(key, saved):
            rule = rule_of(optimizer)
            book = codebook(rule is None or rule.states[key], value.device)
            scales = saved[key + ABSMAX]
            states[key] = _NamedState(key, value, True, QuantizedState(value.view(-1), scales, book))
            continue
        is_wise = isinstance(value, Tensor) and value.dim() > 0 and value.shape == place.sharded.shape
        states[key] = _NamedState(key, value, is_wise and not (key == "step" and value.numel() == 1))
    return states
