"""Sharded parameters: named_parameters() yields them between steps, and the optimizer holds them.

Glossary:
  original parameter    the module's own, full shape; gone once the module is sharded.
  sharded parameter     1-D, this rank's slice of the main parameter, in the main dtype.
  unsharded parameter   full shape, compute dtype; in the modules during forward and backward.

A sharded parameter behaves as a tensor for optimizers and people; `numel()`, sums and norms are of the slice.
It must not pass silently for the whole weight. So these uses are errors:

  any that reads values      in a forward, where its unit is not gathered; once the engine is closed
  a layer computes with it   or takes a part of it, while gradients are on
  a matrix is computed with  the slice would be broadcast over it
  a loss depends on it       the gradient would end there: an error in backward
  torch.autograd.grad        nobody would reduce the gradient; and backward(inputs=[p]), as autograd knows
                             the unsharded parameter alone
  clip_grad_norm_ of torch   and its GradScaler: they would take the slice of the gradient for all of it
  p.grad is read or dropped  while gradients of later micro-batches wait in sums elsewhere
  p.data = values            the slice would leave its buffer
  p.requires_grad = True     of a parameter that was frozen at initialize: it has no memory for a gradient
  copies and pickles         they would hold the slice
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn

from zeroshard.internals import pytree
from zeroshard.internals.dispatch import compute_past_guards, past_guards
from zeroshard.parameters.saved import NotCopied
from zeroshard.parameters.state import ModuleState, Moment, Phase, Steps
from zeroshard.plan.cuts import Cut

_LAYERS = ("torch.nn.functional", "torch._C._nn")
"""The modules of functions that compute with a whole weight: refused for a slice even if the shapes fit."""
_PRODUCTS = frozenset(
    function
    for namespace in (torch, Tensor)
    for name in ("matmul", "__matmul__", "__rmatmul__", "mv", "addmv", "einsum", "tensordot", "t")
    if callable(function := getattr(namespace, name, None))
)
"""Functions that take slices for vectors, and give other numbers; `t` leaves a slice as it is."""
_PARTS = frozenset((Tensor.__getitem__, Tensor.T.__get__))  # type: ignore[attr-defined]
"""The parts that models take of a weight before they compute with it; refused where gradients are on."""

# Compared with ==: each access of a getter makes a new object.
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_GET_DEVICE = Tensor.device.__get__
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]
_SET_GRAD = (Tensor.grad.__set__, Tensor.grad.__delete__)  # type: ignore[union-attr]
_FREEZES = frozenset((Tensor.requires_grad.__set__, Tensor.requires_grad_))  # type: ignore[attr-defined]

_KINDS: dict[Callable[..., Any], Callable[[torch.dtype], bool]] = {
    torch.is_complex: attrgetter("is_complex"),
    torch.is_floating_point: attrgetter("is_floating_point"),
}
"""The questions that optimizers ask of each parameter in each step, with the answer of its dtype."""
_ARITHMETIC = frozenset(
    getattr(Tensor, name)
    for name in ("add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_", "lerp_", "copy_", "zero_", "clamp_")
)
"""The arithmetic of optimizers with one parameter at a time."""

_DESCRIBES = frozenset(
    getattr(Tensor, name)
    for name in (
        *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "data_ptr"),
        *("is_floating_point", "is_complex", "is_contiguous", "get_device", "untyped_storage"),
        *("__len__", "__hash__", "__repr__", "register_hook", "requires_grad_"),
    )
).union(
    getattr(Tensor, name).__get__
    for name, _ in inspect.getmembers(Tensor, inspect.isdatadescriptor)
    if name not in ("data", "T", "mT", "H", "mH", "real", "imag")
)
"""Functions, and getters, that read no values: a model may ask for a dtype anywhere."""
_PLACES = frozenset((Tensor.data_ptr, Tensor.untyped_storage))


gradient_of = cast(Callable[[Tensor], Tensor | None], attrgetter("_gradient"))
"""Returns the gradient of a sharded parameter, [n]; None if it has none."""


def set_gradients(pairs: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Give sharded parameters a gradient each, of their shape and dtype, without the checks of `p.grad`.

    One on another device is not in torch's own attribute, which refuses it: its parameter is to follow.
    """
    with past_guards():
        for parameter, gradient in pairs:
            try:
                _SET_GRAD[0](parameter, gradient)
            except RuntimeError:
                if gradient is None or gradient.device == parameter.device:
                    raise
                _SET_GRAD[0](parameter, None)
            cast(Any, parameter)._gradient = gradient


