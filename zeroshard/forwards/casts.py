"""Forwards of modules that compute in a dtype of their own, inside a model that computes in another one.

    x (bf16) --cast--> x (fp32) --forward, parameters in fp32--> y (fp32) --cast--> y (bf16)

So the modules around go on in their own dtype. Inside, autocast is off: it would compute a product of float32
in its own dtype, whatever the parameters have. The functions are around the forwards, not in hooks: a
recomputed forward casts again, and torch's encoder layers allow no hooks inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.internals import pytree
from zeroshard.internals.nested import cast_inputs, change_tensors
from zeroshard.plan.names import Cast
from zeroshard.sharding.changes import Changes


def cast_forwards(root: nn.Module, casts: Mapping[nn.Module, Cast], changes: Changes) -> None:
    """Let modules cast their inputs and outputs.

    Args:
        root: the model.
        casts: modules of it, as `find_casts` gives them.
        changes: the changes of the modules.
    """
    for module, cast in casts.items():
        if cast.is_called:
            changes.set(module, "forward", casting(module, module.forward, cast, in_lists=module is root))


def casting(
    module: nn.Module, method: Callable[..., Any], cast: Cast, *, in_lists: bool = False
) -> Callable[..., Any]:
    """A method of a module that casts its float inputs, and its outputs back to the dtype of the first one.

    Args:
        module: the module.
        method: its forward or another method.
        cast: the dtypes.
        in_lists: True also casts in lists and mappings, see `cast_inputs`.
    """
    without = cast.without if cast.is_outermost else cast.dtype

    @functools.wraps(method)
    def cast_around(*args: Any, **kwargs: Any) -> Any:
        first = _first_float(args, kwargs)
        back = without if first is None else first.dtype
        args, kwargs = cast_inputs(module, args, kwargs, dtype=cast.dtype, in_lists=in_lists)
        with _without_autocast((next(module.parameters()) if first is None else first).device.type):
            output = method(*args, **kwargs)
        if back == cast.dtype:
            return output
        return change_tensors(output, lambda t: t.to(back) if t.dtype == cast.dtype else t)

    return cast_around


def _first_float(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first floating-point tensor among arguments; None if there is none."""
    for value in (*args, *kwargs.values()):
        for leaf in (value,) if isinstance(value, Tensor) else pytree.tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return leaf
    return None


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Turn autocast off for a type of device, where it is on."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
