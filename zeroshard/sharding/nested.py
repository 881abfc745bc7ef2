"""Tensors inside what a forward takes and returns: containers, dataclasses, objects, nested in any way."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested containers and dataclasses, in `dtype`."""
    return _map(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)


def view_tensors(value: Any) -> Any:
    """The same nested value with new tensor objects, views of the old ones, that autograd tells apart."""
    return _map(value, lambda t: t.view_as(t) if t.requires_grad else t)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        twin = copy.copy(leaf)
        for field in fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(twin, field.name, _map(getattr(leaf, field.name), change))
        return twin

    return pytree.tree_map(visit, value)