def describe_unit(name: str) -> str:
    """The name of a unit in errors."""
    return f"unit '{name}'" if name else "the root unit"


class ShardedParameter(NotCopied, nn.Parameter):
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
        own_dtype: its dtype, which takes ten times as long to read from torch's own attribute.
    """

    __hash__ = object.__hash__  # torch's own takes many times as long

    state: ModuleState
    fqn: str
    unit_name: str
    full_shape: torch.Size
    is_partial: bool
    is_trained: bool
    unsharded: Callable[[], nn.Parameter | None]
    own_dtype: torch.dtype
    cut: Cut | None = None
    tp_rank: int = 0
    _gradient: Tensor | None = None
    """The object in torch's own attribute, which takes ten times as long to read."""

    @staticmethod
    def wrap(data: Tensor, requires_grad: bool, **attributes: Any) -> ShardedParameter:
        """Make a sharded parameter over `data`, [n], without a copy; `attributes` as the class lists them."""
        _make_known_to_optimizers()
        parameter = torch.Tensor._make_subclass(ShardedParameter, data, requires_grad)
        parameter.is_trained, parameter.own_dtype = requires_grad, data.dtype
        vars(parameter).update({"unsharded": lambda: None}, **attributes)
        refuse_gradients(parameter, OUTSIDE.format(parameter.describe()))
        return parameter

    # torch's own attribute goes through `__torch_function__`, which takes ten times as long. An optimizer
    # reads it four times a step, for each parameter.
    @property
    def grad(self) -> Tensor | None:
        """[n]: this rank's slice of the averaged gradient."""
        state = self.state
        if (reader := _READERS.get(sys._getframe(1).f_code.co_qualname)) is not None:
            self._answer(*reader)
        elif state.has_sums and self._gradient is not None and Moment.STEPPED not in state.moments:
            self._refuse_sums()
        state.steps.before_look()
        state.has_shown_gradients = True
        return self._gradient

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if gradient is None:
            self._refuse_sums()
        self.state.steps.before_look()
        self.state.has_shown_gradients = True
        try:
            with past_guards():
                _SET_GRAD[0](self, gradient)
        except RuntimeError as error:
            raise RuntimeError(
                f"the gradient of {self.describe()}: {error}. A rank holds its slice of the mean. To give "
                "the whole gradient, call engine.set_full_gradient(name, gradient) on all ranks"
            ) from error
        self._gradient = gradient

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _refuse_sums(self) -> None:
        """Refuse to read or drop a gradient while sums of later micro-batches wait, which it lacks."""
        if self.state.has_sums:
            raise RuntimeError(
                f"p.grad of {self.describe()} lacks gradients of micro-batches that wait for a reduction: "
                "read it after the last backward of a step, outside of no_sync(), or use full_gradient() of "
                "the engine. To drop all of them, call zero_grad() of the engine, the optimizer or the model"
            )

    def _answer(self, name: str, remedy: str) -> None:
        """Refuse a function of torch that takes the slice of the gradient for all of it; see `_READERS`."""
        self.state.refuse(f"{name}()", Moment.STEPPED)
        self._refuse_sums()
        if remedy and self.is_partial:
            raise RuntimeError(
                f"{name} of torch would see only this rank's slice of the gradient of '{self.fqn}'; "
                f"use {remedy} instead"
            )

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Register a hook on the unsharded parameter, where autograd's gradient arrives.

        The hook gets the whole gradient of this rank's micro-batch, before it is averaged over the ranks.
        """
        return self.hookable().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Register a hook that gets this parameter when `grad` holds this rank's slice of the mean."""
        self.hookable()
        self.state.has_hooks = True
        with past_guards():
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def hookable(self) -> nn.Parameter:
        """The unsharded parameter, on which hooks of gradients are registered."""
        if (unsharded := self.unsharded()) is None:
            raise RuntimeError(
                f"the engine of {self.describe()} no longer exists, so a hook would never be called: "
                "expected a parameter of engine.named_parameters()"
            )
        return unsharded

    def describe(self) -> str:
        """Return the name of the parameter and of its unit, for error messages."""
        return f"the sharded parameter '{self.fqn}' of {describe_unit(self.unit_name)}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        self.state.steps.before_look()
        with past_guards():
            values = self.detach().__repr__()
        return f"ShardedParameter({self.fqn}, slice of {tuple(self.full_shape)}: {values})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _KINDS and args:
            return _KINDS[func](args[0].own_dtype)
        kwargs = kwargs or {}
        if func == _GET_DEVICE or (func in _ARITHMETIC and _is_plain(args, kwargs)):
            return compute_past_guards(func, types, args, kwargs)
        if func == _GET_GRAD:  # past the property
            return args[0].grad
        if func in _SET_GRAD:
            args[0].grad = args[1] if len(args) > 1 else None
            return None
        first = _check(func, args, kwargs)
        if func == _GET_DATA:
            func = Tensor.detach  # edits of it count versions, which replicated parameters follow
        with past_guards():
            try:
                result = func(*args, **kwargs)
                if first.state.can_wait and (func in _PLACES or _has_memory_of(first, result)):
                    first.state.steps.never_wait()
                return result
            except (RuntimeError, IndexError) as error:
                if torch.is_grad_enabled():  # a model computes with a slice; an optimizer has gradients off
                    raise _used_outside(_first_sharded(args, kwargs), func) from error
                raise


