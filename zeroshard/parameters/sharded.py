"""Sharded parameters: named_parameters() yields them between steps, and the optimizer holds them.

Glossary:
  original parameter    the module's own, full shape; gone once the module is sharded.
  sharded parameter     1-D, this rank's slice of the main parameter, in the main dtype.
  unsharded parameter   full shape, compute dtype; in the modules during forward and backward.

A sharded parameter behaves as a tensor for optimizers and people. It must not pass silently for the whole
weight. So it raises an error if a layer computes with it, if gradients would flow to it, and if torch would
take its slice of the gradient for the whole.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn

from zeroshard.internals import pytree
from zeroshard.internals.dispatch import compute_past_guards, past_guards
from zeroshard.parameters import counts
from zeroshard.parameters.functions import (
    ARITHMETIC,
    CASTS,
    CHANGES,
    DESCRIBES,
    GET_DATA,
    GET_GRAD,
    KINDS,
    LAYER_FUNCTIONS,
    PARTS,
    SET_DATA,
    SET_GRAD,
    VALUES,
)
from zeroshard.parameters.gradient import set_gradient
from zeroshard.parameters.gradreaders import QUIET, check_reader
from zeroshard.parameters.mixing import check_parts, explain
from zeroshard.parameters.state import ModuleState, Phase
from zeroshard.parameters.targets import backward_to, no_grad_of
from zeroshard.plan.cuts import Cut


def describe_unit(name: str) -> str:
    """The name of a unit in errors."""
    return f"unit '{name}'" if name else "the root unit"


class ShardedParameter(nn.Parameter):
    """This rank's 1-D slice of a main parameter.

    Attributes:
        fqn: the original name.
        unit_name: the name of its unit.
        full_shape: the shape of the original parameter, also where tensor ranks hold a part of it each.
        is_partial: True if the slice can be less than the whole.
        cut, tp_rank: the cut of the original over tensor ranks, if there is one; the number of this part.
        state: the state of the module.
        is_trained: True if `requires_grad` was set at first; then it may be taken away and given back.
        unsharded: the unsharded parameter, which is frozen with it; None once the engine is gone.
    """

    state: ModuleState
    fqn: str
    unit_name: str
    full_shape: torch.Size
    is_partial: bool
    is_trained: bool
    unsharded: Callable[[], nn.Parameter | None]
    cut: Cut | None = None
    tp_rank: int = 0
    _gradient: Tensor | None = None
    """The object in torch's own attribute, which takes ten times as long to read."""

    @staticmethod
    def wrap(
        data: Tensor,
        requires_grad: bool,
        *,
        fqn: str,
        unit_name: str,
        full_shape: torch.Size,
        is_partial: bool,
        state: ModuleState,
    ) -> ShardedParameter:
        """Make a sharded parameter over `data`, [n], without a copy."""
        _make_known_to_optimizers()
        parameter = torch.Tensor._make_subclass(ShardedParameter, data, requires_grad)
        parameter.fqn, parameter.unit_name = fqn, unit_name
        parameter.full_shape, parameter.is_partial, parameter.state = full_shape, is_partial, state
        parameter.is_trained, parameter.unsharded = requires_grad, lambda: None
        refuse_gradients(parameter, parameter.describe())
        return parameter

    # torch's own attribute goes through `__torch_function__`, which takes ten times as long. An optimizer
    # reads it four times a step, for each parameter.
    @property
    def grad(self) -> Tensor | None:
        """[n]: this rank's slice of the averaged gradient."""
        frame, state = sys._getframe(1), self.state
        is_quiet = QUIET.get(id(frame.f_code))
        if is_quiet is None or (not is_quiet[1] and state.has_sums):
            check_reader(self, frame)
        state.has_shown_gradients = True
        if state.before_show is not None:
            state.before_show()
        return self._gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        state = self.state
        if gradient is None and state.has_sums:
            state.forget_gradient(self)
        state.has_shown_gradients = True
        if state.before_show is not None:
            state.before_show()
        try:
            set_gradient(self, gradient)
        except RuntimeError as error:
            raise RuntimeError(
                f"the gradient of {self.describe()}: {error}. A rank holds its slice of the mean. To give "
                "the whole gradient, call engine.set_full_gradient(name, gradient) on all ranks"
            ) from error

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook on the unsharded parameter, where autograd's gradient arrives.

        The hook gets the whole gradient of this rank's micro-batch, before it is averaged over the ranks.
        """
        return self._hookable().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that gets this parameter when `grad` holds this rank's slice of the mean."""
        self._hookable()
        self.state.has_hooks = True
        with past_guards():
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _hookable(self) -> nn.Parameter:
        """The unsharded parameter, on which hooks of gradients are registered."""
        if (unsharded := self.unsharded()) is None:
            raise RuntimeError(
                f"{self.describe()} is a copy, or its engine no longer exists, so a hook would never be "
                "called: expected a parameter of engine.named_parameters()"
            )
        return unsharded

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        with past_guards():
            data = self.detach().clone()
        twin = memo[id(self)] = ShardedParameter.wrap(
            data,
            self.requires_grad,
            fqn=self.fqn,
            unit_name=self.unit_name,
            full_shape=self.full_shape,
            is_partial=self.is_partial,
            state=self.state,
        )
        for name, value in vars(self).items():
            if name != "_gradient":
                vars(twin).setdefault(name, value)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain parameter with the values of the slice."""
        with past_guards():
            plain = nn.Parameter(self.detach(), self.requires_grad)
            return plain.__reduce_ex__(protocol)

    def describe(self) -> str:
        """Return the name of the parameter and of its unit, for error messages."""
        return f"the sharded parameter '{self.fqn}' of {describe_unit(self.unit_name)}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with past_guards():
            values = self.detach().__repr__()
        return f"ShardedParameter({self.fqn}, slice of {tuple(self.full_shape)}: {values})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in KINDS or (func in ARITHMETIC and _is_plain(args, kwargs)):
            return _compute(func, types, args, kwargs)
        if func == GET_GRAD:
            check_reader(args[0], sys._getframe(1))
            args[0].state.show_gradients()
        elif func in SET_GRAD:
            args[0].state.show_gradients()
            if (len(args) == 1 or args[1] is None) and args[0].state.has_sums:
                args[0].state.forget_gradient(args[0])
            return set_gradient(args[0], args[1] if len(args) > 1 else None)
        elif func is torch.autograd.backward:
            return backward_to(*args, **(kwargs or {}))
        else:
            func = _checked(func, args, kwargs)
            if func in counts.ASKED and isinstance(args[0], ShardedParameter):
                whole = counts.answer(args[0], func, sys._getframe(1))
                if whole is not None:
                    return whole
        with past_guards():
            try:
                result = func(*args, **(kwargs or {}))
            except (RuntimeError, IndexError) as error:
                first = _first_sharded(args, kwargs)
                if torch.is_grad_enabled():  # a model computes with a slice; an optimizer has gradients off
                    raise _used_outside(first, func) from error
                if (explained := explain(error, first)) is not None:
                    raise explained from error
                raise
        if func in CASTS and type(result) is Tensor and result.requires_grad:
            result = result.as_subclass(_CastSlice)
            first = _first_sharded(args, kwargs)
            result.describe, result.state = first.describe, first.state
        return result


class _CastSlice(Tensor):
    """A slice in another dtype: no layer may compute with it either."""

    describe: Callable[[], str]
    state: ModuleState

    __torch_function__ = ShardedParameter.__torch_function__


_SLICES = frozenset((ShardedParameter, _CastSlice))


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """True for the arithmetic of an optimizer, on one sharded parameter, while nothing forbids it."""
    first = args[0]
    if type(first) is not ShardedParameter or torch.is_grad_enabled():
        return False
    state = first.state
    if state.phase is not Phase.REST or state.reads_main:
        return False
    for value in args[1:]:
        if type(value) in _SLICES:
            return False
    return not kwargs or _SLICES.isdisjoint(map(type, kwargs.values()))


def _compute(func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    try:
        return compute_past_guards(func, types, args, kwargs or {})
    except (RuntimeError, IndexError) as error:
        if (explained := explain(error, args[0])) is not None:
            raise explained from error
        raise


def _checked(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Callable[..., Any]:
    """The function to call in the place of `func`; an error for one that sharded parameters refuse."""
    if not _only_describes(func):
        first = _first_sharded(args, kwargs)
        if first.state.refusal:
            raise RuntimeError(f"{first.describe()} {first.state.refusal}")
        if first.state.phase is Phase.FORWARD:
            raise _used_outside(first, func)
        if first.state.reads_main and _may_change(func, kwargs):
            first.state.before_edit()
        check_parts(func, args, ShardedParameter)
    if func is torch.autograd.grad:
        raise no_grad_of(_first_sharded(args, kwargs).describe())
    if func == GET_DATA:
        return Tensor.detach  # the same values, but edits count versions, which replicated parameters follow
    if func in CHANGES:
        _check_change(func, args, kwargs)
    elif func in LAYER_FUNCTIONS or (func in PARTS and torch.is_grad_enabled()):
        raise _used_outside(_first_sharded(args, kwargs), func)
    return func


def _may_change(func: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> bool:
    """True for a function that writes to a tensor, or gives a tensor that others may write to."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_written = is_in_place or name.startswith(("__i", "__setitem__")) or "out" in (kwargs or {})
    return is_written or func in (GET_DATA, Tensor.detach)


