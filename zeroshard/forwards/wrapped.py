"""Compilation and recomputation of the forward of a unit's module, inside the hooks that gather and free."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroshard.internals.nested import cast_inputs, change_tensors, find_tensors
from zeroshard.plan.names import Cast
from zeroshard.sharding.context import Changes
from zeroshard.sharding.unit import Unit

_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The names of the cache in attention layers of transformers; their forward adds to it.

Since transformers 5.24 its name is `cache`. Other models may have a harmless argument of this name, so the
classes of transformers tell.
"""

_CACHE_MODULE = "transformers.cache_utils"

Copies = list[tuple[nn.Module, dict[str, torch.Tensor]]]
"""Modules with copies of their buffers."""


def compile_forwards(units: Sequence[Unit], changes: Changes) -> None:
    """Compile the units that have no unit inside: hooks stay outside of compiled code.

    Args:
        units: the root unit first; it is left as it is.
        changes: the changes of their modules.
    """
    with_hooks = {unit.module: unit for unit in units}
    for module in branches(units[0].module, _modules_of(units)):
        if with_hooks.keys().isdisjoint(set(module.modules()) - {module}):
            changes.around(module, "compile", torch.compile)
            with_hooks[module].layers.clear()


@functools.cache
def exclude_from_tracing() -> None:
    """Let torch.compile leave this package out. It compiles the model's own code, and hooks run as they are.

    Dynamo would trace collectives and the memory of units. torch has no public name for this; a decorator
    around each hook would cost more than the hook.
    """
    # Slow to import; torch's optimizers import it anyway.
    trace_rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    trace_rules.add("zeroshard")


def recompute_forwards(units: Sequence[Unit], changes: Changes) -> None:
    """Keep only the inputs of each outermost unit for backward, which computes the rest again.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost". The unit is gathered for its backward
    anyway, so nothing is gathered twice. A module without children has nothing to save.

    Args:
        units: the root unit first; it is left as it is.
        changes: the changes of their modules.
    """
    with_hooks = {unit.module: unit for unit in units}
    for module in outermost(units[0].module, _modules_of(units)):
        for part in set(module.modules()) & with_hooks.keys() - {module}:
            with_hooks[part].recomputed_in.append(with_hooks[module])
            with_hooks[module].freed_inside += with_hooks[part].freed_inside
        changes.around(module, "recompute", functools.partial(checkpointed, module))


def _modules_of(units: Sequence[Unit]) -> set[nn.Module]:
    return {unit.module for unit in units[1:] if unit.buffers}


def branches(root: nn.Module, modules: Container[nn.Module]) -> Iterator[nn.Module]:
    """Yield each of the `modules` that has modules inside, from the outside in."""
    return (module for module in root.modules() if module in modules and any(module.children()))


def outermost(root: nn.Module, modules: Container[nn.Module]) -> Iterator[nn.Module]:
    """Yield the `branches` that are not inside of another branch."""
    inside: set[nn.Module] = set()
    for module in branches(root, modules):
        if module not in inside:
            inside.update(module.modules())
            yield module


def checkpointed(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward of a module that keeps its inputs alone, and runs again in the backward."""

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for cache, value in kwargs.items():
            if _is_cache(cache, value):
                raise ValueError(
                    f"a recomputation runs the forward of {type(module).__name__} twice and would fill its "
                    f"{cache!r} twice: set use_cache=False in the model's config for training. Prefix tuning "
                    "needs the cache; use recompute='none' with it"
                )
        before = _copy_buffers(module)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _WithBuffers(before)

        once, inputs = _each_once(forward, args, kwargs)
        return checkpoint(once, *inputs, use_reentrant=False, context_fn=contexts)

    return recomputed


def _is_cache(name: str, value: Any) -> bool:
    """True for an argument to which the forward of an attention layer adds."""
    if value is None:
        return False
    return name in _CACHES or any(base.__module__ == _CACHE_MODULE for base in type(value).__mro__)


def _each_once(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """A forward that takes each object among its inputs once, all by position; and these inputs.

    `checkpoint` saves its arguments one by one. Hooks may take the saved tensors (another checkpoint around,
    `save_on_cpu`). Then a tensor that was given twice comes back as two. A forward that asks if they are one,
    as MultiheadAttention does, computes something else. Keywords are not saved at all: no hook sees them, and
    the random states of their devices are not kept. And `checkpoint` has keywords of its own.
    """
    given, keywords, num_args = [*args, *kwargs.values()], list(kwargs), len(args)
    distinct = {id(value): value for value in given}
    places = [list(distinct).index(id(value)) for value in given]

    def once(*inputs: Any) -> Any:
        values = [inputs[place] for place in places]
        return forward(*values[:num_args], **dict(zip(keywords, values[num_args:], strict=True)))

    return once, list(distinct.values())


def _copy_buffers(module: nn.Module) -> Copies:
    """Copies of the buffers that a forward in training may read and then change; bool masks are left out."""

    def copies(part: nn.Module) -> dict[str, torch.Tensor]:
        buffers = part._buffers.items()
        return {name: b.clone() for name, b in buffers if b is not None and b.dtype != torch.bool}

    return [(part, copies(part)) for part in module.modules() if part.training and part._buffers]


class _WithBuffers:
    """A context in which a second forward reads the buffers of the first one, and its writes are lost.

    It is entered once for each backward through the graph of the first forward, so it is no generator.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._now: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
        """The buffers of the model while copies stand in their places."""

    def __enter__(self) -> None:
        self._now = [(part, dict(part._buffers)) for part, _ in self._copies]
        for part, values in self._copies:
            part._buffers.update({name: value.clone() for name, value in values.items()})

    def __exit__(self, *_: object) -> None:
        now, self._now = self._now, []
        for part, buffers in now:
            part._buffers.update(buffers)


# ------------------------------------------------------------------------------------------------- casts


def cast_forwards(root: nn.Module, casts: Mapping[nn.Module, Cast], changes: Changes) -> None:
    """Let modules cast their inputs and outputs.

    Args:
        root: the model.
        casts: modules of it, as `find_casts` gives them.
        changes: the changes of the modules.
    """
    for module, cast in casts.items():
        if cast.without is not None:
            changes.around(module, "cast", functools.partial(_casting, module, cast, module is root))


def _casting(
    module: nn.Module, cast: Cast, in_lists: bool, forward: Callable[..., Any]
) -> Callable[..., Any]:
    """A forward that casts its float inputs, and its outputs back to the dtype of the first one."""
    without = cast.without or cast.dtype

    def cast_around(*args: Any, **kwargs: Any) -> Any:
        first = next((t for t in find_tensors((args, kwargs))[0] if t.is_floating_point()), None)
        back = without if first is None else first.dtype
        args, kwargs = cast_inputs(module, args, kwargs, dtype=cast.dtype, in_lists=in_lists)
        kind = (next(module.parameters()) if first is None else first).device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            output = forward(*args, **kwargs)
        if back == cast.dtype:
            return output
        return change_tensors(output, lambda t: t.to(back) if t.dtype == cast.dtype else t)

    return cast_around