def _is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for the arithmetic of an optimizer, on one sharded parameter, while nothing forbids it."""
    first = args[0]
    if type(first) is not ShardedParameter or torch.is_grad_enabled():
        return False
    state = first.state
    if state.phase is not Phase.REST or state.reads_main or type(state.steps) is not Steps:
        return False
    return ShardedParameter not in map(type, (*args[1:], *kwargs.values()))


def _has_memory_of(parameter: ShardedParameter, result: Any) -> bool:
    """True for a result, or results, over the memory of a parameter; past the guards."""
    results = result if isinstance(result, list | tuple) else [result]
    tensors = (one for one in results if isinstance(one, Tensor) and type(one) is not ShardedParameter)
    place = parameter.untyped_storage().data_ptr()
    return any(one.untyped_storage().data_ptr() == place for one in tensors if one.numel())


def _check(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    """Refuse a function that would take a slice for the whole parameter: see the table of the module.

    Returns:
        The first sharded parameter among the arguments.
    """
    first = _first_sharded(args, kwargs)
    if func not in _DESCRIBES:
        if first.state.refusal:
            raise RuntimeError(f"{first.describe()} {first.state.refusal}")
        if first.state.phase is Phase.FORWARD:
            raise _used_outside(first, func)
        first.state.steps.before_look()
        if first.state.reads_main:
            first.state.before_edit()  # whoever reads values may write to them
    if func == _SET_DATA:
        _check_data(first, args[1])
    elif func in _FREEZES:
        _freeze(first, bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
    elif func in (torch.autograd.grad, torch.autograd.backward):
        raise RuntimeError(
            f"torch.autograd.{func.__name__} got {first.describe()} as an input, and autograd knows the "
            "unsharded parameter alone. Freeze the other parameters before the forward, call loss.backward() "
            "and read p.grad, this rank's slice of the mean; or keep the parameter that the forward of its "
            "module sees: for backward(inputs=[...]), or for this rank's own gradient"
        )
    elif (
        getattr(func, "__module__", "") in _LAYERS
        or func in _PRODUCTS
        or (func in _PARTS and torch.is_grad_enabled())
        or any(type(value) in (Tensor, nn.Parameter) and value.dim() > 1 for value in args)
    ):
        raise _used_outside(first, func)
    return first


def _check_data(parameter: ShardedParameter, new: Any) -> None:
    """Refuse to replace the data; `p.data -= ...` has changed it in place and sets it to itself."""
    with past_guards():
        if isinstance(new, Tensor) and new.dtype == parameter.dtype and new.is_set_to(parameter):
            return
    raise RuntimeError(
        f"{parameter.describe()} is a view of a flat buffer: its data cannot be replaced; copy_() into "
        "it under torch.no_grad(), or edit the whole under engine.unsharded(module, write_back=True). "
        "For another dtype set Config(precision=...)"
    )


def _freeze(parameter: ShardedParameter, is_trained: bool) -> None:
    """Freeze or train the unsharded parameter with the sharded one."""
    if is_trained and not parameter.is_trained:
        raise RuntimeError(
            f"{parameter.describe()} was frozen at initialize, so it has no memory for a gradient: set "
            "requires_grad=True before initialize; afterwards it can be frozen and trained in turns"
        )
    if (unsharded := parameter.unsharded()) is not None:
        unsharded.requires_grad_(is_trained)


@functools.cache
def _make_known_to_optimizers() -> None:
    """Prepare torch's optimizers for sharded parameters, when the first one is made."""
    # torch's for-each and fused optimizers look at the exact type of a parameter; torch lists its own
    # subclasses (DTensor) in the same place. tests/parameters/test_parameter.py notices if that moves.
    torch_optimizer._foreach_supported_types.append(ShardedParameter)
    torch_optimizer.register_optimizer_step_pre_hook(_count_change)
    torch_optimizer.register_optimizer_step_post_hook(_count_change)  # a closure may have gathered


