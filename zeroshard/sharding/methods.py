"""Methods of the model other than `forward`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zeroshard.sharding.runtime import Runtime, cast_inputs


def as_forward(runtime: Runtime, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the root that gathers, frees and reduces as the root's forward does."""
    reference = weakref.ref(runtime)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        runtime = reference()
        if runtime is None or runtime.is_in_method or runtime.is_in_forward:
            return method(*args, **kwargs)
        root = runtime.root
        if (dtype := runtime.context.dtypes.param_dtype) is not None:
            args, kwargs = cast_inputs(root.module, args, kwargs, dtype=dtype)
        runtime.before_forward(root)
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


@contextmanager
def held_unsharded(runtime: Runtime) -> Iterator[None]:
    """Gather everything, in the compute dtype, and keep it in the modules: forwards inside exchange nothing.

    Parts of the model may be called by themselves, as transformers calls the encoder of an encoder-decoder.
    """
    runtime.settle()
    for unit in runtime.units:
        unit.refresh()
        unit.unshard()
    for unit in runtime.units:
        unit.wait()
        unit.install()
    runtime.is_held = True
    try:
        yield
    finally:
        runtime.is_held = False
        runtime.put_away()
