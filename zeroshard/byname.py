"""One full parameter, gradient or optimizer state by the parameter's name, to read and to write; collective.

Ranks hold slices of each. A read gathers the slices of a shard group, some megabytes at a time. For a write
every rank gives the same full tensor and keeps its slice of it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.checkpoint.agreed import on_all
from zeroshard.checkpoint.blockwise import is_codes, is_scales
from zeroshard.checkpoint.tensors import read_model
from zeroshard.comm import moves
from zeroshard.internals.dispatch import past_guards
from zeroshard.optim.eightbit.blocks import Quantized
from zeroshard.optim.eightbit.codebook import codebook
from zeroshard.optim.eightbit.states import ABSMAX
from zeroshard.optim.statenames import rule_of, to_common
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import refuse_in_step
from zeroshard.sharding.buffer import FlatBuffer
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.wholes import own_value, whole_value

_GATHERED_BYTES = 64 << 20
"""Memory that a gather takes beside its result."""


class ByName:
    """The part of an engine that reads and writes full tensors by name.

    All ranks call these methods with the same name, outside of forward and backward. Names are those of
    `named_parameters()`, and the other names of tied parameters.
    """

    _runtime: Runtime
    optimizer: Optimizer | None

    def full_parameter(self, name: str) -> Tensor:
        """Copy a parameter to every rank; collective.

        Returns:
            Its full shape, from the main parameter, in float32 or wider, on the engine's device.

        Raises:
            ValueError: the model has no such parameter, or ranks give different names.
        """
        place, _ = _agree(self._runtime, "full_parameter()", name)
        return place.gather(place.sharded.detach())

    def set_full_parameter(self, name: str, values: Tensor) -> None:
        """Give a parameter other values; collective.

        Args:
            name: the name of the parameter.
            values: its full shape, the same on every rank.

        Raises:
            ValueError: no such parameter; values of another shape, or other ones on other ranks.
        """
        call = "set_full_parameter()"
        place, facts = _agree(self._runtime, call, name, lambda place: place.digest(values))
        _require_same(call, name, facts)
        with torch.no_grad():
            place.sharded.detach().copy_(place.cut(values))
        for unit in self._runtime.units:
            if place.buffer in unit.buffers:
                unit.refresh()

    def full_gradient(self, name: str) -> Tensor | None:
        """Copy a parameter's gradient, averaged over the ranks and unscaled, to every rank; collective.

        Micro-batches of an unfinished step are reduced first, as `clip_grad_norm_` does.

        Returns:
            The parameter's full shape, in float32 or wider. None if no rank has a gradient: for a frozen or
            unused parameter, and after `step()` and `zero_grad()`.

        Raises:
            ValueError: the model has no such parameter, or ranks give different names.
            RuntimeError: only some ranks have a gradient.
        """
        call = "full_gradient()"
        place, facts = _agree(
            self._runtime, call, name, lambda place: place.gradient is not None, reduces=True
        )
        if len(set(facts)) > 1:
            raise RuntimeError(
                f"{call}: only ranks {[rank for rank, has in enumerate(facts) if has]} have a gradient of "
                f"'{name}'; expected one on all ranks or on none. Drop p.grad on all ranks alike"
            )
        gradient = place.gradient
        return None if gradient is None else place.gather(gradient)

    def set_full_gradient(self, name: str, values: Tensor) -> None:
        """Give a parameter another gradient, for the next step; collective.

        Args:
            name: the name of the parameter.
            values: its full shape, unscaled, the same on every rank.

        Raises:
            ValueError: no such parameter; a frozen one; values of another shape, or other ones elsewhere.
            RuntimeError: a backward has stepped units, with `offload.step_in_backward`.
        """
        call = "set_full_gradient()"
        refuse_in_step(self._runtime.context.state, call)

        def tell(place: _Place) -> bytes:
            if not place.sharded.requires_grad:
                raise ValueError(f"{call}: '{name}' is frozen: expected a parameter that is trained")
            return place.digest(values)

        place, facts = _agree(self._runtime, call, name, tell, reduces=True)
        _require_same(call, name, facts)
        place.set_gradient(place.cut(values).to(place.sharded.dtype, copy=True))

    def full_optimizer_state(self, name: str) -> dict[str, Any]:
        """Copy the optimizer's states of a parameter to every rank; collective.

        Returns:
            The states by the names that torch's optimizers use. Element-wise states come in the parameter's
            full shape, in float32 or wider (8-bit ones too); others, such as `step`, as they are. {} before
            the first step, and for a parameter that the optimizer does not hold.

        Raises:
            ValueError: the model has no such parameter, or ranks give different names.
            RuntimeError: the engine has no optimizer.
        """
        place, states, _ = self._states("full_optimizer_state()", name, {})
        return {key: state.read(place) for key, state in states.items()}

    def set_full_optimizer_state(self, name: str, values: Mapping[str, Any]) -> None:
        """Give states of a parameter other values; collective. States that are not given stay.

        Args:
            name: the name of the parameter.
            values: states as `full_optimizer_state` returns them, the same on every rank.

        Raises:
            ValueError: no such parameter or state; values of another shape, or other ones on other ranks.
            RuntimeError: the engine has no optimizer.
        """
        call = "set_full_optimizer_state()"
        place, states, facts = self._states(call, name, values)
        _require_same(call, name, facts)
        assert self.optimizer is not None, "its states were read"
        own = self.optimizer.state.get(place.sharded, {})
        with torch.no_grad():
            for key, value in values.items():
                states[key].write(place, own, value)

    def _states(
        self, call: str, name: str, given: Mapping[str, Any]
    ) -> tuple[_Place, dict[str, _State], list[Any]]:
        """Return the states of a parameter, and a digest of the given states from every rank."""
        optimizer, states = self.optimizer, {}
        if optimizer is None:
            raise RuntimeError(f"{call} needs an optimizer: give one to zeroshard.initialize")

        def tell(place: _Place) -> tuple[dict[str, bool], list[Any]]:
            states.update(_read_states(optimizer, place))
            if unknown := [key for key in given if key not in states]:
                there = ", ".join(states) or "none before the first step"
                raise ValueError(f"{call}: expected states of '{name}' ({there}), got {unknown[0]!r}")
            digests = [place.digest(given[k]) if states[k].is_wise else repr(given[k]) for k in sorted(given)]
            return {key: state.is_wise for key, state in states.items()}, digests

        place, facts = _agree(self._runtime, call, name, tell)
        kinds = [kind for kind, _ in facts]
        if any(kind.keys() != kinds[0].keys() for kind in kinds):
            raise RuntimeError(
                f"{call}: the ranks have different optimizer states of '{name}': {list(map(list, kinds))}; "
                "expected the same on all ranks"
            )
        for key, state in states.items():  # a slice of one element looks like one value, and the other way
            states[key] = replace(state, is_wise=all(kind[key] for kind in kinds))
        return place, states, [digests for _, digests in facts]


# ------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter, and the places of its slices."""

    runtime: Runtime
    buffer: FlatBuffer
    index: int

    @property
    def sharded(self) -> ShardedParameter:
        return self.buffer.sharded[self.index]

    @property
    def gradient(self) -> Tensor | None:
        """This rank's slice of the gradient."""
        with past_guards():
            return self.sharded.grad

    def set_gradient(self, values: Tensor) -> None:
        """Give this rank's slice of the gradient, [n], other values."""
        with past_guards():
            self.sharded.grad = values

    def gather(self, own: Tensor) -> Tensor:
        """Gather a whole tensor, in the parameter's shape, from the slices [n] of the ranks; collective.

        The result lies on the device that computes, wherever the slices do.
        """
        axes, original = self.runtime.context.axes, self.buffer.originals[self.index]
        return whole_value(self._gather_part(own), original, axes.tp)

    def _gather_part(self, own: Tensor) -> Tensor:
        """Gather this rank's part, or all, of a parameter from the ranks that share it."""
        shape = self.buffer.shapes[self.index]
        wide = torch.promote_types(own.dtype, torch.float32) if own.dtype.is_floating_point else own.dtype
        device = self.runtime.context.device
        if not self.buffer.is_partial:
            return moves.to_device(own.detach().to(wide, copy=True), device).view(shape)
        axis = self.runtime.context.axis
        spans = [self.buffer.layout.owned(self.index, rank) for rank in range(axis.size)]
        whole = torch.empty(shape.numel(), dtype=wide, device=device)
        longest = max(span.size for span in spans)
        step = min(longest, max(1, _GATHERED_BYTES // (axis.size * own.element_size())))
        for at in range(0, longest, step or 1):
            piece = torch.zeros(step, dtype=own.dtype, device=device)
            part = own.detach()[at : at + step]
            piece[: part.numel()].copy_(part)
            pieces = torch.empty(axis.size * step, dtype=own.dtype, device=device)
            label = f"all-gather of '{self.sharded.fqn}'"
            axis.all_gather(
                pieces.view(torch.uint8), piece.view(torch.uint8), tag=self.buffer.tag, label=label
            ).wait()
            for span, values in zip(spans, pieces.split(step), strict=True):
                start = min(span.start + at, span.stop)
                num = min(step, span.stop - start)
                whole[start : start + num].copy_(values[:num])
        return whole.view(shape)

    def cut(self, values: Tensor) -> Tensor:
        """This rank's slice of a full tensor, [n], on its device."""
        start, original = self.buffer.start(self.index), self.buffer.originals[self.index]
        values = own_value(values.detach(), original, self.runtime.context.axes.tp)
        part = values.reshape(-1)[start : start + self.sharded.numel()]
        return moves.beside(part, self.buffer.main)

    def digest(self, values: Any) -> bytes:
        """A digest of a full tensor, which ranks compare.

        Raises:
            ValueError: it is not a tensor, or has another shape.
        """
        shape = tuple(self.buffer.whole_shapes[self.index])
        if not isinstance(values, Tensor) or tuple(values.shape) != shape or values.is_meta:
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"'{self.sharded.fqn}': expected a full tensor of shape {shape}, got {got}")
        raw = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return blake2b(f"{values.dtype}".encode() + raw.numpy().tobytes(), digest_size=16).digest()


def _agree(
    runtime: Runtime,
    call: str,
    name: str,
    tell: Callable[[_Place], Any] = lambda place: None,
    *,
    reduces: bool = False,
) -> tuple[_Place, list[Any]]:
    """Find a parameter, on all ranks the same.

    Args:
        runtime: the runtime of the model.
        call: the name of the method, for errors.
        name: the name of the parameter.
        tell: a function whose results the ranks exchange; its errors are raised on all ranks.
        reduces: True reduces gradients first that were not reduced yet.

    Raises:
        ValueError: there is no parameter of that name, or the ranks give different names.
    """
    runtime.settle()
    runtime.require_slices(call)
    if reduces:
        runtime.before_step()
    places: list[_Place] = []

    def look() -> tuple[str, Any]:
        places.append(_find(runtime, call, name))
        return places[0].sharded.fqn, tell(places[0])

    facts = on_all(runtime.context.axes.everyone, f"agreement on {call}", look)
    if len({fqn for fqn, _ in facts}) > 1:
        raise ValueError(f"{call}: expected one name on all ranks, got {[fqn for fqn, _ in facts]}")
    return places[0], [fact for _, fact in facts]


def _find(runtime: Runtime, call: str, name: str) -> _Place:
    places = {
        parameter.fqn: _Place(runtime, buffer, index)
        for buffer in runtime.buffers
        for index, parameter in enumerate(buffer.sharded)
    }
    for fqn, others in read_model(runtime).aliases.items():
        places |= dict.fromkeys(others, places[fqn])
    if name not in places:
        close = difflib.get_close_matches(str(name), places, n=3)
        hint = f"; close: {', '.join(map(repr, close))}" if close else ""
        raise ValueError(f"{call}: expected the name of a parameter of the model, got {name!r}{hint}")
    return places[name]


def _require_same(call: str, name: str, facts: list[Any]) -> None:
    for rank, fact in enumerate(facts):
        if fact != facts[0]:
            raise ValueError(
                f"{call}: ranks 0 and {rank} were given different values for '{name}': expected the same on "
                "every rank. Nothing was written"
            )


# ----------------------------------------------------------------------------------------------- states


@dataclass(frozen=True, slots=True)
class _State:
    """One state of a parameter, as this rank has it."""

    key: str
    value: Any
    is_wise: bool
    """True for a state with a value for each element of the slice."""
    quantized: Quantized | None = None

    def read(self, place: _Place) -> Any:
        """Return the full state, in memory of its own; collective for an element-wise one."""
        if self.is_wise:
            return place.gather(self.value if self.quantized is None else self.quantized.load())
        return self.value.detach().clone() if isinstance(self.value, Tensor) else self.value

    def write(self, place: _Place, own: dict[str, Any], value: Any) -> None:
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
            self.value.copy_(place.cut(value) if self.is_wise else torch.as_tensor(value))
        else:
            own[self.key] = type(self.value)(value) if isinstance(self.value, int | float) else value


def _read_states(optimizer: Optimizer, place: _Place) -> dict[str, _State]:
    """Return the states of this rank's slice by their common names, without scales of quantized states."""
    saved = to_common(optimizer, optimizer.state.get(place.sharded, {}))
    dtypes = {key: value.dtype for key, value in saved.items() if isinstance(value, Tensor)}
    states: dict[str, _State] = {}
    for key, value in saved.items():
        if is_scales(key, dtypes):
            continue
        if is_codes(key, dtypes):
            rule = rule_of(optimizer)
            book = codebook(rule is None or rule.states[key], value.device)
            states[key] = _State(key, value, True, Quantized(value.view(-1), saved[key + ABSMAX], book))
            continue
        is_wise = isinstance(value, Tensor) and value.dim() > 0 and value.shape == place.sharded.shape
        states[key] = _State(key, value, is_wise and not (key == "step" and value.numel() == 1))
    return states