def _count_change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Let gathers follow a step that is not the engine's, whose kernels autograd may not see."""
    stepped = [p for group in optimizer.param_groups for p in group["params"] if type(p) is ShardedParameter]
    if stepped:
        if refusal := stepped[0].state.refusal:
            raise RuntimeError(f"{type(optimizer).__name__}.step(): {stepped[0].describe()} {refusal}")
        if optimizer not in stepped[0].state.attached:  # these note their own steps
            stepped[0].state.steps.take_all()
            torch.autograd.graph.increment_version(stepped)


def only_sharded(parameters: Iterable[nn.Parameter]) -> list[ShardedParameter]:
    """The sharded parameters of an optimizer's group."""
    return [parameter for parameter in parameters if isinstance(parameter, ShardedParameter)]


_CLIP = "engine.clip_grad_norm_(max_norm) or Config(clip_grad_norm=...)"
_SCALE = "Precision(param_dtype='float16', loss_scale=...) with engine.backward(loss) and engine.step()"
_READERS = {
    function + inside: reader
    for function, reader in {
        "clip_grad_norm_": ("clip_grad_norm_", _CLIP),
        "_clip_grads_with_norm_": ("clip_grads_with_norm_", _CLIP),
        "clip_grad_value_": ("clip_grad_value_", ""),
        "GradScaler._unscale_grads_": ("GradScaler", _SCALE),
        **dict.fromkeys(("Module.zero_grad", "Optimizer.zero_grad"), ("zero_grad", "")),
    }.items()
    for inside in ("", ".<locals>.<listcomp>")  # of Python 3.11
}
"""Functions of torch that mean more by `p.grad` than this rank's slice, by their qualified names: the name,
and the remedy for a slice. They pass over a `grad` that is None, although sums may wait."""


REMEDY = (
    "Use it inside the forward of its unit, or inside a method that was given to "
    "engine.register_forward_method(name). To share it between modules, or to use several in a loss, put a "
    "module around them that computes with them in its forward, and name its class in units=. To read "
    "values, use torch.no_grad() and engine.unsharded(module)"
)


OUTSIDE = f"the loss depends on {{}} outside the forward of its unit. {REMEDY}."
"""The message about a gradient that would end in a parameter, where the engine would miss it."""


def refuse_gradients(parameter: Tensor, message: str) -> None:
    """Refuse gradients of a parameter from autograd, with the message of the error."""

    def refuse(gradient: Tensor) -> Tensor:
        raise RuntimeError(message)

    if parameter.requires_grad:
        Tensor.register_hook(parameter, refuse)  # type: ignore[no-untyped-call]


def _used_outside(parameter: ShardedParameter, func: Callable[..., Any]) -> RuntimeError:
    name = getattr(func, "__name__", str(func))
    return RuntimeError(f"{name} got {parameter.describe()} outside the forward of its unit. {REMEDY}.")


def _first_sharded(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    first = args[0] if args else None
    if isinstance(first, list | tuple) and first:  # the list of a for-each function
        first = first[0]
    if isinstance(first, ShardedParameter):
        return first
    return next(v for v in pytree.tree_leaves((args, dict(kwargs))) if isinstance(v, ShardedParameter))


_OURS = frozenset(ShardedParameter.__annotations__) | {"recorded_version", "was", "sharded", "at_first"}


def carry_attributes(source: nn.Parameter, *targets: nn.Parameter) -> None:
    """Give parameters the attributes that a user has set on another parameter (`p.no_decay = True`)."""
    for name, value in vars(source).items():
        if name not in _OURS:
            for target in targets:
                setattr(target, name, value)
