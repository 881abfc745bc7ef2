"""Methods of the model other than `forward`."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from zeroshard.forwards.casts import casting
from zeroshard.internals.autograd import is_in_backward
from zeroshard.internals.nested import cast_inputs
from zeroshard.parameters.saved import SavedSlices
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.sharding.runtime import Runtime
from zeroshard.sharding.unit import Unit


def as_forward(runtime: Runtime, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the root that gathers, frees and reduces as the root's forward does."""
    reference = weakref.ref(runtime)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        runtime = reference()
        if runtime is None or runtime.is_closed or runtime.is_in_method or runtime.is_in_forward:
            return method(*args, **kwargs)
        root = runtime.root
        if (dtype := runtime.input_dtype(runtime.module)) is not None:
            args, kwargs = cast_inputs(root.modules[0], args, kwargs, dtype=dtype)
        runtime.before_forward(root, sys._getframe())
        try:
            runtime.is_in_method = True
            try:
                output = method(*args, **kwargs)
            finally:
                runtime.is_in_method = False
            return runtime.after_forward(root, output)
        finally:
            runtime.leave_forward(root)

    return called


def register_method_of_part(runtime: Runtime, name: str) -> None:
    """Let a method of a part of the model gather the unit around the part, as that unit's forward does.

    Args:
        runtime: the runtime of the model.
        name: the name of the part in the model, a dot, and the name of the method.

    Raises:
        ValueError: there is no such method.
    """
    path, _, attribute = name.rpartition(".")
    module = dict(runtime.module.named_modules()).get(path)
    if module is None:
        raise ValueError(f"register_forward_method({name!r}): the model has no module '{path}'")
    method = getattr(module, attribute, None)
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(
            f"register_forward_method({name!r}): expected a method of {type(module).__name__}, "
            f"got {attribute!r}"
        )
    around = [
        unit
        for unit in runtime.units
        if any(part is module for own in unit.modules for part in own.modules())
    ]
    if (cast := runtime.casts.get(module)) is not None:
        method = casting(module, method, cast)
    in_unit = _in_unit(runtime, around[-1], method)
    in_root = as_forward(runtime, in_unit)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:  # inside a recomputed forward the root is there
        return (in_unit if is_in_backward() else in_root)(*args, **kwargs)

    runtime.changes.set(module, attribute, called)


def _in_unit(runtime: Runtime, unit: Unit, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs as a forward of a unit does, unless such a forward is running already."""
    reference = weakref.ref(runtime)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        runtime = reference()
        if runtime is None or runtime.is_closed or unit is runtime.root or unit.is_in_forward:
            return method(*args, **kwargs)
        if (dtype := runtime.input_dtype(unit.modules[0])) is not None:
            args, kwargs = cast_inputs(unit.modules[0], args, kwargs, dtype=dtype, in_lists=False)
        try:
            runtime.before_forward(unit, sys._getframe())
            return runtime.after_forward(unit, method(*args, **kwargs))
        finally:
            runtime.leave_forward(unit)

    return called


class _MethodStandIn:
    """An object that stands in a model for a method of its class; a deep copy of the model has the method."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        return getattr(type(module), self._name)(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        return types.MethodType(getattr(type(module), self._name), memo.get(id(module), module))


class OnWholes(_MethodStandIn):
    """A method of a model that would take slices for its parameters: it runs on whole ones, or never.

    Args:
        module, name: the model and the name of the method.
        refusal: the message of the error.
        is_ever_right: False refuses the method for whole parameters, too, unless it is given a state_dict.
    """

    def __init__(self, module: nn.Module, name: str, refusal: str, *, is_ever_right: bool) -> None:
        super().__init__(module, name)
        self._refusal, self._is_ever_right = refusal, is_ever_right

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = cast(nn.Module, self._module()).parameters()
        has_slices = any(isinstance(parameter, ShardedParameter) for parameter in parameters)
        is_given = not isinstance(kwargs.get("state_dict"), SavedSlices | None)
        if not is_given and (has_slices or not self._is_ever_right):
            raise RuntimeError(self._refusal)
        return self._original(*args, **kwargs)


class EnginesOwn(_MethodStandIn):
    """A method of a model in whose place the engine's method is called, as long as there is an engine."""

    def __init__(self, engine: nn.Module, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        self._engine = weakref.ref(engine)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        call = self._original if engine is None else getattr(engine, self._name)
        return call(*args, **kwargs)


@contextmanager
def held_unsharded(runtime: Runtime) -> Iterator[None]:
    """Gather all parameters, in the compute dtype, and keep them in the modules: forwards exchange nothing.

    Parts of the model may be called by themselves, as transformers calls the encoder of an encoder-decoder.
    """
    runtime.settle()
    for unit in runtime.units:
        unit.refresh()
        unit.unshard()
    for unit in runtime.units:
        unit.wait()
        unit.slots.install()
    runtime.leases.held.take(*runtime.units)
    try:
        yield
    finally:
        runtime.leases.held.end()
        runtime.put_away()
