"""Tensors inside what a forward takes and returns: containers, dataclasses, objects, nested in any way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_PLAIN = (str, bytes, int, float, complex, bool, type, type(None), torch.dtype, torch.device)
MAX_OBJECTS = 10_000
"""More than this is not looked through."""


def find_tensors(value: Any) -> tuple[list[Tensor], bool]:
    """All tensors in nested containers, dataclasses and objects with attributes.

    Returns:
        The tensors, and whether something was found that cannot be looked into and may hide more.
    """
    if type(value) is Tensor:
        return [value], False
    tensors: list[Tensor] = []
    seen: set[int] = set()
    is_opaque = False
    to_visit = pytree.tree_leaves(value)
    for leaf in to_visit:  # grows on the way
        if isinstance(leaf, _PLAIN) or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):
            to_visit += pytree.tree_leaves([getattr(leaf, field.name, None) for field in fields(leaf)])
        elif callable(leaf) or not hasattr(leaf, "__dict__") or len(seen) > MAX_OBJECTS:
            is_opaque = True
        else:
            to_visit += pytree.tree_leaves(vars(leaf))
    return tensors, is_opaque


def cast_floats(
    value: Any,
    dtype: torch.dtype,
    *,
    in_lists: bool = True,
    done: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Any:
    """Floating-point tensors in nested containers and dataclasses, in `dtype`.

    Args:
        in_lists: also those in lists and mappings, which are then copies: what is added to them is lost.
        done: by id, tensors and what they became: one that is found again is the same object again.
    """
    done = {} if done is None else done

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in done:
            done[id(tensor)] = tensor, tensor.to(dtype)
        return done[id(tensor)][1]

    return _map(value, cast, None if in_lists else lambda part: isinstance(part, list | Mapping))


def cast_inputs(
    module: torch.nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype, in_lists: bool = True
) -> tuple[Any, Any]:
    """A forward pre-hook: float tensors among the inputs in `dtype`.

    Args:
        in_lists: also those in lists and mappings. Blocks hand on lists that later ones add to.
    """
    # One tensor given twice stays one: MultiheadAttention computes otherwise where query, key and value are.
    cast = functools.partial(cast_floats, dtype=dtype, in_lists=in_lists, done={})
    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}


def view_tensors(value: Any) -> Any:
    """The same nested value with new tensor objects, views of the old ones, that autograd tells apart."""
    return _map(value, lambda t: t.view_as(t) if t.requires_grad else t)


def copy_tensors(value: Any, which: Callable[[Tensor], bool]) -> Any:
    """The same nested value with copies of some tensors, through which gradients flow."""
    return _map(value, lambda t: t.clone() if which(t) else t)


def _map(value: Any, change: Callable[[Tensor], Tensor], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Whatever has no changed tensor in it stays the same object."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type) or (is_leaf is not None and is_leaf(leaf)):
            return leaf
        names = [field.name for field in fields(leaf) if hasattr(leaf, field.name)]
        values = {name: getattr(leaf, name) for name in names}
        changed = {name: _map(part, change, is_leaf) for name, part in values.items()}
        if all(changed[name] is part for name, part in values.items()):
            return leaf
        twin = copy.copy(leaf)
        for name, part in changed.items():
            object.__setattr__(twin, name, part)
        return twin

    leaves, structure = pytree.tree_flatten(value, is_leaf)
    changed = [visit(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(changed, structure)