def _only_describes(func: Callable[..., Any]) -> bool:
    """True if a function tells of a tensor without its values: a model may ask for a dtype anywhere."""
    if getattr(func, "__name__", "") == "__get__":
        return func not in VALUES
    return func in DESCRIBES


@functools.cache
def _make_known_to_optimizers() -> None:
    """Prepare torch's optimizers for sharded parameters, when the first one is made."""
    # torch's for-each and fused optimizers look at the exact type of a parameter; torch lists its own
    # subclasses (DTensor) in the same place. tests/sharding/test_parameter.py notices if that moves.
    torch_optimizer._foreach_supported_types.append(ShardedParameter)
    # Before the step: an attached optimizer gathers right after it, and must not gather once more.
    torch_optimizer.register_optimizer_step_pre_hook(_count_change)


def _count_change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Let replicated parameters follow a step whose kernels autograd does not see, attached or not."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if type(p) is ShardedParameter]
    if stepped:
        if refusal := stepped[0].state.refusal:
            raise RuntimeError(f"{type(optimizer).__name__}.step(): {stepped[0].describe()} {refusal}")
        torch.autograd.graph.increment_version(stepped)


def only_sharded(parameters: Iterable[nn.Parameter]) -> list[ShardedParameter]:
    """The sharded parameters of an optimizer's group."""
    return [parameter for parameter in parameters if isinstance(parameter, ShardedParameter)]


