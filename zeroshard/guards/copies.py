"""Copies of a sharded model: a deep copy is a plain model or an error, and pickles are errors."""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from zeroshard.parameters.saved import SavedSlices
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.runtime import Runtime

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks")
_KINDS_OF_HOOKS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)
_COPYING = ("__deepcopy__", "__reduce_ex__")
"""The methods that `copy` and `pickle` ask an object for."""

PICKLED = (
    "a sharded model cannot be pickled: save engine.full_state_dict() (called on all ranks), or call "
    "engine.save_pretrained(folder) or engine.save_checkpoint(folder)"
)
COPIED = (
    "copy.deepcopy of a sharded model would copy this rank's slices: copy engine.module under "
    "engine.unsharded(), which gives a plain model with whole parameters, or copy the model before initialize"
)


def guard_copies(runtime: Runtime) -> None:
    """Make deep copies of the model and of its units plain; warn of saved slices, refuse loaded wholes."""
    for module in runtime.module.modules():
        runtime.changes.hook(
            module._register_state_dict_hook(_mark_slices),
            module.register_load_state_dict_pre_hook(_refuse_wholes),
        )
    for module in (module for unit in runtime.units for module in unit.modules):
        copies = _Copies(module)
        for name, method in zip(_COPYING, (copies.deepcopy, copies.reduce), strict=True):
            runtime.changes.set(module, name, method)


class NotCopied:
    """An object that holds a sharded model and its process groups: no copy or pickle of it can be made."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise RuntimeError(COPIED)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(PICKLED)


class _Copies:
    """Makes the copies of a unit's module, without keeping the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module without what sharding has added to it.

        Raises:
            RuntimeError: its parameters are not shown whole.
        """
        module = self._module()
        assert module is not None, "it is being copied"
        if any(isinstance(parameter, ShardedParameter) for parameter in module.parameters()):
            raise RuntimeError(COPIED)
        with _without(module, _COPYING):
            twin = copy.deepcopy(module, memo)
        for part, original in zip(twin.modules(), module.modules(), strict=True):
            _strip(part, original, memo)
        return twin

    def reduce(self, protocol: Any) -> Any:
        """Refuse to pickle the module; a shallow copy shares all that it has."""
        module = self._module()
        assert module is not None, "it is being copied"
        if sys._getframe(1).f_code is copy.copy.__code__:
            with _without(module, _COPYING):
                return type(module).__reduce_ex__(module, protocol)
        raise RuntimeError(PICKLED)


@contextmanager
def _without(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    taken = {name: module.__dict__.pop(name) for name in names}
    try:
        yield
    finally:
        module.__dict__.update(taken)


def _strip(twin: nn.Module, original: nn.Module, memo: dict[int, Any]) -> None:
    """Remove the hooks and wrapped methods of sharding from a copy of a module."""
    for kind in _HOOKS:
        hooks: dict[int, Any] = getattr(twin, kind)
        for number in [number for number, hook in hooks.items() if _is_own(hook)]:
            del hooks[number]
            for numbers in _KINDS_OF_HOOKS:
                getattr(twin, numbers).pop(number, None)
    for parameter in twin._parameters.values():
        if type(parameter).__module__.startswith("zeroshard."):
            parameter.__class__ = nn.Parameter  # tied ones stay one object
    for name, value in vars(original).items():
        inner = _innermost(value)
        is_of_class = isinstance(inner, types.MethodType) and inner.__func__ is getattr(
            type(original), name, None
        )
        if is_of_class or type(value).__module__.startswith("zeroshard."):
            twin.__dict__.pop(name, None)
        elif inner is not value:
            twin.__dict__[name] = copy.deepcopy(inner, memo)


def _is_own(hook: Callable[..., Any]) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith("zeroshard.")


def _innermost(method: Any) -> Any:
    """The function inside the wrappers of zeroshard and torch.compile."""
    while isinstance(method, types.FunctionType) and hasattr(method, "__wrapped__"):
        if not method.__globals__["__name__"].startswith(("zeroshard.", "torch._dynamo.")):
            break
        method = method.__wrapped__
    return method


def _refuse_wholes(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse to load whole parameters into the slices of a module."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, ShardedParameter) or not isinstance(value, torch.Tensor):
            continue
        if value.shape == parameter.full_shape != parameter.shape:
            raise RuntimeError(
                f"load_state_dict() got the whole '{parameter.fqn}', but a rank holds a slice of it: call "
                "load_state_dict() on all ranks under engine.unsharded(write_back=True), or before "
                "initialize"
            )


def _mark_slices(module: nn.Module, state_dict: OrderedDict[str, Any], prefix: str, _: Any) -> Any:
    """Return the state dict of a module, marked as one of slices."""
    if prefix or not any(isinstance(parameter, ShardedParameter) for parameter in module.parameters()):
        return None
    marked = SavedSlices(state_dict)
    marked.__dict__.update(state_dict.__dict__)  # torch keeps versions there
    return marked
