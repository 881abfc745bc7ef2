"""Methods of the model other than `forward`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroshard.internals.nested import cast_inputs
from zeroshard.parameters.saved import SavedSlices
from zeroshard.parameters.sharded import ShardedParameter
from zeroshard.parameters.state import Phase
from zeroshard.sharding.runtime import Runtime

if TYPE_CHECKING:
    from zeroshard.engine import Engine


def as_forward(runtime: Runtime, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gathers, frees and reduces as the model's forward does, unless that is running already.

    Args:
        runtime: the runtime of the model.
        method: the method.
    """
    reference = weakref.ref(runtime)

    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        runtime = reference()
        if runtime is None or runtime.is_closed or runtime.state.phase is Phase.FORWARD:
            return method(*args, **kwargs)
        root, passes = runtime.root, runtime.passes
        if (dtype := runtime.input_dtype(root.module)) is not None:
            args, kwargs = cast_inputs(root.module, args, kwargs, dtype=dtype)
        before = passes.passive
        try:
            passes.before_forward(root)
            try:
                passes.passive = (*before, root)
                output = method(*args, **kwargs)
            finally:
                passes.passive = before
            return passes.after_forward(root, root.module, args, output)
        finally:
            passes.exit_forward(root)

    return called


def register_forward_method(engine: Engine, name: str) -> None:
    """Let a method of the model other than `forward` use its parameters: `engine.<name>(...)`.

    Inside the method parameters are gathered and freed, and gradients reduced, as in `forward`. The
    engine has a `generate` already.

    Args:
        name: the name of a method of the model. A method of a part is called by one of the model.

    Raises:
        ValueError: the model has no such method, or the engine has something of that name.
    """
    runtime = engine._runtime
    if name == "generate":
        return
    if hasattr(type(engine), name):
        raise ValueError(f"the engine has a method {name!r} of its own: give the model's method another name")
    method = getattr(runtime.module, name, None)
    if not callable(method) or isinstance(method, nn.Module):
        raise ValueError(
            f"register_forward_method({name!r}): expected the name of a method of "
            f"{type(runtime.module).__name__}. A method of a part is called by one of the model"
        )
    wrapped = as_forward(runtime, method)
    setattr(engine, name, wrapped)
    runtime.changes.set(runtime.module, name, wrapped)


def _on_wholes(
    module: nn.Module, method: Callable[..., Any], refusal: str, is_divided: bool, *args: Any, **kwargs: Any
) -> Any:
    """Call a method that writes or resizes the model's parameters: whole ones, or those it is given.

    Args:
        module, method: the model and the method.
        refusal: the message of the error.
        is_divided: True if other pipeline ranks hold parts of the model, which are missing here.
        args, kwargs: the arguments of the method.
    """
    has_slices = is_divided or any(isinstance(p, ShardedParameter) for p in module.parameters())
    if has_slices and isinstance(kwargs.get("state_dict"), SavedSlices | None):
        raise RuntimeError(refusal)
    return method(*args, **kwargs)


def refuse_files_of_slices(runtime: Runtime) -> None:
    """Have methods of transformers and peft refuse slices, in all of their models inside a model."""
    is_divided = runtime.context.axes.pp.size > 1
    remedy = "call it under engine.unsharded() on all ranks"
    if is_divided:
        remedy = "save engine.full_state_dict(), which has the parameters of all pipeline ranks"
    resizes = "call it before initialize, or after engine.close()"
    for path, module in runtime.module.named_modules():
        saves = remedy if path else f"{remedy}; or call save_pretrained() of the engine"
        remedies = dict.fromkeys(("save_pretrained", "push_to_hub"), saves)
        names = ("resize_token_embeddings", "set_input_embeddings", "set_output_embeddings")
        remedies |= dict.fromkeys(names, resizes)
        for name, call in remedies.items():
            if hasattr(type(module), name):  # peft hands on the methods of the model inside
                refusal = (
                    f"{name}(){f' of {path!r}' if path else ''} of the sharded model sees only this rank's "
                    f"slices: {call}"
                )
                own = getattr(module, name)
                method = functools.partial(_on_wholes, module, own, refusal, is_divided)
                runtime.changes.set(module, name, method)


@contextmanager
def gathered(engine: Engine) -> Iterator[None]:
    """Gather all parameters, in the compute dtype, and keep them: forwards inside exchange nothing.

    All ranks enter it, and may then call `engine.module` unevenly, or parts of it by themselves, as
    transformers calls the encoder of an encoder-decoder. Nothing inside is recorded for a backward.
    """
    runtime = engine._runtime
    runtime.wait()
    runtime.passes.refresh()
    if runtime.passes.scheduled.units:  # a block around this one keeps them
        with torch.no_grad():
            yield
        return
    runtime.unshard(runtime.units)
    for unit in runtime.units:
        unit.wait()
        unit.slots.install()
    before = [unit.slots.stand_in(unit.slots.unsharded) for unit in runtime.units]
    try:
        with torch.no_grad():
            yield
    finally:
        for unit, shown in zip(runtime.units, before, strict=True):
            unit.slots.stand_in(shown)
        runtime.reshard()
        runtime.passes.reshard_all()


@torch.no_grad()
def generate(engine: Engine, *args: Any, **kwargs: Any) -> Any:
    """Run the model's own `generate` on this rank's prompts; all ranks must call it.

    All parameters stay gathered meanwhile, in the compute dtype, so ranks may stop at different lengths;
    tensor-parallel ranks must have the same prompts and options.
    If they do not fit, `synced_gpus=True` gathers unit by unit for every token, and transformers keeps
    the ranks in step.

    Raises:
        AttributeError: the model has no method `generate`.
    """
    generate: Any = getattr(engine.module, "generate", None)
    if generate is None:
        raise AttributeError(f"{type(engine.module).__name__} has no method 'generate'")
    if kwargs.get("synced_gpus"):
        return as_forward(engine._runtime, generate)(*args, **kwargs)
    if (dtype := engine._runtime.input_dtype(engine.module)) is not None:
        args, kwargs = cast_inputs(engine.module, args, kwargs, dtype=dtype)
    with gathered(engine):
        return generate(*args, **kwargs)