REMEDY = (
    "Use it inside the forward of its unit, or inside a method that was given to "
    "engine.register_forward_method(name). To share it between modules, or to use several in a loss, put a "
    "module around them that computes with them in its forward, and name its class in units=. To read "
    "values, use torch.no_grad() and engine.unsharded(module)"
)


def refuse_gradients(parameter: Tensor, what: str) -> None:
    """Refuse gradients of a parameter from autograd: they would end there, and the engine would miss them."""

    def refuse(gradient: Tensor) -> Tensor:
        raise RuntimeError(f"the loss depends on {what} outside the forward of its unit. {REMEDY}.")

    if parameter.requires_grad:
        Tensor.register_hook(parameter, refuse)  # type: ignore[no-untyped-call]


Guarded = ShardedParameter | _CastSlice


def _used_outside(parameter: Guarded, func: Callable[..., Any]) -> RuntimeError:
    name = getattr(func, "__name__", str(func))
    return RuntimeError(f"{name} got {parameter.describe()} outside the forward of its unit. {REMEDY}.")


def _first_sharded(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Guarded:
    first = args[0] if args else None
    if isinstance(first, list | tuple) and first:  # the list of a for-each function
        first = first[0]
    if isinstance(first, Guarded):
        return first
    for value in pytree.tree_leaves((args, dict(kwargs or {}))):
        if isinstance(value, Guarded):
            return value
    raise AssertionError("called for a function that got a sharded parameter")


def _check_change(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
    """Refuse changes that a slice cannot follow; freeze or train the unsharded parameter with it."""
    parameter = args[0]
    if func == SET_DATA:
        with past_guards():
            new = args[1]
            # p.data -= ... has changed it in place and sets it to itself
            if isinstance(new, Tensor) and new.dtype == parameter.dtype and new.is_set_to(parameter):
                return
        raise RuntimeError(
            f"{parameter.describe()} is a view of a flat buffer: its data cannot be replaced; copy_() into "
            "it under torch.no_grad(), or edit the whole under engine.unsharded(module, write_back=True). "
            "For another dtype set Config(precision=...)"
        )
    wanted = bool(args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True))
    if wanted and not parameter.is_trained:
        raise RuntimeError(
            f"{parameter.describe()} was frozen at initialize, so it has no memory for a gradient: set "
            "requires_grad=True before initialize; afterwards it can be frozen and trained in turns"
        )
    if (unsharded := parameter.unsharded()) is not None:
        unsharded.requires_grad_(wanted)
