"""Tensors inside the inputs and outputs of a forward: in containers and dataclasses, nested in any way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from zeroshard.internals import pytree

_PLAIN = (str, bytes, int, float, complex, range, type, type(None), type(...), torch.dtype, torch.device)


def find_tensors(value: Any) -> tuple[list[Tensor], bool]:
    """Find all tensors in nested containers and dataclasses.

    Returns:
        The tensors, and True if there is another object, which may hide more.
    """
    if type(value) is Tensor:
        return [value], False
    seen: dict[int, Any] = {}
    to_visit = pytree.tree_leaves(value)
    for leaf in to_visit:  # the list grows in the loop
        if id(leaf) not in seen and is_dataclass(leaf) and not isinstance(leaf, type):
            to_visit += pytree.tree_leaves(list(_fields(leaf).values()))
        seen[id(leaf)] = leaf
    others = [leaf for leaf in seen.values() if not isinstance(leaf, Tensor)]
    is_opaque = any(not isinstance(leaf, _PLAIN) and not is_dataclass(leaf) for leaf in others)
    return [leaf for leaf in seen.values() if isinstance(leaf, Tensor)], is_opaque


def cast_inputs(
    module: torch.nn.Module, args: Any, kwargs: Any, *, dtype: torch.dtype, in_lists: bool = True
) -> tuple[Any, Any]:
    """Cast float tensors among the inputs to `dtype`: a forward pre-hook.

    Args:
        in_lists: True also casts in lists and mappings, which become copies: later additions to them are
            lost, and blocks hand on lists to which later blocks add.
    """
    is_leaf = None if in_lists else lambda part: isinstance(part, list | Mapping)
    if len(args) == 1 and not kwargs:  # a tensor alone takes no walk
        return (cast_tensors(args[0], dtype, is_leaf),), kwargs
    # All at once: MultiheadAttention asks if query, key and value are one tensor.
    own, named = cast_tensors((args, tuple(kwargs.values())), dtype, is_leaf)
    return own, dict(zip(kwargs, named, strict=True))


def cast_tensors(value: Any, dtype: torch.dtype, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return the nested value with floating-point tensors in `dtype`; see `change_tensors`."""
    return change_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t, is_leaf)


def change_tensors(
    value: Any, change: Callable[[Tensor], Tensor], is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return the nested value with `change(tensor)` in the place of each tensor.

    A container or dataclass with a changed tensor becomes a copy: other holders of it see no change. One
    without stays the same object. A tensor that is found twice is changed once.

    Args:
        is_leaf: True for a container in which nothing is changed.
    """
    if type(value) is Tensor:
        return change(value)
    done: dict[int, Tensor] = {}

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in done:
                done[id(leaf)] = change(leaf)
            return done[id(leaf)]
        if not is_dataclass(leaf) or isinstance(leaf, type) or (is_leaf is not None and is_leaf(leaf)):
            return leaf
        values = _fields(leaf)
        changed = {name: walk(part) for name, part in values.items()}
        if all(changed[name] is part for name, part in values.items()):
            return leaf
        twin = copy.copy(leaf)
        for name, part in changed.items():
            object.__setattr__(twin, name, part)
        return twin

    def walk(part: Any) -> Any:
        leaves, structure = pytree.tree_flatten(part, is_leaf)
        changed = [visit(leaf) for leaf in leaves]
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return part
        return pytree.tree_unflatten(changed, structure)

    try:
        return walk(value)
    finally:
        done.clear()  # the functions are a cycle, which would keep the tensors until a collection


def _fields(value: Any) -> dict[str, Any]:
    """The values of the fields of a dataclass, by name."""
    names = [field.name for field in fields(value) if hasattr(value, field.name)]
    return {name: getattr(value, name) for name in names}
